"""Reading, resizing and normalizing images."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

__all__ = [
    "DARK",
    "MODES",
    "NEARLY_ALL",
    "dark_images",
    "darker_images",
    "is_grayscale",
    "load_image",
    "normalize",
    "pixels",
    "preprocess",
]

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, of the images that a file can hold, by their channels
_GRAY_MODES = ("1", "L", "LA", "La", "I", "F")
_WITH_FRAMES = ("TIFF", "GIF", "PNG", "WEBP", "AVIF")  # those of cameras, MPO, are previews or another eye's view
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_WHITE_IS_ZERO, _TIFF_SIGN, _TIFF_SIGNED = 258, 262, 0, 339, 2
DARK = 32  # of 255: darker than this are nearly all pixels of images that use a small part of the range
NEARLY_ALL = 0.999  # of the pixels, as single ones may be saturated
_BATCH = 256  # images whose brightness is measured together
_FRACTION = 2.0  # the largest value of images in 0 to 1, with what interpolation adds at edges
_TIFF_BANDS = 277  # samples a pixel


def normalize(
    images: Tensor, mean: tuple[float, ...] | Tensor, std: tuple[float, ...] | Tensor, dtype: torch.dtype
) -> Tensor:
    """Normalizes images: ``(x / 255 − mean) / std`` for each channel.

    Args:
        images: ``(n, channels, height, width)`` with values in 0 to 255, uint8 or floating point.
        mean: The mean of each channel, or one for all, for pixel values in 0 to 1.
        std: The standard deviation, the same.
        dtype: The floating point type of the result.

    Returns:
        ``(n, channels, height, width)``.

    Raises:
        TypeError: If images are no tensor, or the type is not floating point.
        ValueError: If mean or std has another number of channels, and more than one.

    Warns:
        UserWarning: If floating point images on the CPU seem to have values in 0 to 1, as those of
            `torchvision.transforms.ToTensor`: none is above 2, as `preprocess` may go beyond 1 at edges, and not all
            are 0. Multiply them by 255 before. Also if a value is above 510, as raw counts have.
    """
    if isinstance(images, np.ndarray | Sequence):
        raise TypeError(f"images are a tensor, got {type(images).__name__}; torch.as_tensor(images) makes one")
    if not dtype.is_floating_point:
        raise TypeError(f"normalized images are of a floating point type such as torch.float32, got {dtype}")
    if isinstance(images, Tensor) and not torch.jit.is_tracing():  # type: ignore[attr-defined]
        counts = {torch.as_tensor(values).numel() for values in (mean, std)}
        if images.ndim != 4 or not counts <= {1, images.shape[1]}:
            raise ValueError(
                "images are (n, channels, height, width), and mean and std have a number for each channel, or one for "
                f"all, got {tuple(images.shape)}, {mean} and {std}"
            )
        if images.is_floating_point() and images.device.type == "cpu" and not torch.compiler.is_compiling():
            _warn_of_fractions(images.detach())
    return normalized(images, mean, std, dtype)


def normalized(
    images: Tensor, mean: tuple[float, ...] | Tensor, std: tuple[float, ...] | Tensor, dtype: torch.dtype
) -> Tensor:
    """`normalize` without its checks, for images that this package has read."""
    shape = (1, -1, 1, 1)
    center = torch.as_tensor(mean, dtype=dtype, device=images.device).view(shape)
    scale = torch.as_tensor(std, dtype=dtype, device=images.device).view(shape)
    return (images.to(dtype) / 255 - center) / scale


def _warn_of_fractions(images: Tensor) -> None:
    if not images.numel():
        return
    try:
        largest = float(images.amax())
    except RuntimeError:  # no values to look at: under torch.func.vmap, or a fake tensor
        return
    if 0 < largest <= _FRACTION:
        warnings.warn(
            f"the largest value of the images is {largest:.3g}: normalize takes values in 0 to 255 and divides them by "
            "255; multiply images with values in 0 to 1 by 255 before",
            stacklevel=3,
        )
    if largest > 2 * 255:
        warnings.warn(
            f"the largest value of the images is {largest:.4g}: normalize takes values in 0 to 255; scale them as "
            "those that the network was trained on",
            stacklevel=3,
        )


def dark_images(images: Tensor) -> Tensor:
    """Which images have nearly all of their pixels below `DARK`, but are not black, ``(n,)`` bool.

    Args:
        images: ``(n, channels, height, width)`` with values in 0 to 255.
    """
    parts = [part.flatten(1) for part in images.split(_BATCH)]
    found = [((part < DARK).double().mean(1) >= NEARLY_ALL) & (part.amax(1) > 0) for part in parts]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def darker_images(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Which images are much darker than those that a network was trained on, ``(n,)`` bool; black ones are not.

    Where those are bright, as of `dark_images`. Where they are dark themselves, such as cells that glow on a black
    ground: the images whose largest value in each channel is below ``mean + std`` of the training images, and `DARK`.
    The first three channels count: a fourth may be the opacity.

    Args:
        images: ``(n, channels, height, width)`` with values in 0 to 255.
        mean: Of the training images' values divided by 255, one for each channel or for all.
        std: The same.
    """
    colors, mean, std = images[:, :3], mean[:3], std[:3]
    if 255 * max(mean) >= 2 * DARK:
        return dark_images(colors)
    limits = (255 * (torch.tensor(mean) + torch.tensor(std))).clamp(max=DARK)
    largest = colors.amax((2, 3)).double().cpu()
    return (largest < limits).all(1) & (largest > 0).any(1)


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
        ValueError: If ``channels`` is another number; if pixels have 32 bits, floating point numbers or signs, so that
            the values of black and white are unknown; or if a TIFF has bands that are neither colors nor opacity, which
            Pillow leaves out.
    """
    if channels not in MODES:
        raise ValueError(
            f"images are read with 1, 3 or 4 channels, got {channels}; pass other images as a .npz file or as tensors"
        )
    white_is_zero = _tag(image, _TIFF_PHOTOMETRIC) == _TIFF_WHITE_IS_ZERO
    bits = _tag(image, _TIFF_BITS)
    check_header(image)
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
    if channels < 4 and (image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info):
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, (0, 0, 0, 255)), seen)
    if image.mode not in ("1", "L", "P", "RGB", "RGBA"):  # Pillow converts all others by way of RGB
        image = image.convert("RGB" if image.mode not in ("LA", "La", "PA", "RGBa") else "RGBA")
    values = np.array(image.convert(MODES[channels]))
    planes = torch.from_numpy(values.reshape(*values.shape[:2], channels)).permute(2, 0, 1)
    return planes.contiguous().float()  # in this order large images take less memory


def check_header(image: Image.Image) -> None:
    """Raises ValueError if the header of a TIFF says that Pillow leaves bands out, or that numbers have a sign."""
    bands, known = _tag(image, _TIFF_BANDS) or 1, len(image.getbands())
    if bands > known:
        raise _UnsuitableError(
            f"it has {bands} bands, of which Pillow reads {known}; save the ones that you need as gray or color, or "
            "train on all of them in a .npz file"
        )
    if _tag(image, _TIFF_SIGN) == _TIFF_SIGNED:
        raise _UnknownRangeError(f"{_tag(image, _TIFF_BITS)}-bit numbers with a sign")


class _UnsuitableError(ValueError):
    """An image that Pillow reads, but whose pixels are not those that one would see."""


class _UnknownRangeError(_UnsuitableError):
    """An image whose numbers say nothing of black and white."""

    def __init__(self, numbers: str) -> None:
        super().__init__(
            f"its pixels are {numbers}, and the values of black and white are unknown; save it with 8 or 16 bits, "
            "without a sign"
        )


def check_frames(image: Image.Image) -> None:
    """Raises ValueError if a file holds several images, unless the others are smaller copies of the first."""
    count = getattr(image, "n_frames", 1) if image.format in _WITH_FRAMES else 1
    width, height = image.size
    for i in range(1, count):
        image.seek(i)
        if image.size[0] * image.size[1] >= width * height:
            raise _UnsuitableError(
                f"it holds {count} images, the first of {width} x {height} pixels, such as a stack or an animation; "
                "save each one that is to be read in a file of its own"
            )
    if count > 1:
        image.seek(0)


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
        raise _UnknownRangeError(f"{kind}, {values.min():g} to {values.max():g}")
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
            the pages of a stack or the frames of an animation, of which Pillow shows the first. Smaller copies behind
            it are no error.
    """
    if channels not in MODES:
        raise ValueError(
            f"image files are read with 1, 3 or 4 channels, and {channels} were asked for; images of others are arrays "
            "in a .npz file, which eqzoo predict, evaluate and finetune read, or tensors in Python"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"no image at {path}")
    try:
        with Image.open(path) as image:
            check_frames(image)
            return pixels(image, channels)
    except _UnsuitableError as error:
        raise ValueError(f"{path}: {error}") from error
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        way = "cut it into tiles or scale it down, or set PIL.Image.MAX_IMAGE_PIXELS"
        raise ValueError(f"{path} has more pixels than Pillow reads: {way} ({error})") from error
    except Exception as error:  # each of Pillow's formats raises its own errors on corrupt files
        said = unidentified(Path(path)) if isinstance(error, UnidentifiedImageError) else error
        arrays = Path(path).suffix.lower() in (".npz", ".npy", ".h5", ".hdf5")
        way = "; eqzoo predict and evaluate read .npz files, and in Python a network takes arrays as tensors" * arrays
        raise ValueError(f"{path} is not an image that Pillow can read: {said}{way}") from error


def unidentified(path: Path) -> str:
    """Why Pillow does not know what a file is, as far as it can be said."""
    if not path.stat().st_size:
        return "the file is empty"
    if path.suffix.lower() not in (".tif", ".tiff"):
        return "its format is unknown"
    return "its format, or the number or type of its bands, is unknown; several bands can be trained on in a .npz file"


def preprocess(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes an image and crops its center; commutes with 90° rotations and reflections.

    One side is scaled to its target length and the other to a length of the same parity as its target, so that the crop
    removes the same number of pixels at both ends. The usual center crop rounds to one end instead. Values are not
    rounded to integers, so the result is exact up to floating-point round-off. Where bicubic interpolation overshoots,
    values are clamped to 0 to 255, or to the range of the image where that is wider. If an image with a NaN is
    scaled, all its values become NaN.

    Args:
        image: ``(channels, height, width)`` floating point, or a batch of such.
        size: Height and width of the result, in pixels.

    Returns:
        ``(channels, *size)``, or a batch of such.

    Raises:
        TypeError: If the image is no floating point tensor, or the size no pair.
        ValueError: If the image has another number of dimensions, or no pixels.
    """
    if not isinstance(image, Tensor) or not image.is_floating_point():
        got = str(image.dtype) if isinstance(image, Tensor) else type(image).__name__
        raise TypeError(f"an image is a floating point tensor, got {got}; torch.as_tensor(image).float() makes one")
    if image.ndim not in (3, 4):
        raise ValueError(
            f"an image is (channels, height, width), or a batch of such, got {tuple(image.shape)}; image[None] adds "
            "the channel of a grayscale one"
        )
    if 0 in image.shape[-3:]:
        raise ValueError(f"the image has no pixels, its shape is {tuple(image.shape)}")
    if not isinstance(size, Sequence) or len(size) != 2:
        raise TypeError(f"a size is (height, width), such as model.input_size[1:], got {size!r}")
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
