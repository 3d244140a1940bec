"""CIFAR-10 and CIFAR-100, read by torchvision."""

import os
from pathlib import Path

import numpy as np

from .arrays import from_arrays
from .external import corrupt, fetched, missing
from .splits import Split

__all__ = ["cifar"]


def cifar(name: str, data_dir: str | os.PathLike[str], download: bool) -> dict[str, Split]:
    """The splits ``train`` and ``test`` of a data set, by the name of torchvision's class.

    Args:
        name: ``"CIFAR10"`` or ``"CIFAR100"``.
        data_dir: The folder that torchvision reads.
        download: Whether torchvision may download it.

    Raises:
        FileNotFoundError: If it is not there and not downloaded.
        OSError: If it cannot be downloaded.
        ValueError: If a file is corrupt.
    """
    from torchvision import datasets

    cls = getattr(datasets, name)
    folder = Path(data_dir) / cls.base_folder
    if not download and not folder.is_dir():
        raise FileNotFoundError(missing(name, folder))
    if download:
        with fetched(name, folder):
            cls(data_dir, download=True)
    with corrupt(folder):
        parts = {part: cls(data_dir, train=part == "train") for part in ("train", "test")}
    return {
        part: from_arrays(data.data, np.array(data.targets), str(folder), tuple(data.classes))
        for part, data in parts.items()
    }
