"""The responses of a group convolution, `f̃(o, s, c)`, reduced over pixels or channels without being stored.

`response_peak` takes their maxima over pixels, `response_sum` their sums weighed by attention. On the CPU C++ reduces
each response as it produces it, on a GPU Triton does, and elsewhere eager torch for a few pictures at a time. Their
gradients are computed from the responses produced once more.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _backend

__all__ = ["pictures_at_once", "response_peak", "response_sum", "responses", "weighed_sum"]

# The responses that eager torch makes at once: no smaller a number makes it faster.
_ELEMENTS_AT_ONCE = 1 << 20


def responses(x: Tensor, filters: Tensor, poses: int, stride: int, padding: int, dilation: int) -> Tensor:
    """All responses, stored: ``(B, C, S, O, height', width')``."""
    bank = filters.transpose(0, 1).reshape(-1, 1, *filters.shape[2:])
    response = F.conv2d(x, bank, None, stride, padding, dilation, groups=x.shape[1])
    return response.unflatten(1, (-1, poses, filters.shape[0]))


def weighed_sum(response: Tensor, alpha: Tensor | None, spatial: Tensor | None, attention_dilation: int) -> Tensor:
    """``Σ_s α^X Σ_c α^C f̃`` of stored responses; alpha is ``(B, C, S, O)``. Without an attention its weight is 1."""
    attended = response if alpha is None else response * alpha[..., None, None]
    total = attended.sum(1)
    if spatial is None:
        return total.sum(1)
    weight = _spatial_attention(total / attended.shape[1], attended.amax(1), spatial, attention_dilation)
    return (total * weight).sum(1)


def pictures_at_once(x: Tensor, filters: Tensor) -> int:
    """For how many pictures eager torch makes responses at once."""
    return max(1, _ELEMENTS_AT_ONCE // (x[0].numel() * len(filters)))


def _spatial_attention(mean: Tensor, peak: Tensor, spatial: Tensor, dilation: int) -> Tensor:
    """``α^X`` of the two statistics of the channels, ``(B, S, O, height, width)`` as each of these.

    Every output plane and input pose has a filter of its own for each statistic, so both are filtered plane by plane.
    """
    poses, out = mean.shape[1:3]
    padding = dilation * (spatial.shape[-1] // 2)
    filters = spatial.unflatten(1, (2, poses)).permute(1, 2, 0, 3, 4).flatten(1, 2).unsqueeze(2)
    maps = [
        F.conv2d(statistic.flatten(1, 2), own, None, 1, padding, dilation, groups=poses * out)
        for statistic, own in zip((mean, peak), filters, strict=True)
    ]
    return (maps[0] + maps[1]).unflatten(1, (poses, out)).sigmoid()


def _peaks(x: Tensor, filters: Tensor, *sampling: int) -> tuple[Tensor, Tensor]:
    values, places = responses(x, filters, *sampling).permute(0, 2, 1, 3, 4, 5).flatten(4).max(-1)
    return values, places.int()


def _sums(x: Tensor, alpha: Tensor | None, filters: Tensor, spatial: Tensor | None, *sampling: int) -> Tensor:
    weight = None if alpha is None else alpha.transpose(1, 2)
    return weighed_sum(responses(x, filters, *sampling[:4]), weight, spatial, sampling[4])


@torch.library.custom_op("eqzoo::response_peak", mutates_args=())
def response_peak(
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
    x, filters = x.contiguous(), filters.contiguous()
    peak, where = _peak_fake(x, filters, *sampling)
    function = _backend.cpu_function("attentive_conv", "response_peak", x, filters)
    if function is not None:
        _backend.launch(function, x, filters, peak, where, *_sizes(x, filters, None, *sampling))
    elif _backend.on_cuda(x, filters):
        from .triton import attentive_conv as triton

        triton.response_peak(x, filters, peak, where, *sampling)
    else:
        for some in _pictures(x, filters):
            peak[some], where[some] = _peaks(x[some], filters, *sampling)
    return peak, where


@torch.library.custom_op("eqzoo::response_peak_backward", mutates_args=())
def _response_peak_backward(
    grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    sampling = (poses, stride, padding, dilation)
    grad, x, filters = grad.contiguous(), x.contiguous(), filters.contiguous()
    function = _backend.cpu_function("attentive_conv", "response_peak_backward", grad, x, filters)
    if function is not None:
        grads = torch.empty_like(x), torch.empty_like(filters)
        _backend.launch(function, x, filters, where, grad, *grads, *_sizes(x, filters, None, *sampling))
        return grads
    if _backend.on_cuda(grad, x, filters):
        from .triton import attentive_conv as triton

        return triton.response_peak_backward(grad, x, filters, where, *sampling)
    return _gradients(lambda x, filters: _peaks(x, filters, *sampling)[0], (x,), (filters,), grad)


@torch.library.custom_op("eqzoo::response_sum", mutates_args=())
def response_sum(
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
    """``Σ_s α^X Σ_c α^C f̃``, ``(B, O, height', width')``, and what its gradient needs.

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
        keep: Whether a gradient will be asked for.

    Returns:
        The sum; then, for the gradient through the spatial attention alone and otherwise empty, the sums and the
        maxima over channels and the channels of the maxima, each ``(B, S, height', width', O)``.
    """
    sampling = (poses, stride, padding, dilation, attention_dilation)
    x, filters = x.contiguous(), filters.contiguous()
    alpha, spatial = (None if v is None else v.contiguous() for v in (alpha, spatial))
    out = _sum_fake(x, filters, alpha, spatial, *sampling, keep)
    function = _backend.cpu_function("attentive_conv", "response_sum", *_given(x, filters, alpha, spatial))
    if function is not None:
        kept = out[1:] if out[1].numel() else (None, None, None)
        _backend.launch(function, x, filters, alpha, spatial, out[0], *kept, *_sizes(x, filters, spatial, *sampling))
    elif _backend.on_cuda(*_given(x, filters, alpha, spatial)):
        from .triton import attentive_conv as triton

        triton.response_sum(x, filters, alpha, spatial, out[0], *sampling)
    else:
        for some in _pictures(x, filters):
            out[0][some] = _sums(x[some], None if alpha is None else alpha[some], filters, spatial, *sampling)
    return out


@torch.library.custom_op("eqzoo::response_sum_backward", mutates_args=())
def _response_sum_backward(
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
    sampling = (poses, stride, padding, dilation, attention_dilation)
    grad = grad.contiguous()
    x, filters = x.contiguous(), filters.contiguous()
    alpha, spatial = (None if v is None else v.contiguous() for v in (alpha, spatial))
    inputs = (x, filters, alpha, spatial)
    grads: Sequence[Tensor | None]
    function = _backend.cpu_function("attentive_conv", "response_sum_backward", *_given(grad, *inputs))
    if function is not None:
        grads = [None if v is None else torch.empty_like(v) for v in inputs]
        sizes = _sizes(x, filters, spatial, *sampling)
        _backend.launch(function, *inputs, sums, peaks, which, grad, *grads, *sizes)
    elif _backend.on_cuda(*_given(grad, *inputs)):
        from .triton import attentive_conv as triton

        grads = triton.response_sum_backward(grad, *inputs, *sampling)
    else:
        first, second, third, fourth = _gradients(lambda *v: _sums(*v, *sampling), (x, alpha), (filters, spatial), grad)
        grads = [first, third, second, fourth]
    given, slopes, weights, bends = (x.new_empty(0) if v is None else v for v in grads)
    return given, slopes, weights, bends


@response_peak.register_fake
def _peak_fake(
    x: Tensor, filters: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], poses, x.shape[1] // poses, filters.shape[0])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


@_response_peak_backward.register_fake
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
    height, width = (_outputs(side, filters.shape[-1], stride, padding, dilation) for side in x.shape[2:])
    batch, out = len(x), len(filters)
    # On a GPU they are cheaper made again than kept, and eager torch has no use for them.
    keep = keep and spatial is not None and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    kept = (batch, poses, height, width, out) if keep else (0,)
    which = x.new_empty(kept, dtype=torch.int16)
    return x.new_empty(batch, out, height, width), x.new_empty(kept), x.new_empty(kept), which


@_response_sum_backward.register_fake
def _sum_backward_fake(
    grad: Tensor, x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = ((0,) if v is None else v.shape for v in (x, filters, alpha, spatial))
    grads = [x.new_empty(shape) for shape in shapes]
    return grads[0], grads[1], grads[2], grads[3]


def _keep_for_peak(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, filters, *sampling = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, filters, output[1])
    ctx.sampling = sampling


def _peak_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_response_peak_backward(grad, *ctx.saved_tensors, *ctx.sampling), None, None, None, None


def _keep_for_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, filters, alpha, spatial, *sampling, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, filters, alpha, spatial, *output[1:])
    ctx.sampling = sampling


def _sum_gradient(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    grads = _response_sum_backward(grad, *ctx.saved_tensors, *ctx.sampling)
    needed = (g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False))
    return *needed, None, None, None, None, None, None


response_peak.register_autograd(_peak_gradient, setup_context=_keep_for_peak)
response_sum.register_autograd(_sum_gradient, setup_context=_keep_for_sum)


def _gradients(
    function: Callable[..., Tensor],
    batched: tuple[Tensor | None, ...],
    shared: tuple[Tensor | None, ...],
    grad: Tensor,
) -> tuple[Any, ...]:
    """The gradients of what eager torch computes, a few pictures at a time; None for None."""
    everything, parts = (*batched, *shared), len(batched)
    x, filters = _given(batched[0], shared[0])
    totals = [None if v is None else torch.zeros_like(v) for v in everything]
    for some in _pictures(x, filters):

        def of_part(values: Sequence[Tensor | None], part: slice = some) -> list[Tensor | None]:
            return [v[part] if i < parts and v is not None else v for i, v in enumerate(values)]

        # Inside an operator autograd's own way of recording is switched off.
        pull = torch.func.vjp(_without_none(function, everything), *_given(*of_part(everything)))[1]
        for total, slope in zip(_given(*of_part(totals)), pull(grad[some]), strict=True):
            total += slope
    return tuple(totals)


def _without_none(function: Callable[..., Tensor], like: Sequence[Tensor | None]) -> Callable[..., Tensor]:
    """The function of those arguments that are not None."""

    def call(*tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        return function(*(None if v is None else next(rest) for v in like))

    return call


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [v for v in tensors if v is not None]


def _pictures(x: Tensor, filters: Tensor) -> Iterator[slice]:
    step = pictures_at_once(x, filters)
    return (slice(i, i + step) for i in range(0, len(x), step))


def _outputs(side: int, k: int, stride: int, padding: int, dilation: int) -> int:
    return (side + 2 * padding - dilation * (k - 1) - 1) // stride + 1


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
    """What the kernels are told of shapes, in their order."""
    (batch, planes, *sides), (out, _, k, _) = x.shape, filters.shape
    rows, columns = (_outputs(side, k, stride, padding, dilation) for side in sides)
    n = 1 if spatial is None else spatial.shape[-1]
    sampling = (stride, padding, dilation, n, attention_dilation)
    return batch, planes // poses, poses, out, k, *sides, rows, columns, *sampling
