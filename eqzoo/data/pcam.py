"""PatchCamelyon: patches of lymph node sections, read from its HDF5 files.

References:
    Rotation Equivariant CNNs for Digital Pathology (Veeling et al., 2018), https://arxiv.org/abs/1806.03962
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .external import corrupt, fetched, missing
from .folder import MEMORY_LIMIT
from .splits import AnySplit, Split, Streamed

__all__ = ["CLASSES", "pcam"]

CLASSES = ("normal", "tumor")
_SPLITS = {"train": "train", "valid": "val", "test": "test"}  # our names and torchvision's


def pcam(data_dir: str | os.PathLike[str], download: bool) -> dict[str, AnySplit]:
    """The splits of PatchCamelyon, in memory or, if they are large, streamed.

    Args:
        data_dir: The folder that holds ``pcam/camelyonpatch_level_2_split_*.h5``, as torchvision lays it out.
        download: Whether torchvision may fetch what is missing.

    Raises:
        FileNotFoundError: If files are missing.
        ImportError: If h5py is not installed.
        ValueError: If a file is corrupt or has other contents.
    """
    try:
        import h5py  # noqa: F401  torchvision's own error does not name the extra
    except ImportError as error:
        raise ImportError(
            "PatchCamelyon is read with h5py, which is not installed: pip install 'eqzoo[train]'"
        ) from error
    from torchvision.datasets import PCAM

    folder = Path(data_dir) / "pcam"
    files = {part: [folder / f"camelyonpatch_level_2_split_{part}_{key}.h5" for key in "xy"] for part in _SPLITS}
    if download:
        for theirs in _SPLITS.values():
            with fetched("PatchCamelyon", folder):
                PCAM(data_dir, theirs, download=True)
    if absent := [path.name for paths in files.values() for path in paths if not path.is_file()]:
        packed = [f"{name}.gz" for name in absent if (folder / f"{name}.gz").is_file()]
        unpack = f"; unpack {packed[0]} and the like with gunzip" if packed else ""
        raise FileNotFoundError(f"{missing('PatchCamelyon', folder)} ({', '.join(absent)} missing{unpack})")
    return {part: _h5_split(images, labels) for part, (images, labels) in files.items()}


def _h5_split(images: Path, labels: Path) -> AnySplit:
    """A split of PatchCamelyon: ``x``, ``(n, height, width, 3)`` uint8, and ``y``, n integers 0 and 1."""
    with _h5_array(labels, "y") as y:
        fits = y.dtype.kind in "iub" and y.ndim and y.size == y.shape[0]
        if not fits or not np.isin(y[:], (0, 1)).all():
            raise ValueError(
                f"{labels}: y has the class of each image, integers 0 (normal) and 1 (tumor), (n, 1, 1, 1) or (n,); "
                f"got {y.dtype} {y.shape}{', with other numbers' * bool(fits)}"
            )
        classes = torch.from_numpy(y[:].reshape(-1).astype(np.int64))
    with _h5_array(images, "x") as x:
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != 3:
            raise ValueError(
                f"{images}: x has images in red, green and blue, uint8 (n, height, width, 3); got {x.dtype} {x.shape}"
            )
        count, height, width, channels = x.shape
        if count != len(classes):
            raise ValueError(f"{images} has {count:,} images, and {labels.name} {len(classes):,} labels")
        if x.size <= MEMORY_LIMIT:
            return Split(torch.from_numpy(x[:]).permute(0, 3, 1, 2).contiguous(), classes, CLASSES)
    return Streamed(_H5Reader(images), torch.arange(count), classes, (channels, height, width), CLASSES)


@contextmanager
def _h5_array(path: Path, key: str) -> Iterator[Any]:
    """An array of an HDF5 file, which is read on demand."""
    import h5py

    with ExitStack() as stack:
        with corrupt(path):
            file = stack.enter_context(h5py.File(path))
        if key not in file or not isinstance(file[key], h5py.Dataset):
            raise ValueError(f"{path} has no array {key!r}, only {', '.join(map(repr, file)) or 'nothing'}")
        try:
            yield file[key]
        except OSError as error:  # while it is read
            raise ValueError(f"{path} is corrupt ({error}); remove it and download it again") from error


class _H5Reader:
    """Reads single images of an HDF5 file; each process opens the file at its first read, also one that was forked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pixels: Any = None
        self.process = 0

    def __call__(self, index: int) -> Tensor:
        if self.process != os.getpid():
            import h5py

            if self.pixels is not None:  # inherited from the process that this one was forked from, with its file
                self.pixels.file.close()
            self.pixels, self.process = h5py.File(self.path)["x"], os.getpid()
        return torch.from_numpy(self.pixels[index]).permute(2, 0, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "pixels": None, "process": 0}  # an open file cannot be sent to another process
