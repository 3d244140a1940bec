"""How a field lies in memory: its channels first, or last as in torch's channels_last."""

import torch
from torch import Tensor

__all__ = ["as_laid_out", "from_planes", "group_last", "is_channels_last", "to_planes"]


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a picture or field are its fastest axis in memory, with the group axis the next one.

    A field ``(B, C, |H|, height, width)`` then lies as ``(B, height, width, |H|, C)``: to torch, planes with the group
    axis slow are in `torch.channels_last`, and so is the field with its group axis behind the width.
    """
    if x.stride(1) != 1:
        return False
    if x.ndim == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.ndim == 5 and group_last(x).is_contiguous(memory_format=torch.channels_last_3d)


def group_last(x: Tensor) -> Tensor:
    """A view of a field with its group axis last, ``(B, C, height, width, |H|)``."""
    return x.permute(0, 1, 3, 4, 2)


def to_planes(x: Tensor) -> Tensor:
    """The planes of a field, ``(B, C·|H|, height, width)``, with channels last as ``(B, |H|·C, height, width)``.

    They are a view of a field in either layout; pictures are planes already.
    """
    if x.ndim != 5:
        return x
    return x.transpose(1, 2).flatten(1, 2) if is_channels_last(x) else x.flatten(1, 2)


def from_planes(y: Tensor, channels: int, order: int, channels_last: bool) -> Tensor:
    """The field ``(B, C, |H|, height, width)`` that planes of `to_planes` are a view of."""
    if channels_last:
        return y.unflatten(1, (order, channels)).transpose(1, 2)
    return y.unflatten(1, (channels, order))


def as_laid_out(y: Tensor, x: Tensor) -> Tensor:
    """A field ``(B, C, |H|, height, width)`` in the layout that another tensor has."""
    if not is_channels_last(x) or is_channels_last(y):
        return y
    return group_last(y).contiguous(memory_format=torch.channels_last_3d).permute(0, 1, 4, 2, 3)
