"""Memory layout of fields: contiguous, or channels last."""

import torch
from torch import Tensor

from ..ops._dispatch import is_transformed
from ..ops._layout import LAST, follow


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of an image or field are its fastest axis in memory, followed by the group axis.

    A field ``(B, C, |H|, height, width)`` in this layout is stored as ``(B, height, width, |H|, C)``, so its planes
    ``(B, |H|·C, height, width)`` are in `torch.channels_last`. An image of one channel, whose memory is the same in
    both layouts, is channels last if its strides say so. False while torch exports, as a file has no layouts, and while
    it compiles for one image: the strides that the compiler expects of convolutions are then not those they have. False
    under torch.func, where strides do not tell the layout of a batched tensor.
    """
    if (
        x.ndim not in (4, 5)
        or is_transformed()
        or torch.compiler.is_exporting()
        or (torch.compiler.is_compiling() and len(x) == 1)
    ):
        return False
    axes = LAST if x.ndim == 5 else (1, 3, 2, 0)
    return follow(x, axes[:-1], exactly=True) and follow(x, axes)


def group_last(x: Tensor) -> Tensor:
    """A view of a field with its group axis last, ``(B, C, height, width, |H|)``."""
    return x.permute(0, 1, 3, 4, 2)


def to_planes(x: Tensor) -> Tensor:
    """The planes of a field, ``(B, C·|H|, height, width)``; with channels last, ``(B, |H|·C, height, width)``.

    They are a view in both layouts. Images are returned as they are.
    """
    if x.ndim != 5:
        return x
    return x.transpose(1, 2).flatten(1, 2) if is_channels_last(x) else x.flatten(1, 2)


def from_planes(y: Tensor, channels: int, order: int, channels_last: bool) -> Tensor:
    """The field ``(B, C, |H|, height, width)`` of planes in the order of `to_planes`."""
    if channels_last:
        return with_channels_last(y).unflatten(1, (order, channels)).transpose(1, 2)
    return y.unflatten(1, (channels, order))


def laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    """The field y, copied to channels last if x is in that layout and y is not."""
    if not is_channels_last(x) or is_channels_last(y):
        return y
    return from_planes(y.transpose(1, 2).flatten(1, 2), y.shape[1], y.shape[2], channels_last=True)


def with_channels_last(planes: Tensor) -> Tensor:
    """Planes in `torch.channels_last`; a convolution of a batch of one does not always return that layout."""
    return planes if is_channels_last(planes) else planes.to(memory_format=torch.channels_last)
