"""Pictures to fine-tune on, from wherever they are: folders, files, and data sets by name, in three parts."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .folder import folder_channels, image_folder
from .named import HUB_PREFIX, hub_set, torchvision_names, torchvision_set
from .pictures import preprocess
from .sets import DATASETS, npz
from .split import AnySplit, Split, Streamed, check, stratified

__all__ = ["divided", "read_pictures"]

_AT_ONCE = 256  # pictures that are scaled together


def read_pictures(
    data: str | os.PathLike[str],
    side: int,
    channels: int | None = None,
    data_dir: str | os.PathLike[str] = "data",
    download: bool = False,
) -> dict[str, AnySplit]:
    """Reads pictures and their classes, and brings them to a size.

    Args:
        data: A folder with ``train``, ``val`` and ``test`` or with the class folders alone; a .npz file; a name of
            `DATASETS`; a data set of torchvision's; or ``hf:<owner>/<name>``.
        side: The side of the square that pictures are scaled and cropped to, in pixels.
        channels: How many to give; None for those that the pictures have: of files 1 if all are grey, else 3.
        data_dir: The folder in which data sets with a name are.
        download: Whether what is missing there may be fetched.

    Returns:
        ``train``, and ``valid`` and ``test`` where there are any.

    Raises:
        FileNotFoundError: If there is no such data.
        ValueError: If pictures are broken or of other channels, classes are missing or differ between the parts.
        ImportError: If a package that reads it is missing.
    """
    name, path = str(data), Path(data)
    if path.is_dir():
        splits = image_folder(path, (channels or folder_channels(path), side, side), flat=True)
    elif path.suffix == ".npz":
        splits = npz(path, needs_test=False)
    elif name in DATASETS:
        splits = DATASETS[name](data_dir, download)
    elif name.startswith(HUB_PREFIX):
        splits = hub_set(name.removeprefix(HUB_PREFIX), data_dir, side, channels)
    elif name.lower() in torchvision_names():
        splits = torchvision_set(name, data_dir, side, channels, download)
    else:
        raise FileNotFoundError(
            f"no pictures at {name}: neither a folder, nor a .npz file, nor one of {', '.join(DATASETS)}, nor a data "
            f"set of torchvision's such as EuroSAT, nor {HUB_PREFIX}<owner>/<name>"
        )
    check(splits, name)
    found = splits["train"].shape[0]
    if channels not in (None, found):
        raise ValueError(f"the pictures of {name} have {found} channels, and {channels} are asked for")
    return {part: _resized(split, side) for part, split in splits.items()}


def divided(splits: Mapping[str, AnySplit], valid: float, test: float) -> dict[str, AnySplit]:
    """Splits with the parts that are missing drawn from the training pictures, class by class and always alike.

    Args:
        splits: ``train`` and others.
        valid: The fraction to validate on, where there is no such part; 0 for none.
        test: The fraction to test on, likewise.

    Raises:
        ValueError: If a fraction is out of range or a class has too few pictures.
    """
    valid, test = (0.0 if part in splits else share for part, share in (("valid", valid), ("test", test)))
    if min(valid, test) < 0 or valid + test >= 1:
        raise ValueError(f"the parts to validate and to test on are 0 or more, together less than 1: {valid}, {test}")
    parts = dict(splits)
    left = 1.0
    if test:
        parts["train"], parts["test"] = stratified(parts["train"], test)
        left -= test
    if valid:
        parts["train"], parts["valid"] = stratified(parts["train"], valid / left)
    return parts


class _Resized:
    """Reads a picture at another size."""

    def __init__(self, split: Streamed, side: int) -> None:
        self.read, self.side = split.read, side

    def __call__(self, index: int) -> Tensor:
        return _scaled(self.read(index), self.side)


def _scaled(pictures: Tensor, side: int) -> Tensor:
    return preprocess(pictures.float(), (side, side)).round().to(torch.uint8)


def _resized(split: AnySplit, side: int) -> AnySplit:
    channels, *size = split.shape
    if size == [side, side]:
        return split
    if isinstance(split, Split):
        return replace(split, images=torch.cat([_scaled(part, side) for part in split.images.split(_AT_ONCE)]))
    return replace(split, read=_Resized(split, side), shape=(channels, side, side))
