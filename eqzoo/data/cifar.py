"""CIFAR-10 and CIFAR-100, read by torchvision."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from .arrays import from_arrays
from .external import corrupt, fetched, missing
from .splits import AnySplit

__all__ = ["cifar"]


def cifar(name: str) -> Callable[[str | os.PathLike[str], bool], dict[str, AnySplit]]:
    """The reader of a data set of torchvision, by the name of its class: ``(data_dir, download)`` to the splits."""

    def read(data_dir: str | os.PathLike[str], download: bool) -> dict[str, AnySplit]:
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
        splits = {part: from_arrays(data.data, np.array(data.targets), str(folder)) for part, data in parts.items()}
        classes = tuple(parts["train"].classes)
        return {part: replace(split, classes=classes) for part, split in splits.items()}

    return read
