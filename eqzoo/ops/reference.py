"""The definition of every operation: its formula in torch's own operators, with every intermediate result stored.

``use_backend("reference")`` runs these functions. The fast forms are tested against them, figures of attention weights
are computed with them, and the benchmark compares time and memory with them. Arguments are those of the functions of
the same name in `eqzoo.ops`, where they are documented and checked.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class AffineBank(NamedTuple):
    """An affine map at every output element: factors and constants.

    Args:
        psi: ``(C, |H|, |H|, k²)``: channel, output element P, input element R, offset; None is the identity, R = P.
        beta: ``(C, |H|, k²)``: channel, output element, offset; None is zero.
    """

    psi: Tensor | None
    beta: Tensor | None


class AffineBanks(NamedTuple):
    """The affine maps of one layer.

    Args:
        query: The map of the queries, with ``k = 1``.
        key: The map of the keys.
        value: The map of the values; None makes the mapped keys the values.
    """

    query: AffineBank
    key: AffineBank
    value: AffineBank | None


def windows(x: Tensor, kernel_size: tuple[int, int]) -> Tensor:
    """The neighborhood of each pixel, with zeros outside of the image.

    Args:
        x: ``(B, ..., height, width)``.
        kernel_size: The rows and columns of the neighborhood, in pixels, odd.

    Returns:
        ``(B, ..., height·width, rows·columns)``.

    Example:
        >>> windows(torch.arange(3.0).reshape(1, 1, 1, 1, 3), (3, 3))[0, 0, 0, 0]  # the first pixel, at a corner
        tensor([0., 0., 0., 0., 0., 1., 0., 0., 0.])
    """
    padding = tuple(side // 2 for side in kernel_size)
    taps = F.unfold(x.flatten(1, -3), kernel_size, padding=padding)
    return taps.unflatten(1, (*x.shape[1:-2], -1)).transpose(-1, -2)


def inside(height: int, width: int, kernel_size: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """Which taps of `windows` lie in the image, ``(height·width, rows·columns)`` bool.

    Example:
        >>> inside(1, 3, (3, 3))[0].long()
        tensor([0, 0, 0, 0, 1, 1, 0, 0, 0])
    """
    sides = zip((height, width), kernel_size, strict=True)
    rows, columns = (_inside_axis(side, taps, device) for side, taps in sides)
    both = rows[:, None, :, None] & columns[None, :, None, :]
    return both.flatten(2).flatten(0, 1)


def _inside_axis(side: int, taps: int, device: torch.device | None) -> Tensor:
    places = torch.arange(side, device=device)[:, None] + torch.arange(taps, device=device) - taps // 2
    return (places >= 0) & (places < side)


def generate_filters(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``K(s, h, d, x) = Σ_j weight(h, s, d, j) hidden(j, h, x) + bias(h, s, d)``, ``(B, s, |H|, k², h, w)``."""
    filters = torch.einsum("bjhyx,hsdj->bshdyx", hidden, weight)
    return filters + bias.transpose(0, 1)[..., None, None]


def generated_depthwise(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    """``out(c, h, x) = Σ_d K(slice(c), h, d, x) value(c, h, x + d)`` with the filters of `generate_filters`."""
    kernel, k = generate_filters(hidden, weight, bias), math.isqrt(weight.shape[2])
    neighbors = windows(value, (k, k)).transpose(-1, -2).unflatten(-1, value.shape[-2:])  # (B, C, |H|, k², h, w)
    neighbors = neighbors.unflatten(1, (weight.shape[1], -1))
    return (kernel.unsqueeze(2) * neighbors).sum(4).flatten(1, 2)


def affine_map(x: Tensor, bank: AffineBank, kernel_size: int) -> Tensor:
    """``out(c, P, d, x) = Σ_R f(c, R, x + d) ψ(c, P, R, d) + β(c, P, d)``, ``(B, C, |H|, k², height·width)``.

    Neighbors outside of the image are 0 and are mapped to β.
    """
    y = windows(x, (kernel_size, kernel_size)).transpose(-1, -2)
    if bank.psi is not None:
        y = torch.einsum("bcrdn,cprd->bcpdn", y, bank.psi)
    return y if bank.beta is None else y + bank.beta.unsqueeze(-1)


def affine_attention_weights(
    query: Tensor, key: Tensor, value: Tensor | None, banks: AffineBanks, kernel_size: int, num_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """``α(P, x, d) = softmax_d(scale · Σ_{c in head} q(c, P, x) k(c, P, d, x))`` and the mapped values.

    Returns:
        ``(B, heads, |H|, k², height·width)`` and ``(B, heads, C/heads, |H|, k², height·width)``.
    """
    heads = (num_heads, query.shape[1] // num_heads)
    queries = affine_map(query, banks.query, 1).unflatten(1, heads)
    keys = affine_map(key, banks.key, kernel_size).unflatten(1, heads)
    weights = (scale * (queries * keys).sum(2)).softmax(3)
    if value is None or banks.value is None:
        return weights, keys
    return weights, affine_map(value, banks.value, kernel_size).unflatten(1, heads)


def affine_attention(
    query: Tensor, key: Tensor, value: Tensor | None, banks: AffineBanks, kernel_size: int, num_heads: int, scale: float
) -> Tensor:
    """``out(c, P, x) = Σ_d α(P, x, d) v(c, P, d, x)``."""
    weights, values = affine_attention_weights(query, key, value, banks, kernel_size, num_heads, scale)
    out = (weights.unsqueeze(2).to(values.dtype) * values).sum(4)
    return out.flatten(1, 2).unflatten(-1, query.shape[-2:])


def responses(x: Tensor, filters: Tensor, poses: int, stride: int, padding: int, dilation: int) -> Tensor:
    """``f̃(h, h', c) = f(c, h') ⋆ (h·ψ)(c, h')``, ``(B, C, S, O, height', width')``."""
    bank = filters.transpose(0, 1).reshape(-1, 1, *filters.shape[2:])
    response = F.conv2d(x, bank, None, stride, padding, dilation, groups=x.shape[1])
    return response.unflatten(1, (-1, poses, filters.shape[0]))


def channel_attention(mean: Tensor, peak: Tensor, reduce: Tensor, expand: Tensor) -> Tensor:
    """``α^C = σ(φ(mean) + φ(max))`` with ``φ = W₂ ReLU(W₁ ·)`` for every output plane and input pose.

    φ's second layer is linear, so the two hidden vectors are added before it. Statistics and result are
    ``(B, S, C, O)``.
    """
    hidden = [torch.einsum("bsco,osnc->bson", s, reduce.to(s.dtype)).relu() for s in (mean, peak)]
    return torch.einsum("bson,oscn->bsco", hidden[0] + hidden[1], expand.to(mean.dtype)).sigmoid()


def spatial_attention(mean: Tensor, peak: Tensor, spatial: Tensor, dilation: int) -> Tensor:
    """``α^X = σ(ψ ⋆ [mean_c, max_c])``, with one filter for every output plane, input pose and statistic.

    Statistics and result are ``(B, S, O, height, width)``.
    """
    poses, out = mean.shape[1:3]
    padding = dilation * (spatial.shape[-1] // 2)
    filters = spatial.unflatten(1, (2, poses)).permute(1, 2, 0, 3, 4).flatten(1, 2).unsqueeze(2)
    maps = [
        F.conv2d(statistic.flatten(1, 2), own, None, 1, padding, dilation, groups=poses * out)
        for statistic, own in zip((mean, peak), filters, strict=True)
    ]
    return (maps[0] + maps[1]).unflatten(1, (poses, out)).sigmoid()


def response_attention(
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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The responses of `attentive_conv`, ``(B, C, S, O, height', width')``, and the two factors of its attention.

    Returns:
        The responses, ``α^C`` ``(B, S, C, O)`` and ``α^X`` ``(B, S, O, height', width')``; None for one there is not.
    """
    response = attended = responses(x, filters, poses, stride, padding, dilation)
    channel = None
    if reduce is not None and expand is not None:
        mean, peak = response.mean((4, 5)).transpose(1, 2), response.amax((4, 5)).transpose(1, 2)
        channel = channel_attention(mean, peak, reduce, expand)
        attended = response * channel.transpose(1, 2)[..., None, None]
    if spatial is None:
        return response, channel, None
    return response, channel, spatial_attention(attended.mean(1), attended.amax(1), spatial, attention_dilation)


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
) -> Tensor:
    """``out(h) = Σ_c Σ_h' (1 − α^C(h, h', c) α^X(h, h')) f̃(h, h', c)``; without attention α is 1."""
    sampling = (poses, stride, padding, dilation, attention_dilation)
    response, channel, spatial = response_attention(x, filters, reduce, expand, spatial, *sampling)
    suppressed = response
    if channel is not None:
        suppressed = suppressed * channel.transpose(1, 2)[..., None, None]
    if spatial is not None:
        suppressed = suppressed * spatial.unsqueeze(1)
    return (response - suppressed).sum((1, 2))


def input_attention(
    x: Tensor, reduce: Tensor | None, expand: Tensor | None, spatial: Tensor, poses: int, dilation: int = 1
) -> tuple[Tensor | None, Tensor]:
    """``α^C``, ``(B, C, S)`` or None, and ``α^X``, ``(B, S, height, width)``, of `attend_input`."""
    statistics, channel = x, None
    if reduce is not None and expand is not None:
        hidden = [F.linear(s, reduce.flatten(1)).relu() for s in (x.mean((2, 3)), x.amax((2, 3)))]
        channel = F.linear(hidden[0] + hidden[1], expand.flatten(1)).sigmoid().unflatten(1, (-1, poses))
        attended = x.unflatten(1, (-1, poses)) * channel[..., None, None]
        statistics = torch.cat((attended.mean(1), attended.amax(1)), 1)
    logits = F.conv2d(statistics, spatial, padding=dilation * (spatial.shape[-1] // 2), dilation=dilation)
    if poses == 1:
        logits = logits.amax(1, keepdim=True)
    return channel, logits.sigmoid()


def attend_input(
    x: Tensor, reduce: Tensor | None, expand: Tensor | None, spatial: Tensor, poses: int, dilation: int = 1
) -> Tensor:
    """``(1 − α^C α^X) x``; without channel attention ``α^C`` is 1."""
    channel, place = input_attention(x, reduce, expand, spatial, poses, dilation)
    field = x.unflatten(1, (-1, poses))
    attended = field if channel is None else field * channel[..., None, None]
    return (field - attended * place.unsqueeze(1)).flatten(1, 2)


def group_attention_weights(
    query: Tensor,
    key: Tensor,
    position: Tensor,
    pose: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """``softmax_(m, j)[shared + placed]`` over the poses m and places j of the keys.

    With queries ``(g, i)`` and output poses v, ``placed(v, g, i, j) = scale·⟨q_position(g, i), position(v, i, j)⟩`` and
    ``shared(g, i, m, j) = scale·(⟨q(g, i), k(m, j)⟩ + ⟨q_pose(g, i), pose(g, m)⟩)``.

    Args:
        query: ``(B, heads, d, |G|, I)`` at I places. The first channels are compared with positions, the last ones
            with poses.
        key: ``(B, heads, d, |M|, I, J)``, the J neighbors of each place, or ``(B, heads, d, |M|, 1, J)`` where all
            places have the same neighbors.
        position: The encoded positions ``(p, |V|, I, J)``, or ``(p, |V|, 1, J)`` where all places have the same.
        pose: The encoded relative poses, ``(e, |G|, |M|)``; None for none.
        mask: Which neighbors exist, ``(I, J)`` bool; None for all. Each place needs one at least.
        scale: What the scores are multiplied by.

    Returns:
        ``(B, heads, |V|, |G|, I, |M|, J)``.
    """
    scores = torch.einsum("bncgi,bncmij->bngimj", query, key).unsqueeze(2)
    placed = torch.einsum("bncgi,cvij->bnvgij", query[:, :, : position.shape[0]], position)
    scores = scores + placed.unsqueeze(5)
    if pose is not None:
        posed = torch.einsum("bncgi,cgm->bngim", query[:, :, -pose.shape[0] :], pose)
        scores = scores + posed[:, :, None, ..., None]
    scores = scale * scores
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return scores.flatten(-2).softmax(-1).unflatten(-1, scores.shape[-2:])


def group_self_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    pose: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """``out(v, i) = Σ_g Σ_(m, j) softmax_(m, j)[shared + placed] val(m, j)``; dropout is the same for all v.

    ``(B, heads, d, |V|, I)``, for values shaped as the keys of `group_attention_weights`.
    """
    weights = group_attention_weights(query, key, position, pose, mask, scale)
    if dropout:
        weights = weights * F.dropout(torch.ones_like(weights[:, :, :1]), dropout)
    return torch.einsum("bnvgimj,bncmij->bncvi", weights.to(value.dtype), value)


def local_group_attention(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None = None,
    *,
    kernel_size: tuple[int, int],
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """`group_self_attention` with the unfolded neighborhoods of all pixels as keys and values."""
    query, key, value = qkv.unbind(1)
    height, width = qkv.shape[-2:]
    mask = inside(height, width, kernel_size, qkv.device)
    key, value = (windows(t, kernel_size) for t in (key, value))
    codes = position.unsqueeze(2)
    out = group_self_attention(query.flatten(-2), key, value, codes, pose, mask, scale, dropout)
    return out.unflatten(-1, (height, width))
