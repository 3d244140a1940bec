"""GELU and layer norm of octic layers.

A field of irreps of p4m is two tensors: A1, A2, B1 and B2 in ``ab`` ``(4, B, N, c)``, and the two components of E in
``e`` ``(2, B, N, 2c)``, over N tokens. See `eqzoo.layers.Irreps` for how the group acts.

References:
    Octic Vision Transformers: Quicker ViTs Through Equivariance (Nordström, Edstedt, Kahl and Bökman, 2025)
    https://arxiv.org/abs/2505.15441
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _compile
from .._derivatives import derivative_of_gradients
from .._dispatch import Operator, check_shape, forced, plain
from . import eager
from .eager import Pair


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
        >>> (octic_gelu(ab, e)[0][0] - torch.nn.functional.gelu(torch.tensor(0.5**0.5)) * 8**0.5).abs().item() < 1e-6
        True
    """
    check_shape("ab", ab, 4, *ab.shape[1:])
    check_shape("e", e, 2, *ab.shape[1:-1], 2 * ab.shape[-1])
    if not _fast(ab, e):
        return eager.gelu(ab, e)
    return _gelu(ab.contiguous(), e.contiguous())


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
    check_shape("ab", ab, 4, *ab.shape[1:])
    check_shape("e", e, 2, *ab.shape[1:-1], 2 * ab.shape[-1])
    check_shape("weight", weight, 6 * ab.shape[-1])
    check_shape("bias", bias, ab.shape[-1])
    if not _fast(ab, e, weight, bias):
        return eager.norm(ab, e, weight, bias, eps)
    return _norm(ab.contiguous(), e.contiguous(), weight.contiguous(), bias.contiguous(), eps)


def _fast(*tensors: Tensor) -> bool:
    """Whether the operators run; else the formulas do, which record and compile as torch's own operators."""
    recording = plain() or torch.compiler.is_compiling() or forced("reference")
    first = tensors[0]
    known = first.dtype in (torch.float32, torch.float64)
    return not recording and known and all(t.is_cpu and t.dtype == first.dtype for t in tensors)


def _empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def _eager_gelu_backward(grad_ab: Tensor, grad_e: Tensor, *inputs: Tensor) -> Any:
    # Autograd is off inside an operator; torch.func is not.
    return torch.func.vjp(eager.gelu, *inputs)[1]((grad_ab, grad_e))


def _eager_norm_backward(grad_ab: Tensor, grad_e: Tensor, *inputs_and_eps: Any) -> Any:
    *inputs, eps = inputs_and_eps
    return torch.func.vjp(partial(eager.norm, eps=eps), *inputs)[1]((grad_ab, grad_e))


_gelu = Operator("octic_gelu(Tensor ab, Tensor e) -> (Tensor, Tensor)", eager.gelu, _empty_like)
_gelu_backward = Operator(
    "octic_gelu_backward(Tensor grad_ab, Tensor grad_e, Tensor ab, Tensor e) -> (Tensor, Tensor)",
    _eager_gelu_backward,
    lambda grad_ab, grad_e, ab, e: _empty_like(ab, e),
)
_norm = Operator(
    "octic_norm(Tensor ab, Tensor e, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
    eager.norm,
    lambda ab, e, weight, bias, eps: _empty_like(ab, e),
)
_norm_backward = Operator(
    "octic_norm_backward(Tensor grad_ab, Tensor grad_e, Tensor ab, Tensor e, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _eager_norm_backward,
    lambda grad_ab, grad_e, ab, e, weight, bias, eps: _empty_like(ab, e, weight, bias),
)


@_gelu.kernel("cpu")
def _(ab: Tensor, e: Tensor) -> Any:
    function = _compile.cpu_function("octic/cpu", "octic_gelu", ab, e)
    if function is None:
        return NotImplemented
    out = _empty_like(ab, e)
    _compile.launch(function, ab, e, *out, *_rows(ab))
    return out


@_gelu_backward.kernel("cpu")
def _(grad_ab: Tensor, grad_e: Tensor, ab: Tensor, e: Tensor) -> Any:
    function = _compile.cpu_function("octic/cpu", "octic_gelu_backward", grad_ab, grad_e, ab, e)
    if function is None:
        return NotImplemented
    out = _empty_like(ab, e)
    _compile.launch(function, grad_ab, grad_e, ab, e, *out, *_rows(ab))
    return out


@_norm.kernel("cpu")
def _(ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    function = _compile.cpu_function("octic/cpu", "octic_norm", ab, e, weight, bias)
    if function is None:
        return NotImplemented
    out = _empty_like(ab, e)
    _compile.launch(function, ab, e, weight, bias, *out, *_rows(ab), eps)
    return out


@_norm_backward.kernel("cpu")
def _(grad_ab: Tensor, grad_e: Tensor, ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    function = _compile.cpu_function("octic/cpu", "octic_norm_backward", grad_ab, grad_e, ab, e, weight)
    if function is None:
        return NotImplemented
    out, threads = _empty_like(ab, e), torch.get_num_threads()
    sums = weight.new_zeros(threads, *weight.shape), bias.new_zeros(threads, *bias.shape)
    _compile.launch(function, grad_ab, grad_e, ab, e, weight, *out, *sums, *_rows(ab), eps)
    return *out, sums[0].sum(0), sums[1].sum(0)


@_gelu.gradient()
def _(ctx: Any, *grads: Tensor) -> Any:
    return _gelu_backward(*(g.contiguous() for g in grads), *ctx.saved_tensors)


@_norm.gradient()
def _(ctx: Any, *grads: Tensor) -> Any:
    return _norm_backward(*(g.contiguous() for g in grads), *ctx.saved_tensors, *ctx.numbers)


# Second derivatives, through the formulas: too rare for kernels.


@_gelu_backward.gradient()
def _(ctx: Any, *cotangents: Tensor) -> Any:
    return derivative_of_gradients(eager.gelu, ctx.saved_tensors[:2], ctx.saved_tensors[2:], cotangents)


@_norm_backward.gradient()
def _(ctx: Any, *cotangents: Tensor) -> Any:
    formula = partial(eager.norm, eps=ctx.numbers[0])
    return derivative_of_gradients(formula, ctx.saved_tensors[:2], ctx.saved_tensors[2:], cotangents)


def _rows(ab: Tensor) -> tuple[int, int]:
    return math.prod(ab.shape[1:-1]), ab.shape[-1]
