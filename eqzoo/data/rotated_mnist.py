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
from PIL import Image

from .arrays import from_arrays
from .splits import Split

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
        RuntimeError: If MNIST is not in ``data_dir`` and is not downloaded.

    References:
        An Empirical Evaluation of Deep Architectures on Problems with Many Factors of Variation
        (Larochelle et al., 2007), section 3.1
    """
    from torchvision.datasets import MNIST

    parts = [MNIST(data_dir, train=train, download=download) for train in (True, False)]
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
    rows = [
        np.loadtxt(Path(folder) / f"mnist_all_rotation_normalized_float_{part}.amat", np.float32, ndmin=2)
        for part in AMAT_ROWS
    ]
    if [table.shape for table in rows] != [(count, 785) for count in AMAT_ROWS.values()]:
        raise ValueError(
            f"the files in {folder} are not rotated MNIST: they have {[table.shape for table in rows]} numbers"
        )
    table = np.concatenate(rows)
    # Pixels are stored as multiples of 1/256, in column-major order.
    pixels = np.rint(table[:, :-1] * 256).clip(0, 255).astype(np.uint8)
    return _split(pixels.reshape(-1, 28, 28).swapaxes(1, 2), table[:, -1].astype(np.int64))


def _rotate(image: np.ndarray[Any, Any], angle: float) -> np.ndarray[Any, Any]:
    return np.asarray(Image.fromarray(image).rotate(angle, resample=Image.Resampling.BICUBIC))


def _split(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, Split]:
    ends = np.cumsum(list(ROTMNIST_SIZES.values()))[:-1]
    parts = zip(ROTMNIST_SIZES, np.split(images, ends), np.split(labels, ends), strict=True)
    return {name: from_arrays(x, y, f"rotated MNIST, {name}") for name, x, y in parts}
