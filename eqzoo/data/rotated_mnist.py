"""Rotated MNIST, generated from MNIST or read from its original files.

The original rotated MNIST (Larochelle et al., 2007) has 62,000 digits, rotated by angles uniform in [0, 2π) and stored
transposed in text files. `rotmnist` generates a data set of the same sizes from MNIST: 10,000 training and 2,000
validation digits from MNIST's training split, and 50,000 test digits, which are MNIST's test split and 40,000 more
digits of its training split. Each MNIST digit is used at most once and rotated with bicubic interpolation. Digits and
angles are drawn with a fixed seed, so the generated set is the same everywhere; it is not the original set.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .external import fetched
from .splits import Split

__all__ = ["rotmnist", "rotmnist_from_amat"]

ROTMNIST_SEED = 2007
ROTMNIST_SIZES = {"train": 10_000, "valid": 2_000, "test": 50_000}
AMAT_ROWS = {"train_valid": 12_000, "test": 50_000}


def rotmnist(data_dir: str | os.PathLike[str], download: bool = False) -> dict[str, Split]:
    """Generates rotated MNIST from MNIST.

    Args:
        data_dir: The folder that contains ``MNIST/raw``, in torchvision's layout.
        download: Whether torchvision may download MNIST.

    Returns:
        The splits ``train``, ``valid`` and ``test``; images ``(n, 1, 28, 28)`` uint8, white on black.

    Raises:
        FileNotFoundError: If MNIST is not in ``data_dir`` and is not downloaded.

    References:
        An Empirical Evaluation of Deep Architectures on Problems with Many Factors of Variation
        (Larochelle et al., 2007), section 3.1
    """
    from torchvision.datasets import MNIST

    folder = Path(data_dir) / "MNIST" / "raw"
    if download:
        with fetched("MNIST", folder):
            MNIST(data_dir, download=True)
    try:
        parts = [MNIST(data_dir, train=train) for train in (True, False)]
    except RuntimeError as error:
        raise FileNotFoundError(
            f"no MNIST in {folder}: put its four files there, set --data-dir to the "
            "folder that contains them, or pass --download"
        ) from error
    train, test = ((part.data.numpy(), part.targets.numpy()) for part in parts)
    # RandomState, because its streams are frozen for good; torch's and numpy's new generators promise none.
    random = np.random.RandomState(ROTMNIST_SEED)
    order = random.permutation(len(train[1]))
    angles = random.uniform(0, 360, size=sum(ROTMNIST_SIZES.values()))
    chosen = order[: len(angles) - len(test[1])]
    images = np.concatenate([train[0][chosen], test[0]])
    labels = np.concatenate([train[1][chosen], test[1]])
    rotated = np.stack([_rotate(image, angle) for image, angle in zip(images, angles, strict=True)])
    return _split(rotated, labels)


def rotmnist_from_amat(folder: str | os.PathLike[str]) -> dict[str, Split]:
    """Reads the original files of rotated MNIST, whose digits are stored transposed.

    Args:
        folder: The folder with ``mnist_all_rotation_normalized_float_train_valid.amat`` (12,000 rows of 784 pixels and
            a class) and ``mnist_all_rotation_normalized_float_test.amat`` (50,000 rows).

    Returns:
        The splits ``train`` (the first 10,000 rows), ``valid`` (the next 2,000) and ``test``, in the format of
        `rotmnist`, not transposed.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file has other contents.
    """
    rows = []
    for part, count in AMAT_ROWS.items():
        path = Path(folder) / f"mnist_all_rotation_normalized_float_{part}.amat"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; rotmnist() generates a similar set from MNIST")
        rows.append(_read_amat(path, count))
    table = np.concatenate(rows)
    # Pixels are stored as multiples of 1/256, in column-major order.
    pixels = np.rint(table[:, :-1] * 256).clip(0, 255).astype(np.uint8)
    return _split(pixels.reshape(-1, 28, 28).swapaxes(1, 2), table[:, -1].astype(np.int64))


def _read_amat(path: Path, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        table = np.loadtxt(path, dtype=np.float32, encoding="utf-8", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} is not rotated MNIST: {error}") from error
    if table.shape != (count, 785):
        raise ValueError(
            f"{path} has {len(table)} rows of {table.shape[1]} numbers, not {count} rows of 784 pixels and a class"
        )
    pixels, classes = table[:, :-1], table[:, -1]
    if np.any(pixels < 0) or np.any(pixels > 1) or not np.all(np.isin(classes, np.arange(10))):
        raise ValueError(f"{path} is not rotated MNIST: pixels must be in [0, 1] and classes in 0 to 9")
    return table


def _rotate(image: np.ndarray[Any, Any], angle: float) -> np.ndarray[Any, Any]:
    return np.asarray(Image.fromarray(image).rotate(angle, resample=Image.Resampling.BICUBIC))


def _split(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, Split]:
    ends = np.cumsum(list(ROTMNIST_SIZES.values()))[:-1]
    parts = zip(ROTMNIST_SIZES, np.split(images, ends), np.split(labels, ends), strict=True)
    return {
        name: Split(torch.from_numpy(np.ascontiguousarray(x))[:, None], torch.from_numpy(y.astype(np.int64)))
        for name, x, y in parts
    }
