"""Padding of images and fields with their own pixels."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from ._layout import from_planes, is_channels_last, to_planes, with_channels_last

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


def padded(x: Tensor, padding: int, mode: PaddingMode) -> Tensor:
    """An image or field padded with its own pixels, which commutes with rotations and reflections.

    Args:
        x: ``(..., height, width)``, contiguous or channels last; the result has the same layout.
        padding: The number of pixels added to each side.
        mode: ``"reflect"``, ``"replicate"`` or ``"circular"``, as in `torch.nn.functional.pad`.
    """
    if not padding:
        return x
    last = is_channels_last(x)
    planes = F.pad(to_planes(x), (padding,) * 4, mode)
    if x.ndim == 4:
        return with_channels_last(planes) if last else planes
    return from_planes(planes, x.shape[1], x.shape[2], last)
