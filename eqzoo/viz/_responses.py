"""The attention of attentive group convolutions, computed with the formulas of `eqzoo.ops.reference`."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import AttentiveGroupConv2d, AttentiveLiftingConv2d, InputAttention2d
from ..ops import reference

Attentive = AttentiveGroupConv2d | AttentiveLiftingConv2d


class ResponseWeights(NamedTuple):
    """The attention of an attentive convolution to its responses; α is the product of the factors that there are.

    Args:
        channel: ``α^C(h, h', c)``, ``(B, C', |H|, S, C)``: output field and pose, input pose, input field; or None.
        spatial: ``α^X(x, h, h')``, ``(B, C', |H|, S, height, width)``, or None.
        output: The sum of the responses times ``1 − α``, with the bias: ``(B, C', |H|, height, width)``.
    """

    channel: Tensor | None
    spatial: Tensor | None
    output: Tensor


class InputWeights(NamedTuple):
    """The attention of a layer to its input; α is the product of the factors that there are.

    Args:
        channel: ``α^C(c, h)``, ``(B, C, S)``, or None.
        spatial: ``α^X(x, h)``, ``(B, S, height, width)``.
        output: The input times ``1 − α``, of its shape.
    """

    channel: Tensor | None
    spatial: Tensor
    output: Tensor


def response_weights(layer: Attentive, x: Tensor) -> ResponseWeights:
    """The attention of a convolution to its responses, one output field at a time.

    Args:
        layer: A convolution with ``attention`` ``"full"``, ``"channel"`` or ``"spatial"``.
        x: Its input.

    Raises:
        ValueError: If the attention is on the input; call `input_weights` with ``layer.attention`` then.
    """
    if isinstance(layer.attention, InputAttention2d):
        raise ValueError(f"{layer} has attention on its input; call input_weights(layer.attention, x)")
    x = x.flatten(1, 2) if x.ndim == 5 else x
    poses = layer.in_planes // layer.in_channels
    sampling = (poses, layer.stride, layer.padding, layer.dilation, layer.attention_dilation)
    filters, (reduce, expand, spatial) = layer.filters(), layer.attention.banks()
    channels, spatials, outputs = list[Tensor](), list[Tensor](), list[Tensor]()
    for planes in torch.arange(len(filters), device=filters.device).split(layer.group.order):
        own = [None if bank is None else bank[planes] for bank in (reduce, expand, spatial)]
        arguments = (x, filters[planes], own[0], own[1], own[2], *sampling)
        _, channel, place = reference.response_attention(*arguments)
        channels += [] if channel is None else [channel]
        spatials += [] if place is None else [place]
        outputs.append(reference.attentive_conv(*arguments))
    output = torch.stack(outputs, 1)
    bias = layer.expanded_bias()
    if bias is not None:
        output = output + bias.unflatten(0, output.shape[1:3])[..., None, None]
    return ResponseWeights(
        torch.stack(channels, 1).permute(0, 1, 4, 2, 3) if channels else None,
        torch.stack(spatials, 1).transpose(2, 3) if spatials else None,
        output,
    )


def input_weights(layer: InputAttention2d, x: Tensor) -> InputWeights:
    """The attention of a layer to its input.

    Args:
        layer: The attention, on its own or inside an attentive convolution.
        x: Its input.
    """
    planes = x.flatten(1, 2) if x.ndim == 5 else x
    arguments = (planes, *layer.banks(), layer.poses, layer.attention_dilation)
    channel, spatial = reference.input_attention(*arguments)
    return InputWeights(channel, spatial, reference.attend_input(*arguments).reshape(x.shape))
