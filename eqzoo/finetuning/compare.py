"""Comparison of fine-tuned networks on the same test images."""

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cards import Checkpoint, read_checkpoint
from ..data.user_data import FOLDERS
from ..evaluation.metrics import scores
from .write import PREDICTIONS_NAME

_RESAMPLES = 1000  # of the images, with replacement, for the intervals of differences


@dataclass(frozen=True)
class _Predictions:
    """The evaluated images of a folder's predictions.csv: files, class names, true and predicted classes."""

    files: list[str]
    names: list[str]
    labels: Tensor
    predicted: Tensor


def compare(*folders: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Networks that were fine-tuned and evaluated on the same images, the first one beside each of the others.

    Args:
        *folders: The folders that `eqzoo.finetune` wrote, two or more.

    Returns:
        For each its ``folder``, ``checkpoint``, the split that it was ``evaluated_on`` and its number of ``images``,
        ``accuracy`` and ``macro_f1`` in percent,
        ``same_class_at_all_quarter_rotations`` and ``lowest_over_angles`` in percent, of ``rotated_images`` and
        ``images_over_angles`` of the test images; ``images_per_second``,
        ``multiply_adds``, ``megabytes`` and ``training_minutes``; and from the second one on the differences to the
        first, ``accuracy_difference`` and ``macro_f1_difference`` in points, each with a 95 % ``..._interval`` by
        resampling the images (paired bootstrap), and ``p_value``, that of McNemar's exact test: how likely so unequal
        numbers of images that one of the two alone classifies correctly are, if both are equally accurate; and
        ``other_pixels``, whether images of the same names and the same size have other pixels.

    Raises:
        FileNotFoundError: If a folder is not that of a finished fine-tuning.
        ValueError: If there are fewer than two, or they were evaluated on other images or classes.

    References:
        Note on the sampling error of the difference between correlated proportions (McNemar, 1947)
        https://doi.org/10.1007/BF02295996
    """
    if len(folders) < 2:
        raise ValueError(f"two or more folders are compared, got {len(folders)}")
    paths = [Path(folder) for folder in folders]
    checkpoints = [read_checkpoint(path) for path in paths]
    classes = [[str(row["name"]) for row in checkpoint.results["classes"]] for checkpoint in checkpoints]
    named = next((names for names in classes if not _numbered(names)), [])  # those of others may still be numbers
    classes = [named if _numbered(names) and len(names) == len(named) else names for names in classes]
    found = [_read(*each) for each in zip(paths, checkpoints, classes, strict=True)]
    first = found[0]
    for path, other in zip(paths, found, strict=True):
        if (other.files, other.names) != (first.files, first.names) or not torch.equal(other.labels, first.labels):
            raise ValueError(f"{path} was evaluated on other images or classes than {paths[0]}; use the same split")
    rows = [_facts(path, checkpoint) for path, checkpoint in zip(paths, checkpoints, strict=True)]
    pixels = [_pixels(checkpoint) for checkpoint in checkpoints]
    for row, other, (size, digest) in zip(rows[1:], found[1:], pixels[1:], strict=True):
        row |= _difference(first, other)
        row["other_pixels"] = size == pixels[0][0] and None not in (digest, pixels[0][1]) and digest != pixels[0][1]
    return rows


def _numbered(names: Sequence[str]) -> bool:
    """Whether the names of classes are numbers, which names may be given to later."""
    return all(map(str.isdecimal, names))


def _read(folder: Path, checkpoint: Checkpoint, current: Sequence[str]) -> _Predictions:
    """The predictions for the split that the results are of, with these names of the classes in their order."""
    part = FOLDERS[checkpoint.results["evaluated_on"]]
    if not (folder / PREDICTIONS_NAME).is_file():
        raise FileNotFoundError(
            f"{folder} has no {PREDICTIONS_NAME}, whose predictions are compared: a fine-tuning writes it, publishing "
            "leaves it out. Where it was deleted, the command of the run writes it again"
        )
    with (folder / PREDICTIONS_NAME).open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = sorted((row for row in csv.DictReader(file) if row["split"] == part), key=lambda row: row["file"])
    columns, names = [*rows[0]][4:], sorted(current)
    written = columns if _numbered(columns) else current  # numbers may have been given names since
    numbers = {name: names.index(now) for name, now in zip(written, current, strict=True)}
    labels, predicted = (torch.tensor([numbers[row[key]] for row in rows]) for key in ("class", "prediction"))
    return _Predictions([row["file"] for row in rows], names, labels, predicted)


def _facts(folder: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    r = checkpoint.results
    kept = ("accuracy", "macro_f1", "same_class_at_all_quarter_rotations", "rotated_images", "multiply_adds")
    return {
        "folder": str(folder),
        "checkpoint": checkpoint.name,
        "evaluated_on": r["evaluated_on"],
        "images": r["images"][r["evaluated_on"]],
        **{key: r[key] for key in kept},
        "lowest_over_angles": min(r["rotation_curve"]["accuracy"]),
        "images_over_angles": r["rotation_curve"]["images"],
        "images_per_second": r["throughput"]["images_per_second"],
        "megabytes": round(checkpoint.size / 1e6, 2),
        "training_minutes": round(r["training_seconds"] / 60, 1),
    }


def _pixels(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The size of the images that a network sees, and the digest of those that it was evaluated on."""
    digests = checkpoint.training.get("data_sha256") or {}
    return checkpoint.config["pretrained_cfg"]["input_size"], digests.get(checkpoint.results["evaluated_on"])


def _difference(first: _Predictions, other: _Predictions) -> dict[str, Any]:
    """What the second is better by, with intervals, and McNemar's p-value."""
    right = torch.stack([first.predicted == first.labels, other.predicted == other.labels])
    draw = torch.Generator().manual_seed(0)
    found = []
    for number in range(1 + _RESAMPLES):
        count = len(first.labels)
        index = torch.randint(count, (count,), generator=draw) if number else torch.arange(count)
        accuracy = 100 * right[:, index].double().mean(1)
        f1 = [scores(first.labels[index], each.predicted[index], first.names)["macro_f1"] for each in (first, other)]
        found.append((float(accuracy[1] - accuracy[0]), f1[1] - f1[0]))
    values = torch.tensor(found, dtype=torch.float64)
    bounds = values[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
    row: dict[str, Any] = {}
    for column, key in enumerate(("accuracy", "macro_f1")):
        row[f"{key}_difference"] = round(float(values[0, column]), 2)
        row[f"{key}_difference_interval"] = [round(float(bound), 2) for bound in bounds[:, column]]
    alone = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
    return row | {"p_value": _mcnemar(*alone)}


def _mcnemar(one: int, other: int) -> float:
    """``2 P(X <= min(b, c))`` for a binomial X of ``b + c`` throws of a fair coin, at most 1."""
    count = one + other
    tail = sum(math.comb(count, k) for k in range(min(one, other) + 1))
    return min(1.0, 2 * tail / 2**count)
