"""The weights of self-attention over neighbors, computed with the formulas of `eqzoo.ops.reference`."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import (
    AffineSelfConv2d,
    GroupSelfAttention2d,
    LiftingSelfAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from ..ops import reference

SelfConv = AffineSelfConv2d | SimpleAffineSelfConv2d | StandAloneSelfAttention2d
SelfAttention = LiftingSelfAttention2d | GroupSelfAttention2d


class WindowWeights(NamedTuple):
    """The attention of an affine self convolution or of stand-alone self-attention.

    Args:
        weights: ``α(P, x, d)``, ``(B, heads, |H|, k², height, width)``; they sum to 1 over the k² neighbors d.
        values: The values, ``(B, heads, C/heads, |H|, k², height, width)``.
    """

    weights: Tensor
    values: Tensor


class GroupWeights(NamedTuple):
    """The attention of group self-attention from some query places.

    Args:
        weights: ``(B, heads, |V|, |G|, places, |M|, neighbors)``: output pose v, query pose g and place, key pose m
            and neighbor; they sum to 1 over the last two. Lifting attention has one query and one key pose.
        values: The values, ``(B, heads, d, |M|, places, neighbors)``.
    """

    weights: Tensor
    values: Tensor


def window_weights(layer: SelfConv, x: Tensor) -> WindowWeights:
    """The softmax of every place over the window around it.

    Args:
        layer: The layer.
        x: Its input, ``(B, C, |H|, height, width)``.
    """
    to_query, to_key, to_value = layer.embeddings()
    key, value = to_key(x), None if to_value is None else to_value(x)
    options = (layer.kernel_size, layer.num_heads, layer.score_factor)
    weights, values = reference.affine_attention_weights(to_query(x), key, value, layer.banks(), *options)
    return WindowWeights(weights.unflatten(-1, x.shape[-2:]), values.unflatten(-1, x.shape[-2:]))


def group_weights(layer: SelfAttention, x: Tensor, places: Tensor, heads: slice = slice(None)) -> GroupWeights:
    """The softmax over poses and neighbors, from some query places.

    Args:
        layer: The layer.
        x: Its input, a field or an image.
        places: The query places, counted row by row, ``(n,)`` int64.
        heads: The heads.
    """
    height, width = x.shape[-2:]
    query, key, value = (t[:, heads].flatten(-2) for t in layer.split(x).unbind(1))  # (B, heads, d, poses, places)
    around, exists = neighbor_places(layer.kernel_size, height, width, places)
    key, value = (t[..., around] for t in (key, value))
    query = query[..., places]
    codes = _codes(layer, height, width, places)  # (p, |V|, n, neighbors)
    poses = layer.encode_poses()
    weights = reference.group_attention_weights(query, key, codes, poses, exists, scale=layer.scale)
    return GroupWeights(weights, value)


def neighbor_places(kernel_size: int | str, height: int, width: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """The neighbors of places, counted row by row, and which exist, each ``(n, neighbors)``.

    The entry of one that does not exist is some place that does.
    """
    if kernel_size == "global":
        every = torch.arange(height * width, device=places.device).expand(len(places), -1)
        return every, torch.ones_like(every, dtype=torch.bool)
    side = int(kernel_size)
    offset = torch.arange(side, device=places.device) - side // 2
    rows = (places // width)[:, None, None] + offset[:, None] + 0 * offset
    columns = (places % width)[:, None, None] + offset + 0 * offset[:, None]
    exists = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    around = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    return around.flatten(1), exists.flatten(1)


def _codes(layer: SelfAttention, height: int, width: int, places: Tensor) -> Tensor:
    """The encoded relative positions of the neighbors of places, ``(2·d, |V|, n, neighbors)``."""
    if layer.kernel_size != "global":
        side = int(layer.kernel_size)
        codes: Tensor = layer.position((side, side))
        return codes.unsqueeze(2).expand(-1, -1, len(places), -1)
    # A window from any place to any other, of which each place reads its own part.
    codes = layer.position((2 * height - 1, 2 * width - 1))
    rows, columns = (torch.arange(count, device=places.device) for count in (height, width))
    row = rows[None, :, None] - (places // width)[:, None, None] + height - 1
    column = columns[None, None, :] - (places % width)[:, None, None] + width - 1
    return codes[:, :, (row * (2 * width - 1) + column).flatten(1)]
