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

__all__ = ["ARRAYS", "from_arrays", "images_shape", "is_npz", "npz", "unlabeled_images", "without_npz"]

ARRAYS = (".npz", ".npy")  # how files of arrays end

_NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test", "x_valid", "y_valid")
_UNLABELED = ("x_test", "x_valid", "x_train")  # by preference


def is_npz(path: str | os.PathLike[str]) -> bool:
    """Whether a path ends in .npz, in lower or upper case."""
    return Path(path).suffix.lower() == ".npz"


def without_npz(path: str | os.PathLike[str]) -> str:
    """The last part of a path, without .npz if it ends so."""
    return Path(path).stem if is_npz(path) else Path(path).name


def npz(path: str | os.PathLike[str], needs_test: bool = True, needs_train: bool = True) -> dict[str, AnySplit]:
    """Reads the splits of a .npz file.

    The arrays are ``x_train``, ``y_train``, ``x_test``, ``y_test`` and optionally ``x_valid``, ``y_valid`` and
    ``label_names``. Images are uint8, ``(n, height, width)`` or ``(n, height, width, channels)``; labels are integers.

    Args:
        path: The file.
        needs_test: Whether a test split is required.
        needs_train: Whether a training split is required.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not readable, arrays are missing or of another shape or type, images have no labels
            or labels no images, arrays have other names that begin with ``x_`` or ``y_``, or two classes have the same
            name.
    """
    needed = (_NPZ_KEYS[:2] if needs_train else ()) + (_NPZ_KEYS[2:4] if needs_test else ())
    there: list[str] = []

    def choose(names: list[str]) -> list[str]:
        there.extend(names)
        return [name for name in names if name in _NPZ_KEYS or name == "label_names"]

    arrays = _loaded(path, choose)
    if isinstance(arrays, np.ndarray):
        raise ValueError(
            f"{path} holds a single array, {arrays.dtype} {arrays.shape}, as numpy.save writes it; numpy.savez writes "
            f"{', '.join(needed or _NPZ_KEYS[2:4])} into a .npz file"
        )
    if missing := set(needed) - set(arrays):
        raise ValueError(f"{path} needs the arrays {', '.join(needed)}; {sorted(missing)} missing, got {there}")
    partners = {f"{'y' if key[0] == 'x' else 'x'}{key[1:]}": key for key in arrays if key in _NPZ_KEYS}
    if alone := sorted(f"{key} without {partner}" for partner, key in partners.items() if partner not in arrays):
        raise ValueError(f"{path} has {' and '.join(alone)}: images and labels belong together; add what is missing")
    if others := sorted(key for key in there if key.startswith(("x_", "y_")) and key not in _NPZ_KEYS):
        raise ValueError(
            f"{path} has {', '.join(others)}, which would not be read; images and labels are {', '.join(_NPZ_KEYS)}: "
            "rename the arrays or leave them out"
        )
    if not needed and not partners:
        raise ValueError(f"{path} has no images; they are arrays {', '.join(_NPZ_KEYS)}, got {there}")
    classes = _class_names(arrays["label_names"], path) if "label_names" in arrays else ()
    names = [name for name in ("train", "valid", "test") if {f"x_{name}", f"y_{name}"} <= set(arrays)]
    return {name: from_arrays(arrays[f"x_{name}"], arrays[f"y_{name}"], f"{path}, {name}", classes) for name in names}


def images_shape(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """The shape of the first array of images of a .npz file, by `_UNLABELED`, without reading its pixels."""
    with zipfile.ZipFile(path) as file:
        name = next((f"{name}.npy" for name in _UNLABELED if f"{name}.npy" in file.namelist()), None)
        if name is None:
            raise ValueError(f"{path} has no images; they are arrays {', '.join(_UNLABELED)}")
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
    if isinstance(arrays, np.ndarray):
        return _several(arrays, str(path))
    if len(arrays) != 1:
        raise ValueError(f"{path} has the arrays {list(arrays)}; that of the images is named x_test, or the only one")
    ((name, images),) = arrays.items()
    return _several(images, f"{path}, {name}")


def _several(images: np.ndarray[Any, Any], source: str) -> Tensor:
    """`_planes`, but for one image in color, which would look like many gray ones."""
    if images.ndim == 3 and images.shape[2] in (3, 4):
        raise ValueError(
            f"{source}: an array {images.shape} is one image in color, or images of {images.shape[2]} pixels in width; "
            "the first axis counts images: save image[None], or several by np.stack"
        )
    return _planes(images, source)


def _loaded(
    path: str | os.PathLike[str], choose: Callable[[list[str]], list[str]] = list
) -> np.ndarray[Any, Any] | dict[str, np.ndarray[Any, Any]]:
    """The array of a .npy file, or of the arrays of a .npz file those whose names are chosen."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file at {path}")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as file:
            return {key: file[key] for key in choose(file.files)}
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, AttributeError, TypeError) as error:
        if "Object arrays" in str(error):
            raise ValueError(
                f"{path} has an array of Python objects, which is not read because it could run code; save images as "
                "uint8, labels as integers and their names as an array of strings, np.array(names, dtype=str)"
            ) from error
        kind = Path(path).suffix.lower() if Path(path).suffix.lower() in ARRAYS else ".npz"
        raise ValueError(f"{path} is not a readable {kind} file ({error}); it may be truncated") from error


def _class_names(names: np.ndarray[Any, Any], path: str | os.PathLike[str]) -> tuple[str, ...]:
    if names.ndim != 1:
        raise ValueError(f"{path}: label_names is a list with a name for each class, got {names.dtype} {names.shape}")
    if names.dtype.kind not in "USTiu":
        raise ValueError(f"{path}: label_names are strings, np.array(names, dtype=str), got {names.dtype}")
    try:
        classes = tuple(map(str, np.char.decode(names, "utf-8") if names.dtype.kind == "S" else names))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: label_names are bytes that are no UTF-8 ({error}); save them as strings") from error
    if (twice := next((name for name in classes if classes.count(name) > 1), None)) is not None:
        raise ValueError(
            f"{path}: the classes of label_names have different names, and {classes.count(twice)} of them are named "
            f"{twice!r}; rename them, or give their images the same label"
        )
    return classes


def from_arrays(
    images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], source: str, classes: tuple[str, ...] = ()
) -> Split:
    """A split of uint8 images ``(n, height, width[, channels])`` and integer labels, one an image.

    Raises:
        ValueError: If images or labels are of another shape or type; ``source`` is named.
    """
    planes = _planes(images, source)
    if not np.issubdtype(labels.dtype, np.integer) or not labels.ndim or labels.size != len(labels):
        raise ValueError(
            f"{source}: labels are integers, one per image, got {labels.dtype} {labels.shape}{_labeling(labels)}"
        )
    return Split(planes, torch.from_numpy(labels.reshape(-1).astype(np.int64)), classes)


def _planes(images: np.ndarray[Any, Any], source: str) -> Tensor:
    """Images ``(n, height, width[, channels])`` as ``(n, channels, height, width)``, uint8."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(
            f"{source}: images are uint8, (n, height, width) or (n, height, width, channels), got {images.dtype} "
            f"{images.shape}{_scaling(images)}"
        )
    if images.ndim == 4 and images.shape[3] > min(images.shape[1:3]):
        raise ValueError(f"{source}: channels come last, (n, height, width, channels), got {images.shape}")
    if min(images.shape[1:]) < 1:
        raise ValueError(f"{source}: images have no pixels, got {images.shape}")
    planes = torch.from_numpy(images)
    planes = planes[:, None] if images.ndim == 3 else planes.permute(0, 3, 1, 2)
    return planes.contiguous()


def _scaling(images: np.ndarray[Any, Any]) -> str:
    """How images of another type become uint8."""
    if images.dtype == np.uint8 or images.dtype.kind not in "biuf":
        return ""
    bad = images.size - int(np.isfinite(images).sum())
    return (
        f"{f', with {bad:,} values that are infinite or not a number, to be replaced first' * bool(bad)}; scale the "
        "values: ((x - low) / (high - low) * 255).clip(0, 255).round().astype(np.uint8), with the same low and high "
        "for all images, of np.arcsinh(x) where faint structure matters beside bright"
    )


def _labeling(labels: np.ndarray[Any, Any]) -> str:
    """How labels of another kind become classes, or what takes them as they are."""
    if labels.dtype.kind in "UT":
        return "; label_names, y = np.unique(y, return_inverse=True) makes names and integers of them"
    if labels.dtype.kind == "b" and labels.ndim == 1:
        return "; y.astype(np.int64) makes the classes 0 and 1"
    if labels.dtype.kind in "biuf" and labels.ndim < 2:
        return "; numbers such as a size need a training loop of your own (docs/own_training.md)"
    if labels.dtype.kind in "biuf":
        return (
            "; y.argmax(1) makes classes of a row of shares for each image; shares themselves, and numbers such as a "
            "size, need a training loop of your own (docs/own_training.md)"
        )
    return ""
