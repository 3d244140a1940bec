"""Processes of tests that begin as a copy of the test's own: importing torch and timm anew takes seconds."""

import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

_CONTEXT = multiprocessing.get_context("fork")


def start(function, *args, folder=None, environment=None, out=os.devnull, err=os.devnull):
    """Starts a process that calls a function, on one thread and with torch's default type.

    Args:
        function: What is called. An exception of it is printed as by an interpreter.
        args: Its arguments.
        folder: The current folder of the process; None for that of the test.
        environment: Variables that are added to those of the test.
        out: The file or file descriptor of the standard output.
        err: That of the standard error.

    Returns:
        The `multiprocessing.Process`.
    """
    process = _CONTEXT.Process(target=_call, args=(function, args, folder, environment or {}, out, err))
    process.start()
    return process


def run(function, *args, folder=None, environment=None):
    """Waits for such a process; returns its ``returncode``, ``stdout`` and ``stderr``, as `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as written:
        out, err = Path(written) / "out", Path(written) / "err"
        process = start(function, *args, folder=folder, environment=environment, out=out, err=err)
        process.join()
        return SimpleNamespace(returncode=process.exitcode, stdout=out.read_text(), stderr=err.read_text())


def script(path, *arguments):
    """Runs a Python file as a command."""
    sys.argv = [str(path), *map(str, arguments)]
    runpy.run_path(str(path), run_name="__main__")


def _call(function, args, folder, environment, out, err):
    for stream, to in ((1, out), (2, err)):
        os.dup2(to if isinstance(to, int) else os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    with contextlib.chdir(folder or "."):
        function(*args)
