"""Reading, resizing and normalizing images."""

import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, TiffImagePlugin
from torch import Tensor

T = TypeVar("T")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, of the images that a file can hold, by their channels
_GRAY_MODES = ("1", "L", "LA", "La", "I", "F")
_ANIMATED = ("GIF", "PNG", "WEBP", "AVIF")  # the frames of MPO are previews or another eye's view
_FRACTION = 2.0  # the largest value of images in 0 to 1, with what interpolation adds at edges
_UNKNOWN_RANGE = "and the values of black and white are unknown; save it with 8 or 16 bits, without a sign"
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT")  # what pixels depend on
_JPEG2000_HEADER = 65_536  # bytes in which its codestream begins
_MISREAD_APART = ("LA", "PA", "LAB", "YCbCr")  # with the bands of a TIFF one behind the other
# Tags of a TIFF and some of their values.
_SUBFILE, _REDUCED, _MASK = 254, 1, 4
_WIDTH, _HEIGHT, _BITS = 256, 257, 258
_PHOTOMETRIC, _WHITE_IS_ZERO, _PALETTE = 262, 0, 3
_BANDS, _PLANES, _APART, _SIGN, _SIGNED, _EXTRA, _COLORS = 277, 284, 2, 339, 2, 338, 320
_DESCRIPTION, _INNER_PAGES, _DEPTH = 270, 330, 32997
_STACK = re.compile(r'^ImageJ=.*^images=([2-9]|\d\d)|"truncated": true', re.MULTILINE | re.DOTALL)  # pages without tags

# For all of the process, uncompressed TIFF files are read by libtiff, as Pillow reads compressed ones: its own code
# scrambles those of orientation 5 to 8, with subsampled chroma, or with planes of FillOrder 2.
TiffImagePlugin.READ_LIBTIFF = True


def normalize(
    images: Tensor, mean: tuple[float, ...] | Tensor, std: tuple[float, ...] | Tensor, dtype: torch.dtype
) -> Tensor:
    """Normalizes images: ``(x / 255 − mean) / std`` for each channel.

    Args:
        images: ``(n, channels, height, width)`` with values in 0 to 255.
        mean: The mean of each channel, or one for all, for pixel values in 0 to 1.
        std: The standard deviation, the same.
        dtype: The floating point type of the result.

    Returns:
        ``(n, channels, height, width)``.

    Raises:
        ValueError: If mean or std has another number of channels, and more than one, or the type is not floating point.

    Warns:
        UserWarning: If floating point images on the CPU seem to have values in 0 to 1, as those of
            `torchvision.transforms.ToTensor`: none is above 2, as `preprocess` may go beyond 1 at edges, and not all
            are 0. Multiply them by 255 before. Also if a value of any type is above 510, as raw counts have.
    """
    if isinstance(images, Tensor) and not torch.jit.is_tracing():  # type: ignore[attr-defined]
        counts = {torch.as_tensor(values).numel() for values in (mean, std)}
        if not dtype.is_floating_point or images.ndim != 4 or not counts <= {1, images.shape[1]}:
            raise ValueError(
                "images are (n, channels, height, width), mean and std have a number for each channel or one for all, "
                f"and the result is of a floating point type; got {tuple(images.shape)}, {mean}, {std} and {dtype}"
            )
        if images.dtype != torch.uint8 and images.device.type == "cpu" and not torch.compiler.is_compiling():
            _warn_of_range(images.detach())
    return normalized(images, mean, std, dtype)


def normalized(
    images: Tensor, mean: tuple[float, ...] | Tensor, std: tuple[float, ...] | Tensor, dtype: torch.dtype
) -> Tensor:
    """`normalize` without its checks, for images that this package has read."""
    shape = (1, -1, 1, 1)
    center = torch.as_tensor(mean, dtype=dtype, device=images.device).view(shape)
    scale = torch.as_tensor(std, dtype=dtype, device=images.device).view(shape)
    return (images.to(dtype) / 255 - center) / scale


def _warn_of_range(images: Tensor) -> None:
    if not images.numel():
        return
    try:
        largest = float((images if images.is_floating_point() else images.float()).amax())
    except RuntimeError:  # no values to look at: under torch.func.vmap, or a fake tensor
        return
    if (images.is_floating_point() and 0 < largest <= _FRACTION) or largest > 2 * 255:
        warnings.warn(
            f"the largest value of the images is {largest:.4g}, and normalize takes values in 0 to 255: multiply those "
            "in 0 to 1 by 255, and scale others as the images that the network was trained on",
            stacklevel=3,
        )


def is_grayscale(image: Image.Image) -> bool:
    """Whether an image is grayscale by its header; images with a palette count as colored."""
    return image.mode in _GRAY_MODES or image.mode.startswith("I;16")


def pixels(image: Image.Image, channels: int) -> Tensor:
    """The pixels of a Pillow image of any mode, in the orientation given by its EXIF data.

    Values of 16-bit images are multiplied by 255 / 65535, those of a TIFF of fewer bits by 255 / (2^bits - 1), and
    inverted where it says that 0 is white. Transparent pixels are composited onto black unless four channels are
    requested. Palettes, CMYK and other color spaces are converted to RGB.

    Args:
        image: The image.
        channels: 1 for grayscale, 3 for RGB, 4 for RGB and opacity.

    Returns:
        ``(channels, height, width)`` float32 with values in 0 to 255.

    Raises:
        ValueError: If ``channels`` is another number, or Pillow would give other pixels than those of the image: of
            numbers with 32 bits, fractions or signs, whose values of black and white are unknown; of a TIFF with bands
            that are neither colors nor opacity, which Pillow leaves out; of some whose bands lie one behind the other,
            JPEG 2000 with more than 8 bits in color, masks in BMP with bytes for pixels, and FITS, which it misreads.
    """
    white_is_zero = _tag(image, _PHOTOMETRIC) == _WHITE_IS_ZERO
    bits = _tag(image, _BITS)
    check_header(image, channels)
    with suppress(SyntaxError):  # EXIF data that is damaged says nothing of the orientation
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        gray = _deep(image, bits)
        gray = 255 - gray if white_is_zero else gray
        opacity = torch.full_like(gray, 255)
        if isinstance(value := image.info.get("transparency"), int):
            opacity[torch.from_numpy(np.asarray(image) == value)] = 0
        if channels == 4:
            return torch.stack([gray, gray, gray, opacity])
        return (gray * (opacity / 255)).expand(channels, -1, -1).contiguous()
    if image.mode == "La":  # gray times opacity, which Pillow converts to this alone
        image = image.convert("LA")
    if channels < 4 and (image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info):
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, (0, 0, 0, 255)), seen)
    if image.mode not in ("1", "L", "P", "RGB", "RGBA"):  # Pillow converts all others by way of RGB
        image = image.convert("RGB" if image.mode not in ("LA", "PA", "RGBa") else "RGBA")
    values = np.array(image.convert(MODES[channels]))
    planes = torch.from_numpy(values.reshape(*values.shape[:2], channels)).permute(2, 0, 1)
    return planes.contiguous().float()  # in this order large images take less memory


class _UnsuitableError(ValueError):
    """An image that Pillow reads, but whose pixels are not those that one would see."""


def check_header(image: Image.Image, channels: int = 3) -> None:
    """Raises ValueError if an image cannot be read with these channels, or Pillow would give other pixels than its."""
    if reason := _misread(image):
        raise _UnsuitableError(reason)
    if channels not in MODES:
        raise _UnsuitableError(f"images are read with 1, 3 or 4 channels, got {channels}; others go into a .npz file")


def _misread(image: Image.Image) -> str | None:
    """Why Pillow would give other pixels than those of an image, by its header; None if it gives them."""
    bands, known, bits = _tag(image, _BANDS) or 1, len(image.getbands()), _tag(image, _BITS) or 8
    if bands > known:
        return (
            f"it has {bands} bands, of which Pillow reads {known}; save the ones that you need as gray or color, or "
            "train on all of them in a .npz file"
        )
    if _tag(image, _SIGN) == _SIGNED:
        return f"its pixels are {bits}-bit numbers with a sign, {_UNKNOWN_RANGE}"
    unknown_fourth = image.mode == "RGBA" and _tag(image, _EXTRA) is None
    if _tag(image, _PLANES) == _APART and (unknown_fourth or image.mode in _MISREAD_APART):
        return (
            f"its bands of {bits} bits lie one behind the other, which Pillow misreads; save it with the numbers of a "
            "pixel side by side (gdal_translate -co INTERLEAVE=PIXEL), or in color with 8 bits"
        )
    if _tag(image, _PHOTOMETRIC) == _PALETTE and 0 < max(getattr(image, "tag_v2", {}).get(_COLORS, (0,))) < 256:
        return "the colors of its palette have 8 bits instead of 16, which Pillow reads as black; save it in color"
    if image.format == "FITS":
        return "Pillow leaves out the scale, the sign and further planes of FITS; put its numbers into a .npz file"
    if image.format == "JPEG2000" and not image.mode.startswith("I;16") and (depth := _jpeg2000_bits(image)) != 8:
        return f"of JPEG 2000 with {depth or 'unknown'} bits Pillow can read white as black; save it as PNG or TIFF"
    tile = getattr(image, "tile", ()) if (image.format, image.mode) == ("BMP", "1") else ()
    if tile and tile[0].args[1] != (image.width + 31) // 32 * 4:
        return "Pillow reads a bit for each byte of a BMP with a palette of two colors; save it as PNG"
    return None


def _jpeg2000_bits(image: Image.Image) -> int | None:
    """The bits of a number in a JPEG 2000, from the SIZ marker segment; None where they are unknown."""
    if (file := getattr(image, "fp", None)) is None:  # closed, as its pixels have been read
        return None
    place = file.tell()
    file.seek(0)
    data = file.read(_JPEG2000_HEADER)
    file.seek(place)
    start = data.find(b"\xff\x4f\xff\x51")
    return None if start < 0 or start + 42 >= len(data) else (data[start + 42] & 0x7F) + 1


def _check_single(image: Image.Image) -> None:
    """Raises ValueError if a file holds several images, unless those behind the first are smaller copies or masks."""
    if image.format != "TIFF":
        several = image.format in _ANIMATED and getattr(image, "n_frames", 1) > 1
    else:
        (width, height), page = image.size, 1
        first = image.tag_v2  # type: ignore[attr-defined]
        thumbnail = first.get(_SUBFILE, 0) & _REDUCED and _INNER_PAGES in first  # of a raw image of a camera
        stack = first.get(_DEPTH, 1) > 1 or _STACK.search(str(first.get(_DESCRIPTION, "")))
        several = bool(thumbnail or stack)
        while not several:
            with suppress(Exception):  # of pages that Pillow cannot show; their tags have been read
                image.seek(page)
            if image.tell() != page:
                break
            tags = image.tag_v2  # type: ignore[attr-defined]
            copy = tags.get(_SUBFILE, 0) & (_REDUCED | _MASK) or tags[_WIDTH] * tags[_HEIGHT] < width * height
            several, page = not copy, page + 1
        image.seek(0)
    if several:
        raise _UnsuitableError(
            "it holds several images, such as a stack, an animation or a thumbnail before an image; save each one that "
            "is to be read in a file of its own"
        )


def _tag(image: Image.Image, tag: int) -> int | None:
    """The first number of a tag of a TIFF; None for other formats, or where it is missing."""
    value = getattr(image, "tag_v2", {}).get(tag)
    return value[0] if isinstance(value, tuple) else value


def _deep(image: Image.Image, bits: int | None) -> Tensor:
    """The values of a 16-bit grayscale image, scaled to 0 to 255; Pillow's own conversion clips them at 255.

    Args:
        image: The image. Pillow reads TIFFs of 12 and 16 bits in the mode I;16 and other whole numbers in the mode I,
            in which it reads 16 bits of other formats too.
        bits: The bits of a number in a TIFF; None for other formats.
    """
    values = np.asarray(image)
    if image.mode == "F" or (image.mode == "I" and (bits or values.min() < 0 or values.max() > 65_535)):
        kind = "floating point numbers" if image.mode == "F" else f"{bits or 32}-bit numbers"
        raise _UnsuitableError(f"its pixels are {kind}, {values.min():g} to {values.max():g}, {_UNKNOWN_RANGE}")
    white = 2 ** min(bits or 16, 16) - 1
    return torch.from_numpy(values.astype(np.float32) / (white / 255))


def load_image(path: str | os.PathLike[str], channels: int) -> Tensor:
    """Reads an image file; conversions are those of `pixels`.

    Args:
        path: A file of any format that Pillow reads.
        channels: 1 for grayscale, 3 for RGB, 4 for RGB and opacity.

    Returns:
        ``(channels, height, width)`` float32 with values in 0 to 255.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not a readable image, or `pixels` does not take it; or if it holds several images,
            the pages of a stack or the frames of an animation, of which Pillow shows the first. Smaller copies and
            masks behind it are no error.
    """
    return read_file(Path(path), lambda image: pixels(image, channels))


def read_file(path: Path | bytes, read: Callable[[Image.Image], T], whole: bool = True) -> T:
    """What a function makes of an image file; of a PNG whose metadata Pillow refuses, without these.

    Args:
        path: The file, or its content.
        read: The function.
        whole: Whether the file is to be checked for several images.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: As `load_image`.
    """

    def attempt(file: Path | BytesIO) -> T:
        with Image.open(file) as image:
            if whole:
                _check_single(image)
            return read(image)

    name = "the file" if isinstance(path, bytes) else path
    try:
        try:
            return attempt(BytesIO(path) if isinstance(path, bytes) else path)
        except (ValueError, SyntaxError, OSError):
            if isinstance(path, Path):
                with path.open("rb") as file:
                    if file.read(len(_PNG)) != _PNG:
                        raise
                path = path.read_bytes()
            if not path.startswith(_PNG):
                raise
            return attempt(_png_without_metadata(path))
    except _UnsuitableError as error:
        raise ValueError(f"{name}: {error}") from error
    except (FileNotFoundError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        most = 2 * Image.MAX_IMAGE_PIXELS  # type: ignore[operator]
        raise ValueError(f"{name} has more than {most:,} pixels, which Pillow refuses; cut it into tiles") from error
    except Exception as error:  # each of Pillow's formats raises its own errors on corrupt files
        if not (path if isinstance(path, bytes) else path.stat().st_size):
            raise ValueError(f"{name} is not an image: it is empty") from error
        way = "; save it with 8 or 16 bits in gray or color, or its bands in a .npz file"
        way = way if Path(str(name)).suffix.lower() in (".tif", ".tiff") else ""
        raise ValueError(
            f"{name} is not an image that Pillow can read: {str(error) or type(error).__name__}{way}"
        ) from error


def _png_without_metadata(data: bytes) -> BytesIO:
    """A PNG with only what its pixels depend on, and EXIF data that is intact."""
    kept, place = [_PNG], len(_PNG)
    while place < len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4], "big")
        kind = data[place + 4 : place + 8]
        intact = data[end - 4 : end] == crc32(data[place + 4 : end - 4]).to_bytes(4, "big")
        if kind in _PNG_CHUNKS or (kind == b"eXIf" and intact):
            kept.append(data[place:end])
        place = end
    return BytesIO(b"".join(kept))


def preprocess(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes an image and crops its center; commutes with 90° rotations and reflections.

    One side is scaled to its target length and the other to a length of the same parity as its target, so that the crop
    removes the same number of pixels at both ends. The usual center crop rounds to one end instead. Values are not
    rounded to integers, so the result is exact up to floating-point round-off. Where bicubic interpolation overshoots,
    values are clamped to 0 to 255, or to the range of the image where that is wider. If an image with a NaN is
    scaled, all its values become NaN.

    Args:
        image: ``(channels, height, width)``, or a batch of such; whole numbers become float32.
        size: Height and width of the result, in pixels.

    Returns:
        ``(channels, *size)``, or a batch of such.
    """
    image = image if image.is_floating_point() else image.float()
    factor = max(wanted / side for wanted, side in zip(size, image.shape[-2:], strict=True))
    scaled = [
        wanted + 2 * round((side * factor - wanted) / 2) for wanted, side in zip(size, image.shape[-2:], strict=True)
    ]
    if scaled != list(image.shape[-2:]):
        batch = image if image.ndim == 4 else image[None]
        low, high = batch.amin((1, 2, 3), True), batch.amax((1, 2, 3), True)
        exact = torch.promote_types(batch.dtype, torch.float32)  # torch scales no 16-bit numbers on a CPU
        scaled_batch = F.interpolate(batch.to(exact), scaled, mode="bicubic", antialias=True).to(batch.dtype)
        scaled_batch = scaled_batch.clamp(low.clamp(max=0), high.clamp(min=255))
        image = scaled_batch if image.ndim == 4 else scaled_batch[0]
    top, left = ((have - wanted) // 2 for have, wanted in zip(scaled, size, strict=True))
    return image[..., top : top + size[0], left : left + size[1]]


def preprocess_uint8(image: Tensor, size: tuple[int, int]) -> Tensor:
    """`preprocess`, rounded to whole numbers from 0 to 255: the pixels that networks are trained and evaluated on.

    The arguments and the shape are those of `preprocess`; the result is uint8.
    """
    return preprocess(image, size).round().clamp(0, 255).to(torch.uint8)
