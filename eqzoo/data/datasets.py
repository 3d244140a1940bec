"""Data sets by name, such as rotated MNIST, CIFAR and EuroSAT, and those of a folder of data sets."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arrays import from_arrays, is_npz, npz
from .chula_rbc12 import SIDE as CELL_SIDE
from .chula_rbc12 import chula_rbc12
from .eurosat import SIDE as TILE_SIDE
from .eurosat import eurosat
from .external import fetched
from .folder import MEMORY_LIMIT, image_folder
from .rotated_mnist import rotmnist, rotmnist_from_amat
from .splits import AnySplit, Split, Streamed, check, hold_out, per_class, resized

__all__ = ["DATASETS", "SIDES", "load_splits"]

_PCAM_SPLITS = {"train": "train", "valid": "val", "test": "test"}  # our names and torchvision's


def load_splits(
    name: str,
    data_dir: str | os.PathLike[str],
    download: bool = False,
    input_size: tuple[int, int, int] | None = None,
    valid_size: int | None = None,
    samples_per_class: int | None = None,
) -> dict[str, AnySplit]:
    """Reads the splits of a data set and checks them.

    A split of up to 2 GiB is loaded into memory, as `Split`; a larger one is read on demand, as `Streamed`.

    Args:
        name: One of `DATASETS`, or the name of an image folder or .npz file in ``data_dir``. A file ``<name>.npz``
            there takes precedence over the data set of `DATASETS`.
        data_dir: The folder of data sets.
        download: Whether torchvision may download missing files.
        input_size: The channels, height and width to which images of a folder are converted. Images of a data set or
            file are scaled to this height and width if theirs are others.
        valid_size: The number of training images to hold out for validation, if the data set has no validation split;
            None for a tenth, 0 for none.
        samples_per_class: The number of training images of each class to use; None for all.

    Returns:
        The splits ``train``; ``valid``, unless ``valid_size`` is 0; and ``test``, unless a folder has none.

    Raises:
        FileNotFoundError: If the data set is not found and not downloaded.
        ValueError: If a file is corrupt or has other contents, or a size is larger than the data set.
        ImportError: If a package needed to read it is not installed.
    """
    path = Path(data_dir) / name
    if name in DATASETS:
        splits, source = named_set(name, data_dir, download)
    elif path.is_dir():
        if input_size is None:
            raise ValueError(f"images of the folder {path} have to be scaled: pass input_size, or name a network")
        splits, source = image_folder(path, input_size), str(path)
    else:
        file = stand_in(name, data_dir) or path
        if not is_npz(file) or not file.is_file():
            raise FileNotFoundError(
                f"no data set {name!r}: it is not one of {', '.join(DATASETS)}, and no image folder or .npz file is at "
                f"{path}; set --data-dir to the folder that contains it"
            )
        splits, source = npz(file), str(file)
    check(splits, source)
    if input_size is not None:
        splits = {part: resized(split, input_size[1:]) for part, split in splits.items()}
    splits = hold_out(splits, valid_size)
    if samples_per_class is not None:
        splits["train"] = per_class(splits["train"], samples_per_class)
    return splits


def stand_in(name: str, data_dir: str | os.PathLike[str]) -> Path | None:
    """The file ``<name>.npz`` in the data folder, which takes the place of the data set; None if there is none."""
    path = Path(data_dir) / f"{name}.npz"
    return path if path.is_file() else None


def named_set(
    name: str, data_dir: str | os.PathLike[str], download: bool, needs_test: bool = True
) -> tuple[dict[str, AnySplit], str]:
    """A data set of `DATASETS`, or the file that takes its place, see `stand_in`; and its source.

    Args:
        name: The name.
        data_dir: The folder of data sets.
        download: Whether torchvision may download missing files.
        needs_test: Whether the file has to have a test split.
    """
    if file := stand_in(name, data_dir):
        return npz(file, needs_test), str(file)
    return DATASETS[name](data_dir, download), f"{name} in {data_dir}"


def _cifar(name: str) -> Callable[[str | os.PathLike[str], bool], dict[str, AnySplit]]:
    def read(data_dir: str | os.PathLike[str], download: bool) -> dict[str, AnySplit]:
        from torchvision import datasets

        cls = getattr(datasets, name)
        folder = Path(data_dir) / cls.base_folder
        if not download and not folder.is_dir():
            raise FileNotFoundError(_missing(name, folder))
        if download:
            with fetched(name, folder):
                cls(data_dir, download=True)
        with _corrupt(folder):
            parts = {part: cls(data_dir, train=part == "train") for part in ("train", "test")}
        splits = {part: from_arrays(data.data, np.array(data.targets), str(folder)) for part, data in parts.items()}
        classes = tuple(parts["train"].classes)
        return {part: replace(split, classes=classes) for part, split in splits.items()}

    return read


def _pcam(data_dir: str | os.PathLike[str], download: bool) -> dict[str, AnySplit]:
    try:
        import h5py  # noqa: F401  torchvision's own error does not name the extra
    except ImportError as error:
        raise ImportError(
            "PatchCamelyon is read with h5py, which is not installed: pip install 'eqzoo[train]'"
        ) from error
    from torchvision.datasets import PCAM

    folder = Path(data_dir) / "pcam"
    files = {part: [folder / f"camelyonpatch_level_2_split_{part}_{key}.h5" for key in "xy"] for part in _PCAM_SPLITS}
    if download:
        for theirs in _PCAM_SPLITS.values():
            with fetched("PatchCamelyon", folder):
                PCAM(data_dir, theirs, download=True)
    if missing := [path.name for paths in files.values() for path in paths if not path.is_file()]:
        packed = [f"{name}.gz" for name in missing if (folder / f"{name}.gz").is_file()]
        unpack = f"; unpack {packed[0]} and the like with gunzip" if packed else ""
        raise FileNotFoundError(f"{_missing('PatchCamelyon', folder)} ({', '.join(missing)} missing{unpack})")
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
    names = ("normal", "tumor")
    with _h5_array(images, "x") as x:
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != 3:
            raise ValueError(
                f"{images}: x has images in red, green and blue, uint8 (n, height, width, 3); got {x.dtype} {x.shape}"
            )
        count, height, width, channels = x.shape
        if count != len(classes):
            raise ValueError(f"{images} has {count:,} images, and {labels.name} {len(classes):,} labels")
        if x.size <= MEMORY_LIMIT:
            return Split(torch.from_numpy(x[:]).permute(0, 3, 1, 2).contiguous(), classes, names)
    return Streamed(_H5Reader(images), torch.arange(count), classes, (channels, height, width), names)


@contextmanager
def _h5_array(path: Path, key: str) -> Iterator[Any]:
    """An array of an HDF5 file, which is read on demand."""
    import h5py

    with ExitStack() as stack:
        with _corrupt(path):
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


def _missing(name: str, folder: Path) -> str:
    return (
        f"no {name} in {folder}: put its files there, set --data-dir to the folder that contains it, or pass --download"
    )


@contextmanager
def _corrupt(path: Path) -> Iterator[None]:
    """Converts what readers raise on a corrupt file to a ValueError that names the file."""
    try:
        yield
    except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is corrupt or has other contents ({error}); remove it and download it again"
        ) from error


def _rotmnist(data_dir: str | os.PathLike[str], download: bool) -> dict[str, AnySplit]:
    try:
        return dict(rotmnist(data_dir, download))
    except (ValueError, AssertionError, EOFError) as error:  # a corrupt file of MNIST
        folder = Path(data_dir) / "MNIST" / "raw"
        said = f"{folder} is corrupt or has other contents ({error}); remove it and download it again"
        raise ValueError(said) from error


def _rotmnist_original(data_dir: str | os.PathLike[str], download: bool) -> dict[str, AnySplit]:
    return dict(rotmnist_from_amat(data_dir))


def _chula_rbc12(data_dir: str | os.PathLike[str], download: bool) -> dict[str, AnySplit]:
    return dict(chula_rbc12(data_dir))  # nobody serves it for --download; the error says where it is


DATASETS: dict[str, Callable[[str | os.PathLike[str], bool], dict[str, AnySplit]]] = {
    "rotmnist": _rotmnist,
    "rotmnist_original": _rotmnist_original,
    "cifar10": _cifar("CIFAR10"),
    "cifar100": _cifar("CIFAR100"),
    "pcam": _pcam,
    "eurosat": eurosat,
    "chula_rbc12": _chula_rbc12,
}
SIDES = {  # of their images, in pixels
    "rotmnist": 28,
    "rotmnist_original": 28,
    "cifar10": 32,
    "cifar100": 32,
    "pcam": 96,
    "eurosat": TILE_SIDE,
    "chula_rbc12": CELL_SIDE,
}
