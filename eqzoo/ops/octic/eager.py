"""Operations on fields of irreps in eager torch: the formulas of GELU and norm, and vectors of attention heads."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import check_shape
from .._dtypes import accumulation_dtype

Pair = tuple[Tensor, Tensor]

# Rows: the values at e, r, rr, rrr, m, mr, mrr, mrrr. Columns: the parts A1, A2, B1, B2 and four of E, as `eight_parts`
# gives them. Times √2/4 it is orthonormal.
_SIGNS = (
    (1, 1, 1, 1, 1, 1, 1, -1),
    (1, 1, -1, -1, 1, -1, -1, -1),
    (1, 1, 1, 1, -1, -1, -1, 1),
    (1, 1, -1, -1, -1, 1, 1, 1),
    (1, -1, 1, -1, -1, 1, -1, -1),
    (1, -1, -1, 1, -1, -1, 1, -1),
    (1, -1, 1, -1, 1, -1, 1, 1),
    (1, -1, -1, 1, 1, 1, -1, 1),
)


def regular_matrix(like: Tensor) -> Tensor:
    """The orthonormal matrix from the eight parts of a field to its values at the eight elements, ``(8, 8)``."""
    return torch.tensor(_SIGNS, dtype=like.dtype, device=like.device) * (math.sqrt(2) / 4)


def eight_parts(ab: Tensor, e: Tensor) -> Tensor:
    """The field as eight parts of equal width, ``(8, ..., c)``.

    The last four are E: the first halves of the channels of components 0 and 1, then the second halves.
    """
    halves = torch.stack(e.unflatten(-1, (2, -1)).unbind(-2))
    return torch.cat([ab, halves.flatten(0, 1)])


def gelu(ab: Tensor, e: Tensor) -> Pair:
    """Between two products with the `regular_matrix`, as `eqzoo.ops.octic_gelu` says."""
    parts = eight_parts(ab, e)
    matrix = regular_matrix(parts)
    regular = (matrix @ parts.flatten(1)).to(parts.dtype)  # autocast would give a half
    found, halves = (matrix.T @ F.gelu(regular)).to(parts.dtype).view_as(parts).split(4)
    return found, torch.cat([halves[:2], halves[2:]], -1)


def norm(ab: Tensor, e: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Pair:
    """``weight · (x − mean(x)) / s + bias``, see `eqzoo.ops.octic_norm`."""
    dtype = torch.promote_types(ab.dtype, weight.dtype)
    ab, e = (x.to(accumulation_dtype(dtype)) for x in (ab, e))
    ab, e = (x - x.mean(-1, keepdim=True) for x in (ab, e))
    variance = ab.square().mean(-1, keepdim=True).sum(0) + e.square().mean(-1, keepdim=True).mean(0)
    inverse = (variance + eps).rsqrt() * (4 / math.sqrt(2))
    width = bias.shape[0]
    ones = [1] * (ab.ndim - 2)
    shift = F.pad(bias[None], (0, 0, 0, 3))  # of A1 alone
    ab = ab * inverse * weight[: 4 * width].view(4, *ones, width) + shift.view(4, *ones, width)
    return ab.to(dtype), (e * inverse * weight[4 * width :]).to(dtype)


def stack_heads(ab: Tensor, e: Tensor, count: int, heads: int) -> Tensor:
    """The vectors of attention heads: of each part a share of the channels, A1, A2, B1, B2, E0, E1 in a row.

    Args:
        ab: A1, A2, B1 and B2, ``(4, B, N, count·heads·d)``.
        e: The components of E, ``(2, B, N, count·heads·2d)``.
        count: How many vectors a head has: 3 for queries, keys and values.
        heads: The number of heads.

    Returns:
        ``(count, B, heads, N, 8d)``; the group acts on the last axis by an orthogonal matrix, so that inner products
        of vectors are invariant.

    Example:
        >>> stack_heads(torch.zeros(4, 2, 5, 24), torch.zeros(2, 2, 5, 48), 3, 2).shape
        torch.Size([3, 2, 2, 5, 32])
    """
    check_shape("ab", ab, 4, *ab.shape[1:])
    check_shape("e", e, 2, *ab.shape[1:-1], 2 * ab.shape[-1])
    parts = (x.unflatten(-1, (count, heads, -1)).permute(3, 1, 4, 2, 0, 5).flatten(4) for x in (ab, e))
    return torch.cat(tuple(parts), -1)


def split_heads(x: Tensor) -> Pair:
    """The inverse of `stack_heads`: ``(count, B, heads, N, 8d)`` to a field of ``count·heads·d`` channels a part."""
    ab, e = (
        y.unflatten(-1, (parts, -1)).permute(4, 1, 3, 0, 2, 5).flatten(3)
        for y, parts in zip(x.tensor_split(2, -1), (4, 2), strict=True)
    )
    return ab, e
