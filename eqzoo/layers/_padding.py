"""The window of a convolution, and pixels around its input."""

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from ._arguments import named
from ._exact import SizeError
from ._layout import from_planes, is_channels_last, to_planes, with_channels_last

__all__ = ["PaddingMode", "check_window", "padded"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


def check_window(kernel_size: int, stride: int, padding: int, dilation: int, padding_mode: str) -> None:
    """Raises ValueError unless numbers and mode are those of a convolution."""
    if min(kernel_size, stride, dilation) < 1 or padding < 0:
        raise ValueError(
            "a convolution needs kernel_size, stride and dilation of at least 1 and padding of at least 0, got "
            f"{kernel_size}, {stride}, {dilation} and {padding}"
        )
    if padding_mode not in get_args(PaddingMode):
        raise ValueError(f"padding_mode is one of {', '.join(get_args(PaddingMode))}, got {padding_mode!r}")


def padded(layer: nn.Module, x: Tensor, padding: int, mode: PaddingMode) -> Tensor:
    """An image or a field ``(..., height, width)`` with pixels of its own around it, which every symmetry moves along.

    Args:
        layer: The layer, for the error.
        x: The image or field, contiguous or with channels last, as the result is then.
        padding: The pixels at each side.
        mode: ``"reflect"``, ``"replicate"`` or ``"circular"``, as in `torch.nn.functional.pad`.

    Raises:
        SizeError: If the image has too few pixels for the mode.
    """
    most = {"reflect": min(x.shape[-2:]) - 1, "circular": min(x.shape[-2:])}.get(mode, padding)
    if padding > most:
        raise SizeError(
            f"{named(layer)}, with padding_mode={mode!r}, pads an image of {x.shape[-2]} x {x.shape[-1]} by at most "
            f"{most} pixels, and padding is {padding}"
        )
    if not padding:
        return x
    last = is_channels_last(x)
    planes = F.pad(to_planes(x), (padding,) * 4, mode)
    if x.ndim == 4:
        return with_channels_last(planes) if last else planes
    return from_planes(planes, x.shape[1], x.shape[2], last)
