"""PatchCamelyon: patches of lymph node sections, read from its HDF5 files.

References:
    Rotation Equivariant CNNs for Digital Pathology (Veeling et al., 2018), https://arxiv.org/abs/1806.03962
"""

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arrays import from_arrays, hdf5
from .folder import MEMORY_LIMIT
from .splits import AnySplit, Streamed

CLASSES = ("normal", "tumor")


def pcam(data_dir: str | os.PathLike[str], download: bool) -> dict[str, AnySplit]:
    """The splits of PatchCamelyon, in memory or, if they are large, streamed.

    Args:
        data_dir: The folder that holds ``pcam/camelyonpatch_level_2_split_*.h5``, as torchvision lays it out.
        download: Whether torchvision may fetch what is missing.

    Raises:
        OSError: If files are missing or corrupt.
        ImportError: If h5py is not installed.
        ValueError: If a file has other contents.
    """
    from torchvision.datasets import PCAM

    if download:
        for theirs in ("train", "val", "test"):
            PCAM(data_dir, theirs, download=True)
    stem = f"{data_dir}/pcam/camelyonpatch_level_2_split"
    return {
        part: _h5_split(Path(f"{stem}_{part}_x.h5"), Path(f"{stem}_{part}_y.h5")) for part in ("train", "valid", "test")
    }


def _h5_split(images: Path, labels: Path) -> AnySplit:
    """A split of PatchCamelyon: ``x``, ``(n, height, width, 3)`` uint8, and ``y``, n integers 0 and 1."""
    with hdf5(images) as of_images, hdf5(labels) as of_labels:
        x, y = of_images["x"], of_labels["y"][:]
        if x.size <= MEMORY_LIMIT:
            return from_arrays(x[:], y, str(images), CLASSES)
        count, height, width, channels = x.shape
    classes = torch.from_numpy(y.reshape(-1).astype(np.int64))
    return Streamed(partial(_read, images), torch.arange(count), classes, (channels, height, width), CLASSES)


@cache
def _pixels(path: Path) -> Any:
    """The images of an HDF5 file, which stays open.

    Forked processes share it: HDF5 reads at places (pread), and not at an offset that another process may have moved.
    """
    return hdf5(path)["x"]


def _read(path: Path, index: int) -> Tensor:
    return torch.from_numpy(_pixels(path)[index]).permute(2, 0, 1)
