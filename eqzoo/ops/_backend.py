"""Which implementation runs: kernels where there are some, eager torch everywhere."""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ..files import atomic

__all__ = ["Backend", "cpu_function", "launch", "on_cuda", "plain", "use_backend"]

Backend = Literal["auto", "eager"]

_SOURCES = Path(__file__).with_name("native")
_SCALARS = {torch.float32: "float", torch.float64: "double"}
# Sums may be reordered, as a vector unit does; infinities and not-a-numbers keep their meaning.
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
]

_log = logging.getLogger("eqzoo")
_backend: Backend = "auto"
_building = threading.Lock()


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Chooses the implementation of the neighbourhood operations for a block of code, in all threads.

    Args:
        backend: ``"auto"``: on a GPU the Triton kernels where Triton is installed, on a CPU the C++ kernels where a
            compiler is at hand, and eager torch for everything else. ``"eager"``: eager torch alone. All give the same
            numbers, up to rounding; at exact ties kernels give the gradient of a maximum to the first, eager torch
            shares it out.

    Raises:
        ValueError: If there is no such backend.

    Example:
        >>> import torch, eqzoo.ops
        >>> with eqzoo.ops.use_backend("eager"):
        ...     eqzoo.ops.dynamic_depthwise(torch.ones(1, 1, 1, 9, 4, 4), torch.ones(1, 1, 1, 4, 4)).sum()
        tensor(100.)
    """
    global _backend
    if backend not in get_args(Backend):
        raise ValueError(f"backend is 'auto' or 'eager', got {backend!r}")
    previous, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = previous


def plain() -> bool:
    """Whether the graph has to consist of torch's own operators: on request, and while a network is exported."""
    return _backend == "eager" or torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def on_cuda(*tensors: Tensor) -> bool:
    """Whether tensors are on a GPU that Triton has kernels for, in a floating type that they read."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    return all(t.is_cuda and t.dtype in types for t in tensors) and _has_triton()


def cpu_function(source: str, function: str, *tensors: Tensor) -> "ctypes._NamedFuncPointer | None":
    """The C++ function for tensors of one type on the CPU, or None where eager torch has to do.

    Args:
        source: The name of the file in ``native``, without its ending. It is compiled when first asked for.
        function: The name of the function, without ``_float`` or ``_double``.
        tensors: What it is to read.
    """
    dtype = tensors[0].dtype
    if _backend == "eager" or dtype not in _SCALARS or any(not t.is_cpu or t.dtype != dtype for t in tensors):
        return None
    with _building:  # a cache alone would let threads that come at once build at once
        built = _library(source)
    return None if built is None else getattr(built, f"{function}_{_SCALARS[dtype]}")


def launch(function: "ctypes._NamedFuncPointer", *arguments: Tensor | int | float | None) -> None:
    """Calls a C++ function with pointers to contiguous tensors, whole numbers as int64 and others as double.

    The number of threads follows as the last argument, torch's own.
    """
    packed: list[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_double] = []
    for argument in (*arguments, torch.get_num_threads()):
        if argument is None:
            packed.append(ctypes.c_void_p(None))
        elif isinstance(argument, Tensor):
            assert argument.is_contiguous()
            packed.append(ctypes.c_void_p(argument.data_ptr()))
        elif isinstance(argument, float):
            packed.append(ctypes.c_double(argument))
        else:
            packed.append(ctypes.c_int64(argument))
    function(*packed)


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _library(source: str) -> ctypes.CDLL | None:
    """Builds a source file once for this machine and keeps it in the user's cache."""
    compiler = next((path for name in _compilers() if (path := shutil.which(name))), None)
    if compiler is None or os.environ.get("EQZOO_NATIVE") == "0":
        _log.info("no C++ compiler, or EQZOO_NATIVE=0: attention runs in eager torch")
        return None
    files = [_SOURCES / "common.h", _SOURCES / f"{source}.cpp"]
    flags = [*_FLAGS, *(["-mprefer-vector-width=512"] if "avx512f" in _cpu() else [])]
    made_of = [compiler, _run([compiler, "--version"]).stdout, _cpu(), *flags, *(f.read_text() for f in files)]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    try:
        target = _folder() / f"{source}-{key}.so"
        if not target.exists():
            atomic(target, functools.partial(_compile, compiler, flags, files[1]))
        return ctypes.CDLL(str(target))
    except OSError as error:
        warnings.warn(f"eqzoo: {files[1].name} could not be built, eager torch does its work: {error}", stacklevel=2)
        return None


def _compile(compiler: str, flags: Sequence[str], source: Path, target: Path) -> None:
    # Without OpenMP there is one thread, and no other difference; some compilers do not know the machine they run on.
    for extra in (["-march=native", "-fopenmp"], ["-march=native"], []):
        ran = _run([compiler, *flags, *extra, str(source), "-o", str(target)])
        if ran.returncode == 0:
            return
    raise OSError(f"{compiler} says: {ran.stderr.strip()[-2000:]}")


def _compilers() -> Iterator[str]:
    if "CXX" in os.environ:
        yield os.environ["CXX"]
    yield from ("g++", "clang++", "c++")


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)


@functools.cache
def _folder() -> Path:
    """Where built kernels stay: the user's cache, or a folder of this process's where there is none to write to."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eqzoo" / "kernels"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(cache, os.W_OK):
            return cache
    except (OSError, RuntimeError):  # no such folder can be made, or the user has no home
        pass
    folder = tempfile.mkdtemp(prefix="eqzoo-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _cpu() -> str:
    """What machine code may depend on: homes are shared between machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"
