"""Classification data sets of torchvision and of the Hugging Face Hub, by name."""

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .folder import MEMORY_LIMIT
from .images import is_grayscale, pixels, preprocess
from .splits import AnySplit, Split, Streamed

__all__ = ["HUB_PREFIX", "corrupt", "fetched", "hub_set", "missing", "torchvision_names", "torchvision_set"]

HUB_PREFIX = "hf:"
_LOOKED_AT = 50  # the images inspected to tell whether a data set has colors
_SPLITS = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}


class _Rows:
    """Reads image i of a data set, scaled and cropped to the input size; errors name the data set and i."""

    def __init__(self, source: str, image: Callable[[int], Any], input_size: tuple[int, int, int]) -> None:
        self.source, self.image, self.input_size = source, image, input_size

    def __call__(self, index: int) -> Tensor:
        channels, height, width = self.input_size
        try:
            values = pixels(self.image(index), channels)
        except Exception as error:  # each of Pillow's formats raises its own errors on corrupt files
            raise ValueError(f"image {index} of {self.source} cannot be read: {error}") from error
        return preprocess(values, (height, width)).round().clamp(0, 255).to(torch.uint8)


class _First:
    """The image of pair i of a torchvision data set; a class, so that it can be pickled."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __call__(self, index: int) -> Any:
        return self.pairs[index][0]


class _Column:
    """The image in row i of a Hugging Face data set."""

    def __init__(self, rows: Any, column: str) -> None:
        self.rows, self.column = rows, column

    def __call__(self, index: int) -> Any:
        return self.rows[index][self.column]


@contextmanager
def fetched(name: str, folder: Path) -> Iterator[None]:
    """Converts what torchvision raises where it cannot download to an OSError that says the reason.

    Args:
        name: The data set, as the error names it.
        folder: Where its files may be put by hand.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise OSError(
            f"{name} cannot be downloaded ({str(error).rstrip('.')}); try again, or put its files in {folder}"
        ) from error


def missing(name: str, folder: Path, url: str | None = None) -> str:
    """What to do where a data set is missing, which ``url`` has if torchvision cannot download it."""
    way = f"they are at {url}" if url else "pass --download"
    return f"no {name} in {folder}: put its files there, set --data-dir to the folder that contains it, or {way}"


@contextmanager
def corrupt(path: Path) -> Iterator[None]:
    """Converts what readers raise on a corrupt file to a ValueError that names the file."""
    try:
        yield
    except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is corrupt or has other contents ({error}); remove it and download it again"
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
        ValueError: If its items are not pairs of image and class, or its class needs further arguments.
    """
    from torchvision import datasets

    name = torchvision_names()[name.lower()]
    cls = getattr(datasets, name)
    wants = inspect.signature(cls.__init__).parameters
    more = {"download": download} if "download" in wants else {}
    if "train" in wants:
        ways: dict[str, list[dict[str, Any]]] = {"train": [{"train": True}], "test": [{"train": False}]}
    elif "split" in wants:
        ways = {ours: [{"split": theirs} for theirs in names] for ours, names in _SPLITS.items()}
    else:
        ways = {"train": [{}]}
    found, refused = {}, ""
    for ours, tries in ways.items():
        for arguments in tries:
            try:
                found[ours] = cls(data_dir, **arguments, **more)
            except ValueError as error:
                if "split" not in arguments:
                    raise ValueError(f"torchvision cannot read {name} in {data_dir}: {error}") from error
                refused = str(error)  # no split of that name
                continue
            except RuntimeError as error:
                way = "; the download failed" if download else "; --download fetches it"
                raise FileNotFoundError(f"no {name} in {data_dir} ({error}){way}") from error
            except TypeError as error:
                raise ValueError(
                    f"torchvision's {name} needs further arguments ({error}); create it in Python and pass the splits"
                ) from error
            break
    if "train" not in found:
        raise ValueError(
            f"torchvision's {name} has no split named train ({refused}); create it in Python and pass the splits"
        )
    splits = {}
    for ours, pairs in found.items():
        source = f"torchvision's {name}, {ours}"
        values = _listed(pairs)
        if ours != "train" and _has_none(values, source):
            continue
        labels = _labels(pairs, values, source)
        classes = _names(getattr(found["train"], "classes", ()))
        channels = channels or _channels(_First(pairs), len(labels))
        splits[ours] = _split(_Rows(source, _First(pairs), (channels, side, side)), labels, tuple(classes))
    return splits


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
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{HUB_PREFIX}{name} is read with the package datasets, which is not installed: pip install datasets"
        ) from error
    try:
        loaded = load_dataset(name, cache_dir=str(data_dir))
    except Exception as error:  # datasets lets the errors of its HTTP and file libraries through
        raise OSError(f"the data set {name} of the Hub cannot be read: {error}") from error
    parts = {ours: loaded[theirs] for ours, names in _SPLITS.items() for theirs in names if theirs in loaded}
    if "train" not in parts:
        raise ValueError(f"{name} has no split named train; it has {', '.join(loaded)}")
    features = parts["train"].features
    types = [type(feature).__name__ for feature in features.values()]
    if types.count("Image") != 1 or types.count("ClassLabel") != 1:
        said = ", ".join(f"{column} ({kind})" for column, kind in zip(features, types, strict=True))
        raise ValueError(
            f"{name} needs one column of type Image and one of type ClassLabel; it has {said}; create the splits in "
            "Python and pass them"
        )
    kinds = dict(zip(types, features, strict=True))
    splits = {}
    for ours, rows in parts.items():
        image = _Column(rows, kinds["Image"])
        channels = channels or _channels(image, len(rows))
        source, values = f"{name}, {ours}", list(rows[kinds["ClassLabel"]])
        if ours != "train" and _has_none(values, source):
            continue
        labels = torch.tensor(values)
        reader = _Rows(source, image, (channels, side, side))
        splits[ours] = _split(reader, labels, tuple(features[kinds["ClassLabel"]].names))
    return splits


def _has_none(labels: Sequence[Any], source: str) -> bool:
    """Whether no image of a part has a label, as in the test parts of competitions; then a line on stderr says so."""
    if any(label is not None and label != -1 for label in labels):
        return False
    print(f"eqzoo: {source}: its images have no labels, and are left out", file=sys.stderr)
    return True


def _listed(pairs: Any) -> Sequence[Any]:
    """The labels of all pairs: the data set's list of labels if it has one, else read pair by pair."""
    lists = (getattr(pairs, name, None) for name in ("targets", "labels", "_labels"))
    kept = next((values for values in lists if values is not None and len(values) == len(pairs)), None)
    return [pairs[i][1] for i in range(len(pairs))] if kept is None else kept


def _names(classes: Sequence[Any]) -> list[str]:
    """The names of classes; of several for one, as ImageNet has, the first, and all where it is that of another too.

    Names that are still equal, as those of ImageNet's two cranes, are numbered by their classes.
    """
    first = [str(c[0] if isinstance(c, tuple) else c) for c in classes]
    alone = {name for name, count in Counter(first).items() if count == 1}
    names = [
        name if name in alone or not isinstance(c, tuple) else ", ".join(c)
        for name, c in zip(first, classes, strict=True)
    ]
    count = Counter(names)
    return [name if count[name] == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def _labels(pairs: Any, values: Sequence[Any], source: str) -> Tensor:
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # lists of boxes, dictionaries, images
        labels = torch.empty(0, 0)
    if labels.ndim != 1 or labels.is_floating_point() or not isinstance(pairs[0][0], Image.Image):
        raise ValueError(
            f"{source} does not give pairs of one image and one class; create it in Python and pass the splits"
        )
    return labels.long()


def _channels(image: Callable[[int], Any], count: int) -> int:
    return 1 if all(is_grayscale(image(i)) for i in range(min(count, _LOOKED_AT))) else 3


def _split(reader: _Rows, labels: Tensor, classes: tuple[str, ...]) -> AnySplit:
    """A split in memory, all images decoded now, if it is small; else a streamed one."""
    if len(labels) * torch.Size(reader.input_size).numel() <= MEMORY_LIMIT:
        return Split(torch.stack([reader(i) for i in range(len(labels))]), labels, classes)
    return Streamed(reader, torch.arange(len(labels)), labels, reader.input_size, classes)
