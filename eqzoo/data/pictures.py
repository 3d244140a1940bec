"""Pictures: read from files, brought to a network's size, and standardised."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

__all__ = ["load_picture", "normalise", "preprocess"]


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Pictures as a network takes them: ``(x / 255 − mean) / std``, channel by channel.

    Args:
        images: ``(n, channels, height, width)`` with values in 0 to 255, uint8 or floating point.
        mean: The mean of every channel, over 255.
        std: The standard deviation of every channel, over 255.
        dtype: The floating point type of the result.

    Returns:
        ``(n, channels, height, width)``.
    """
    shape = (1, -1, 1, 1)
    centre = torch.tensor(mean, dtype=dtype, device=images.device).view(shape)
    scale = torch.tensor(std, dtype=dtype, device=images.device).view(shape)
    return (images.to(dtype) / 255 - centre) / scale


def load_picture(path: str | os.PathLike[str], channels: int) -> Tensor:
    """Reads a picture file.

    Args:
        path: A picture of any format that Pillow reads.
        channels: 1 for grey, 3 for colour.

    Returns:
        ``(channels, height, width)`` float32 with values in 0 to 255.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a picture, or ``channels`` is neither 1 nor 3.
    """
    modes = {1: "L", 3: "RGB"}
    if channels not in modes:
        raise ValueError(f"a picture file gives 1 or 3 channels; the network takes {channels}, so call it from Python")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no picture at {path}")
    try:
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert(modes[channels]), dtype=np.float32)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{path} is not a picture that Pillow can read: {error}") from error
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1).contiguous()


def preprocess(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """Scales a picture to a network's size and crops what is over, alike from every side.

    The shorter side is scaled to its size and the longer one to a length of the same parity, so that as much is cropped
    on either end: a turned picture gives the turned result, which the usual rounded crops do not promise. Pixels are
    floating point throughout, for the same reason.

    Args:
        picture: ``(channels, height, width)`` floating point.
        size: Height and width of the result, in pixels.

    Returns:
        ``(channels, *size)``.
    """
    factor = max(wanted / side for wanted, side in zip(size, picture.shape[-2:], strict=True))
    scaled = [
        wanted + 2 * round((side * factor - wanted) / 2) for wanted, side in zip(size, picture.shape[-2:], strict=True)
    ]
    if scaled != list(picture.shape[-2:]):
        picture = F.interpolate(picture[None], scaled, mode="bicubic", antialias=True)[0].clamp(0, 255)
    top, left = ((have - wanted) // 2 for have, wanted in zip(scaled, size, strict=True))
    return picture[..., top : top + size[0], left : left + size[1]]
