"""Attentive group convolution: attention on the responses of a group convolution, or on its input.

Fields are planes, ``(B, C·S, height, width)``, and filters are those of all group elements: S is the number of poses of
the input, |H| for a regular field and 1 for an image, and ``O = C'·|H|`` the number of output planes. Attention
suppresses: responses are multiplied by ``1 − α``.

References:
    Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), sections 3.2 to 3.4
    https://arxiv.org/abs/2002.03830
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import _chunks, _dispatch, reference
from .._dispatch import check_shape, check_window
from .._layout import output_side
from . import eager
from .input import field_statistics, suppress
from .responses import response_peak, response_sum


def attentive_conv(
    x: Tensor,
    filters: Tensor,
    reduce: Tensor | None,
    expand: Tensor | None,
    spatial: Tensor | None,
    poses: int,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    attention_dilation: int = 1,
    chunk: int = 16,
) -> Tensor:
    """A group convolution that multiplies every response by ``1 − α`` before the sum over input channels and poses.

    ``out(h) = Σ_c Σ_h' (1 − α^C(h, h', c) α^X(h, h')) f̃(h, h', c)`` with the response ``f̃ = f(c, h') ⋆ (h·ψ)(c, h')``.
    All responses would take ``C·S`` times the memory of the output. The kernels store none: each response is reduced as
    it is computed, to its maximum for the channel attention, and to the sum and the maximum over channels for the
    spatial attention. The backward pass computes responses again; with spatial attention a CPU keeps their sums and
    maxima for it, 2.5·S times the output in float32. Eager torch computes the responses of a few images and output
    planes at a time.

    Args:
        x: The input, ``(B, C·S, height, width)``.
        filters: ``h·ψ`` for all elements h, ``(O, C·S, k, k)``.
        reduce: The first matrices of the channel attention, ``(O, S, hidden, C)``, or None for none.
        expand: Its second matrices, ``(O, S, C, hidden)``.
        spatial: The filters of the spatial attention, ``(O, 2·S, n, n)`` with the mean first, or None for none.
        poses: The number of poses of the input, S.
        stride: The step between outputs, in pixels.
        padding: The zeros added to each side, in pixels.
        dilation: The step between taps of the filters, in pixels.
        attention_dilation: The step between taps of the spatial attention, in pixels.
        chunk: The number of output planes whose responses eager torch computes at once.

    Returns:
        ``(B, O, height', width')``.

    Raises:
        ValueError: If the shapes do not fit together, or the dilation of the attention is below 1.
    """
    _check(x, filters, reduce, expand, spatial, poses, attention_dilation)
    sampling = (stride, padding, dilation)
    if _dispatch.forced("reference"):
        return reference.attentive_conv(x, filters, reduce, expand, spatial, poses, *sampling, attention_dilation)
    if _dispatch.plain():
        return _eager(x, filters, reduce, expand, spatial, chunk, poses, *sampling, attention_dilation)
    out = F.conv2d(x, filters, None, *sampling)
    dtype = torch.promote_types(x.dtype, filters.dtype)
    x, filters = x.to(dtype), filters.to(dtype)
    alpha = None
    if reduce is not None and expand is not None:
        means = _window_means(x, filters, *sampling)
        mean = torch.einsum("bcsuv,ocsuv->bsco", *(v.unflatten(1, (-1, poses)) for v in (means, filters)))
        peak, _ = response_peak(x, filters, [poses, *sampling])
        alpha = reference.channel_attention(mean, peak, reduce, expand).to(dtype)
    spatial = None if spatial is None else spatial.to(dtype)
    keep = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in (x, filters, alpha, spatial))
    numbers = [poses, *sampling, attention_dilation, int(keep)]
    suppressed = response_sum(x, filters, alpha, spatial, numbers)[0]
    return out - suppressed.to(out.dtype)


def _check(
    x: Tensor,
    filters: Tensor,
    reduce: Tensor | None,
    expand: Tensor | None,
    spatial: Tensor | None,
    poses: int,
    attention_dilation: int,
) -> None:
    out, planes, side, _ = filters.shape
    channels = planes // poses
    hidden = None if reduce is None else reduce.shape[2]
    check_shape("x", x, None, channels * poses, None, None)
    check_shape("filters", filters, out, channels * poses, side, side)
    check_shape("reduce", reduce, out, poses, hidden, channels)
    check_shape("expand", expand, out, poses, channels, hidden)
    if spatial is not None:
        check_shape("spatial", spatial, out, 2 * poses, spatial.shape[-1], spatial.shape[-1])
        check_window(spatial.shape[-1], dilation=attention_dilation)


def _check_input(
    x: Tensor, reduce: Tensor | None, expand: Tensor | None, spatial: Tensor, poses: int, dilation: int
) -> None:
    planes, outs, side = x.shape[1] // poses * poses, spatial.shape[0], spatial.shape[-1]
    hidden = None if reduce is None else reduce.shape[0]
    statistics = 2 * poses if reduce is not None and expand is not None else planes
    check_shape("x", x, None, planes, None, None)
    check_shape("reduce", reduce, hidden, planes, 1, 1)
    check_shape("expand", expand, planes, hidden, 1, 1)
    check_shape("spatial", spatial, outs if poses == 1 else poses, statistics, side, side)
    check_window(side, dilation=dilation)


def attend_input(
    x: Tensor, reduce: Tensor | None, expand: Tensor | None, spatial: Tensor, poses: int, dilation: int = 1
) -> Tensor:
    """Attention on the input of an ordinary group convolution: ``x ↦ (1 − α^C α^X) x``.

    ``α^C = σ(φ(mean_x f) + φ(max_x f))`` with ``φ = W₂ ReLU(W₁ ·)``, two 1 x 1 group convolutions;
    ``α^X = σ(ψ ⋆ [mean_c, max_c](α^C f))``, a group convolution with one output field. Without channel attention ψ is
    applied to the field itself. On an image (``poses`` 1) ``α^X`` is the maximum over ψ's poses.

    Args:
        x: The input, ``(B, C·S, height, width)``.
        reduce: The filter bank of W₁, ``(hidden·S, C·S, 1, 1)``, or None for no channel attention.
        expand: The filter bank of W₂, ``(C·S, hidden·S, 1, 1)``.
        spatial: The filter bank of ψ, ``(|H|, 2·S, n, n)``, or ``(|H|, C·S, n, n)`` without channel attention.
        poses: The number of poses of the input, S.
        dilation: The step between taps of ψ, in pixels.

    Returns:
        The attended input, shaped as x.

    Raises:
        ValueError: If the shapes do not fit together, or the dilation of the attention is below 1.
    """
    _check_input(x, reduce, expand, spatial, poses, dilation)
    if _dispatch.forced("reference"):
        return reference.attend_input(x, reduce, expand, spatial, poses, dilation)
    plain = _dispatch.plain()
    x = x if plain else x.contiguous()
    field, statistics, alpha = x.unflatten(1, (-1, poses)), x, None
    if reduce is not None and expand is not None:
        # φ's second layer is linear: the two hidden vectors are added before it.
        peak = x.amax((2, 3)) if plain else x.flatten(2).max(2).values
        hidden = F.linear(torch.stack((x.mean((2, 3)), peak)), reduce.flatten(1)).relu().sum(0)
        alpha = F.linear(hidden, expand.flatten(1)).sigmoid().to(x.dtype).unflatten(1, (-1, poses))
        statistics, _ = (eager.statistics if plain else field_statistics)(field, alpha)
        if statistics.device.type == "cpu" and not plain:
            # With so few channels the gradients of torch's convolution are up to twice as fast in this layout.
            statistics = statistics.contiguous(memory_format=torch.channels_last)
    weight = F.conv2d(statistics, spatial, padding=dilation * (spatial.shape[-1] // 2), dilation=dilation)
    if poses == 1:
        weight = weight.amax(1, keepdim=True)
    y: Tensor = (eager.suppress if plain else suppress)(field, alpha, weight.sigmoid().to(x.dtype))
    return y.flatten(1, 2)


def _eager(
    x: Tensor,
    filters: Tensor,
    reduce: Tensor | None,
    expand: Tensor | None,
    spatial: Tensor | None,
    chunk: int,
    *sampling: int,
) -> Tensor:
    """`attentive_conv` with the responses of some images and output planes at a time, recomputed for gradients.

    An exported graph has all images at once, as it does not know the batch size.
    """
    exporting = _dispatch.exporting()
    if exporting:
        chunk = max(chunk, _chunks.EXPORTED_ELEMENTS // math.prod(x.shape[1:]))
    weights = (filters, reduce, expand, spatial)
    planes = functools.partial(_attentive_planes, sampling=sampling)
    parts = [[None if v is None else v[i : i + chunk] for v in weights] for i in range(0, len(filters), chunk)]
    if exporting:
        return torch.cat([planes(x, *part) for part in parts], 1)  # type: ignore[arg-type]
    recomputed = functools.partial(checkpoint, planes, use_reentrant=False)
    images = x.split(_chunks.chunk_size(math.prod(x.shape[1:]) * min(chunk, len(filters)), x.device))
    return torch.cat([torch.cat([recomputed(some, *part) for part in parts], 1) for some in images])


def _attentive_planes(
    x: Tensor,
    filters: Tensor,
    reduce: Tensor | None,
    expand: Tensor | None,
    spatial: Tensor | None,
    sampling: tuple[int, ...],
) -> Tensor:
    """`attentive_conv` for some output planes, all at once."""
    response = reference.responses(x, filters, *sampling[:4])
    alpha = None
    if reduce is not None and expand is not None:
        mean, peak = response.mean((4, 5)).transpose(1, 2), response.amax((4, 5)).transpose(1, 2)
        alpha = reference.channel_attention(mean, peak, reduce, expand)
    return F.conv2d(x, filters, None, *sampling[1:4]) - eager.attended_sum(response, alpha, spatial, sampling[4])


def _window_means(x: Tensor, filters: Tensor, stride: int, padding: int, dilation: int) -> Tensor:
    """The mean over outputs of the input at each tap, ``(B, C·S, k, k)``: times a filter, the mean response."""
    k = filters.shape[-1]
    rows, columns = (_read_by(side, k, stride, padding, dilation, x) for side in x.shape[2:])
    return rows.T @ (x @ columns)


def _read_by(side: int, k: int, stride: int, padding: int, dilation: int, like: Tensor) -> Tensor:
    """Whether each tap reads each pixel of a line, ``(side, k)``, divided by the number of outputs."""
    outputs = output_side(side, k, stride, padding, dilation)
    first = torch.arange(side, device=like.device)[:, None] + padding
    offset = first - dilation * torch.arange(k, device=like.device)
    inside = (offset >= 0) & (offset % stride == 0) & (offset < outputs * stride)
    return inside.to(like.dtype) / outputs
