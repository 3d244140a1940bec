"""C++ kernels, compiled at their first use and writable in the user's cache."""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ._dispatch import without_kernels

_SOURCES = Path(__file__).parent
_SCALARS = {torch.float32: "float", torch.float64: "double"}
WITH_BFLOAT16 = {**_SCALARS, torch.bfloat16: "bfloat16"}  # the scalars of kernels that also read bfloat16
# Sums may be reordered, as vector units do; infinities and NaNs keep their meaning.
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
_building = threading.Lock()


def cpu_function(
    source: str, function: str, *tensors: Tensor, scalars: Mapping[torch.dtype, str] = _SCALARS
) -> "ctypes._NamedFuncPointer | None":
    """The C++ function for CPU tensors of one type, or None where eager torch has to do.

    Args:
        source: The file, such as ``"asc/cpu"``; compiled for each type at its first use, so that
            nobody waits for types that are not used.
        function: The function.
        tensors: The tensors that it will read.
        scalars: The types that it can be compiled for, and their names.
    """
    dtype = tensors[0].dtype
    if without_kernels() or dtype not in scalars or any(not t.is_cpu or t.dtype != dtype for t in tensors):
        return None
    with _building:  # functools.cache alone would let concurrent threads build concurrently
        built = _library(source, scalars[dtype])
    return None if built is None else getattr(built, function)


@torch.compiler.assume_constant_result
def is_built(source: str, function: str) -> bool:
    """Whether there is the C++ function in single precision: what a graph that is compiled decides by."""
    return cpu_function(source, function, torch.empty(0, dtype=torch.float32)) is not None


@torch.compiler.assume_constant_result
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions that multiply bfloat16 (AVX512-BF16, AMX, Arm's), which oneDNN uses."""
    return "bf16" in cpu_flags()


@torch.compiler.assume_constant_result
def has_avx2_alone() -> bool:
    """Whether the processor has AVX2 (vectors of eight float32 numbers) and not AVX-512; False if it does not say."""
    flags = cpu_flags().split()
    return "avx2" in flags and "avx512f" not in flags


def launch(function: "ctypes._NamedFuncPointer", *arguments: Tensor | int | float | None) -> None:
    """Calls a C++ function: contiguous tensors as pointers, int as int64, float as double, None as a null pointer.

    torch's number of threads is added as the last argument.
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
def _library(source: str, scalar: str) -> ctypes.CDLL | None:
    """A source file compiled for one type: from the user's cache, or built and kept there."""
    if os.environ.get("EQZOO_NATIVE") == "0":
        _log.info("EQZOO_NATIVE=0: eqzoo.ops runs in eager torch")
        return None
    files = [_SOURCES / f"{source}.cpp", *sorted(_SOURCES.rglob("*.h"))]
    flags = [*_FLAGS, f"-DEQZOO_{scalar.upper()}", *(["-mprefer-vector-width=512"] if "avx512f" in cpu_flags() else [])]
    sources = [f.read_text(encoding="utf-8") for f in files]
    # What machine code depends on, as home folders may be shared by machines with different processors.
    cpu = f"{platform.machine()} {platform.processor()} {cpu_flags()}"
    name = f"{source.replace('/', '-')}-{scalar}-{_hashed(cpu, *flags, *sources)}"
    try:
        compiler = _compiler()
        if compiler:
            name += f"-{_hashed(*compiler, _run([*compiler, '--version']).stdout)}"
        cache = _cache()
        path = _find_library(cache, name) if cache else None
        if path is None:
            if compiler is None:
                _log.info("no C++ compiler: eqzoo.ops runs in eager torch")
                return None
            writable = cache is not None and os.access(cache, os.W_OK)
            folder = cache if cache and writable else _temporary_folder()
            with _locked(folder / f".{name}.lock"):
                if (path := _find_library(folder, name)) is None:
                    duration = (
                        f"once ({folder})" if writable else "for this process alone, as its cache cannot be written"
                    )
                    print(f"eqzoo: compiling {source}.cpp ({scalar}) for this processor, {duration}", file=sys.stderr)
                    path = _build(folder, name, [*compiler, *flags, f"-I{_SOURCES}", str(files[0])])
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # on a file system without the right to execute
            if path.parent == _temporary_folder():
                raise
            return ctypes.CDLL(str(shutil.copy(path, _temporary_folder() / path.name)))
    except (OSError, ValueError) as error:
        message = f"eqzoo: {source}.cpp could not be built or loaded, eager torch is used instead: {error}"
        warnings.warn(message, stacklevel=2)
        return None


def _hashed(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Processes that need the same library wait for the first, where the system has locks of files."""
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield


def _find_library(folder: Path, name: str) -> Path | None:
    """A library in a folder, of any compiler if ``name`` ends before that.

    Its name ends in a hash of its content: one that is truncated would end the process when it is loaded.
    """
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.stem.rpartition("-")[2] == _digest(path):
            return path
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return None


def _build(folder: Path, name: str, command: Sequence[str]) -> Path:
    """Compiles a library in a temporary folder inside of ``folder``, and moves it to the name that has its hash."""
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as made:
        temporary = Path(made) / "kernel.so"
        # Without OpenMP kernels use one thread; some compilers do not know -march=native.
        for extra in (["-march=native", "-fopenmp"], ["-march=native"], []):
            ran = _run([*command, *extra, "-o", str(temporary)], env=os.environ | {"TMPDIR": made})
            if ran.returncode == 0 and temporary.is_file():
                return temporary.replace(folder / f"{name}-{_digest(temporary)}.so")
    raise OSError(f"{command[0]} says: {ran.stderr.strip()[-2000:] or f'nothing, and ends with {ran.returncode}'}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@functools.cache
def _compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: CXX, or the first of the usual ones that there is."""
    requested = shlex.split(os.environ.get("CXX", ""))
    for command in ([requested] if requested else []) + [["g++"], ["clang++"], ["c++"]]:
        if path := shutil.which(command[0]):
            if requested and command != requested:
                warnings.warn(f"eqzoo: there is no CXX={shlex.join(requested)}; {path} compiles", stacklevel=2)
            return (path, *command[1:])
    return None


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=env)


@functools.cache
def _cache() -> Path | None:
    """The folder of built kernels, which need not be writable; None where there is none and none can be made."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eqzoo" / "kernels"
        with contextlib.suppress(PermissionError):
            cache.mkdir(parents=True, exist_ok=True)
        return cache if cache.is_dir() else None
    except (OSError, RuntimeError):  # no such folder can be made, or the user has no home
        return None


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="eqzoo-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def cpu_flags() -> str:
    """The line of the processor's instruction sets; empty where it cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
