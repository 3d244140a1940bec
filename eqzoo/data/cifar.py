"""CIFAR-10 and CIFAR-100, read by torchvision."""

import os

import numpy as np

from .arrays import from_arrays
from .splits import Split


def cifar(name: str, data_dir: str | os.PathLike[str], download: bool) -> dict[str, Split]:
    """The splits ``train`` and ``test`` of a data set, by the name of torchvision's class.

    Args:
        name: ``"CIFAR10"`` or ``"CIFAR100"``.
        data_dir: The folder that torchvision reads.
        download: Whether torchvision may download it.

    Raises:
        RuntimeError: If it is not there and not downloaded, or a file is corrupt.
    """
    from torchvision import datasets

    splits = {}
    for part in ("train", "test"):
        data = getattr(datasets, name)(data_dir, train=part == "train", download=download)
        splits[part] = from_arrays(data.data, np.array(data.targets), name, tuple(data.classes))
    return splits
