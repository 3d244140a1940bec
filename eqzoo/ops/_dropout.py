"""Dropout that keeps no mask: whether a number stays follows from a seed and its place in memory."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backend import WITH_BFLOAT16, cpu_function, launch, plain
from ._transforms import is_transformed

__all__ = ["dropout"]

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

    Raises:
        ValueError: If p is not a probability.

    References:
        Dropout: A Simple Way to Prevent Neural Networks from Overfitting (Srivastava et al., 2014)
        https://jmlr.org/papers/v15/srivastava14a.html
        Fast Splittable Pseudorandom Number Generators (Steele et al., 2014), https://doi.org/10.1145/2660193.2660195

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dropout(torch.ones(4, 100)).unique()
        tensor([0., 2.])
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p is a probability between 0 and 1, got {p}")
    if not training or p == 0:
        return x
    if torch.compiler.is_compiling() or not _has_kernel(x) or round(p * _WORDS) == _WORDS:
        return F.dropout(x, p)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    return _Dropout.apply(x, seed, p)


def _has_kernel(x: Tensor) -> bool:
    if not x.is_cpu or type(x) is not Tensor or plain() or is_transformed():
        return False
    return cpu_function("dropout", "dropout", x, scalars=WITH_BFLOAT16) is not None


class _Dropout(torch.autograd.Function):
    """A linear map, which is its own adjoint: both passes are the same product with the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: int, p: float) -> Tensor:
        x = x if _is_dense(x) else x.contiguous()
        ctx.seed, ctx.p, ctx.strides = seed, p, x.stride()
        y = torch.empty_like(x)
        function = cpu_function("dropout", "dropout", x, scalars=WITH_BFLOAT16)
        assert function is not None
        # As numbers: `launch` takes contiguous tensors alone.
        launch(function, x.data_ptr(), y.data_ptr(), x.numel(), seed, round(p * _WORDS), 1 / (1 - p))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0]
        if grad.stride() != ctx.strides:
            grad = torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype).copy_(grad)
        return _Dropout.apply(grad, ctx.seed, ctx.p), None, None


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor fills its memory, in whatever order."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True
