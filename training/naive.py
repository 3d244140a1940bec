"""Plain formulations to measure against: what the papers' own code does, with nothing shared and nothing recomputed."""

import contextlib
import types
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eqzoo.layers import GroupSelfAttention2d, LiftingSelfAttention2d

__all__ = ["naive_attention", "naive_self_attention"]


def naive_self_attention(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None = None,
    log_measure: Tensor | None = None,
    *,
    kernel_size: tuple[int, int],
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """`eqzoo.ops.local_group_attention` as released: neighbourhoods unfolded, and |H|³ scores in one softmax.

    Scores ``(B, heads, |V|, |G|, places, |M|, neighbours)`` are the sum of content, row, column and pose terms.
    Dropout is drawn for each of them.
    """
    query, key, value = qkv.unbind(1)
    height, width = qkv.shape[-2:]
    padding = tuple(side // 2 for side in kernel_size)

    def unfold(x: Tensor) -> Tensor:
        taps = F.unfold(x.flatten(1, 3), kernel_size, padding=padding)
        return taps.unflatten(1, (*x.shape[1:4], -1)).transpose(-1, -2)

    query = query.flatten(-2)
    content = torch.einsum("bncgi,bncmij->bngimj", query, unfold(key))
    half = position.shape[0] // 2
    row = torch.einsum("bncgi,cvj->bnvgij", query[:, :, :half], position[:half])
    column = torch.einsum("bncgi,cvj->bnvgij", query[:, :, half : 2 * half], position[half:])
    scores = content[:, :, None] + row[..., None, :] + column[..., None, :]
    if pose is not None:
        # The released code gathers a pose for each v, too.
        poses = pose[:, None].expand(-1, position.shape[1], -1, -1)
        scores = scores + torch.einsum("bncgi,cvgm->bnvgim", query[:, :, -pose.shape[0] :], poses)[..., None]
    outside = unfold(torch.ones(1, 1, 1, 1, height, width, device=qkv.device))[0, 0, 0, 0] == 0
    scores = (scores * scale).masked_fill(outside[:, None], float("-inf"))
    weights = F.dropout(scores.flatten(-2).softmax(-1), dropout).unflatten(-1, scores.shape[-2:])
    out = torch.einsum("bnvgimj,bncmij->bncvi", weights, unfold(value))
    return out.unflatten(-1, (height, width))


@contextlib.contextmanager
def naive_attention(network: nn.Module) -> Iterator[None]:
    """Lets all self-attention layers of a network compute as the released code does, for a block of code.

    Raises:
        ValueError: If there is none in it.
    """
    layers = [m for m in network.modules() if isinstance(m, GroupSelfAttention2d | LiftingSelfAttention2d)]
    if not layers:
        raise ValueError(f"{type(network).__name__} has no group self-attention")
    for layer in layers:
        layer._attend = types.MethodType(_attend, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer._attend


def _attend(
    layer: GroupSelfAttention2d | LiftingSelfAttention2d, qkv: Tensor, position: Tensor, window: tuple[int, int]
) -> Tensor:
    pose = layer.pose(layer.pose_table).movedim(-1, -3) if isinstance(layer, GroupSelfAttention2d) else None
    return naive_self_attention(qkv, position, pose, kernel_size=window, scale=layer.scale, dropout=layer.dropout)
