"""Splits of a data set, in memory or streamed: batches, held-out parts and subsets."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .images import preprocess_uint8

_BATCH = 256  # images that are resized together
DRAW_SEED = 2016  # of all draws here: runs are trained and evaluated on the same images


@dataclass(frozen=True, repr=False)
class Split:
    """Images and labels in memory.

    Args:
        images: ``(n, channels, height, width)`` uint8.
        labels: ``(n,)`` int64.
        classes: The names of the classes, or an empty tuple.
        files: The file of each image, below the folder of all, or its number; or an empty tuple.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def __getitem__(self, index: Tensor | slice) -> "Split":
        files = _chosen(self.files, index)
        return replace(self, images=self.images[index], labels=self.labels[index], files=files)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return _described(self)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def to(self, device: torch.device) -> "Split":
        """The split on another device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, repr=False)
class Streamed(Dataset[Tensor]):
    """Images that are read on demand, and labels.

    Args:
        read: Reads an image by its number, ``(channels, height, width)`` uint8; runs in worker processes.
        places: ``(n,)`` int64, the number under which ``read`` knows each image of the split.
        labels: ``(n,)`` int64.
        shape: Channels, height and width of an image.
        classes: The names of the classes, or an empty tuple.
        files: The file of each image, below the folder of all, or its number; or an empty tuple.
    """

    read: Callable[[int], Tensor]
    places: Tensor
    labels: Tensor
    shape: tuple[int, int, int]
    classes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def __getitem__(self, index: Tensor | slice | int) -> "Streamed | Tensor":  # type: ignore[override]
        if isinstance(index, int):
            return self.read(int(self.places[index]))
        files = _chosen(self.files, index)
        return replace(self, places=self.places[index], labels=self.labels[index], files=files)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return _described(self)


AnySplit = Split | Streamed


def _chosen(files: tuple[str, ...], index: Tensor | slice) -> tuple[str, ...]:
    index = index.cpu() if isinstance(index, Tensor) else index
    return tuple(files[i] for i in torch.arange(len(files))[index].tolist()) if files else ()


def numbered(split: AnySplit) -> AnySplit:
    """A split whose images are known by their number, from 0, if they have no files."""
    return split if split.files else replace(split, files=tuple(map(str, range(len(split)))))


def _described(split: AnySplit) -> str:
    """A split, described in one line; its images alone would fill the screen."""
    known = f"{len(split.classes)} named classes" if split.classes else "classes without names"
    images = "image" if len(split) == 1 else "images"
    return f"{type(split).__name__}({len(split):,} {images} of {' x '.join(map(str, split.shape))}, {known})"


def batches(split: AnySplit, indices: Iterable[Tensor], workers: int = 0, pin: bool = False) -> Iterator[Tensor]:
    """The images of each batch of indices, ``(n, channels, height, width)`` uint8.

    Args:
        split: The split; one in memory is indexed on its device, a streamed one is read ahead by worker processes.
        indices: The image indices of each batch.
        workers: The number of worker processes; 0 reads in this process.
        pin: Whether to return streamed images in pinned memory, for a GPU.

    Raises:
        ValueError: If a streamed image cannot be read, or a worker process ended.
    """
    if isinstance(split, Split):
        return (split.images[index] for index in indices)
    order = [index.tolist() for index in indices]
    # The loader draws a base seed: from its own generator, so that it does not advance the global one.
    loader = DataLoader(
        split,
        batch_sampler=order,
        num_workers=min(workers, len(order)),
        collate_fn=torch.stack,
        pin_memory=pin,
        generator=torch.Generator(),
    )
    return _with_readable_errors(iter(loader))


def _with_readable_errors(images: Iterator[Tensor]) -> Iterator[Tensor]:
    """The batches of a loader; the error of a worker process, which comes with its traceback, becomes its last line."""
    try:
        yield from images
    except (ValueError, OSError, RuntimeError) as error:
        # torch's frames hold the loader in a cycle with the error. As garbage its queues no longer tell the workers to
        # end, and each of these is waited for, five seconds.
        traceback.clear_frames(error.__traceback__)
        images = iter(())
        if "DataLoader worker" not in str(error):
            raise
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix(f"{type(error).__name__}: ")) from error


def hold_out(splits: Mapping[str, AnySplit], size: int | None = None) -> dict[str, AnySplit]:
    """Holds out a validation split from the training split, if there is none; the same images at every call.

    Args:
        splits: ``train`` and possibly others.
        size: The number of images to hold out; None for a tenth, 0 for none.

    Raises:
        ValueError: If no training image would be left, or none of a class; or a size is given and there is a validation
            split already.
    """
    count = len(splits["train"])
    if size is None:
        size = 0 if "valid" in splits else max(1, count // 10)
    if size and "valid" in splits:
        raise ValueError(f"there are {len(splits['valid'])} validation images already: leave valid_size={size} out")
    if size == 0:
        return dict(splits)
    if not 0 < size < count:
        raise ValueError(f"valid_size is at least 0 and less than the {count} training images, got {size}")
    # RandomState, whose streams are frozen; those of torch and of numpy's newer generators may change.
    order = torch.from_numpy(np.random.RandomState(DRAW_SEED).permutation(count))
    train = splits["train"]
    kept, before = train.labels[order[size:]].unique(), train.labels.unique()
    if gone := sorted(set(before.tolist()) - set(kept.tolist())):
        name = train.classes[gone[0]] if train.classes else gone[0]
        raise ValueError(
            f"class {name!r} has too few images: all {int((train.labels == gone[0]).sum())} would be held out for "
            "validation; add images, set valid_size=0, or provide the validation images yourself"
        )
    return {"train": part_of(train, order[size:]), "valid": part_of(train, order[:size])} | {
        name: split for name, split in splits.items() if name != "train"
    }


def per_class(split: AnySplit, count: int) -> AnySplit:
    """A subset with the same number of images of each class; smaller subsets are contained in larger ones.

    Raises:
        ValueError: If a class has fewer images than ``count``, or that is less than 1.
    """
    smallest = int(split.labels.bincount().min())
    if not 1 <= count <= smallest:
        raise ValueError(
            f"samples_per_class is at least 1 and at most {smallest}, the size of the smallest class, got {count}"
        )
    order = torch.from_numpy(np.random.RandomState(DRAW_SEED).permutation(len(split)))
    labels = split.labels.cpu()[order]
    chosen = [order[labels == label][:count] for label in labels.unique()]
    return part_of(split, torch.cat(chosen).sort().values)


def stratified(split: AnySplit, fraction: float) -> tuple[AnySplit, AnySplit]:
    """A stratified split in two: the second part has the given fraction of each class, at least one image.

    The parts are the same at every call.

    Raises:
        ValueError: If a class has no image left for one of the parts.
    """
    order = torch.from_numpy(np.random.RandomState(DRAW_SEED).permutation(len(split)))
    labels = split.labels.cpu()[order]
    first, second = [], []
    for label in labels.unique().tolist():
        of_class = order[labels == label]
        count = round(fraction * len(of_class)) or 1
        if not 0 < count < len(of_class):
            name = split.classes[label] if split.classes else label
            raise ValueError(
                f"class {name!r} has too few images to split: of {len(of_class)} that no other part has, {count} would "
                "be held out; add images, hold out fewer or none, or provide the folders train, val and test yourself"
            )
        first.append(of_class[count:])
        second.append(of_class[:count])
    return part_of(split, torch.cat(first).sort().values), part_of(split, torch.cat(second).sort().values)


def num_classes(splits: Mapping[str, AnySplit]) -> int:
    """The number of classes: the largest training label plus 1."""
    return int(splits["train"].labels.max()) + 1


def check_types(split: AnySplit, source: str) -> None:
    """Raises ValueError unless images are ``(n, channels, height, width)`` uint8 and labels ``(n,)`` int64."""
    labels, files, images = split.labels, split.files, getattr(split, "images", None)
    wrong = labels.dtype != torch.int64 or labels.ndim != 1 or len(files) not in (0, len(labels))
    if images is not None:
        wrong |= images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(labels)
    if wrong:
        got = "" if images is None else f"images {images.dtype} {tuple(images.shape)}, "
        raise ValueError(
            f"{source}: images are uint8 (n, channels, height, width), labels int64 (n,), and files n or no names, got "
            f"{got}labels {labels.dtype} {tuple(labels.shape)} and {len(files)} files"
        )


def check(splits: Mapping[str, AnySplit], source: str) -> None:
    """Raises ValueError unless all splits have uint8 images, of one shape, and labels 0, 1, 2 ... without gaps.

    Where splits have names of classes, these are the same and in the same order.
    """
    if "train" not in splits or not splits.keys() <= {"train", "valid", "test"}:
        raise ValueError(
            f"{source}: the splits are train and possibly valid and test, got {', '.join(splits) or 'none'}"
        )
    train = splits["train"]
    classes, names = len(train.labels.unique()), tuple(train.classes)
    for part, split in splits.items():
        check_types(split, f"{source}, {part}")
        if not len(split) or split.shape != train.shape:
            raise ValueError(f"{source}: splits have images of one size, got {splits}")
        least, most = int(split.labels.min()), int(split.labels.max())
        if least < 0 or most >= classes:
            raise ValueError(
                f"{source}: labels are 0, 1, 2 ... without gaps, and {classes} are among those of the training images; "
                f"those of {part} go from {least} to {most}"
            )
        if split.classes and (tuple(split.classes) != names or len({*names}) != classes):
            raise ValueError(
                f"{source}: the {classes} classes have different names, in one order in all splits; those of {part} "
                f"are {', '.join(map(repr, split.classes))}, those of train {', '.join(map(repr, names))}"
            )


def part_of(split: AnySplit, index: Tensor) -> AnySplit:
    """The images of a split with these numbers, in this order."""
    part = split[index]
    assert isinstance(part, Split | Streamed)
    return part


def resized(split: AnySplit, size: tuple[int, int]) -> AnySplit:
    """The images scaled to a height and width by `preprocess`, rounded to uint8; streamed ones as they are read."""
    channels, *before = split.shape
    if tuple(before) == size:
        return split
    if isinstance(split, Split):
        return replace(split, images=torch.cat([preprocess_uint8(part, size) for part in split.images.split(_BATCH)]))
    return replace(split, read=partial(_read_scaled, split.read, size), shape=(channels, *size))


def _read_scaled(read: Callable[[int], Tensor], size: tuple[int, int], index: int) -> Tensor:
    return preprocess_uint8(read(index), size)
