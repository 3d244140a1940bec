"""Custom operators, and the choice between their kernels, eager torch and the reference."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "eager", "reference", "irreps", "expanded"]
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

_backend: Backend = "auto"


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Chooses the implementation of the operations for a block of code, in all threads.

    Args:
        backend: ``"auto"``: the Triton kernels on a GPU where Triton is installed, the C++ kernels on a CPU where there
            is a compiler, eager torch elsewhere. ``"eager"``: torch's own operators, as in an exported file.
            ``"reference"``: the formulas of `eqzoo.ops.reference`, with every intermediate result stored. ``"irreps"``:
            as ``"auto"``, with every group convolution on a CPU through the irreps of its group, also where that is
            slower. ``"expanded"``: as ``"auto"``, with every group convolution expanded to a plain one. All agree up
            to round-off; where several channels or pixels share a maximum, kernels give its gradient to the first of
            them, torch's operators divide it among them.

    Raises:
        ValueError: If there is no such backend.

    Example:
        >>> import torch, eqzoo.ops
        >>> x = torch.ones(1, 1, 1, 3, 3)
        >>> with eqzoo.ops.use_backend("eager"):
        ...     eqzoo.ops.generated_depthwise(x, torch.ones(1, 1, 9, 1), torch.zeros(1, 1, 9), x).sum()
        tensor(49.)
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
    return _backend == backend or (backend == "reference" and is_transformed())


def plain() -> bool:
    """Whether the graph must consist of torch's own operators: on request, and while a network is exported."""
    return _backend == "eager" or exporting()


def exporting() -> bool:
    """Whether a graph is recorded for a file, in which the batch size is not known."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def without_kernels() -> bool:
    """Whether `use_backend` chooses torch's own operators."""
    return _backend in ("eager", "reference")


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active, for which custom operators have no rules.

    False while torch compiles, as the graph is then transformed as a whole.
    """
    if torch.compiler.is_compiling():
        return False
    in_forward_mode = torch.autograd.forward_ad._current_level >= 0
    return in_forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def is_observed() -> bool:
    """Whether a dispatch mode sees each operator, as make_fx, fake tensors and torch's FLOP counter do.

    What a kernel writes into memory by itself would be hidden from it.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has memory of its own; gradients that are mapped over (``is_grads_batched``) have none."""
    try:
        return x.data_ptr() is not None
    except RuntimeError:
        return False


def on_cuda(*tensors: Tensor) -> bool:
    """Whether the Triton kernels apply: Triton is installed, and the tensors are of a type that the kernels read."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    return not without_kernels() and all(t.is_cuda and t.dtype in types for t in tensors) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def on_own_device(function: Callable[P, T]) -> Callable[P, T]:
    """Launches the kernels of a function on the GPU of its first tensor."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0]
        tensor = first if isinstance(first, Tensor) else first[0]  # type: ignore[index]
        with torch.cuda.device_of(tensor) if tensor.is_cuda else contextlib.nullcontext():
            return function(*args, **kwargs)

    return run


def check_shape(name: str, x: Tensor | None, *shape: int | None) -> None:
    """Raises ValueError unless a tensor has this shape, before a kernel reads memory by it; None is any length."""
    if x is None:
        return
    if x.ndim != len(shape) or any(n is not None and n != side for n, side in zip(shape, x.shape, strict=True)):
        lengths = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has shape ({lengths}), got {tuple(x.shape)}")


def check_window(*sides: int, dilation: int = 1) -> None:
    """Raises ValueError unless a window has a center pixel, and its taps are at least one pixel apart."""
    if any(side < 1 or side % 2 == 0 for side in sides) or dilation < 1:
        raise ValueError(f"windows have odd sides and a dilation of at least 1, got {sides} and {dilation}")


def check_pixels(x: Tensor) -> None:
    """Raises ValueError unless images have a pixel, by whose number kernels divide."""
    if min(x.shape[-2:]) < 1:
        raise ValueError(f"images have at least one pixel, got {tuple(x.shape)}")


class Operator:
    """A custom operator ``eqzoo::name``: an eager form, kernels by device, and derivatives.

    Args:
        schema: Its name, arguments and results, tensors before numbers: ``"scale(Tensor x, float s) -> Tensor"``.
        eager: The eager form, which runs where no kernel does.
        empty: The results without their values, for tracing.
        any_strides: Whether torch.compile may change the strides of the arguments; those of the results must not
            depend on them.
    """

    def __init__(
        self, schema: str, eager: Callable[..., Any], empty: Callable[..., Any], any_strides: bool = False
    ) -> None:
        name, _, arguments = schema.partition("(")
        tags = (torch.Tag.flexible_layout,) if any_strides else ()
        self.op = torch.library.custom_op(f"eqzoo::{name}", eager, mutates_args=(), schema=f"({arguments}", tags=tags)
        self.op.register_fake(empty)
        self._eager = eager
        self._num_tensors = schema.partition("->")[0].count("Tensor")

    def __call__(self, *args: Any) -> Any:
        return self.op(*args)

    def kernel(self, device: str) -> Callable[[F], F]:
        """Registers a kernel for a device type, ``"cpu"`` or ``"cuda"``.

        Where it returns NotImplemented, as for types and sizes that it does not cover, the eager form runs.
        """

        def register(kernel: F) -> F:
            def run(*args: Any) -> Any:
                result = kernel(*args)
                return self._eager(*args) if result is NotImplemented else result

            self.op.register_kernel(device)(run)
            return kernel

        return register

    def gradient(self, saves: Sequence[int] = ()) -> Callable[[F], F]:
        """Registers the gradient, a function of a context and of the gradients of the results.

        The context has the tensor arguments in ``saved_tensors``, followed by the results that are saved, and the
        numbers in ``numbers``. The function returns the gradients of the tensor arguments.

        Args:
            saves: Results that it needs, by their places; they have no gradients of their own.
        """

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            tensors: list[Tensor | None] = []
            for argument in inputs[: self._num_tensors]:
                tensors += argument if isinstance(argument, list | tuple) else [argument]
            saved = [output[i] for i in saves]
            ctx.numbers = inputs[self._num_tensors :]
            ctx.mark_non_differentiable(*saved)
            ctx.set_materialize_grads(not saves)  # zeros for saved results would only take memory
            ctx.save_for_backward(*tensors, *saved)

        def register(gradient: F) -> F:
            def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
                needs = ctx.needs_input_grad
                found = () if grads[0] is None else gradient(ctx, *grads)
                padded = [*found, *[None] * (len(needs) - len(found))]
                return tuple(g if need else None for g, need in zip(padded, needs, strict=True))

            self.op.register_autograd(backward, setup_context=setup)
            return gradient

        return register
