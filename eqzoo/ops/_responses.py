"""Reductions of the responses of a group convolution, ``f̃(o, s, c)``, without storing the responses.

`response_peak` is their maximum over pixels, `response_sum` their attended sum over input channels and poses. The C++
and Triton kernels reduce each response as it is computed, eager torch those of a few images at a time; gradients
compute the responses again.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _backend
from ._chunks import chunks
from ._higher_derivatives import derivative_of_gradients
from ._sizes import output_side
from .reference import responses, spatial_attention

__all__ = ["attended_sum", "response_peak", "response_sum"]


def attended_sum(response: Tensor, alpha: Tensor | None, spatial: Tensor | None, attention_dilation: int) -> Tensor:
    """``Σ_s α^X Σ_c α^C f̃`` of stored responses ``(B, C, S, O, height, width)``; an attention that is None is 1.

    Args:
        response: The responses.
        alpha: The channel attention, ``(B, S, C, O)``.
        spatial: The filters of the spatial attention.
        attention_dilation: The step between their taps.
    """
    attended = response if alpha is None else response * alpha.transpose(1, 2)[..., None, None]
    total = attended.sum(1)
    if spatial is None:
        return total.sum(1)
    weight = spatial_attention(total / attended.shape[1], attended.amax(1), spatial, attention_dilation)
    return (total * weight).sum(1)


def _peaks(x: Tensor, filters: Tensor, *sampling: int) -> tuple[Tensor, Tensor]:
    values, places = responses(x, filters, *sampling).permute(0, 2, 1, 3, 4, 5).flatten(4).max(-1)
    return values, places.int()


def _sums(x: Tensor, alpha: Tensor | None, filters: Tensor, spatial: Tensor | None, *sampling: int) -> Tensor:
    return attended_sum(responses(x, filters, *sampling[:4]), alpha, spatial, sampling[4])


def eager_peak(
    x: Tensor, filters: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """The maximum over pixels of every response, ``(B, S, C, O)``, and the pixel where it is first reached.

    Args:
        x: The input, ``(B, C·S, height, width)``.
        filters: The filters, ``(O, C·S, k, k)``, of the same type.
        poses: The number of poses of the input, S.
        stride: The step between outputs, in pixels.
        padding: The zeros added to each side, in pixels.
        dilation: The step between taps of the filters, in pixels.
    """
    sampling = (poses, stride, padding, dilation)
    peak, where = _peak_fake(x, filters, *sampling)
    for some in _images(x, filters):
        peak[some], where[some] = _peaks(x[some], filters, *sampling)
    return peak, where


def eager_peak_backward(
    grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """The gradients of input and filters."""
    sampling = (poses, stride, padding, dilation)
    grads = _gradients(lambda x, filters: _peaks(x, filters, *sampling)[0], (x,), (filters,), grad)
    return grads[0], grads[1]


def eager_sum(
    x: Tensor,
    filters: Tensor,
    alpha: Tensor | None,
    spatial: Tensor | None,
    poses: int,
    stride: int,
    padding: int,
    dilation: int,
    attention_dilation: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``Σ_s α^X Σ_c α^C f̃``, ``(B, O, height', width')``, and intermediate results for its gradient.

    Args:
        x: The input, ``(B, C·S, height, width)``.
        filters: The filters, ``(O, C·S, k, k)``; all tensors are of one type.
        alpha: The channel attention, ``(B, S, C, O)``, or None for ones.
        spatial: The filters of the spatial attention, ``(O, 2·S, n, n)``, or None for an attention of ones.
        poses: The number of poses of the input, S.
        stride: The step between outputs, in pixels.
        padding: The zeros added to each side, in pixels.
        dilation: The step between taps of the filters, in pixels.
        attention_dilation: The step between taps of the spatial attention, in pixels.
        keep: Whether a gradient will be computed.

    Returns:
        The sum; then, for the gradient through the spatial attention alone and otherwise empty, the sums and the
        maxima over channels and the channels of the maxima, each ``(B, S, height', width', O)``.
    """
    sampling = (poses, stride, padding, dilation, attention_dilation)
    out = _sum_fake(x, filters, alpha, spatial, *sampling, keep)
    for some in _images(x, filters):
        out[0][some] = _sums(x[some], None if alpha is None else alpha[some], filters, spatial, *sampling)
    return out


def eager_sum_backward(
    grad: Tensor,
    x: Tensor,
    filters: Tensor,
    alpha: Tensor | None,
    spatial: Tensor | None,
    sums: Tensor,
    peaks: Tensor,
    which: Tensor,
    poses: int,
    stride: int,
    padding: int,
    dilation: int,
    attention_dilation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, filters, alpha and spatial filters, empty for None."""
    sampling = (poses, stride, padding, dilation, attention_dilation)
    grads = _gradients(lambda *v: _sums(*v, *sampling), (x, alpha), (filters, spatial), grad)
    return _or_empty(grads[0], grads[2], grads[1], grads[3])


response_peak = _backend.operator("response_peak", eager_peak)
response_sum = _backend.operator("response_sum", eager_sum)
_peak_backward = _backend.operator("response_peak_backward", eager_peak_backward)
_sum_backward = _backend.operator("response_sum_backward", eager_sum_backward)


@_backend.register(response_peak, "cpu", eager_peak)
def _native_peak(x: Tensor, filters: Tensor, *sampling: int) -> tuple[Tensor, Tensor]:
    x, filters = x.contiguous(), filters.contiguous()
    function = _backend.cpu_function("attentive_conv", "response_peak", x, filters)
    if function is None:
        return NotImplemented
    peak, where = _peak_fake(x, filters, *sampling)
    _backend.launch(function, x, filters, peak, where, *_sizes(x, filters, None, *sampling))
    return peak, where


@_backend.register(_peak_backward, "cpu", eager_peak_backward)
def _native_peak_backward(
    grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, *sampling: int
) -> tuple[Tensor, Tensor]:
    grad, x, filters = grad.contiguous(), x.contiguous(), filters.contiguous()
    function = _backend.cpu_function("attentive_conv", "response_peak_backward", grad, x, filters)
    if function is None:
        return NotImplemented
    grads = torch.empty_like(x), torch.empty_like(filters)
    _backend.launch(function, x, filters, where, grad, *grads, *_sizes(x, filters, None, *sampling))
    return grads


@_backend.register(response_sum, "cpu", eager_sum)
def _native_sum(
    x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, *sampling_and_keep: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, filters, alpha, spatial = _contiguous(x, filters, alpha, spatial)
    function = _backend.cpu_function("attentive_conv", "response_sum", *_given(x, filters, alpha, spatial))
    if function is None:
        return NotImplemented
    out = _sum_fake(x, filters, alpha, spatial, *sampling_and_keep)
    kept = out[1:] if out[1].numel() else (None, None, None)
    sizes = _sizes(x, filters, spatial, *sampling_and_keep[:-1])
    _backend.launch(function, x, filters, alpha, spatial, out[0], *kept, *sizes)
    return out


@_backend.register(_sum_backward, "cpu", eager_sum_backward)
def _native_sum_backward(
    grad: Tensor,
    x: Tensor,
    filters: Tensor,
    alpha: Tensor | None,
    spatial: Tensor | None,
    sums: Tensor,
    peaks: Tensor,
    which: Tensor,
    *sampling: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, inputs = grad.contiguous(), _contiguous(x, filters, alpha, spatial)
    function = _backend.cpu_function("attentive_conv", "response_sum_backward", *_given(grad, *inputs))
    if function is None:
        return NotImplemented
    grads = [None if v is None else torch.empty_like(v) for v in inputs]
    sizes = _sizes(x, filters, spatial, *sampling)
    _backend.launch(function, *inputs, sums, peaks, which, grad, *grads, *sizes)
    return _or_empty(*grads)


@_backend.register(response_peak, "cuda", eager_peak)
def _triton_peak(x: Tensor, filters: Tensor, *sampling: int) -> tuple[Tensor, Tensor]:
    if not _backend.on_cuda(x, filters):
        return NotImplemented
    from .triton import attentive_conv as kernels

    peak, where = _peak_fake(x, filters, *sampling)
    kernels.response_peak(x.contiguous(), filters.contiguous(), peak, where, *sampling)
    return peak, where


@_backend.register(_peak_backward, "cuda", eager_peak_backward)
def _triton_peak_backward(
    grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, *sampling: int
) -> tuple[Tensor, Tensor]:
    if not _backend.on_cuda(grad, x, filters):
        return NotImplemented
    from .triton import attentive_conv as kernels

    return kernels.response_peak_backward(grad.contiguous(), x.contiguous(), filters.contiguous(), where, *sampling)


@_backend.register(response_sum, "cuda", eager_sum)
def _triton_sum(
    x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, *sampling_and_keep: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _backend.on_cuda(*_given(x, filters, alpha, spatial)):
        return NotImplemented
    from .triton import attentive_conv as kernels

    inputs = _contiguous(x, filters, alpha, spatial)
    out = _sum_fake(*inputs, *sampling_and_keep)
    kernels.response_sum(*inputs, out[0], *sampling_and_keep[:-1])
    return out


@_backend.register(_sum_backward, "cuda", eager_sum_backward)
def _triton_sum_backward(
    grad: Tensor,
    x: Tensor,
    filters: Tensor,
    alpha: Tensor | None,
    spatial: Tensor | None,
    sums: Tensor,
    peaks: Tensor,
    which: Tensor,
    *sampling: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _backend.on_cuda(*_given(grad, x, filters, alpha, spatial)):
        return NotImplemented
    from .triton import attentive_conv as kernels

    inputs = _contiguous(x, filters, alpha, spatial)
    grads = kernels.response_sum_backward(grad.contiguous(), *inputs, *sampling)
    return _or_empty(grads[0], grads[1], None if alpha is None else grads[2], grads[3])


@response_peak.register_fake
def _peak_fake(
    x: Tensor, filters: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], poses, x.shape[1] // poses, filters.shape[0])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


@_peak_backward.register_fake
def _peak_backward_fake(grad: Tensor, x: Tensor, filters: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), filters.new_empty(filters.shape)


@response_sum.register_fake
def _sum_fake(
    x: Tensor,
    filters: Tensor,
    alpha: Tensor | None,
    spatial: Tensor | None,
    poses: int,
    stride: int,
    padding: int,
    dilation: int,
    attention_dilation: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    height, width = (output_side(side, filters.shape[-1], stride, padding, dilation) for side in x.shape[2:])
    batch, out = len(x), len(filters)
    # The Triton kernels compute them again, which is cheaper than keeping them; eager torch does not need them.
    keep = keep and spatial is not None and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    kept = (batch, poses, height, width, out) if keep else (0,)
    which = x.new_empty(kept, dtype=torch.int16)
    return x.new_empty(batch, out, height, width), x.new_empty(kept), x.new_empty(kept), which


@_sum_backward.register_fake
def _sum_backward_fake(
    grad: Tensor, x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = ((0,) if v is None else v.shape for v in (x, filters, alpha, spatial))
    grads = [x.new_empty(shape) for shape in shapes]
    return grads[0], grads[1], grads[2], grads[3]


def _save_for_peak(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, filters, *sampling = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, filters, output[1])
    ctx.sampling = sampling


def _peak_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_peak_backward(grad, *ctx.saved_tensors, *ctx.sampling), None, None, None, None


def _save_for_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, filters, alpha, spatial, *sampling, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, filters, alpha, spatial, *output[1:])
    ctx.sampling = sampling


def _sum_gradient(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    grads = _sum_backward(grad, *ctx.saved_tensors, *ctx.sampling)
    needed = (g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False))
    return *needed, None, None, None, None, None, None


def _save_peak_twice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.sampling = inputs[4:]


def _save_sum_twice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.sampling = inputs[8:]


# Second derivatives, through the eager forms: too rare for kernels.


def _peak_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    grad, *inputs = ctx.saved_tensors
    found = derivative_of_gradients(lambda *v: _peaks(*v, *ctx.sampling)[0], [grad], inputs, cotangents)
    return *found, *[None] * 5


def _sum_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    grad, *inputs = ctx.saved_tensors

    def total(x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None) -> Tensor:
        return _sums(x, alpha, filters, spatial, *ctx.sampling)

    return *derivative_of_gradients(total, [grad], inputs, cotangents), *[None] * 8


response_peak.register_autograd(_peak_gradient, setup_context=_save_for_peak)
response_sum.register_autograd(_sum_gradient, setup_context=_save_for_sum)
_peak_backward.register_autograd(_peak_twice, setup_context=_save_peak_twice)
_sum_backward.register_autograd(_sum_twice, setup_context=_save_sum_twice)


def _gradients(
    function: Callable[..., Tensor],
    batched: tuple[Tensor | None, ...],
    shared: tuple[Tensor | None, ...],
    grad: Tensor,
) -> tuple[Any, ...]:
    """The gradients of an eager function, a few images at a time; None for None."""
    arguments, count = (*batched, *shared), len(batched)
    x, filters = _given(batched[0], shared[0])
    totals = [None if v is None else torch.zeros_like(v, memory_format=torch.contiguous_format) for v in arguments]
    for some in _images(x, filters):

        def of_images(values: Sequence[Tensor | None], part: slice = some) -> list[Tensor | None]:
            return [v[part] if i < count and v is not None else v for i, v in enumerate(values)]

        # Autograd is off inside an operator; torch.func is not.
        vjp = torch.func.vjp(_without_none(function, arguments), *_given(*of_images(arguments)))[1]
        for total, found in zip(_given(*of_images(totals)), vjp(grad[some]), strict=True):
            total += found
    return tuple(totals)


def _without_none(function: Callable[..., Tensor], like: Sequence[Tensor | None]) -> Callable[..., Tensor]:
    """The function of those arguments that are not None."""

    def call(*tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        return function(*(None if v is None else next(rest) for v in like))

    return call


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [v for v in tensors if v is not None]


def _contiguous(
    x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    alpha, spatial = (None if v is None else v.contiguous() for v in (alpha, spatial))
    return x.contiguous(), filters.contiguous(), alpha, spatial


def _or_empty(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operators return tensors alone: an empty one for None."""
    like = _given(*tensors)[0]
    first, second, third, fourth = (like.new_empty(0) if v is None else v for v in tensors)
    return first, second, third, fourth


def _images(x: Tensor, filters: Tensor) -> Iterator[slice]:
    return chunks(len(x), math.prod(x.shape[1:]) * len(filters), x.device)


def _sizes(
    x: Tensor,
    filters: Tensor,
    spatial: Tensor | None,
    poses: int,
    stride: int,
    padding: int,
    dilation: int,
    attention_dilation: int = 1,
) -> tuple[int, ...]:
    """The shape arguments of the C++ functions, in their order."""
    (batch, planes, *sides), (out, _, k, _) = x.shape, filters.shape
    rows, columns = (output_side(side, k, stride, padding, dilation) for side in sides)
    n = 1 if spatial is None else spatial.shape[-1]
    sampling = (stride, padding, dilation, n, attention_dilation)
    return batch, planes // poses, poses, out, k, *sides, rows, columns, *sampling
