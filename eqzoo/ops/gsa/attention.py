"""Group self-attention: content, pose and position scores, and one softmax over the poses and places of the keys."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _dispatch, reference
from .._dtypes import accumulation_dtype


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
    """Attends from each pose and place of the queries to all poses and neighboring places of the keys.

    With queries ``(g, i)``, keys ``(m, j)`` and output poses ``v``, a head gives::

        shared(g, i, m, j)  = scale·(⟨q(g, i), k(m, j)⟩ + ⟨q_pose(g, i), pose(g, m)⟩)
        placed(v, g, i, j)  = scale·⟨q_position(g, i), position(v, i, j)⟩
        out(v, i) = Σ_g Σ_(m, j) softmax_(m, j)[shared + placed] val(m, j)

    Only ``placed`` knows v, and it does not know m. So the softmax factorizes without any loss:
    ``P(m, j) = P(j) P(m | j)`` with ``P(m | j) = softmax_m shared``, the same for all v, and
    ``P(j) = softmax_j [placed + logsumexp_m shared]``. No exponential of ``|H|³`` entries is taken, and both parts
    are as stable as softmax is. The product is summed over g before it meets the values.

    Args:
        query: ``(B, heads, d, |G|, I)`` at I places. The first channels are compared with positions, the last ones
            with poses.
        key: ``(B, heads, d, |M|, I, J)``, the J neighbors of each place, or ``(B, heads, d, |M|, 1, J)`` where all
            places have the same neighbors.
        value: Shaped as ``key``.
        position: The encoded positions ``(p, |V|, I, J)``, or ``(p, |V|, 1, J)`` where all places have the same.
        pose: The encoded relative poses, ``(e, |G|, |M|)``; None for none.
        mask: Which neighbors exist, ``(I, J)`` bool; None for all. Each place needs one at least.
        scale: What the scores are multiplied by.
        dropout: The probability of dropping a pose and place of the keys, drawn on ``P(m | j)``, so that all v lose
            the same.

    Returns:
        ``(B, heads, d, |V|, I)``.

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), section 5.2, equation 16
        https://arxiv.org/abs/2010.00977

    Example:
        >>> query = torch.randn(2, 9, 6, 4, 16)  # 9 heads of 6 channels, 4 poses, 16 places
        >>> keys = torch.randn(2, 9, 6, 4, 1, 16)  # all of which are neighbors
        >>> group_self_attention(query, keys, keys, torch.randn(4, 4, 16, 16), torch.randn(2, 4, 4)).shape
        torch.Size([2, 9, 6, 4, 16])
    """
    if _dispatch.forced("reference"):
        return reference.group_self_attention(query, key, value, position, pose, mask, scale, dropout)
    among_poses, among_places = probabilities(query * scale, key, position, pose, mask)
    among_poses = F.dropout(among_poses, dropout).to(value.dtype)
    weights = torch.einsum("bnvgij,bngimj->bnvimj", among_places.to(value.dtype), among_poses)
    return torch.einsum("bnvimj,bncmij->bncvi", weights, value)


def probabilities(
    query: Tensor, key: Tensor, position: Tensor, pose: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``P(m | j)``, ``(B, heads, |G|, I, |M|, J)``, and ``P(j)``, ``(B, heads, |V|, |G|, I, J)``, of scaled queries."""
    shared = torch.einsum("bncgi,bncmij->bngimj", query, key)
    if pose is not None:
        shared = shared + torch.einsum("bncgi,cgm->bngim", query[:, :, -pose.shape[0] :], pose)[..., None]
    placed = torch.einsum("bncgi,cvij->bnvgij", query[:, :, : position.shape[0]], position)
    # Exponentials of half-precision scores are taken in single precision.
    precise = accumulation_dtype(query.dtype)
    shared, placed = shared.to(precise), placed.to(precise)
    among_all = shared.logsumexp(4)
    if mask is not None:
        among_all = among_all.masked_fill(~mask, float("-inf"))
    return shared.softmax(4), (placed + among_all[:, :, None]).softmax(-1)
