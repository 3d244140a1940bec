"""Scripts of training/ as commands in this process: importing torch anew takes seconds."""

import contextlib
import importlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))


def run_script(name, *arguments, cwd=ROOT):
    """Runs a script as a command would in a folder.

    Returns:
        The ``returncode``, ``stdout`` and ``stderr``, as of `subprocess.run`. An exception that would be a traceback
        is raised.
    """
    main = importlib.import_module(name).main
    returncode, stdout, stderr = 0, io.StringIO(), io.StringIO()
    torch.set_default_dtype(torch.float32)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            returncode = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str):
                print(stop.code, file=stderr)
        finally:
            torch.set_default_dtype(torch.float64)
    return SimpleNamespace(returncode=returncode, stdout=stdout.getvalue(), stderr=stderr.getvalue())
