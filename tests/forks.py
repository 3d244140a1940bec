"""Processes that begin with torch, timm and eqzoo imported, which takes seconds in each that begins without.

They are copies of a server that has imported these and done nothing else. A copy of the test's own process would not
do: autograd refuses to run in one where it has had threads.
"""

import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if "forkserver" not in multiprocessing.get_all_start_methods():
    pytest.skip("processes cannot be copied on this system", allow_module_level=True)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["eqzoo", "eqzoo.engine.loop", "eqzoo.cli.main", "pytest"])
_SECONDS = 300  # after which a process hangs


def start(function, *args, folder=None, environment=None, out=os.devnull, err=os.devnull):
    """Starts a process that calls a function, on one thread.

    Args:
        function: What is called, a function of a module. An exception of it is printed as by an interpreter.
        args: Its arguments.
        folder: The current folder of the process; None for that of the test.
        environment: Variables that are added to those of the test.
        out: The file of the standard output.
        err: That of the standard error.

    Returns:
        The `multiprocessing.Process`.
    """
    variables = dict(os.environ) | (environment or {})
    process = _CONTEXT.Process(target=_call, args=(function, args, str(folder or Path.cwd()), variables, out, err))
    process.start()
    return process


def run(function, *args, folder=None, environment=None):
    """Waits for such a process; returns its ``returncode``, ``stdout`` and ``stderr``, as `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as written:
        out, err = Path(written) / "out", Path(written) / "err"
        process = start(function, *args, folder=folder, environment=environment, out=out, err=err)
        wait(process)
        return SimpleNamespace(returncode=process.exitcode, stdout=out.read_text(), stderr=err.read_text())


def wait(process):
    """Waits for a process to end; kills it and fails where it does not."""
    process.join(_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"a process of a test has not ended within {_SECONDS} s")


def script(path, *arguments):
    """Runs a Python file as a command."""
    sys.argv = [str(path), *map(str, arguments)]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(str(path), run_name="__main__")


def _call(function, args, folder, variables, out, err):
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with contextlib.chdir(folder):
        function(*args)
