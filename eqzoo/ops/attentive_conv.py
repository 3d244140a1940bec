"""Attention on the responses of a group convolution before they are summed, and on its input.

Everything here is on planes, ``(B, C·S, height, width)``, with the filters of all elements written out: ``S`` is the
number of poses of the input, |H| for a regular field and 1 for a picture, and ``O = C'·|H|`` counts the planes that go
out. Attention suppresses: what passes is ``1 − α``.

References:
    Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), sections 3.2 to 3.4
    https://arxiv.org/abs/2002.03830
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend_input", "attentive_conv"]


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
    """A group convolution that weighs every response before it sums over input channels and poses.

    ``out(h) = Σ_c Σ_h' (1 − α^C(h, h', c) α^X(h, h')) f̃(h, h', c)`` with the response ``f̃ = f(c, h') ⋆ (h·ψ)(c, h')``.
    The responses of all planes at once take ``C·S`` times the memory of the output, so they are made for a few output
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
        chunk: The number of output planes whose responses are made at once: memory grows with it.

    Returns:
        ``(B, O, height', width')``.
    """
    sampling = (poses, stride, padding, dilation, attention_dilation)
    parts = [
        _attentive_planes(
            x,
            filters[i : i + chunk],
            None if reduce is None else reduce[i : i + chunk],
            None if expand is None else expand[i : i + chunk],
            None if spatial is None else spatial[i : i + chunk],
            *sampling,
        )
        for i in range(0, len(filters), chunk)
    ]
    return torch.cat(parts, 1)


def attend_input(
    x: Tensor,
    reduce: Tensor | None,
    expand: Tensor | None,
    spatial: Tensor,
    poses: int,
    dilation: int = 1,
) -> Tensor:
    """Attention that depends on the input alone: ``x ↦ (1 − α^C α^X) x``, before an ordinary convolution.

    ``α^C = σ(φ(mean_x f) + φ(max_x f))`` with ``φ = W₂ ReLU(W₁ ·)``, two 1 x 1 group convolutions;
    ``α^X = σ(ψ ⋆ [mean_c, max_c](α^C f))``, a group convolution that gives one field. Without channel attention ψ sees
    the field itself. In a picture (``poses`` 1) ``α^X`` takes the largest of ψ's poses.

    Args:
        x: The input, ``(B, C·S, height, width)``.
        reduce: The filter bank of W₁, ``(hidden·S, C·S, 1, 1)``, or None for no channel attention.
        expand: The filter bank of W₂, ``(C·S, hidden·S, 1, 1)``.
        spatial: The filter bank of ψ, ``(|H|, 2·S, n, n)``, or ``(|H|, C·S, n, n)`` without channel attention.
        poses: The number of poses of the input, S.
        dilation: The step between taps of ψ, in pixels.

    Returns:
        The attended input, shaped as x.
    """
    attended = statistics = x
    if reduce is not None and expand is not None:
        mean, peak = (
            F.conv2d(F.conv2d(s, reduce).relu(), expand)
            for s in (x.mean((2, 3), keepdim=True), x.amax((2, 3), keepdim=True))
        )
        attended = x * (mean + peak).sigmoid()
        field = attended.unflatten(1, (-1, poses))
        statistics = torch.cat((field.mean(1), field.amax(1)), 1)
    weight = F.conv2d(statistics, spatial, padding=dilation * (spatial.shape[-1] // 2), dilation=dilation)
    if poses == 1:
        weight = weight.amax(1, keepdim=True)
    return x - (attended.unflatten(1, (-1, poses)) * weight.sigmoid().unsqueeze(1)).flatten(1, 2)


def _attentive_planes(
    x: Tensor,
    filters: Tensor,
    reduce: Tensor | None,
    expand: Tensor | None,
    spatial: Tensor | None,
    poses: int,
    stride: int,
    padding: int,
    dilation: int,
    attention_dilation: int,
) -> Tensor:
    """`attentive_conv` for some output planes, all at once."""
    planes = x.shape[1]
    bank = filters.transpose(0, 1).reshape(-1, 1, *filters.shape[2:])
    response = F.conv2d(x, bank, None, stride, padding, dilation, groups=planes)
    response = response.unflatten(1, (-1, poses, filters.shape[0]))  # (B, C, S, O, height, width)
    attended = response
    if reduce is not None and expand is not None:
        attended = response * _channel_attention(response, reduce, expand)
    suppressed = attended.sum(1)
    if spatial is not None:
        suppressed = suppressed * _spatial_attention(attended, spatial, attention_dilation)
    return response.sum((1, 2)) - suppressed.sum(1)


def _channel_attention(response: Tensor, reduce: Tensor, expand: Tensor) -> Tensor:
    """``α^C``, ``(B, C, S, O, 1, 1)``: a perceptron of its own for every output plane and input pose."""
    mean, peak = (
        torch.einsum("bosn,oscn->bcso", torch.einsum("bcso,osnc->bosn", s, reduce).relu(), expand)
        for s in (response.mean((4, 5)), response.amax((4, 5)))
    )
    return (mean + peak).sigmoid()[..., None, None]


def _spatial_attention(attended: Tensor, spatial: Tensor, dilation: int) -> Tensor:
    """``α^X``, ``(B, S, O, height, width)``: every output plane and input pose has a filter of its own."""
    poses, out = attended.shape[2:4]
    statistics = torch.stack((attended.mean(1), attended.amax(1)), 3).flatten(1, 3)
    kernel = spatial.unflatten(1, (2, poses)).permute(2, 0, 1, 3, 4).flatten(0, 1)
    padding = dilation * (spatial.shape[-1] // 2)
    weight = F.conv2d(statistics, kernel, padding=padding, dilation=dilation, groups=poses * out)
    return weight.unflatten(1, (poses, out)).sigmoid()
