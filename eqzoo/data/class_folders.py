"""Data sets published as folders of classes: EuroSAT, PBC, UC Merced, LC25000, radio galaxies, Tiny ImageNet.

References:
    EuroSAT: A Novel Dataset and Deep Learning Benchmark for Land Use and Land Cover Classification
    (Helber, Bischke, Dengel and Borth, 2019), https://arxiv.org/abs/1709.00029
    A dataset of microscopic peripheral blood cell images for development of automatic recognition systems
    (Acevedo, Merino, Alférez, Molina, Boldú and Rodellar, 2020), https://doi.org/10.17632/snkd93bnjr.1
    Bag-of-Visual-Words and Spatial Extensions for Land-Use Classification (Yang and Newsam, 2010)
    Lung and Colon Cancer Histopathological Image Dataset (LC25000) (Borkowski et al., 2019)
    https://arxiv.org/abs/1912.12142
    FIRST radio galaxy data set (Griese, Kummer, Connor, Brüggen and Rustige, 2023)
    https://doi.org/10.5281/zenodo.7120632
    Tiny ImageNet Visual Recognition Challenge (Le and Yang, 2015)
    http://cs231n.stanford.edu/tiny-imagenet-200.zip
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .arrays import from_arrays, hdf5
from .folder import class_names, image_folder, images_below, read_files
from .splits import DRAW_SEED, AnySplit, part_of, resized, stratified

_SHARES = (("train", 0.6), ("valid", 0.8), ("test", 1.0))  # each part ends at this share of a class
_RADIO_NAMES = ("FRI", "FRII", "compact", "bent")  # in the order of the labels in the authors' HDF5 file
_TINY_VALID = 0.05  # of the training images


@dataclass(frozen=True)
class ClassFolders:
    """Reads class folders that have no official split, in three parts: 60 : 20 : 20 of each class.

    The file names of a class, sorted as text, are permuted by ``numpy.random.RandomState(2016).permutation(n)``; the
    first 60 % are ``train``, the next 20 % ``valid`` and the rest ``test``, in the order of the file names again. With
    ``group``, the groups of a class, sorted as text, are permuted instead, and the images of one stay together.

    Args:
        places: The folders of the class folders, below that of all data sets, which is itself tried last.
        counts: The number of images of each class, or of groups; with others, the parts would be others.
        url: Where it is published.
        group: A regular expression for the beginning of a file name that images of one original share.
        torchvision: The class of torchvision that downloads it; None if nobody serves it for that.
    """

    places: tuple[str, ...]
    counts: Mapping[str, int]
    url: str
    group: str | None = None
    torchvision: str | None = None

    def __call__(self, data_dir: str | os.PathLike[str], download: bool, size: tuple[int, int]) -> dict[str, AnySplit]:
        """The parts ``train``, ``valid`` and ``test``.

        Args:
            data_dir: The folder of data sets, or that of the class folders.
            download: Whether torchvision may download what is missing.
            size: Height and width that images are scaled to.

        Raises:
            FileNotFoundError: If no folder has these classes.
            OSError: If it cannot be downloaded.
            ValueError: If a class has another number of images or groups, or a file cannot be read.
        """
        folder = self._folder(Path(data_dir), download)
        images = image_folder(folder, (3, *size), flat=True)["train"]
        labels, names = images.labels.tolist(), [file.rpartition("/")[2] for file in images.files]
        matches = [re.match(self.group or ".*", name) for name in names]
        groups = [match[0] if match else "" for match in matches]
        parts: dict[str, list[int]] = {part: [] for part, _ in _SHARES}
        for label, (name, count) in enumerate(self.counts.items()):
            own = [index for index, of in enumerate(labels) if of == label]
            of_class = sorted({groups[index] for index in own})
            if len(of_class) != count or "" in of_class:
                kind = f"groups of images, by {self.group!r} in their names," if self.group else "images"
                raise ValueError(
                    f"{folder / name} has {len(of_class):,} {kind} and the data set {count:,} of this class, without "
                    f"which its parts would be others; unpack it again ({self.url})"
                )
            order = np.random.RandomState(DRAW_SEED).permutation(count).tolist()
            ends = [round(end * count) for _, end in _SHARES]
            part_of_group = {
                of_class[place]: next(part for part, end in zip(parts, ends, strict=True) if rank < end)
                for rank, place in enumerate(order)
            }
            for index in own:
                parts[part_of_group[groups[index]]].append(index)
        return {part: part_of(images, torch.tensor(index)) for part, index in parts.items()}

    def _folder(self, data_dir: Path, download: bool) -> Path:
        folders = [*(data_dir / place for place in self.places), data_dir]
        if download and self.torchvision and not folders[0].is_dir():
            from torchvision import datasets

            getattr(datasets, self.torchvision)(str(data_dir), download=True)
        for folder in folders:
            if folder.is_dir() and class_names(folder) == tuple(self.counts):
                return folder
        raise FileNotFoundError(f"no folders {', '.join(self.counts)} of {self.url} in {folders[0]}")


def radio_galaxies(
    data_dir: str | os.PathLike[str], size: tuple[int, int], counts: Mapping[str, int]
) -> dict[str, AnySplit]:
    """The radio galaxies of the FIRST survey in the split of their authors.

    Args:
        data_dir: The folder that holds, possibly as ``radio``, the authors' ``galaxy_data_h5.h5`` or the folders
            ``train``, ``val`` and ``test`` with a folder of gray images for each class.
        size: Height and width that images are scaled to.
        counts: The number of images of each part, as published.

    Raises:
        FileNotFoundError: If there is neither.
        ImportError: If h5py is needed and not installed.
        ValueError: If a part has another number of images, or a file cannot be read.
    """
    folder = next((path for path in (Path(data_dir) / "radio", Path(data_dir)) if path.is_dir()), Path(data_dir))
    if (file := folder / "galaxy_data_h5.h5").is_file():
        splits = {part: resized(split, size) for part, split in _radio_file(file).items()}
    else:
        splits = image_folder(folder, (1, *size))
    _check_counts(splits, counts, folder)
    return splits


def _radio_file(path: Path) -> dict[str, AnySplit]:
    """The splits of the authors' file: a group for each image, in the order of their names."""
    images: dict[str, list[Any]] = {"train": [], "valid": [], "test": []}
    labels: dict[str, list[int]] = {part: [] for part in images}
    classes = tuple(sorted(_RADIO_NAMES))
    with hdf5(path) as file:
        for row in file.values():
            part = row["Split_literature"][()].decode()
            images[part].append(row["Img"][()].astype(np.uint8))
            labels[part].append(classes.index(_RADIO_NAMES[int(row["Label_literature"][()])]))
    return {part: from_arrays(np.stack(images[part]), np.array(labels[part]), str(path), classes) for part in images}


def tiny_imagenet(
    data_dir: str | os.PathLike[str], classes: tuple[str, ...], size: tuple[int, int], counts: Mapping[str, int]
) -> dict[str, AnySplit]:
    """Tiny ImageNet: its validation images are ``test``, and 25 training images of each class are ``valid``.

    The held-out images are those of `stratified`; the authors' test images have no labels.

    Args:
        data_dir: The folder that holds, possibly as ``tiny_imagenet`` or ``tiny-imagenet-200``, the folders ``train``
            and ``val``: with a folder for each class, named by its WordNet number, or as published, with
            ``val_annotations.txt``.
        classes: The names of the classes, in the order of their WordNet numbers.
        size: Height and width that images are scaled to.
        counts: The number of images of each part, as published.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it has other numbers of classes or images, or a file cannot be read.
    """
    folders = [Path(data_dir) / name for name in ("tiny_imagenet", "tiny-imagenet-200", ".")]
    folder = next((path for path in folders if (path / "train").is_dir() and (path / "val").is_dir()), folders[0])
    numbers = class_names(folder / "train")
    of_class = {"train": [images_below(folder / "train" / number) for number in numbers]}
    if (table := folder / "val" / "val_annotations.txt").is_file():
        rows = [line.split("\t")[:2] for line in table.read_text(encoding="utf-8").splitlines()]
        of_class["val"] = [[table.parent / "images" / name for name, of in rows if of == number] for number in numbers]
    else:
        of_class["val"] = [images_below(folder / "val" / number) for number in numbers]
    listed = {}
    for part, files in of_class.items():
        labels = torch.tensor([label for label, own in enumerate(files) for _ in own])
        listed[part] = [*chain(*files)], labels
    splits = read_files(folder, listed, classes, (3, *size))
    _check_counts(splits, counts, folder)
    train, valid = stratified(splits["train"], _TINY_VALID)
    return {"train": train, "valid": valid, "test": splits["val"]}


def _check_counts(splits: Mapping[str, AnySplit], counts: Mapping[str, int], folder: Path) -> None:
    """Raises ValueError unless the parts have these numbers of images, so that scores can be compared with others'."""
    if (found := {part: len(split) for part, split in splits.items()}) != counts:
        raise ValueError(f"{folder} has {found} images, and the data set {dict(counts)}: unpack it again")
