"""Splits of a data set, in memory or streamed: batches, held-out parts and subsets."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .images import preprocess

__all__ = [
    "AnySplit",
    "Split",
    "Streamed",
    "batches",
    "check",
    "hold_out",
    "num_classes",
    "numbered",
    "part_of",
    "per_class",
    "resized",
    "stratified",
]

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
        said, of_image = str(error), isinstance(error, ValueError | FileNotFoundError)
        if "DataLoader worker" in said:
            said = said.strip().splitlines()[-1].removeprefix(f"{type(error).__name__}: ")
        elif not of_image:
            raise
        # Without the file the labels are others, which a run is recognized by.
        advice = "; repair the file, or replace it under the same name: a run on other images starts anew"
        raise ValueError(said + advice * of_image) from error


def hold_out(splits: Mapping[str, AnySplit], size: int | None = None) -> dict[str, AnySplit]:
    """Holds out a validation split from the training split, if there is none; the same images at every call.

    Args:
        splits: ``train`` and possibly others.
        size: The number of images to hold out; None for a tenth, 0 for none.

    Raises:
        ValueError: If no training image would be left, or none of a class; or a size is given and there is a validation
            split already.
    """
    if "valid" in splits:
        if size is not None:
            raise ValueError(
                f"the data set has {len(splits['valid'])} validation images of its own, so none are held out: omit "
                f"valid_size, got {size}"
            )
        return dict(splits)
    count = len(splits["train"])
    size = max(1, count // 10) if size is None else size
    if not 0 <= size < count:
        raise ValueError(f"valid_size is at least 0 and less than the {count} training images, got {size}")
    if size == 0:
        return dict(splits)
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
        ValueError: If the fraction is not between 0 and 1, or a class has no image left for the first part.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction is between 0 and 1, got {fraction}")
    order = torch.from_numpy(np.random.RandomState(DRAW_SEED).permutation(len(split)))
    labels = split.labels.cpu()[order]
    first, second = [], []
    for label in labels.unique().tolist():
        of_class = order[labels == label]
        count = max(1, round(fraction * len(of_class)))
        if count >= len(of_class):
            name = split.classes[label] if split.classes else label
            raise ValueError(
                f"class {name!r} has too few images to split: {count} of {len(of_class)} would be held out; add "
                "images, hold out fewer or none, or provide the folders train, val and test yourself"
            )
        first.append(of_class[count:])
        second.append(of_class[:count])
    return part_of(split, torch.cat(first).sort().values), part_of(split, torch.cat(second).sort().values)


def num_classes(splits: Mapping[str, AnySplit]) -> int:
    """The number of classes: the largest training label plus 1."""
    return int(splits["train"].labels.max()) + 1


def check_types(split: AnySplit, source: str, which: str = "these") -> None:
    """Raises ValueError unless images are ``(n, channels, height, width)`` uint8 and labels ``(n,)`` int64.

    Or if names of classes or files are no strings, or two classes have the same name. TypeError if it is no split, or
    its images are no tensor.
    """
    if not isinstance(split, Split | Streamed):
        raise TypeError(f"{source}: {which} are an eqzoo.data.Split(images, labels), got {type(split).__name__}")
    if isinstance(split, Split):
        if not isinstance(split.images, Tensor):
            way = "; torch.from_numpy makes one of an array" * isinstance(split.images, np.ndarray)
            raise TypeError(f"{source}: images are a tensor; {which} are of type {type(split.images).__name__}{way}")
        if split.images.dtype != torch.uint8:
            raise ValueError(f"{source}: images are uint8, 0 to 255; {which} are {split.images.dtype}")
        if split.images.ndim != 4:
            shape = tuple(split.images.shape)
            raise ValueError(f"{source}: images are (n, channels, height, width); {which} have shape {shape}")
    if not isinstance(split.labels, torch.Tensor) or split.labels.dtype != torch.int64 or split.labels.ndim != 1:
        got = f"{split.labels.dtype} {tuple(split.labels.shape)}" if isinstance(split.labels, torch.Tensor) else ""
        raise ValueError(f"{source}: labels are int64 (n,); {which} are {got or f'a {type(split.labels).__name__}'}")
    for kind, names in (("classes", split.classes), ("files", split.files)):
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            got = repr(names) if len(repr(names)) < 80 else f"{repr(names)[:80]}..."
            raise ValueError(
                f"{source}: {kind} are names, {kind}=tuple(map(str, names)) makes them, () is none; got {got}"
            )
    if twice := [name for name, count in Counter(split.classes).items() if count > 1]:
        raise ValueError(f"{source}: classes have different names, and several are named {twice[0]!r}; rename them")


def check_files(split: AnySplit, source: str) -> None:
    """Raises ValueError unless each image has a file, or none has."""
    if split.files and len(split.files) != len(split):
        raise ValueError(
            f"{source} has {len(split):,} images and {len(split.files):,} files; each image has one, or files is ()"
        )


def check(splits: Mapping[str, AnySplit], source: str) -> None:
    """Raises ValueError unless all splits have uint8 images, of one shape, and labels 0, 1, 2 ... without gaps.

    Where splits have names of classes, these are the same and in the same order.
    """
    if "train" not in splits or not splits.keys() <= {"train", "valid", "test"}:
        raise ValueError(
            f"{source}: the splits are train and possibly valid and test, got {', '.join(splits) or 'none'}"
        )
    for name, split in splits.items():
        check_types(split, source, f"those of {name}")
        check_files(split, f"{source}: {name}")
    shapes = {name: split.shape for name, split in splits.items()}
    for name, split in splits.items():
        if not len(split):
            raise ValueError(f"{source}: the {name} split has no images")
        if split.shape != shapes["train"]:
            raise ValueError(f"{source}: images have to be of one size, got {shapes} (channels, height, width)")
        if isinstance(split, Split) and len(split.images) != len(split.labels):
            raise ValueError(f"{source}: {name} has {len(split.images)} images and {len(split.labels)} labels")
    present = splits["train"].labels.unique().tolist()
    if present != list(range(len(present))):
        missing = next(i for i, label in enumerate([*present, None]) if i != label)
        raise ValueError(
            f"{source}: labels are 0, 1, 2 ... without gaps; the training labels go from {present[0]} to "
            f"{present[-1]}, and {missing} is not among them"
        )
    if (names := splits["train"].classes) and len(names) != len(present):
        empty = f", and no images of {', '.join(map(repr, names[len(present) :][:5]))}" * (len(names) > len(present))
        raise ValueError(
            f"{source}: there are {len(names)} names for {len(present)} classes{empty}; give each class one, in the "
            "order of the labels"
        )
    for name, split in splits.items():
        if names and split.classes and tuple(split.classes) != tuple(names):
            raise ValueError(
                f"{source}: the classes of {name} are {', '.join(split.classes)}, those of train "
                f"{', '.join(names)}; label 0 is the first class, and so on, in every split"
            )
        if split.labels.min() < 0 or split.labels.max() >= len(present):
            raise ValueError(
                f"{source}: labels of {name} go from {int(split.labels.min())} to {int(split.labels.max())}, those of "
                f"train from 0 to {len(present) - 1}"
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
        return replace(split, images=torch.cat([_scaled(part, size) for part in split.images.split(_BATCH)]))
    return replace(split, read=_Resized(split, size), shape=(channels, *size))


class _Resized:
    """Reads an image and resizes it."""

    def __init__(self, split: Streamed, size: tuple[int, int]) -> None:
        self.read, self.size = split.read, size

    def __call__(self, index: int) -> Tensor:
        return _scaled(self.read(index), self.size)


def _scaled(images: Tensor, size: tuple[int, int]) -> Tensor:
    return preprocess(images.float(), size).round().to(torch.uint8)
