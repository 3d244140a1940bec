"""What octic layers do besides products of matrices: GELU, layer norm, and the vectors of attention heads.

A field of irreps of p4m is two tensors: A1, A2, B1 and B2 in ``ab`` ``(4, B, N, c)``, and the two components of E in
``e`` ``(2, B, N, 2c)``, over N tokens. See `eqzoo.layers.Irreps` for how the group acts.

References:
    Octic Vision Transformers: Quicker ViTs Through Equivariance (Nordström, Edstedt, Kahl and Bökman, 2025)
    https://arxiv.org/abs/2505.15441
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backend import cpu_function, forced, launch, plain
from ._dtypes import accumulation_dtype
from ._higher_derivatives import derivative_of_gradients

__all__ = ["eight_parts", "octic_gelu", "octic_norm", "regular_matrix", "split_heads", "stack_heads"]

Pair = tuple[Tensor, Tensor]

# Rows: the values at e, r, rr, rrr, m, mr, mrr, mrrr. Columns: the parts A1, A2, B1, B2 and four of E, as `eight_parts`
# gives them. Times √2/4 it is orthonormal.
_SIGNS = (
    (1, 1, 1, 1, 1, 1, 1, -1),
    (1, 1, -1, -1, 1, -1, -1, -1),
    (1, 1, 1, 1, -1, -1, -1, 1),
    (1, 1, -1, -1, -1, 1, 1, 1),
    (1, -1, 1, -1, -1, 1, -1, -1),
    (1, -1, -1, 1, -1, -1, 1, -1),
    (1, -1, 1, -1, 1, -1, 1, 1),
    (1, -1, -1, 1, 1, 1, -1, 1),
)


def regular_matrix(like: Tensor) -> Tensor:
    """The orthonormal matrix from the eight parts of a field to its values at the eight elements, ``(8, 8)``."""
    return torch.tensor(_SIGNS, dtype=like.dtype, device=like.device) * (math.sqrt(2) / 4)


def eight_parts(ab: Tensor, e: Tensor) -> Tensor:
    """The field as eight parts of equal width, ``(8, ..., c)``.

    The last four are E: the first halves of the channels of components 0 and 1, then the second halves.
    """
    halves = torch.stack(e.unflatten(-1, (2, -1)).unbind(-2))
    return torch.cat([ab, halves.flatten(0, 1)])


def _from_eight_parts(parts: Tensor) -> Pair:
    ab, halves = parts.split(4)
    return ab, torch.cat([halves[:2], halves[2:]], -1)


def octic_gelu(ab: Tensor, e: Tensor) -> Pair:
    """GELU of the regular representation: ``Q⁻¹ gelu(Q x)``, Q the orthonormal `regular_matrix`, in one pass.

    Args:
        ab: A1, A2, B1 and B2, ``(4, B, N, c)``.
        e: The components of E, ``(2, B, N, 2c)``.

    Returns:
        A field of the same shapes.

    Example:
        >>> ab, e = torch.zeros(4, 1, 1, 1), torch.zeros(2, 1, 1, 2)
        >>> ab[0] = 2  # an invariant field has the same value at all elements, 2 · √2/4
        >>> (octic_gelu(ab, e)[0][0] - F.gelu(torch.tensor(0.5**0.5)) * 8**0.5).abs().item() < 1e-6
        True
    """
    _check_field(ab, e)
    if not _fast(ab, e):
        return _gelu(ab, e)
    return _gelu_op(ab.contiguous(), e.contiguous())


def octic_norm(ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Pair:
    """Layer norm of a field of irreps: ``weight · (x − mean(x)) / s + bias`` with one s for all parts of a token.

    ``s = √2/4 · sqrt(Σ var(A1, A2, B1, B2) + mean of var(E) over its components + eps)``, as the authors' code has it.
    The standard deviation over channels and elements in the regular representation would count the mean of E four
    times. Means and variances are over the channels of a part; only A1 has a bias.

    Args:
        ab: A1, A2, B1 and B2, ``(4, B, N, c)``.
        e: The components of E, ``(2, B, N, 2c)``.
        weight: A scale for each channel, ``(6c,)``: A1, A2, B1, B2, and E, whose components share theirs.
        bias: The shift of A1, ``(c,)``.
        eps: What is added to the variance.

    Returns:
        A field of the same shapes.
    """
    _check_field(ab, e)
    width = ab.shape[-1]
    if weight.shape != (6 * width,) or bias.shape != (width,):
        raise ValueError(
            f"weight is ({6 * width},) and bias ({width},) for this field, got {tuple(weight.shape)} and "
            f"{tuple(bias.shape)}"
        )
    if not _fast(ab, e, weight, bias):
        return _norm(ab, e, weight, bias, eps)
    return _norm_op(ab.contiguous(), e.contiguous(), weight.contiguous(), bias.contiguous(), eps)


def stack_heads(ab: Tensor, e: Tensor, count: int, heads: int) -> Tensor:
    """The vectors of attention heads: of each part a share of the channels, A1, A2, B1, B2, E0, E1 in a row.

    Args:
        ab: A1, A2, B1 and B2, ``(4, B, N, count·heads·d)``.
        e: The components of E, ``(2, B, N, count·heads·2d)``.
        count: How many vectors a head has: 3 for queries, keys and values.
        heads: The number of heads.

    Returns:
        ``(count, B, heads, N, 8d)``; the group acts on the last axis by an orthogonal matrix, so that inner products
        of vectors are invariant.

    Example:
        >>> stack_heads(torch.zeros(4, 2, 5, 24), torch.zeros(2, 2, 5, 48), 3, 2).shape
        torch.Size([3, 2, 2, 5, 32])
    """
    _check_field(ab, e)
    if ab.ndim != 4 or ab.shape[-1] % (count * heads):
        raise ValueError(
            f"ab is (4, B, N, c) with c a multiple of {count} x {heads} for {count} vectors of {heads} heads, got "
            f"{tuple(ab.shape)}"
        )
    if not _fast(ab, e):
        return _stack(ab, e, count, heads)
    return _stack_op(ab.contiguous(), e.contiguous(), count, heads)


def split_heads(x: Tensor) -> Pair:
    """The inverse of `stack_heads`: ``(count, B, heads, N, 8d)`` to a field of ``count·heads·d`` channels a part."""
    if x.ndim != 5 or x.shape[-1] % 8:
        raise ValueError(f"x is (count, B, heads, N, 8d), got {tuple(x.shape)}")
    if not _fast(x):
        return _split(x)
    return _split_op(x.contiguous())


def _check_field(ab: Tensor, e: Tensor) -> None:
    if ab.ndim < 3 or ab.shape[0] != 4 or e.shape != (2, *ab.shape[1:-1], 2 * ab.shape[-1]):
        raise ValueError(
            f"a field of irreps is ab (4, B, ..., c) and e (2, B, ..., 2c), got {tuple(ab.shape)} and {tuple(e.shape)}"
        )


def _fast(*tensors: Tensor) -> bool:
    """Whether the operators run; else the formulas do, which record and compile as torch's own operators."""
    recording = plain() or torch.compiler.is_compiling() or forced("reference")
    first = tensors[0]
    return not recording and all(t.is_cpu and t.dtype == first.dtype for t in tensors) and _known(first.dtype)


def _known(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


# The formulas.


def _gelu(ab: Tensor, e: Tensor) -> Pair:
    parts = eight_parts(ab, e)
    matrix = regular_matrix(parts)
    regular = (matrix @ parts.flatten(1)).to(parts.dtype)  # autocast would give a half
    return _from_eight_parts((matrix.T @ F.gelu(regular)).to(parts.dtype).view_as(parts))


def _norm(ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Pair:
    dtype = torch.promote_types(ab.dtype, weight.dtype)
    ab, e = (x.to(accumulation_dtype(dtype)) for x in (ab, e))
    ab, e = (x - x.mean(-1, keepdim=True) for x in (ab, e))
    variance = ab.square().mean(-1, keepdim=True).sum(0) + e.square().mean(-1, keepdim=True).mean(0)
    inverse = (variance + eps).rsqrt() * (4 / math.sqrt(2))
    width = bias.shape[0]
    ones = [1] * (ab.ndim - 2)
    ab = ab * inverse * weight[: 4 * width].view(4, *ones, width) + _on_first(bias).view(4, *ones, width)
    return ab.to(dtype), (e * inverse * weight[4 * width :]).to(dtype)


def _on_first(bias: Tensor) -> Tensor:
    """A shift of A1 and none of the other three, ``(4, c)``."""
    return F.pad(bias[None], (0, 0, 0, 3))


def _stack(ab: Tensor, e: Tensor, count: int, heads: int) -> Tensor:
    parts = (x.unflatten(-1, (count, heads, -1)).permute(3, 1, 4, 2, 0, 5).flatten(4) for x in (ab, e))
    return torch.cat(tuple(parts), -1)


def _split(x: Tensor) -> Pair:
    ab, e = (
        y.unflatten(-1, (parts, -1)).permute(4, 1, 3, 0, 2, 5).flatten(3)
        for y, parts in zip(x.tensor_split(2, -1), (4, 2), strict=True)
    )
    return ab, e


# The operators: C++ where there is a compiler, the formulas else.


def _empty_like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


@torch.library.custom_op("eqzoo::octic_gelu", mutates_args=())
def _gelu_op(ab: Tensor, e: Tensor) -> Pair:
    function = cpu_function("octic", "octic_gelu", ab, e)
    if function is None:
        return _gelu(ab, e)
    out_ab, out_e = _empty_like(ab, e)
    launch(function, ab, e, out_ab, out_e, *_rows(ab))
    return out_ab, out_e


@torch.library.custom_op("eqzoo::octic_gelu_backward", mutates_args=())
def _gelu_backward_op(grad_ab: Tensor, grad_e: Tensor, ab: Tensor, e: Tensor) -> Pair:
    function = cpu_function("octic", "octic_gelu_backward", grad_ab, grad_e, ab, e)
    if function is None:
        return _derivative(_gelu, (grad_ab, grad_e), ab, e)
    out_ab, out_e = _empty_like(ab, e)
    launch(function, grad_ab, grad_e, ab, e, out_ab, out_e, *_rows(ab))
    return out_ab, out_e


@torch.library.custom_op("eqzoo::octic_norm", mutates_args=())
def _norm_op(ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Pair:
    function = cpu_function("octic", "octic_norm", ab, e, weight, bias)
    if function is None:
        return _norm(ab, e, weight, bias, eps)
    out_ab, out_e = _empty_like(ab, e)
    launch(function, ab, e, weight, bias, out_ab, out_e, *_rows(ab), eps)
    return out_ab, out_e


@torch.library.custom_op("eqzoo::octic_norm_backward", mutates_args=())
def _norm_backward_op(
    grad_ab: Tensor, grad_e: Tensor, ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    function = cpu_function("octic", "octic_norm_backward", grad_ab, grad_e, ab, e, weight)
    if function is None:
        return _derivative(partial(_norm, eps=eps), (grad_ab, grad_e), ab, e, weight, bias)
    out_ab, out_e = _empty_like(ab, e)
    threads = torch.get_num_threads()
    grad_weight, grad_bias = weight.new_zeros(threads, *weight.shape), bias.new_zeros(threads, *bias.shape)
    launch(function, grad_ab, grad_e, ab, e, weight, out_ab, out_e, grad_weight, grad_bias, *_rows(ab), eps)
    return out_ab, out_e, grad_weight.sum(0), grad_bias.sum(0)


@torch.library.custom_op("eqzoo::octic_stack_heads", mutates_args=())
def _stack_op(ab: Tensor, e: Tensor, count: int, heads: int) -> Tensor:
    function = cpu_function("octic", "octic_stack_heads", ab, e)
    if function is None:
        return _stack(ab, e, count, heads)
    out = ab.new_empty(_stacked_shape(ab, count, heads))
    launch(function, ab, e, out, *out.shape[:4], out.shape[4] // 8)
    return out


@torch.library.custom_op("eqzoo::octic_split_heads", mutates_args=())
def _split_op(x: Tensor) -> Pair:
    function = cpu_function("octic", "octic_split_heads", x)
    if function is None:
        ab, e = _split(x)
        return ab.contiguous(), e.contiguous()
    ab, e = _split_empty(x)
    launch(function, ab, e, x, *x.shape[:4], x.shape[4] // 8)
    return ab, e


def _rows(ab: Tensor) -> tuple[int, int]:
    return math.prod(ab.shape[1:-1]), ab.shape[-1]


def _stacked_shape(ab: Tensor, count: int, heads: int) -> tuple[int, ...]:
    return count, ab.shape[1], heads, ab.shape[2], 8 * (ab.shape[3] // (count * heads))


def _split_empty(x: Tensor) -> Pair:
    count, batch, heads, tokens, size = x.shape
    width = count * heads * size // 8
    return x.new_empty(4, batch, tokens, width), x.new_empty(2, batch, tokens, 2 * width)


def _derivative(function: Callable[..., Any], grads: tuple[Tensor, ...], *inputs: Tensor) -> Any:
    """The gradients of a formula by torch's own differentiation; below an operator autograd alone would see nothing."""
    return torch.func.vjp(function, *inputs)[1](grads)


@_gelu_op.register_fake
def _(ab: Tensor, e: Tensor) -> Pair:
    return torch.empty_like(ab), torch.empty_like(e)


@_gelu_backward_op.register_fake
def _(grad_ab: Tensor, grad_e: Tensor, ab: Tensor, e: Tensor) -> Pair:
    return torch.empty_like(ab), torch.empty_like(e)


@_norm_op.register_fake
def _(ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Pair:
    return torch.empty_like(ab), torch.empty_like(e)


@_norm_backward_op.register_fake
def _(
    grad_ab: Tensor, grad_e: Tensor, ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(ab), torch.empty_like(e), torch.empty_like(weight), torch.empty_like(bias)


@_stack_op.register_fake
def _(ab: Tensor, e: Tensor, count: int, heads: int) -> Tensor:
    return ab.new_empty(_stacked_shape(ab, count, heads))


@_split_op.register_fake
def _(x: Tensor) -> Pair:
    return _split_empty(x)


def _keep(count: int) -> Callable[..., None]:
    """Keeps the first inputs for the backward pass, and what follows them as it is."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.rest = inputs[count:]

    return setup


def _gelu_backward(ctx: Any, grad_ab: Tensor, grad_e: Tensor) -> Pair:
    return _gelu_backward_op(grad_ab.contiguous(), grad_e.contiguous(), *ctx.saved_tensors)


def _norm_backward(ctx: Any, grad_ab: Tensor, grad_e: Tensor) -> tuple[Tensor | None, ...]:
    grads = _norm_backward_op(grad_ab.contiguous(), grad_e.contiguous(), *ctx.saved_tensors, *ctx.rest)
    return (*grads, None)


def _gelu_backward_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    grads, inputs = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
    return derivative_of_gradients(_gelu, grads, inputs, cotangents)


def _norm_backward_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    (eps,) = ctx.rest
    grads, inputs = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
    return (*derivative_of_gradients(partial(_norm, eps=eps), grads, inputs, cotangents), None)


def _stack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_split_op(grad.contiguous()), None, None)


def _keep_counts(ctx: Any, inputs: tuple[Tensor], output: Pair) -> None:
    ctx.counts = inputs[0].shape[0], inputs[0].shape[2]


def _split_backward(ctx: Any, grad_ab: Tensor, grad_e: Tensor) -> Tensor:
    return _stack_op(grad_ab.contiguous(), grad_e.contiguous(), *ctx.counts)


_gelu_op.register_autograd(_gelu_backward, setup_context=_keep(2))
_gelu_backward_op.register_autograd(_gelu_backward_twice, setup_context=_keep(4))
_norm_op.register_autograd(_norm_backward, setup_context=_keep(4))
_norm_backward_op.register_autograd(_norm_backward_twice, setup_context=_keep(6))
_stack_op.register_autograd(_stack_backward, setup_context=_keep(0))
_split_op.register_autograd(_split_backward, setup_context=_keep_counts)
