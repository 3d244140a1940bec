"""Data sets of other packages by name: torchvision's, and those of Hugging Face's datasets."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .folder import MEMORY_LIMIT
from .pictures import pixels, preprocess, says_grey
from .split import AnySplit, Split, Streamed

__all__ = ["HUB_PREFIX", "hub_set", "torchvision_names", "torchvision_set"]

HUB_PREFIX = "hf:"
_LOOKED_AT = 50  # pictures that say whether a set has colours
_SPLITS = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}


class _Rows:
    """Reads picture i of a data set at a size; an error names both."""

    def __init__(self, source: str, picture: Callable[[int], Any], input_size: tuple[int, int, int]) -> None:
        self.source, self.picture, self.input_size = source, picture, input_size

    def __call__(self, index: int) -> Tensor:
        channels, height, width = self.input_size
        try:
            values = pixels(self.picture(index), channels)
        except Exception as error:  # every format of Pillow's raises its own on a broken file
            raise ValueError(f"picture {index} of {self.source} cannot be read: {error}") from error
        return preprocess(values, (height, width)).round().clamp(0, 255).to(torch.uint8)


class _First:
    """The picture of a pair of a data set; a class, because readers go to other processes."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __call__(self, index: int) -> Any:
        return self.pairs[index][0]


class _Column:
    """The picture of a row of a data set."""

    def __init__(self, rows: Any, column: str) -> None:
        self.rows, self.column = rows, column

    def __call__(self, index: int) -> Any:
        return self.rows[index][self.column]


def torchvision_names() -> dict[str, str]:
    """Torchvision's data sets, by their names in lower case."""
    from torchvision import datasets

    return {name.lower(): name for name in datasets.__all__}


def torchvision_set(
    name: str, data_dir: str | os.PathLike[str], side: int, channels: int | None = None, download: bool = False
) -> dict[str, AnySplit]:
    """Reads a data set for classification of torchvision's, such as EuroSAT.

    Args:
        name: Its name, in any case.
        data_dir: The folder that torchvision looks in.
        side: The side that pictures are brought to, in pixels.
        channels: 1, 3 or 4; None for 1 where the first pictures are grey, else 3.
        download: Whether torchvision may fetch it.

    Raises:
        FileNotFoundError: If it is not there, and may not be fetched.
        ValueError: If it is not made of pictures and classes, or wants further arguments.
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
    found = {}
    for ours, tries in ways.items():
        for arguments in tries:
            try:
                found[ours] = cls(data_dir, **arguments, **more)
            except ValueError:  # no split of that name
                continue
            except RuntimeError as error:
                raise FileNotFoundError(f"no {name} in {data_dir} ({error}); --download fetches it") from error
            except TypeError as error:
                raise ValueError(
                    f"torchvision's {name} wants arguments of its own ({error}); read it in Python and pass the splits"
                ) from error
            break
    if "train" not in found:
        raise ValueError(f"torchvision's {name} has no training split of that name; read it in Python")
    splits = {}
    for ours, pairs in found.items():
        source = f"torchvision's {name}, {ours}"
        labels = _labels(pairs, source)
        classes = [str(c[0] if isinstance(c, tuple) else c) for c in getattr(found["train"], "classes", ())]
        channels = channels or _channels(_First(pairs), len(labels))
        splits[ours] = _split(_Rows(source, _First(pairs), (channels, side, side)), labels, tuple(classes))
    return splits


def hub_set(name: str, data_dir: str | os.PathLike[str], side: int, channels: int | None = None) -> dict[str, AnySplit]:
    """Reads a data set for classification of the Hugging Face Hub, through the package datasets.

    Args:
        name: Its repo, ``<owner>/<name>``, or a folder that datasets reads.
        data_dir: The folder that it is cached in.
        side: The side that pictures are brought to, in pixels.
        channels: 1, 3 or 4; None for 1 where the first pictures are grey, else 3.

    Raises:
        ImportError: If datasets is not installed.
        ValueError: If it has no column of pictures and one of classes, or no training split.
        OSError: If it cannot be read or fetched.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"{HUB_PREFIX}{name} is read by the package datasets: pip install datasets") from error
    try:
        loaded = load_dataset(name, cache_dir=str(data_dir))
    except Exception as error:  # datasets raises what its HTTP and file libraries do
        raise OSError(f"the data set {name} of the Hub cannot be read: {error}") from error
    parts = {ours: loaded[theirs] for ours, names in _SPLITS.items() for theirs in names if theirs in loaded}
    if "train" not in parts:
        raise ValueError(f"{name} has no split train, but {', '.join(loaded)}")
    features = parts["train"].features
    kinds = {type(feature).__name__: column for column, feature in features.items()}
    if not {"Image", "ClassLabel"} <= kinds.keys():
        said = ", ".join(f"{column} ({type(feature).__name__})" for column, feature in features.items())
        raise ValueError(f"{name} needs a column of pictures (Image) and one of classes (ClassLabel), and has {said}")
    splits = {}
    for ours, rows in parts.items():
        picture = _Column(rows, kinds["Image"])
        channels = channels or _channels(picture, len(rows))
        labels = torch.tensor(list(rows[kinds["ClassLabel"]]))
        reader = _Rows(f"{name}, {ours}", picture, (channels, side, side))
        splits[ours] = _split(reader, labels, tuple(features[kinds["ClassLabel"]].names))
    return splits


def _labels(pairs: Any, source: str) -> Tensor:
    """The classes of all pairs: from a list that many sets keep, or by going through them."""
    lists = (getattr(pairs, name, None) for name in ("targets", "labels", "_labels"))
    kept = next((values for values in lists if values is not None and len(values) == len(pairs)), None)
    labels = torch.as_tensor([pairs[i][1] for i in range(len(pairs))] if kept is None else kept)
    if labels.ndim != 1 or labels.is_floating_point() or not isinstance(pairs[0][0], Image.Image):
        raise ValueError(f"{source} does not give pictures, each with one class; read it in Python")
    return labels.long()


def _channels(picture: Callable[[int], Any], count: int) -> int:
    return 1 if all(says_grey(picture(i)) for i in range(min(count, _LOOKED_AT))) else 3


def _split(reader: _Rows, labels: Tensor, classes: tuple[str, ...]) -> AnySplit:
    """In memory where it is small, which decodes every picture before the first step."""
    if len(labels) * torch.Size(reader.input_size).numel() <= MEMORY_LIMIT:
        return Split(torch.stack([reader(i) for i in range(len(labels))]), labels, classes)
    return Streamed(reader, torch.arange(len(labels)), labels, reader.input_size, classes)
