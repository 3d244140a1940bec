"""Pictures: read from files, brought to a network's size, and standardised."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

__all__ = ["load_picture", "normalise", "pixels", "preprocess", "says_grey"]

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_GREY = ("1", "L", "LA", "La", "I", "F")


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


def says_grey(picture: Image.Image) -> bool:
    """Whether the header of a picture says that it has no colours; a palette may have some."""
    return picture.mode in _GREY or picture.mode.startswith("I;16")


def pixels(picture: Image.Image, channels: int) -> Tensor:
    """The pixels of a picture of any mode, turned as its EXIF data says that it is to be seen.

    Pictures of 16 bits are scaled to 0 to 255 by 255 / 65535, alike for all. Where no fourth channel is asked for, what
    is transparent is laid over black. Palettes, CMYK and other colour spaces become red, green and blue.

    Args:
        picture: A picture of Pillow's.
        channels: 1 for grey, 3 for colour, 4 for colour and opacity.

    Returns:
        ``(channels, height, width)`` float32 with values in 0 to 255.

    Raises:
        ValueError: If another number of channels is asked for, or the picture has 32 bits a pixel and a range that
            nothing says.
    """
    if channels not in _MODES:
        raise ValueError(
            f"a picture file gives 1, 3 or 4 channels, got {channels}; others come from a .npz file or from Python"
        )
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        grey = _deep(picture)
        if channels == 4:
            return torch.stack([grey, grey, grey, torch.full_like(grey, 255)])
        return grey.expand(channels, -1, -1).contiguous()
    if channels < 4 and (picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info):
        seen = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", seen.size, (0, 0, 0, 255)), seen)
    if picture.mode not in ("1", "L", "P", "RGB", "RGBA"):  # Pillow converts all others by way of RGB
        picture = picture.convert("RGB" if picture.mode not in ("LA", "La", "PA", "RGBa") else "RGBA")
    values = np.asarray(picture.convert(_MODES[channels]), dtype=np.float32)
    return torch.from_numpy(values.reshape(*values.shape[:2], channels)).permute(2, 0, 1).contiguous()


def _deep(picture: Image.Image) -> Tensor:
    """The values of a grey picture of 16 bits, in 0 to 255; Pillow itself would cut off what is over 255."""
    values = np.asarray(picture)
    if picture.mode == "F" or values.min() < 0 or values.max() > 65_535:
        raise ValueError(
            f"its pixels have 32 bits (mode {picture.mode}, {values.min():g} to {values.max():g}), and nothing says "
            "which of them are black and white; save it with 8 or 16 bits"
        )
    return torch.from_numpy(values.astype(np.float32) / 257)


def load_picture(path: str | os.PathLike[str], channels: int) -> Tensor:
    """Reads a picture file, as `pixels` says.

    Args:
        path: A picture of any format that Pillow reads.
        channels: 1 for grey, 3 for colour, 4 for colour and opacity.

    Returns:
        ``(channels, height, width)`` float32 with values in 0 to 255.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a whole picture, or ``channels`` is another number.
    """
    if channels not in _MODES:
        raise ValueError(
            f"a picture file gives 1, 3 or 4 channels; the network takes {channels}, so call it from Python"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"no picture at {path}")
    try:
        with Image.open(path) as picture:
            return pixels(picture, channels)
    except Exception as error:  # every format of Pillow's raises its own on a broken file
        empty = "the file is empty" if not Path(path).stat().st_size else error
        raise ValueError(f"{path} is not a picture that Pillow can read: {empty}") from error


def preprocess(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """Scales a picture to a network's size and crops what is over, alike from every side.

    The shorter side is scaled to its size and the longer one to a length of the same parity, so that as much is cropped
    on either end: a turned picture gives the turned result, which the usual rounded crops do not promise. Pixels are
    floating point throughout, for the same reason.

    Args:
        picture: ``(channels, height, width)`` floating point, or a batch of such.
        size: Height and width of the result, in pixels.

    Returns:
        ``(channels, *size)``, or a batch of such.
    """
    factor = max(wanted / side for wanted, side in zip(size, picture.shape[-2:], strict=True))
    scaled = [
        wanted + 2 * round((side * factor - wanted) / 2) for wanted, side in zip(size, picture.shape[-2:], strict=True)
    ]
    if scaled != list(picture.shape[-2:]):
        batch = picture if picture.ndim == 4 else picture[None]
        scaled_batch = F.interpolate(batch, scaled, mode="bicubic", antialias=True).clamp(0, 255)
        picture = scaled_batch if picture.ndim == 4 else scaled_batch[0]
    top, left = ((have - wanted) // 2 for have, wanted in zip(scaled, size, strict=True))
    return picture[..., top : top + size[0], left : left + size[1]]
