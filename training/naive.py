"""The neighbourhood operations as their formulas suggest, with everything stored: what the benchmark compares with."""

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from eqzoo.layers import affine_self_conv, attentive_conv, e4, self_attention
from eqzoo.ops import AffineBank, AffineBanks

__all__ = ["stored"]


@contextlib.contextmanager
def stored() -> Iterator[None]:
    """Layers that are called in this block use the operations of this file."""
    swaps = [
        (e4, "generated_depthwise", generated_depthwise),
        (affine_self_conv, "affine_attention", affine_attention),
        (attentive_conv, "attentive_conv", attentive_responses),
        (self_attention, "local_group_attention", group_self_attention),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, function in swaps:
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def generated_depthwise(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    """`eqzoo.ops.generated_depthwise` with all filters and an unfolded copy of the field, k² times its size."""
    taps = weight.shape[2]
    kernel = torch.einsum("bjhyx,hsdj->bshdyx", hidden, weight)
    kernel = kernel + bias.transpose(0, 1)[..., None, None]
    k = math.isqrt(taps)
    windows = F.unfold(value.flatten(1, 2), k, padding=k // 2)
    windows = windows.unflatten(1, (*value.shape[1:3], k * k)).unflatten(-1, value.shape[3:])
    windows = windows.unflatten(1, (kernel.shape[1], -1))
    return (kernel.unsqueeze(2) * windows).sum(4).flatten(1, 2)


def affine_map(x: Tensor, bank: AffineBank, kernel_size: int) -> Tensor:
    """The mapped neighbours of every place, ``(B, C, |H|, k², height·width)``."""
    neighbours = F.unfold(x.flatten(1, 2), kernel_size, padding=kernel_size // 2)
    y = neighbours.unflatten(1, (x.shape[1], x.shape[2], kernel_size**2))
    if bank.psi is not None:
        y = torch.einsum("bcrdn,cprd->bcpdn", y, bank.psi)
    return y if bank.beta is None else y + bank.beta.unsqueeze(-1)


def affine_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    banks: AffineBanks,
    kernel_size: int,
    num_heads: int,
    scale: float,
) -> Tensor:
    """`eqzoo.ops.affine_attention` with the mapped keys and values of all neighbourhoods."""
    heads = (num_heads, query.shape[1] // num_heads)
    queries = affine_map(query, banks.query, 1).unflatten(1, heads)
    keys = affine_map(key, banks.key, kernel_size).unflatten(1, heads)
    weights = (scale * (queries * keys).sum(2)).softmax(3).unsqueeze(2)
    values = keys
    if banks.value is not None and value is not None:
        values = affine_map(value, banks.value, kernel_size).unflatten(1, heads)
    return (weights * values).sum(4).flatten(1, 2).unflatten(-1, query.shape[-2:])


def attentive_responses(
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
    *_: int,
) -> Tensor:
    """`eqzoo.ops.attentive_conv` with the responses of all filters to all input planes at once."""
    bank = filters.transpose(0, 1).reshape(-1, 1, *filters.shape[2:])
    response = F.conv2d(x, bank, None, stride, padding, dilation, groups=x.shape[1])
    response = response.unflatten(1, (-1, poses, filters.shape[0]))  # (B, C, S, O, height, width)
    attended = response
    if reduce is not None and expand is not None:
        mean, peak = (
            torch.einsum("bosn,oscn->bcso", torch.einsum("bcso,osnc->bosn", s, reduce).relu(), expand)
            for s in (response.mean((4, 5)), response.amax((4, 5)))
        )
        attended = response * (mean + peak).sigmoid()[..., None, None]
    if spatial is None:
        return (response - attended).sum((1, 2))
    statistics = torch.stack((attended.mean(1), attended.amax(1)), 3).flatten(1, 3)
    kernel = spatial.unflatten(1, (2, poses)).permute(2, 0, 1, 3, 4).flatten(0, 1)
    reach = attention_dilation * (spatial.shape[-1] // 2)
    weight = F.conv2d(statistics, kernel, padding=reach, dilation=attention_dilation, groups=len(kernel))
    return (response - attended * weight.unflatten(1, (poses, -1)).sigmoid().unsqueeze(1)).sum((1, 2))


def group_self_attention(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None = None,
    log_measure: Tensor | None = None,
    *,
    kernel_size: tuple[int, int],
    dilation: int = 1,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """`eqzoo.ops.local_group_attention` as released: neighbourhoods unfolded, |H|³ scores in one softmax.

    Scores ``(B, heads, |V|, |G|, places, |M|, neighbours)`` are the sum of content, row, column and pose terms.
    Dropout is drawn for each of them. Windows without gaps only.
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
