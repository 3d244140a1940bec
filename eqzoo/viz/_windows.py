"""The weights of self-attention over neighbours, computed plainly from parameters and input, and generated filters."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers import (
    AffineSelfConv2d,
    GroupSelfAttention2d,
    LiftingSelfAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from ..ops.affine_attention import AffineBank

__all__ = ["GroupWeights", "WindowWeights", "group_weights", "neighbour_places", "window_weights"]

SelfConv = AffineSelfConv2d | SimpleAffineSelfConv2d | StandAloneSelfAttention2d
SelfAttention = LiftingSelfAttention2d | GroupSelfAttention2d


class WindowWeights(NamedTuple):
    """What an affine self convolution or a stand-alone self-attention attends to.

    Args:
        weights: ``α(P, x, d)``, ``(B, heads, |H|, k², height, width)``; they sum to 1 over the k² neighbours d.
        values: What they weigh, ``(B, heads, C/heads, |H|, k², height, width)``.
    """

    weights: Tensor
    values: Tensor


class GroupWeights(NamedTuple):
    """What group self-attention attends to, from some places.

    Args:
        weights: ``(B, heads, |V|, |G|, places, |M|, neighbours)``: output pose v, query pose g and place, key pose m
            and neighbour; they sum to 1 over the last two. Lifting attention has one query and one key pose.
        values: What they weigh, ``(B, heads, d, |M|, places, neighbours)``.
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
    banks = layer.banks()
    heads = (layer.num_heads, -1)
    key = _affine(to_key(x), banks.key, layer.kernel_size).unflatten(1, heads)
    query = _affine(to_query(x), banks.query, 1).unflatten(1, heads)
    scores = layer.score_factor * (query * key).sum(2)
    if to_value is None or banks.value is None:
        values = key
    else:
        values = _affine(to_value(x), banks.value, layer.kernel_size).unflatten(1, heads)
    return WindowWeights(scores.softmax(3), values)


def _affine(x: Tensor, bank: AffineBank, kernel_size: int) -> Tensor:
    """``Σ_R f(R, x + d) ψ(P, R, d) + β(P, d)``, one neighbour d after the other: ``(B, C, |H|, k², height, width)``."""
    margin = kernel_size // 2
    padded = F.pad(x, (margin,) * 4)
    height, width = x.shape[-2:]
    seen = []
    for d in range(kernel_size**2):
        i, j = divmod(d, kernel_size)
        y = padded[..., i : i + height, j : j + width]
        if bank.psi is not None:
            y = torch.einsum("bcrhw,cpr->bcphw", y, bank.psi[..., d])
        if bank.beta is not None:
            y = y + bank.beta[..., d, None, None]
        seen.append(y)
    return torch.stack(seen, 3)


def group_weights(layer: SelfAttention, x: Tensor, places: Tensor, heads: slice = slice(None)) -> GroupWeights:
    """The softmax over poses and neighbours, from the places that are asked for.

    Args:
        layer: The layer.
        x: Its input, a field or a picture.
        places: The query places, counted row by row, ``(n,)`` int64.
        heads: The heads.
    """
    height, width = x.shape[-2:]
    query, key, value = (t[:, heads].flatten(-2) for t in layer.split(x).unbind(1))  # (B, heads, d, poses, places)
    around, exists = neighbour_places(layer.kernel_size, height, width, places)
    key, value = (t[..., around] for t in (key, value))
    query = query[..., places]
    codes = _codes(layer, height, width, places)  # (p, |V|, n, neighbours)
    scores = torch.einsum("bncgi,bncmij->bngimj", query, key)[:, :, None]
    placed = torch.einsum("bncgi,cvij->bnvgij", query[:, :, : len(codes)], codes)
    scores = scores + placed.unsqueeze(5)
    if isinstance(layer, GroupSelfAttention2d):
        table = layer.pose_table if layer.pose_table.ndim == 3 else layer.pose_table[None]
        pose = layer.pose(table)  # (|V| or 1, |G|, |M|, e)
        posed = torch.einsum("bncgi,vgmc->bnvgim", query[:, :, -pose.shape[-1] :], pose)
        scores = scores + posed.unsqueeze(-1)
    scores = (layer.scale * scores).masked_fill(~exists[:, None], float("-inf"))
    return GroupWeights(scores.flatten(-2).softmax(-1).unflatten(-1, scores.shape[-2:]), value)


def neighbour_places(kernel_size: int | str, height: int, width: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """The neighbours of places, counted row by row, and which exist, each ``(n, neighbours)``.

    One that does not exist stands at some place that does.
    """
    if kernel_size == "global":
        every = torch.arange(height * width).expand(len(places), -1)
        return every, torch.ones_like(every, dtype=torch.bool)
    side = int(kernel_size)
    offset = torch.arange(side) - side // 2
    rows = (places // width)[:, None, None] + offset[:, None] + 0 * offset
    columns = (places % width)[:, None, None] + offset + 0 * offset[:, None]
    exists = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    around = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    return around.flatten(1), exists.flatten(1)


def _codes(layer: SelfAttention, height: int, width: int, places: Tensor) -> Tensor:
    """The encoded relative positions of the neighbours of places, ``(2·d, |V|, n, neighbours)``."""
    if layer.kernel_size != "global":
        side = int(layer.kernel_size)
        codes: Tensor = layer.position((side, side))
        return codes.unsqueeze(2).expand(-1, -1, len(places), -1)
    # A window that reaches from any place to any other; each place reads its own part of it.
    codes = layer.position((2 * height - 1, 2 * width - 1))
    rows, columns = torch.arange(height), torch.arange(width)
    row = rows[None, :, None] - (places // width)[:, None, None] + height - 1
    column = columns[None, None, :] - (places % width)[:, None, None] + width - 1
    return codes[:, :, (row * (2 * width - 1) + column).flatten(1)]
