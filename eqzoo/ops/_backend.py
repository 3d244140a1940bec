"""Backends of the operations: the choice between them, registration by device, C++ built at first use."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from ._transforms import is_transformed

__all__ = [
    "WITH_BFLOAT16",
    "Backend",
    "cpu_function",
    "exporting",
    "forced",
    "has_avx2_alone",
    "launch",
    "multiplies_bfloat16",
    "on_cuda",
    "operator",
    "plain",
    "register",
    "use_backend",
]

Backend = Literal["auto", "eager", "reference", "irreps", "expanded"]
F = TypeVar("F", bound=Callable[..., Any])

_SOURCES = Path(__file__).with_name("native")
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
_backend: Backend = "auto"
_building = threading.Lock()


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Chooses the implementation of the operations for a block of code, in all threads.

    Args:
        backend: ``"auto"``: the Triton kernels on a GPU where Triton is installed, the C++ kernels on a CPU where there
            is a compiler, eager torch elsewhere. ``"eager"``: torch's own operators, as in an exported file.
            ``"reference"``: the formulas of `eqzoo.ops.reference`, with every intermediate result stored. ``"irreps"``:
            as ``"auto"``, with every group convolution on a CPU through the irreps of its group, also where that is
            slower.
            ``"expanded"``: as ``"auto"``, with every group convolution expanded to a plain one. All agree up to
            rounding; where several channels or pixels share a maximum, kernels give its gradient to the first of them,
            torch's operators divide it among them.

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
        raise ValueError(f"backend is 'auto', 'eager', 'reference', 'irreps' or 'expanded', got {backend!r}")
    previous, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = previous


def forced(backend: Backend) -> bool:
    """Whether `use_backend` chooses this backend; the reference is also chosen under torch.func's transforms.

    Custom operators have no rules for these: torch raises an error, or takes tangents of forward mode for zero.
    """
    return _backend == backend or (backend == "reference" and not torch.compiler.is_compiling() and is_transformed())


def plain() -> bool:
    """Whether the graph must consist of torch's own operators: on request, and while a network is exported."""
    return _backend == "eager" or exporting()


def exporting() -> bool:
    """Whether a graph is recorded for a file, in which the batch size is not known."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def operator(name: str, eager: Callable[..., Any], any_strides: bool = False) -> CustomOpDef:
    """A custom operator ``eqzoo::name``, which runs the eager form on devices that no kernel is registered for.

    With ``any_strides`` torch.compile may change the strides of its inputs, and those of its outputs must not depend on
    them.
    """
    tags = (torch.Tag.flexible_layout,) if any_strides else ()
    return torch.library.custom_op(f"eqzoo::{name}", eager, mutates_args=(), tags=tags)


def register(op: CustomOpDef, device: str, eager: Callable[..., Any]) -> Callable[[F], F]:
    """Registers the kernel of an operator for a device type, with torch's dispatcher.

    The kernel returns NotImplemented for what it does not cover: another floating-point type or group order, no
    compiler or no Triton, or a backend that was chosen. The eager form runs then.

    Args:
        op: The operator.
        device: ``"cpu"`` or ``"cuda"``.
        eager: The operator's eager form.
    """

    def decorate(kernel: F) -> F:
        def run(*args: Any) -> Any:
            result = kernel(*args)
            return eager(*args) if result is NotImplemented else result

        op.register_kernel(device)(run)
        return kernel

    return decorate


def on_cuda(*tensors: Tensor) -> bool:
    """Whether the Triton kernels apply: Triton is installed, and the tensors are of a type that the kernels read."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    return not _eager() and all(t.is_cuda and t.dtype in types for t in tensors) and _has_triton()


def cpu_function(
    source: str, function: str, *tensors: Tensor, scalars: Mapping[torch.dtype, str] = _SCALARS
) -> "ctypes._NamedFuncPointer | None":
    """The C++ function for CPU tensors of one type, or None where eager torch has to do.

    Args:
        source: The file in ``native``, without its suffix; compiled for each type at its first use, so that
            nobody waits for types that are not used.
        function: The function, without the suffix of its type, such as ``_float``.
        tensors: The tensors that it will read.
        scalars: The types that it is compiled for, and their suffixes.
    """
    dtype = tensors[0].dtype
    if _eager() or dtype not in scalars or any(not t.is_cpu or t.dtype != dtype for t in tensors):
        return None
    with _building:  # functools.cache alone would let concurrent threads build concurrently
        built = _library(source, scalars[dtype])
    return None if built is None else getattr(built, f"{function}_{scalars[dtype]}")


@torch.compiler.assume_constant_result
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions that multiply bfloat16 (AVX512-BF16, AMX, Arm's), which oneDNN uses."""
    return "bf16" in _cpu()


@torch.compiler.assume_constant_result
def has_avx2_alone() -> bool:
    """Whether the processor has AVX2 (vectors of eight float32 numbers) and not AVX-512; False if it does not say."""
    flags = _cpu().split()
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


def _eager() -> bool:
    return _backend in ("eager", "reference")


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _library(source: str, scalar: str) -> ctypes.CDLL | None:
    """A source file compiled for one type: from the user's cache, or built and kept there."""
    if os.environ.get("EQZOO_NATIVE") == "0":
        _log.info("EQZOO_NATIVE=0: eqzoo.ops runs in eager torch")
        return None
    files = [_SOURCES / f"{source}.cpp", *sorted(_SOURCES.glob("*.h"))]
    flags = [*_FLAGS, f"-DEQZOO_{scalar.upper()}", *(["-mprefer-vector-width=512"] if "avx512f" in _cpu() else [])]
    name = f"{source}-{scalar}-{_hashed(_cpu(), *flags, *(f.read_text(encoding='utf-8') for f in files))}"
    try:
        compiler = _compiler()
        if compiler:
            name += f"-{_hashed(*compiler, _run([*compiler, '--version']).stdout)}"
        cache = _cache()
        path = _found(cache, name) if cache else None
        if path is None:
            if compiler is None:
                _log.info("no C++ compiler: eqzoo.ops runs in eager torch")
                return None
            kept = cache is not None and os.access(cache, os.W_OK)
            folder = cache if cache and kept else _temporary_folder()
            with _locked(folder / f".{name}.lock"):
                if (path := _found(folder, name)) is None:
                    lasts = f"once ({folder})" if kept else "for this process alone, as its cache cannot be written"
                    print(f"eqzoo: compiling {files[0].name} ({scalar}) for this processor, {lasts}", file=sys.stderr)
                    path = _built(folder, name, [*compiler, *flags, str(files[0])])
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # on a file system without the right to execute
            if path.parent == _temporary_folder():
                raise
            return ctypes.CDLL(str(shutil.copy(path, _temporary_folder() / path.name)))
    except (OSError, ValueError) as error:
        said = f"eqzoo: {files[0].name} could not be built or loaded, eager torch is used instead: {error}"
        warnings.warn(said, stacklevel=2)
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


def _found(folder: Path, name: str) -> Path | None:
    """A library in a folder, of any compiler if ``name`` ends before that.

    Its name ends in a hash of its content: one that is truncated would end the process when it is loaded.
    """
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.stem.rpartition("-")[2] == _digest(path):
            return path
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return None


def _built(folder: Path, name: str, command: Sequence[str]) -> Path:
    """Compiles a library in a temporary folder inside of ``folder``, and moves it to the name that has its hash."""
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as made:
        temporary = Path(made) / "kernel.so"
        # Without OpenMP kernels use one thread; some compilers do not know -march=native.
        for extra in (["-march=native", "-fopenmp"], ["-march=native"], []):
            ran = _run([*command, *extra, "-o", str(temporary)])
            if ran.returncode == 0 and temporary.is_file():
                return temporary.replace(folder / f"{name}-{_digest(temporary)}.so")
    raise OSError(f"{command[0]} says: {ran.stderr.strip()[-2000:] or f'nothing, and ends with {ran.returncode}'}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@functools.cache
def _compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: CXX, or the first of the usual ones that there is."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in ([wanted] if wanted else []) + [["g++"], ["clang++"], ["c++"]]:
        if path := shutil.which(command[0]):
            if wanted and command != wanted:
                warnings.warn(f"eqzoo: there is no CXX={shlex.join(wanted)}; {path} compiles", stacklevel=2)
            return (path, *command[1:])
    return None


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


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
def _cpu() -> str:
    """What machine code depends on: home folders may be shared by machines with different processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"
