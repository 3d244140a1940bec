"""Local self-attention whose queries, keys and values pass through affine maps first."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["AffineBank", "AffineBanks", "affine_attention", "affine_map"]


class AffineBank(NamedTuple):
    """An affine map at every output element: what it multiplies and what it adds.

    Args:
        psi: ``(C, |H|, |H|, k²)``: channel, output element P, input element R, offset; None leaves R = P as it is.
        beta: ``(C, |H|, k²)``: channel, output element, offset; None adds nothing.
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


def affine_map(x: Tensor, bank: AffineBank, kernel_size: int) -> Tensor:
    """Maps the neighbours of every place, seen from every output element.

    ``out(c, P, d, x) = Σ_R f(c, R, x + d) ψ(c, P, R, d) + β(c, P, d)``; neighbours outside the picture are 0, so their
    image is β. β is added once, after the sum over R.

    Args:
        x: The field f, ``(B, C, |H|, height, width)``.
        bank: ψ and β.
        kernel_size: The side k of the neighbourhood, in pixels, odd.

    Returns:
        ``(B, C, |H|, k², height·width)``.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), equations 10 and 21, https://arxiv.org/abs/1911.07704
    """
    neighbours = F.unfold(x.flatten(1, 2), kernel_size, padding=kernel_size // 2)
    y = neighbours.unflatten(1, (x.shape[1], x.shape[2], kernel_size**2))
    if bank.psi is not None:
        y = torch.einsum("bcrdn,cprd->bcpdn", y, bank.psi.to(y.dtype))
    return y if bank.beta is None else y + bank.beta.to(y.dtype).unsqueeze(-1)


def affine_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    banks: AffineBanks,
    kernel_size: int,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Attends from every place and output element to the neighbours of the place.

    With q, k, v the mapped queries, keys and values (`affine_map`), for every head:
    ``α(P, x, d) = softmax_d(scale · Σ_{c in head} q(c, P, x) k(c, P, d, x))`` and
    ``out(c, P, x) = Σ_d α(P, x, d) v(c, P, d, x)``. A head owns contiguous channels.

    Args:
        query: The queries before their map, ``(B, C, |H|, height, width)``.
        key: The keys before their map, of the same shape.
        value: The values before their map, of the same shape; not read where ``banks.value`` is None.
        banks: The affine maps.
        kernel_size: The side k of the neighbourhood, in pixels, odd.
        num_heads: The number of heads; it divides C.
        scale: The factor of the scores.

    Returns:
        ``(B, C, |H|, height, width)``.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), equations 20 to 24, https://arxiv.org/abs/1911.07704

    Example:
        >>> x = torch.zeros(2, 4, 1, 8, 8)
        >>> nothing = AffineBank(None, None)
        >>> affine_attention(x, x, x, AffineBanks(nothing, nothing, nothing), 3, num_heads=2, scale=1.0).shape
        torch.Size([2, 4, 1, 8, 8])
    """
    heads = (num_heads, query.shape[1] // num_heads)
    queries = affine_map(query, banks.query, 1).unflatten(1, heads)
    keys = affine_map(key, banks.key, kernel_size).unflatten(1, heads)
    scores = (queries * keys).sum(2)
    weights = (scale * scores).softmax(3).unsqueeze(2)
    if banks.value is None or value is None:
        values = keys
    else:
        values = affine_map(value, banks.value, kernel_size).unflatten(1, heads)
    out = (weights.to(values.dtype) * values).sum(4)
    return out.flatten(1, 2).unflatten(-1, query.shape[-2:])
