"""Reads data sets by name: those of the catalog, image folders and .npz files in a folder of data sets."""

import os
from pathlib import Path

from .arrays import npz
from .catalog import CATALOG
from .external import fetched
from .folder import image_folder
from .splits import AnySplit, check, hold_out, per_class, resized


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
        name: One of `CATALOG`, or the name of an image folder or .npz file in ``data_dir``. A file ``<name>.npz``
            there takes precedence over the data set of `CATALOG`.
        data_dir: The folder of data sets.
        download: Whether torchvision may download missing files.
        input_size: The channels, height and width to which images of a folder are converted. Images of a data set or
            file are scaled to this height and width if theirs are others.
        valid_size: The number of training images to hold out for validation, if the data set has no validation split;
            None for a tenth, 0 for none.
        samples_per_class: The number of training images of each class to use; None for all.

    Returns:
        The splits ``train``; ``valid``, unless ``valid_size`` is 0; and ``test``, unless a folder or a file has none.

    Raises:
        FileNotFoundError: If the data set is not found and not downloaded.
        ValueError: If a file is corrupt or has other contents, or a size is larger than the data set.
        ImportError: If a package needed to read it is not installed.
    """
    path = Path(data_dir) / name
    if name in CATALOG:
        splits, source = named_set(name, data_dir, download, input_size and input_size[1:])
    elif path.is_dir():
        if input_size is None:
            raise ValueError(f"images of the folder {path} have to be scaled: pass input_size, or name a network")
        splits, source = image_folder(path, input_size), str(path)
    else:
        with fetched(name, data_dir):
            splits, source = npz(stand_in(name, data_dir) or path), str(path)
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
    name: str, data_dir: str | os.PathLike[str], download: bool, size: tuple[int, int] | None = None
) -> tuple[dict[str, AnySplit], str]:
    """A data set of `CATALOG`, or the file that takes its place, see `stand_in`; and its source.

    Args:
        name: The name.
        data_dir: The folder of data sets.
        download: Whether torchvision may download missing files.
        size: Height and width to read large images at; others keep theirs. None for those of the data set.
    """
    if file := stand_in(name, data_dir):
        return npz(file), str(file)
    read = CATALOG[name].read
    assert read is not None
    with fetched(name, data_dir):
        return dict(read(data_dir, download, size or CATALOG[name].input_size[1:])), f"{name} in {data_dir}"
