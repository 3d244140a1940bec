"""Dropout that keeps no mask: whether a number stays follows from a seed and its place in memory."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compile
from .._compile import WITH_BFLOAT16
from .._dispatch import Operator, has_memory, is_observed, is_transformed, plain
from .._layout import is_last

_WORDS = 2**32


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Sets each number to 0 with probability p, and divides the others by 1 − p, as `torch.nn.functional.dropout`.

    On a CPU the kernel draws one seed from torch's generator and 32 bits a number from SplitMix64, so that p is exact
    to 2⁻³². The backward pass draws the same bits again. Elsewhere it is torch's dropout.

    Args:
        x: Any tensor.
        p: The probability of dropping a number.
        training: Whether anything is dropped.

    Returns:
        A tensor like x.

    References:
        Dropout: A Simple Way to Prevent Neural Networks from Overfitting (Srivastava et al., 2014)
        https://jmlr.org/papers/v15/srivastava14a.html
        Fast Splittable Pseudorandom Number Generators (Steele et al., 2014), https://doi.org/10.1145/2660193.2660195

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dropout(torch.ones(4, 100)).unique()
        tensor([0., 2.])
    """
    if not training or p == 0:
        return x
    if not 0 < round(p * _WORDS) < _WORDS or not _has_kernel(x):
        return F.dropout(x, p)
    strides = x.stride() if _is_dense(x) else x.contiguous().stride()
    if torch.compiler.is_compiling() or is_observed():
        return _dropout(x, torch.randint(2**63 - 1, (), dtype=torch.int64), p, strides)
    return _Dropout.apply(x, int(torch.empty((), dtype=torch.int64).random_()), p, strides)


def _has_kernel(x: Tensor) -> bool:
    if not x.is_cpu or x.dtype not in WITH_BFLOAT16:
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting() and _compile.is_built("drop/cpu", "dropout")
    if type(x) is not Tensor or plain() or is_transformed():
        return False
    return _compile.cpu_function("drop/cpu", "dropout", x, scalars=WITH_BFLOAT16) is not None


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor fills its memory, in the order of its axes or with channels last."""
    if x.is_contiguous():
        return True
    return x.is_contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.ndim == 5 and is_last(x)


def _drawn(x: Tensor, seed: int, p: float, strides: Sequence[int]) -> Tensor:
    """The product with the mask; the place in memory that a number draws its bits by is that of these strides."""
    if x.stride() != strides:
        x = torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)
    y = torch.empty_like(x)
    function = _compile.cpu_function("drop/cpu", "dropout", x, scalars=WITH_BFLOAT16)
    if function is None:  # it was there when the graph was made
        return x * y.bernoulli_(1 - p, generator=torch.Generator().manual_seed(seed)) / (1 - p)
    # As numbers: `launch` takes contiguous tensors alone.
    _compile.launch(function, x.data_ptr(), y.data_ptr(), x.numel(), seed, round(p * _WORDS), 1 / (1 - p))
    return y


class _Dropout(torch.autograd.Function):
    """A linear map, which is its own adjoint: both passes are the same product with the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: int, p: float, strides: tuple[int, ...]) -> Tensor:
        ctx.options = seed, p, strides
        return _drawn(x, seed, p, strides)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if not has_memory(grads[0]):  # mapped over many gradients
            ones = torch.empty_strided(grads[0].shape, ctx.options[2], dtype=grads[0].dtype).fill_(1)
            return grads[0] * _drawn(ones, *ctx.options), None, None, None
        return _Dropout.apply(grads[0], *ctx.options), None, None, None


# The same for torch.compile and dispatch modes, which take operators as they are.

_dropout = Operator(
    "dropout(Tensor x, Tensor seed, float p, SymInt[] strides) -> Tensor",
    lambda x, seed, p, strides: _drawn(x, int(seed), p, tuple(strides)),
    lambda x, seed, p, strides: x.new_empty_strided(x.shape, strides),
)


@_dropout.gradient()
def _(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    return (_dropout(grad, ctx.saved_tensors[1], *ctx.numbers),)
