"""Classification data sets of torchvision and of the Hugging Face Hub, by name."""

import inspect
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from .folder import MEMORY_LIMIT
from .images import is_grayscale, pixels, preprocess_uint8, read_file
from .splits import AnySplit, Split, Streamed

T = TypeVar("T")
HUB_PREFIX = "hf:"
_LOOKED_AT = 50  # the images inspected to tell whether a data set has colors
_SPLITS = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}


@dataclass(frozen=True)
class _Rows:
    """Reads image i of a data set, scaled and cropped to the input size; errors name the data set and i.

    Args:
        source: The data set, as errors name it.
        rows: Its rows, each with an image.
        key: Where the image is in a row.
        input_size: Channels, height and width.
    """

    source: str
    rows: Any
    key: int | str
    input_size: tuple[int, int, int]

    def read(self, index: int, function: Callable[[Image.Image], T]) -> T:
        """What a function makes of image i, or of its file as `datasets` holds it before it is decoded."""
        try:
            value = self.rows[index][self.key]
            if not isinstance(value, Mapping):
                return function(value)
            return read_file(Path(value["path"]) if value["bytes"] is None else value["bytes"], function)
        except Exception as error:  # each of Pillow's formats raises its own errors on corrupt files
            raise ValueError(f"image {index} of {self.source} cannot be read: {error}") from error

    def __call__(self, index: int) -> Tensor:
        channels, height, width = self.input_size
        values = self.read(index, lambda image: pixels(image, channels))
        return preprocess_uint8(values, (height, width))


@contextmanager
def fetched(name: str, data_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Converts what is raised for missing and corrupt files to an error that says where they belong."""
    try:
        yield
    except (RuntimeError, OSError, EOFError, KeyError, AssertionError) as error:
        raise FileNotFoundError(
            f"{name} cannot be read from {data_dir} ({error}): put its files there, set --data-dir to the folder that "
            "contains them or, if torchvision serves it, pass --download"
        ) from error


def torchvision_names() -> dict[str, str]:
    """The data sets of torchvision: class names by lower-case name."""
    from torchvision import datasets

    return {name.lower(): name for name in datasets.__all__}


def torchvision_set(
    name: str, data_dir: str | os.PathLike[str], side: int, channels: int | None = None, download: bool = False
) -> dict[str, AnySplit]:
    """Reads a classification data set of torchvision, such as Flowers102.

    Args:
        name: The name of torchvision's class, in upper or lower case.
        data_dir: The folder that torchvision reads.
        side: The side of the square images, in pixels.
        channels: 1, 3 or 4; None for 1 if the first images are grayscale, else 3.
        download: Whether torchvision may download it.

    Raises:
        FileNotFoundError: If the files are missing and are not downloaded.
        ValueError: If it has no training split, or an image cannot be read.
        TypeError: If its items are not pairs of image and class, or its class needs further arguments.
    """
    from torchvision import datasets

    name = torchvision_names()[name.lower()]
    cls = getattr(datasets, name)
    wants = inspect.signature(cls.__init__).parameters
    more = {"download": download} if "download" in wants else {}
    ways: list[tuple[str, dict[str, Any]]] = [("train", {})]
    if "train" in wants:
        ways = [("train", {"train": True}), ("test", {"train": False})]
    elif "split" in wants:
        ways = [(ours, {"split": theirs}) for ours, names in _SPLITS.items() for theirs in names]
    found, refused = dict[str, Any](), ""
    for ours, arguments in ways:
        try:
            if ours not in found:
                with fetched(name, data_dir):
                    found[ours] = cls(data_dir, **arguments, **more)
        except ValueError as error:
            if "split" not in arguments:
                raise
            refused = str(error)  # no split of that name
    if "train" not in found:
        raise ValueError(
            f"torchvision's {name} has no split train ({refused}); create it in Python and pass the splits"
        )
    rows = {part: (pairs, _listed(pairs)) for part, pairs in found.items()}
    return _read(name, rows, 0, _names(getattr(found["train"], "classes", ())), side, channels)


def hub_set(name: str, data_dir: str | os.PathLike[str], side: int, channels: int | None = None) -> dict[str, AnySplit]:
    """Reads a classification data set of the Hugging Face Hub with the package `datasets`.

    Args:
        name: The repository, ``<owner>/<name>``, or a local folder that `datasets` reads.
        data_dir: The cache folder.
        side: The side of the square images, in pixels.
        channels: 1, 3 or 4; None for 1 if the first images are grayscale, else 3.

    Raises:
        ImportError: If `datasets` is not installed.
        ValueError: If it has not one column of type Image and one of type ClassLabel, or no training split.
        OSError: If it cannot be downloaded or read.
    """
    try:
        from datasets import Image as HubImage
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"data sets of the Hub need the package datasets: pip install datasets ({error})") from error

    loaded = load_dataset(name, cache_dir=str(data_dir))
    parts = {ours: loaded[theirs] for ours, names in _SPLITS.items() for theirs in names if theirs in loaded}
    features = parts["train"].features if "train" in parts else {}
    types = [type(feature).__name__ for feature in features.values()]
    if types.count("Image") != 1 or types.count("ClassLabel") != 1:
        raise ValueError(
            f"{name} needs a split train with one column of type Image and one of type ClassLabel; it has "
            f"{', '.join(loaded)} with {dict(zip(features, types, strict=True))}; create the splits in Python and pass "
            "them"
        )
    columns = dict(zip(types, features, strict=True))
    labels = columns["ClassLabel"]
    # Decoded by `datasets`, images would have lost what a TIFF says of its numbers, and all of its pages but the first.
    files = {part: rows.cast_column(columns["Image"], HubImage(decode=False)) for part, rows in parts.items()}
    found = {part: (rows, list(rows[labels])) for part, rows in files.items()}
    return _read(name, found, columns["Image"], tuple(features[labels].names), side, channels)


def _read(
    name: str,
    parts: Mapping[str, tuple[Any, Sequence[Any]]],
    key: int | str,
    classes: tuple[str, ...],
    side: int,
    channels: int | None,
) -> dict[str, AnySplit]:
    """The splits of rows with images and of their labels, but for those without any, as test images of competitions."""
    splits = dict[str, AnySplit]()
    for part, (rows, values) in parts.items():
        source = f"{name}, {part}"
        if part != "train" and all(label is None or label == -1 for label in values):
            print(f"eqzoo: {source}: its images have no labels, and are left out", file=sys.stderr)
            continue
        labels = torch.tensor([*map(operator.index, values)])  # no numbers such as a size
        count = len(labels)
        if channels is None:
            some = _Rows(source, rows, key, (3, side, side))
            channels = 1 if all(some.read(i, is_grayscale) for i in range(min(count, _LOOKED_AT))) else 3
        reader = _Rows(source, rows, key, (channels, side, side))
        if count * torch.Size(reader.input_size).numel() <= MEMORY_LIMIT:
            splits[part] = Split(torch.stack([reader(i) for i in range(count)]), labels, classes)
        else:
            splits[part] = Streamed(reader, torch.arange(count), labels, reader.input_size, classes)
    return splits


def _listed(pairs: Any) -> Sequence[Any]:
    """The labels of all pairs: the data set's list of labels if it has one, else read pair by pair."""
    lists = (getattr(pairs, name, None) for name in ("targets", "labels", "_labels"))
    kept = next((values for values in lists if values is not None and len(values) == len(pairs)), None)
    return [pairs[i][1] for i in range(len(pairs))] if kept is None else kept


def _names(classes: Sequence[Any]) -> tuple[str, ...]:
    """The names of classes; of several for one, as ImageNet has, the first, and all where it is that of another too.

    Names that are still equal, as those of ImageNet's two cranes, are numbered by their classes.
    """
    first = [str(c[0] if isinstance(c, tuple) else c) for c in classes]
    count = Counter(first)
    names = [
        ", ".join(c) if count[name] > 1 and isinstance(c, tuple) else name
        for name, c in zip(first, classes, strict=True)
    ]
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name} ({i})" for i, name in enumerate(names))
