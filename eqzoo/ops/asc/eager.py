"""Affine local self-attention in eager torch, as it is exported."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import AffineBank, AffineBanks


def mapped(x: Tensor, bank: AffineBank, kernel_size: int) -> Tensor:
    """`reference.affine_map` as a convolution, also inside of an operator that is differentiated by torch.func."""
    channels, order, height, width = x.shape[1:]
    margin, taps = kernel_size // 2, kernel_size**2
    if bank.psi is None:
        seen = F.unfold(x.flatten(1, 2), kernel_size, padding=margin).unflatten(1, (channels, order, taps))
        return seen if bank.beta is None else seen + bank.beta.to(x.dtype).unsqueeze(-1)
    # Each pixel is mapped for all offsets at which it is a neighbor, and the results are shifted into place.
    weight = bank.psi.to(x.dtype).transpose(2, 3).reshape(-1, order, 1, 1)
    bias = None if bank.beta is None else bank.beta.to(x.dtype).flatten()
    planes = F.pad(x.flatten(1, 2), (margin,) * 4)
    y = F.conv2d(planes, weight, bias, groups=channels).unflatten(1, (channels, order, taps))
    corners = [divmod(tap, kernel_size) for tap in range(taps)]
    windows = [y[:, :, :, d : d + 1, i : i + height, j : j + width] for d, (i, j) in enumerate(corners)]
    return torch.cat(windows, 3).flatten(-2)


def attend(
    query: Tensor, key: Tensor, value: Tensor | None, banks: AffineBanks, kernel_size: int, num_heads: int, scale: float
) -> Tensor:
    """The exported form: the mapped neighbors of all images at once, by one grouped convolution."""
    heads = (num_heads, query.shape[1] // num_heads)
    queries = scale * mapped(query, banks.query, 1).unflatten(1, heads)
    keys = mapped(key, banks.key, kernel_size).unflatten(1, heads)
    weights = (queries * keys).sum(2).softmax(3).unsqueeze(2)
    if value is None or banks.value is None:
        values = keys
    else:
        values = mapped(value, banks.value, kernel_size).unflatten(1, heads)
    out = (weights.to(values.dtype) * values).sum(4)
    return out.flatten(1, 2).unflatten(-1, query.shape[-2:])
