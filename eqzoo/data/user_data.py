"""Data sets to fine-tune on: image folders, .npz files and data sets by name."""

import os
from collections.abc import Mapping
from pathlib import Path

from .arrays import images_shape, is_npz, npz
from .catalog import CATALOG
from .datasets import named_set, stand_in
from .external import HUB_PREFIX, hub_set, torchvision_names, torchvision_set
from .folder import channels_found, folder_of, folder_sides, image_folder, split_folder
from .splits import AnySplit, Split, Streamed, check, check_types, resized

_PARTS = {"test": "test", "val": "valid", "train": "train"}  # by preference to evaluate on, as folders are named
FOLDERS = {split: folder for folder, split in _PARTS.items()}  # what the folder of a split is called


def read_images(
    data: str | os.PathLike[str],
    side: int,
    channels: int | None = None,
    data_dir: str | os.PathLike[str] = "data",
    download: bool = False,
) -> dict[str, AnySplit]:
    """Reads a data set and resizes its images.

    Args:
        data: A folder with ``train``, ``val`` and ``test`` or with the class folders alone; a .npz file; a name of
            `CATALOG`, of which a file ``<name>.npz`` in ``data_dir`` takes the place; the name of a torchvision data
            set; or ``hf:<owner>/<name>``.
        side: The side of the square images, in pixels.
        channels: The number of channels; None for that of the data: for image files 1 if all are grayscale, else 3.
        data_dir: The folder of data sets that are given by name.
        download: Whether missing data sets of torchvision may be downloaded. The Hub's (``hf:``) always are, by the
            package datasets, which keeps them in ``data_dir``.

    Returns:
        ``train``, and ``valid`` and ``test`` if the data set has them.

    Raises:
        FileNotFoundError: If the data set is not found.
        ValueError: If files are unreadable, images have another number of channels, or the splits differ in their
            classes.
        ImportError: If a package needed to read it is not installed.
    """
    name, path = str(data), Path(data)
    if path.is_dir():
        splits = image_folder(path, (channels or channels_found(path)[0] or 3, side, side), flat=True)
    elif is_npz(path):
        splits = npz(path)
    elif name.lower() in CATALOG:
        splits, name = named_set(name.lower(), data_dir, download, (side, side))
    elif name.startswith(HUB_PREFIX):
        splits = hub_set(name.removeprefix(HUB_PREFIX), data_dir, side, channels)
    elif name.lower() in torchvision_names():
        splits = torchvision_set(name, data_dir, side, channels, download)
    else:
        raise FileNotFoundError(
            f"no images at {name}: give a folder with one for each class, a .npz file (numpy.savez with x_train and "
            f"y_train), one of {', '.join(CATALOG)}, the name of a torchvision data set such as Flowers102, or "
            f"{HUB_PREFIX}<owner>/<name>"
        )
    check(splits, name)
    found = splits["train"].shape[0]
    if channels not in (None, found):
        raise ValueError(f"the images of {name} have {found} channels, and channels={channels} was requested")
    return {part: resized(split, (side, side)) for part, split in splits.items()}


def labeled_images(
    data: str | os.PathLike[str] | AnySplit,
    side: int,
    channels: int,
    part: str | None = None,
    data_dir: str | os.PathLike[str] = "data",
    download: bool = False,
) -> tuple[AnySplit, str | None]:
    """The images of one part of a data set, resized, to evaluate a network on; other parts of a folder are not read.

    Args:
        data: As in `read_images`; a folder or a .npz file needs no training images, and a .npz file not all classes.
            Or a split.
        side: The side of the square images, in pixels.
        channels: The number of channels.
        part: ``"test"``, ``"val"`` or ``"train"``; None for the first of these that there is.
        data_dir: The folder of data sets that are given by name.
        download: Whether missing data sets of torchvision may be downloaded.

    Returns:
        The images, and the name of the part; None if the data has no parts.

    Raises:
        FileNotFoundError: If the data set is not found.
        ValueError: As `read_images`, or if there is no such part.
    """
    if isinstance(data, Split | Streamed):
        if part is not None:
            raise ValueError(f"a split has no parts to choose from, got {part!r}")
        return _for_network(data, side, channels, "the split"), None
    path = Path(data)
    there = [name for name in _PARTS if split_folder(path, name)]
    splits = dict[str, AnySplit]()
    file = stand_in(str(data).lower(), data_dir) if not path.is_dir() and str(data).lower() in CATALOG else path
    if file and is_npz(file):
        splits = npz(file, needs_train=False)
    elif not there:
        splits = read_images(data, side, channels, data_dir, download)
    if splits.keys() - {"train"} or (splits and part and not path.is_dir()):
        there = [name for name in _PARTS if _PARTS[name] in splits]
    if part is not None and part not in there:
        parts = f"only {' and '.join(there)}" if there else "they are not divided"
        raise ValueError(f"{data} has no {part} images, {parts}")
    chosen = (part or there[0]) if there else None
    if splits:
        return _for_network(splits[_PARTS[chosen or "train"]], side, channels, data), chosen
    return image_folder(path, (channels, side, side), part=chosen)[str(chosen)], chosen


def _for_network(split: AnySplit, side: int, channels: int, data: object) -> AnySplit:
    """The images resized; raises ValueError unless they have these channels and labels that fit the classes."""
    check_types(split, str(data))
    if not len(split) or split.shape[0] != channels:
        raise ValueError(f"the images of {data} are {split}, and the network takes {channels} channels")
    least, most = int(split.labels.min()), int(split.labels.max())
    names = split.classes
    if least < 0 or (names and (most >= len(names) or len({*names}) < len(names))):
        raise ValueError(
            f"{data}: labels are 0, 1, 2 ..., with a different name each or none, got {least} to {most} and {names}"
        )
    return resized(split, (side, side))


def native_sides(
    data: object, part: str | None = None, data_dir: str | os.PathLike[str] = "data"
) -> tuple[int, int] | None:
    """The shorter and the longer side of images before they are resized, in pixels; of a folder, medians of some.

    Of a folder with splits those of its part ``part``, as it is named there, if one is given.

    None for data of another kind than a folder, a .npz file, a data set of `CATALOG` or splits in memory. A file
    ``<name>.npz`` in ``data_dir`` takes the place of the data set of that name.
    """
    if folder := folder_of(data):
        return folder_sides(folder, part)
    name = str(data).lower() if isinstance(data, str | os.PathLike) else ""
    file = stand_in(name, data_dir) if name in CATALOG else Path(str(data)) if is_npz(name) else None
    if file:
        sides = images_shape(file)[1:3]
    elif name in CATALOG:
        sides = CATALOG[name].input_size[1:]
    elif isinstance(data, Mapping | Split | Streamed):
        sides = (data["train"] if isinstance(data, Mapping) else data).shape[1:]
    else:
        return None
    return min(sides), max(sides)
