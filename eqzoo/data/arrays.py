"""Images in .npz and .npy files, with labels and without."""

import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .splits import AnySplit, Split

ARRAYS = (".npz", ".npy")  # how files of arrays end

_PARTS = ("train", "valid", "test")
_UNLABELED = ("x_test", "x_valid", "x_train")  # by preference


def is_npz(path: str | os.PathLike[str]) -> bool:
    """Whether a path ends in .npz, in lower or upper case."""
    return Path(path).suffix.lower() == ".npz"


def without_npz(path: str | os.PathLike[str]) -> str:
    """The last part of a path, without .npz if it ends so."""
    return Path(path).stem if is_npz(path) else Path(path).name


def hdf5(path: str | os.PathLike[str]) -> Any:
    """Opens an HDF5 file for reading.

    Raises:
        ImportError: If h5py is not installed.
        OSError: If the file is missing or corrupt.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f"{path} is read by h5py: pip install 'eqzoo[train]' ({error})") from error
    return h5py.File(path)


def npz(path: str | os.PathLike[str], needs_train: bool = True) -> dict[str, AnySplit]:
    """Reads the splits of a .npz file.

    The arrays are ``x_train``, ``y_train`` and optionally ``x_valid``, ``y_valid``, ``x_test``, ``y_test`` and
    ``label_names``. Images are uint8, ``(n, height, width)`` or ``(n, height, width, channels)``; labels are integers.

    Args:
        path: The file.
        needs_train: Whether a training split is required.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not readable, arrays are missing or of another shape or type, images have no labels
            or labels no images, or arrays have other names that begin with ``x_`` or ``y_``.
    """
    there: list[str] = []

    def choose(names: list[str]) -> list[str]:
        there.extend(names)
        return [name for name in names if name == "label_names" or name[:2] in ("x_", "y_")]

    arrays = _loaded(path, choose)
    parts = [part for part in _PARTS if {f"x_{part}", f"y_{part}"} <= arrays.keys()]
    paired = {f"{kind}_{part}" for kind in "xy" for part in parts}
    if not parts or (needs_train and "train" not in parts) or arrays.keys() - paired - {"label_names"}:
        raise ValueError(
            f"{path} has {', '.join(there) or 'one array'}; images and labels are x_train and y_train, x_valid and "
            "y_valid, x_test and y_test: rename the arrays, add what is missing, or leave out what has no partner"
        )
    names = arrays.get("label_names", np.empty(0, str)).reshape(-1)
    classes = tuple(map(str, np.char.decode(names, "utf-8") if names.dtype.kind == "S" else names))
    return {part: from_arrays(arrays[f"x_{part}"], arrays[f"y_{part}"], f"{path}, {part}", classes) for part in parts}


def images_shape(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """The shape of the first array of images of a .npz file, by `_UNLABELED`, without reading its pixels."""
    with zipfile.ZipFile(path) as file:
        name = next(f"{name}.npy" for name in _UNLABELED if f"{name}.npy" in file.namelist())
        with file.open(name) as array:
            first = np.lib.format.read_magic(array) == (1, 0)
            header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
            return tuple(header(array)[0])


def unlabeled_images(path: str | os.PathLike[str]) -> Tensor:
    """Reads the images of a .npz or .npy file; labels are not read.

    Of a .npz file these are the first there is of ``x_test``, ``x_valid`` and ``x_train``, or its only array; of a .npy
    file its array: uint8, ``(n, height, width)`` or ``(n, height, width, channels)``.

    Returns:
        ``(n, channels, height, width)`` uint8.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not readable, or has no images of this shape and type or several arrays of them.
    """
    arrays = _loaded(path, lambda names: [name for name in _UNLABELED if name in names][:1] or names)
    images: np.ndarray[Any, Any] = next(iter(arrays.values()), np.empty(0))
    if len(arrays) != 1 or (images.ndim == 3 and images.shape[2] in (3, 4)):  # which would be many gray images
        raise ValueError(
            f"{path} has {', '.join(f'{name} {array.shape}' for name, array in arrays.items()) or 'no array'}: images "
            "are named x_test, or the only array, and its first axis counts them; save image[None], or several by "
            "np.stack"
        )
    return _planes(images, str(path))


def _loaded(path: str | os.PathLike[str], choose: Callable[[list[str]], list[str]]) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a .npz file whose names are chosen, or that of a .npy file without a name."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded as file:
            return {key: file[key] for key in choose(file.files)}
    except FileNotFoundError:
        raise
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def from_arrays(
    images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], source: str, classes: tuple[str, ...] = ()
) -> Split:
    """A split of uint8 images ``(n, height, width[, channels])`` and integer labels, one an image.

    Raises:
        ValueError: If images or labels are of another shape or type; ``source`` is named.
    """
    planes = _planes(images, source)
    if labels.dtype.kind not in "iu" or labels.size != len(planes):
        raise ValueError(
            f"{source}: labels are integers 0, 1, 2 ..., one for each of {len(planes)} images, got {labels.dtype} "
            f"{labels.shape}; label_names, y = np.unique(y, return_inverse=True) makes them of names, and numbers such "
            "as a size need a training loop of your own (docs/own_training.md)"
        )
    return Split(planes, torch.from_numpy(labels.reshape(-1).astype(np.int64)), classes)


def _planes(images: np.ndarray[Any, Any], source: str) -> Tensor:
    """Images ``(n, height, width[, channels])`` as ``(n, channels, height, width)``, uint8."""
    if images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] >= min(images.shape[1:3]) > 0:
        raise ValueError(
            f"{source}: images are (n, height, width, channels) with fewer channels than pixels a side, got "
            f"{images.shape}; if channels come first, save images.transpose(0, 2, 3, 1); more channels than pixels are "
            "taken as an eqzoo.data.Split in Python"
        )
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape[1:]:
        raise ValueError(
            f"{source}: images are uint8, (n, height, width) or (n, height, width, channels), got {images.dtype} "
            f"{images.shape}; others are scaled by ((x - low) / (high - low) * 255).clip(0, 255).round()"
            ".astype(np.uint8), with the same low and high for all, of np.arcsinh(x) where faint structure matters "
            "beside bright, and without NaN"
        )
    planes = torch.from_numpy(images)
    planes = planes[:, None] if images.ndim == 3 else planes.permute(0, 3, 1, 2)
    return planes.contiguous()
