"""Depthwise correlation with a filter at every pixel in eager torch, one offset at a time, and its gradients.

The functions write into ``out`` and return it, as those of `cuda` do; filters may be a view with
contiguous pixels.
"""

import math
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def filtered_sum(kernel: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """``out(c, h, x) = Σ_d kernel(slice(c), h, d, x) value(c, h, x + d)``."""
    slices, taps = kernel.shape[1], kernel.shape[3]
    padded = pad(value, taps).unflatten(1, (slices, -1))
    total = torch.zeros_like(value).unflatten(1, (slices, -1))
    for tap, window in zip(kernel.unsqueeze(2).unbind(4), _windows(value, taps), strict=True):
        total.addcmul_(tap, padded[window])
    return out.copy_(total.flatten(1, 2))


def filter_gradient(grad: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """``out(s, h, d, x) = Σ_c grad(c, h, x) value(c, h, x + d)`` over the channels c of slice s."""
    slices, taps = out.shape[1], out.shape[3]
    padded = pad(value, taps).unflatten(1, (slices, -1))
    grad = grad.unflatten(1, (slices, -1))
    for place, window in enumerate(_windows(value, taps)):
        out[:, :, :, place] = (grad * padded[window]).sum(2)
    return out


def field_gradient(kernel: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """``out(c, h, x) = Σ_d kernel(slice(c), h, d, x − d) grad(c, h, x − d)``."""
    slices, taps = kernel.shape[1], kernel.shape[3]
    padded = pad(grad, taps).unflatten(1, (slices, -1))
    total = torch.zeros_like(grad).unflatten(1, (slices, -1))
    # Reads at −d instead of adding at + d: sums into views of one tensor would not fuse when compiled.
    for place, back in enumerate(reversed(_windows(grad, taps))):
        total.addcmul_(pad(kernel[:, :, :, place], taps)[back].unsqueeze(2), padded[back])
    return out.copy_(total.flatten(1, 2))


def pad(value: Tensor, taps: int) -> Tensor:
    """A field with zeros around it, for the windows of so many taps."""
    return F.pad(value, (math.isqrt(taps) // 2,) * 4)


def _windows(value: Tensor, taps: int) -> list[tuple[Any, ...]]:
    """The view of the padded field at each offset, row by row."""
    height, width = value.shape[-2:]
    return [(..., slice(i, i + height), slice(j, j + width)) for i, j in product(range(math.isqrt(taps)), repeat=2)]
