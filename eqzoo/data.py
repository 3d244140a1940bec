"""Rotated MNIST, made from MNIST or read from its original files, and pictures from files.

The original rotated MNIST (Larochelle et al., 2007) is 62,000 digits turned by angles uniform in [0, 2π), in text files
whose server is often down, with the digits transposed. `rotmnist` makes a set of the same sizes from MNIST: 10,000
training and 2,000 validation digits drawn from MNIST's training split, and 50,000 test digits, MNIST's whole test
split and 40,000 of the remaining training digits. Every digit is used once, upright before its turn, and turned with
bicubic interpolation. The draw and the angles come from a fixed seed: the set is the same everywhere, but it is not
the original.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

__all__ = ["Split", "load_picture", "normalise", "preprocess", "rotmnist", "rotmnist_from_amat"]

ROTMNIST_SEED = 2007
ROTMNIST_SIZES = {"train": 10_000, "valid": 2_000, "test": 50_000}
AMAT_ROWS = {"train_valid": 12_000, "test": 50_000}


@dataclass(frozen=True)
class Split:
    """Pictures and their classes.

    Args:
        images: ``(n, channels, height, width)`` uint8.
        labels: ``(n,)`` int64.
    """

    images: Tensor
    labels: Tensor

    def __getitem__(self, index: Tensor | slice) -> "Split":
        return Split(self.images[index], self.labels[index])

    def __len__(self) -> int:
        return len(self.labels)


def rotmnist(data_dir: str | os.PathLike[str], download: bool = False) -> dict[str, Split]:
    """Makes rotated MNIST from MNIST: the splits ``train``, ``valid`` and ``test``.

    Args:
        data_dir: The folder that holds ``MNIST/raw``, as torchvision lays it out.
        download: Whether torchvision may fetch MNIST into it.

    Returns:
        The splits; pictures ``(n, 1, 28, 28)`` uint8, white on black.

    Raises:
        FileNotFoundError: If MNIST is not in ``data_dir`` and may not be downloaded.

    References:
        An Empirical Evaluation of Deep Architectures on Problems with Many Factors of Variation
        (Larochelle et al., 2007), section 3.1
    """
    from torchvision.datasets import MNIST

    try:
        parts = [MNIST(data_dir, train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        raise FileNotFoundError(
            f"no MNIST in {Path(data_dir) / 'MNIST' / 'raw'}: put its four files there, name the folder that has them "
            "with --data-dir, or pass --download to fetch them"
        ) from error
    train, test = ((part.data.numpy(), part.targets.numpy()) for part in parts)
    # RandomState, because its streams are frozen for good; torch's and numpy's new generators promise none.
    random = np.random.RandomState(ROTMNIST_SEED)
    order = random.permutation(len(train[1]))
    angles = random.uniform(0, 360, size=sum(ROTMNIST_SIZES.values()))
    chosen = order[: len(angles) - len(test[1])]
    images = np.concatenate([train[0][chosen], test[0]])
    labels = np.concatenate([train[1][chosen], test[1]])
    turned = np.stack([_turn(image, angle) for image, angle in zip(images, angles, strict=True)])
    return _split(turned, labels)


def rotmnist_from_amat(folder: str | os.PathLike[str]) -> dict[str, Split]:
    """Reads the original rotated MNIST, and stands its transposed digits upright.

    Args:
        folder: The folder with ``mnist_all_rotation_normalized_float_train_valid.amat`` (12,000 rows of 784 pixels and
            a class) and ``mnist_all_rotation_normalized_float_test.amat`` (50,000 rows).

    Returns:
        The splits ``train`` (the first 10,000 rows), ``valid`` (the next 2,000) and ``test``, as `rotmnist` does.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file holds something else.
    """
    rows = []
    for part, count in AMAT_ROWS.items():
        path = Path(folder) / f"mnist_all_rotation_normalized_float_{part}.amat"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; rotated MNIST's archive holds it, or use rotmnist()")
        rows.append(_read_amat(path, count))
    table = np.concatenate(rows)
    # Pixels are stored as multiples of 1/256 and columns first.
    pixels = np.rint(table[:, :-1] * 256).clip(0, 255).astype(np.uint8)
    return _split(pixels.reshape(-1, 28, 28).swapaxes(1, 2), table[:, -1].astype(np.int64))


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


def _read_amat(path: Path, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.array(path.read_text().split(), dtype=np.float64)
    if values.size != count * 785:
        raise ValueError(f"{path} holds {values.size} numbers, not {count} rows of 784 pixels and a class")
    table = values.reshape(count, 785)
    pixels, classes = table[:, :-1], table[:, -1]
    if np.any(pixels < 0) or np.any(pixels > 1) or not np.all(np.isin(classes, np.arange(10))):
        raise ValueError(f"{path} is not rotated MNIST: pixels must be in [0, 1] and classes in 0 to 9")
    return table


def _turn(image: np.ndarray[Any, Any], angle: float) -> np.ndarray[Any, Any]:
    return np.asarray(Image.fromarray(image).rotate(angle, resample=Image.Resampling.BICUBIC))


def _split(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, Split]:
    ends = np.cumsum(list(ROTMNIST_SIZES.values()))[:-1]
    parts = zip(ROTMNIST_SIZES, np.split(images, ends), np.split(labels, ends), strict=True)
    return {
        name: Split(torch.from_numpy(np.ascontiguousarray(x))[:, None], torch.from_numpy(y.astype(np.int64)))
        for name, x, y in parts
    }
