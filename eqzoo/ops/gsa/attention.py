"""The softmax of group self-attention over the poses and places of the keys, in two factors."""

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype


def probabilities(
    query: Tensor, key: Tensor, position: Tensor, pose: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The two factors of `reference.group_attention_weights`, for queries that are already scaled.

    Only ``placed`` knows the output pose v, and it does not know m. So the softmax factorizes without any loss:
    ``P(m, j) = P(j) P(m | j)`` with ``P(m | j) = softmax_m shared``, the same for all v, and
    ``P(j) = softmax_j [placed + logsumexp_m shared]``. No exponential of ``|H|³`` entries is taken, and both parts
    are as stable as softmax is.

    Returns:
        ``P(m | j)``, ``(B, heads, |G|, I, |M|, J)``, and ``P(j)``, ``(B, heads, |V|, |G|, I, J)``.
    """
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
