"""Thresholds of probabilities, for classes that must not be missed or must not be found wrongly."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.folder import composed, some_names
from .metrics import percent


def check_thresholds(
    thresholds: Mapping[str, float], classes: Sequence[str], network: str, choosing: bool = False
) -> None:
    """Raises ValueError unless thresholds are of classes of a network, between 0 and 1, and to choose not of all."""
    for name, value in thresholds.items():
        if composed(name) not in map(composed, classes):
            raise ValueError(
                f"a threshold is given for {name!r}, and the classes of {network} are {some_names(classes)}"
            )
        if not 0 < value < 1:
            raise ValueError(f"a threshold is a probability above 0 and below 1, got {value} of {name!r}")
    if choosing and thresholds and len(thresholds) == len(classes):
        raise ValueError("all classes have a threshold, so an image that reaches none has no class; leave one out")


def chosen_classes(probabilities: Tensor, classes: Sequence[str], thresholds: Mapping[str, float]) -> Tensor:
    """The class of each image, ``(n,)``.

    A class with a threshold is chosen where its probability reaches it, of several such the most probable one;
    elsewhere the most probable class without one. Without thresholds it is the most probable class.

    Args:
        probabilities: ``(n, classes)``.
        classes: The names of the classes.
        thresholds: The thresholds of some of them, above 0 and below 1; not of all (`check_thresholds`).

    Example:
        >>> p = torch.tensor([[0.7, 0.3], [0.9, 0.1]])
        >>> chosen_classes(p, ("fine", "defect"), {"defect": 0.2})
        tensor([1, 0])
    """
    given, names = {composed(name): value for name, value in thresholds.items()}, list(map(composed, classes))
    with_one = torch.tensor([name in given for name in names])
    limits = torch.tensor([given.get(name, 0.0) for name in names], dtype=probabilities.dtype)
    reached = (probabilities >= limits) & with_one
    allowed = torch.where(reached.any(1, keepdim=True), reached, ~with_one)
    return probabilities.masked_fill(~allowed, -1).argmax(1)


def threshold_scores(
    probabilities: Tensor, labels: Tensor, classes: Sequence[str], thresholds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """How well a class is told from all others where it is found by its threshold, for each threshold.

    Args:
        probabilities: ``(n, classes)``.
        labels: The true classes, ``(n,)``.
        classes: The names of the classes.
        thresholds: The thresholds of some of them.

    Returns:
        For each its ``name`` and ``threshold``; the number of images that reach it, ``found``; and in percent
        ``recall`` (sensitivity, of the images of the class those that are found), ``specificity`` (of the others those
        that are not) and ``precision`` (of those found the images of the class); None where there are no such images.
    """
    rows = []
    for name, threshold in thresholds.items():
        label = list(map(composed, classes)).index(composed(name))
        found, actual = probabilities[:, label] >= threshold, labels == label
        rows.append(
            {
                "name": classes[label],
                "threshold": threshold,
                "found": int(found.sum()),
                "recall": percent((found & actual).sum(), actual.sum()),
                "specificity": percent((~found & ~actual).sum(), (~actual).sum()),
                "precision": percent((found & actual).sum(), found.sum()),
            }
        )
    return rows
