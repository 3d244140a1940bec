"""The parts of a data set: in memory, or read while it is gone through; held-out and reduced ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["AnySplit", "Split", "Streamed", "batches", "check", "hold_out", "num_classes", "per_class", "stratified"]

DRAW_SEED = 2016  # of the pictures held out, and of those kept of each class: the same for all runs


@dataclass(frozen=True)
class Split:
    """Pictures and their classes, in memory.

    Args:
        images: ``(n, channels, height, width)`` uint8.
        labels: ``(n,)`` int64.
        classes: The names of the classes, where they have any.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...] = ()

    def __getitem__(self, index: Tensor | slice) -> "Split":
        return replace(self, images=self.images[index], labels=self.labels[index])

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a picture."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def to(self, device: torch.device) -> "Split":
        """The same on a device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True)
class Streamed(Dataset[Tensor]):
    """Pictures that stay where they are until they are needed, and their classes.

    Args:
        read: Gives picture i, ``(channels, height, width)`` uint8; runs in worker processes.
        places: ``(n,)`` int64, the picture that ``read`` knows by each number.
        labels: ``(n,)`` int64.
        shape: Channels, height and width of a picture.
        classes: The names of the classes, where they have any.
    """

    read: Callable[[int], Tensor]
    places: Tensor
    labels: Tensor
    shape: tuple[int, int, int]
    classes: tuple[str, ...] = ()

    def __getitem__(self, index: Tensor | slice | int) -> "Streamed | Tensor":  # type: ignore[override]
        if isinstance(index, int):
            return self.read(int(self.places[index]))
        return replace(self, places=self.places[index], labels=self.labels[index])

    def __len__(self) -> int:
        return len(self.labels)


AnySplit = Split | Streamed


def batches(split: AnySplit, indices: Iterable[Tensor], workers: int = 0, pin: bool = False) -> Iterator[Tensor]:
    """The pictures of each batch of indices, ``(n, channels, height, width)`` uint8.

    Args:
        split: In memory, it is indexed where it is; else processes read ahead.
        indices: The batches.
        workers: The processes that read; 0 reads here.
        pin: Whether to put what was read into pinned memory, for a GPU.
    """
    if isinstance(split, Split):
        return (split.images[index] for index in indices)
    order = [index.tolist() for index in indices]
    # A generator of its own: the loader must not draw from the one that orders pictures and drops activations.
    loader = DataLoader(
        split,
        batch_sampler=order,
        num_workers=min(workers, len(order)),
        collate_fn=torch.stack,
        pin_memory=pin,
        generator=torch.Generator(),
    )
    return iter(loader)


def hold_out(splits: Mapping[str, AnySplit], size: int | None = None) -> dict[str, AnySplit]:
    """Splits with validation pictures drawn from the training ones, where there are none yet.

    The draw is the same for every run.

    Args:
        splits: ``train`` and others.
        size: How many to draw; None for a tenth, 0 for none.

    Raises:
        ValueError: If no training picture would be left, or there are validation pictures and a size is asked for.
    """
    if "valid" in splits:
        if size is not None:
            raise ValueError(
                f"the data set has {len(splits['valid'])} validation pictures of its own, so that none are held out; "
                f"leave valid_size away, got {size}"
            )
        return dict(splits)
    count = len(splits["train"])
    size = max(1, count // 10) if size is None else size
    if size >= count:
        raise ValueError(f"valid_size is less than the {count} training pictures, got {size}")
    if size == 0:
        return dict(splits)
    # RandomState, because its streams are frozen for good; torch's and numpy's new generators promise none.
    order = torch.from_numpy(np.random.RandomState(DRAW_SEED).permutation(count))
    train = splits["train"]
    return {"train": _part(train, order[size:]), "valid": _part(train, order[:size])} | {
        name: split for name, split in splits.items() if name != "train"
    }


def per_class(split: AnySplit, count: int) -> AnySplit:
    """The same number of pictures of each class, drawn the same for every run; fewer are among more.

    Raises:
        ValueError: If a class has fewer.
    """
    smallest = int(split.labels.bincount().min())
    if count > smallest:
        raise ValueError(f"samples_per_class is at most {smallest}, the size of the smallest class, got {count}")
    order = torch.from_numpy(np.random.RandomState(DRAW_SEED).permutation(len(split)))
    labels = split.labels[order]
    chosen = [order[labels == label][:count] for label in labels.unique()]
    return _part(split, torch.cat(chosen).sort().values)


def stratified(split: AnySplit, fraction: float) -> tuple[AnySplit, AnySplit]:
    """Two parts of a split, the second with a fraction of each class, rounded, and at least one picture of each.

    The draw is the same for every run.

    Raises:
        ValueError: If the fraction is not between 0 and 1, or would leave no picture of a class in the first part.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"a part of a split is between 0 and 1 of it, got {fraction}")
    order = torch.from_numpy(np.random.RandomState(DRAW_SEED).permutation(len(split)))
    labels = split.labels[order]
    first, second = [], []
    for label in labels.unique().tolist():
        of_class = order[labels == label]
        count = max(1, round(fraction * len(of_class)))
        if count >= len(of_class):
            name = split.classes[label] if split.classes else label
            raise ValueError(
                f"class {name!r} has too few pictures to be divided: {len(of_class)} left to hold out {count} of; give "
                "it more, or folders train, val and test of your own"
            )
        first.append(of_class[count:])
        second.append(of_class[:count])
    return _part(split, torch.cat(first).sort().values), _part(split, torch.cat(second).sort().values)


def num_classes(splits: Mapping[str, AnySplit]) -> int:
    """The number of classes of the training pictures: their largest label and 1 more."""
    return int(splits["train"].labels.max()) + 1


def check(splits: Mapping[str, AnySplit], source: str) -> None:
    """Raises ValueError unless there are pictures of one shape in all splits, with classes from 0 without gaps."""
    shapes = {name: split.shape for name, split in splits.items()}
    for name, split in splits.items():
        if not len(split):
            raise ValueError(f"{source}: the {name} split holds no pictures")
        if split.shape != shapes["train"]:
            raise ValueError(f"{source}: pictures of one size are needed, got {shapes} (channels, height, width)")
        if isinstance(split, Split) and len(split.images) != len(split.labels):
            raise ValueError(f"{source}: {name} has {len(split.images)} pictures and {len(split.labels)} labels")
    present = splits["train"].labels.unique().tolist()
    if present != list(range(len(present))):
        missing = next(i for i, label in enumerate([*present, None]) if i != label)
        raise ValueError(
            f"{source}: labels are 0, 1, 2 ... without gaps; the training labels go from {present[0]} to "
            f"{present[-1]}, and {missing} is not among them"
        )
    for name, split in splits.items():
        if split.labels.min() < 0 or split.labels.max() >= len(present):
            raise ValueError(
                f"{source}: labels of {name} go from {int(split.labels.min())} to {int(split.labels.max())}, those of "
                f"train from 0 to {len(present) - 1}"
            )


def _part(split: AnySplit, index: Tensor) -> AnySplit:
    part = split[index]
    assert isinstance(part, Split | Streamed)
    return part
