"""A table of predictions: the class and the probabilities of each image, to look at errors and choose thresholds."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from torch import Tensor

from ..data import AnySplit
from ..data.splits import numbered

_COLUMNS = ("file", "class", "prediction")
_BATCH = 1000  # images whose probabilities are computed together


def each_prediction(split: AnySplit, logits: Tensor, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The ``file``, ``class``, ``prediction`` and ``probabilities`` of each image.

    Where images have no files, ``file`` is their number in the split, from 0.

    Args:
        split: The images.
        logits: ``(n, classes)``.
        names: The names of the classes.
    """
    files, labels = numbered(split).files, split.labels.tolist()
    for start in range(0, len(labels), _BATCH):
        some = slice(start, start + _BATCH)
        rows, predicted = logits[some].double().softmax(1).tolist(), logits[some].argmax(1).tolist()
        for file, label, guess, row in zip(files[some], labels[some], predicted, rows, strict=True):
            yield {"file": file, "class": names[label], "prediction": names[guess], "probabilities": row}


def write_predictions(
    to: TextIO, names: Sequence[str], parts: Mapping[str | None, Iterable[Mapping[str, Any]]]
) -> None:
    """Writes comma-separated values: a line for each image, with the probability of each class.

    Args:
        to: Where they are written.
        names: The names of the classes, which head the columns of their probabilities; behind "probability" where one
            is that of another column.
        parts: What `each_prediction` gives, of each split by its name, which is the column ``split``; or of images
            without splits, None, in which case there is no such column.
    """
    first = [] if None in parts else ["split"]
    prefix = "probability " if {"split", *_COLUMNS} & {*names} else ""
    writer = csv.writer(to, lineterminator="\n")
    writer.writerow([*first, *_COLUMNS, *(prefix + name for name in names)])
    for part, rows in parts.items():
        for row in rows:
            probabilities = (f"{value:.6g}" for value in row["probabilities"])
            writer.writerow([*[part] * len(first), *(row[key] for key in _COLUMNS), *probabilities])
