"""How a field lies in memory: its channels first, or last as in torch's channels_last."""

import torch
from torch import Tensor

__all__ = ["from_planes", "group_last", "is_channels_last", "laid_out_as", "to_planes", "with_channels_last"]


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a picture or field are its fastest axis in memory, with the group axis the next one.

    A field ``(B, C, |H|, height, width)`` then lies as ``(B, height, width, |H|, C)``: its planes with the group axis
    slow are in `torch.channels_last`, and so is the field with its group axis behind the width. Where torch compiles
    or exports, the answer is no: strides are then guesses, and the compiler chooses layouts of its own.
    """
    if x.ndim not in (4, 5) or torch.compiler.is_compiling():
        return False
    stride = 1
    for axis in (1, 2, 4, 3) if x.ndim == 5 else (1, 3, 2):
        if x.stride(axis) != stride:
            return False
        stride *= x.shape[axis]
    return len(x) == 1 or x.stride(0) == stride


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
        return with_channels_last(y).unflatten(1, (order, channels)).transpose(1, 2)
    return y.unflatten(1, (channels, order))


def laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    """A field y, copied to channels last if a field x has them so and y has not."""
    if not is_channels_last(x) or is_channels_last(y):
        return y
    return from_planes(y.transpose(1, 2).flatten(1, 2), y.shape[1], y.shape[2], channels_last=True)


def with_channels_last(planes: Tensor) -> Tensor:
    """Planes in `torch.channels_last`, which a convolution of a batch of one does not always give."""
    return planes if is_channels_last(planes) else planes.to(memory_format=torch.channels_last)
