"""The attention of attentive group convolutions, computed plainly from parameters and input."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import Field, Group, permutation, transform
from ..layers import AttentiveGroupConv2d, AttentiveLiftingConv2d, InputAttention2d

__all__ = ["InputWeights", "ResponseWeights", "input_weights", "response_weights"]


class ResponseWeights(NamedTuple):
    """What an attentive convolution suppresses of its responses; α is the product of the parts that there are.

    Args:
        channel: ``α^C(h, h', c)``, ``(B, C', |H|, S, C)``: output field and pose, input pose, input field; or None.
        spatial: ``α^X(x, h, h')``, ``(B, C', |H|, S, height, width)``, or None.
        output: What is left of the responses, summed, with the bias: ``(B, C', |H|, height, width)``.
    """

    channel: Tensor | None
    spatial: Tensor | None
    output: Tensor


class InputWeights(NamedTuple):
    """What attention on the input suppresses of it; α is the product of the parts that there are.

    Args:
        channel: ``α^C(c, h)``, ``(B, C, S)``, or None.
        spatial: ``α^X(x, h)``, ``(B, S, height, width)``.
        output: What is left of the input, shaped as it.
    """

    channel: Tensor | None
    spatial: Tensor
    output: Tensor


def response_weights(layer: AttentiveGroupConv2d | AttentiveLiftingConv2d, x: Tensor) -> ResponseWeights:
    """The attention of a convolution on its responses, one output field at a time.

    Args:
        layer: A convolution with ``attention`` ``"full"``, ``"channel"`` or ``"spatial"``.
        x: Its input.

    Raises:
        ValueError: If the attention is on the input; that is `input_weights` of ``layer.attention``.
    """
    if isinstance(layer.attention, InputAttention2d):
        raise ValueError(f"{layer} weighs its input, not its responses; call input_weights(layer.attention, x)")
    fields = [_one_field(layer, x, field) for field in range(layer.out_channels)]
    channels, spatials, outputs = zip(*fields, strict=True)
    return ResponseWeights(
        None if channels[0] is None else torch.stack(channels, 1),
        None if spatials[0] is None else torch.stack(spatials, 1),
        torch.stack(outputs, 1),
    )


def _one_field(
    layer: AttentiveGroupConv2d | AttentiveLiftingConv2d, x: Tensor, field: int
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    attention, group = layer.attention, layer.group
    x = x if x.ndim == 5 else x.unsqueeze(2)  # (B, C, S, height, width)
    poses = x.shape[2]
    kind: Field = layer.in_field
    psi = layer.weight[field].unflatten(0, (-1, poses))
    sampling = (layer.stride, layer.padding, layer.dilation)
    response = torch.stack([_each_plane(x, _act(psi, group, h, kind), *sampling) for h in group.elements], 1)
    # response is (B, |H|, C, S, height, width), and every α is made to fit it.
    alpha = torch.ones_like(response[:, :, :, :, :1, :1])
    channel = spatial = None
    if attention.reduce is not None and attention.expand is not None:
        assert isinstance(attention.reduce, Tensor)
        assert isinstance(attention.expand, Tensor)
        first, second = (_by_pose(weight[field], group, kind) for weight in (attention.reduce, attention.expand))
        statistics = (response.mean((4, 5)), response.amax((4, 5)))
        channel = sum(_perceptron(first, second, s) for s in statistics).sigmoid()  # type: ignore[union-attr]
        alpha = alpha * channel[..., None, None]
    if attention.spatial is not None:
        assert isinstance(attention.spatial, Tensor)
        filters = attention.spatial[field].unflatten(0, (2, poses))
        attended = alpha * response
        statistic = torch.stack((attended.mean(2), attended.amax(2)), 2)  # (B, |H|, 2, S, height, width)
        spatial = torch.stack(
            [
                _each_plane(statistic[:, h], _act(filters, group, h, kind), *_same(filters, layer.attention_dilation))
                .sum(1)
                .sigmoid()
                for h in group.elements
            ],
            1,
        )
        alpha = alpha * spatial.unsqueeze(2)
    output = ((1 - alpha) * response).sum((2, 3))
    if layer.bias is not None:
        output = output + layer.bias[field]
    return None if channel is None else channel.transpose(2, 3), spatial, output


def input_weights(layer: InputAttention2d, x: Tensor) -> InputWeights:
    """The attention of a layer on its input.

    Args:
        layer: The attention, of its own or inside an attentive convolution.
        x: Its input.
    """
    group, kind = layer.group, layer.field
    f = x if x.ndim == 5 else x.unsqueeze(2)  # (B, C, S, height, width)
    poses = f.shape[2]
    attended = statistics = f
    channel = None
    if layer.reduce is not None and layer.expand is not None:
        means = (f.mean((3, 4)), f.amax((3, 4)))
        channel = sum(_mix(layer.expand, _mix(layer.reduce, s, group).relu(), group) for s in means).sigmoid()  # type: ignore[union-attr]
        attended = f * channel[..., None, None]
        statistics = torch.stack((attended.mean(1), attended.amax(1)), 1)
    psi = layer.spatial[0].unflatten(0, (-1, poses))
    maps = torch.stack(
        [
            _each_plane(statistics, _act(psi, group, h, kind), *_same(psi, layer.attention_dilation)).sum((1, 2))
            for h in group.elements
        ],
        1,
    )
    if kind == "trivial":  # a picture has one pose
        maps = maps.amax(1, keepdim=True)
    spatial = maps.sigmoid()
    return InputWeights(channel, spatial, (f - spatial.unsqueeze(1) * attended).reshape(x.shape))


def _act(psi: Tensor, group: Group, h: int, field: Field) -> Tensor:
    """``h·ψ`` for a filter ``(C, S, k, k)``."""
    return transform(psi, group, h, field)


def _each_plane(x: Tensor, psi: Tensor, stride: int = 1, padding: int = 0, dilation: int = 1) -> Tensor:
    """Correlates every plane with its own filter: ``(B, C, S, ...)`` and ``(C, S, k, k)`` to ``(B, C, S, ...)``."""
    planes = x.flatten(1, 2)
    y = F.conv2d(planes, psi.flatten(0, 1).unsqueeze(1), None, stride, padding, dilation, groups=planes.shape[1])
    return y.unflatten(1, x.shape[1:3])


def _same(psi: Tensor, dilation: int) -> tuple[int, int, int]:
    """Stride, padding and dilation that keep the side."""
    return 1, dilation * (psi.shape[-1] // 2), dilation


def _by_pose(weight: Tensor, group: Group, field: Field) -> Tensor:
    """Matrices ``(M, N, S)`` as ``W(h⁻¹h')``: ``(|H|, S, M, N)``."""
    if field == "trivial":
        return weight.permute(2, 0, 1).expand(group.order, -1, -1, -1)
    return torch.stack([weight[..., permutation(group, h)].permute(2, 0, 1) for h in group.elements])


def _perceptron(first: Tensor, second: Tensor, statistic: Tensor) -> Tensor:
    """``W₂(h⁻¹h') ReLU(W₁(h⁻¹h') s(h, h'))`` for ``s`` of shape ``(B, |H|, C, S)``."""
    hidden = torch.einsum("hsnc,bhcs->bhns", first, statistic).relu()
    return torch.einsum("hscn,bhns->bhcs", second, hidden)


def _mix(weight: Tensor, statistic: Tensor, group: Group) -> Tensor:
    """A 1 x 1 group convolution of ``(B, C, S)``; with one pose, a matrix."""
    poses = statistic.shape[2]
    matrix = weight[..., 0, 0].unflatten(1, (-1, poses))
    if poses == 1:
        return torch.einsum("ncs,bcs->bns", matrix, statistic)
    turned = torch.stack([matrix[..., permutation(group, h)] for h in group.elements])  # (|H|, N, C, S)
    return torch.einsum("hncs,bcs->bnh", turned, statistic)
