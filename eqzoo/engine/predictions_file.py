"""A table of predictions: the class and the probabilities of each image, to look at errors and choose thresholds."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..data import AnySplit
from ..data.splits import numbered

__all__ = ["each_prediction", "predictions_csv"]

_COLUMNS = ("file", "class", "prediction")


def each_prediction(split: AnySplit, logits: Tensor, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The ``file`` of each image, or its number where images have no files, its ``class``, ``prediction`` and the
    ``probabilities`` of the classes.

    Args:
        split: The images.
        logits: ``(n, classes)``.
        names: The names of the classes.
    """
    probabilities = logits.double().softmax(1)
    files, labels, predicted = numbered(split).files, split.labels.tolist(), logits.argmax(1).tolist()
    for file, label, guess, row in zip(files, labels, predicted, probabilities.tolist(), strict=True):
        yield {"file": file, "class": names[label], "prediction": names[guess], "probabilities": row}


def predictions_csv(
    names: Sequence[str], parts: Mapping[str, Sequence[Mapping[str, Any]]], with_split: bool = False
) -> str:
    """Comma-separated values: a line for each image, with the probability of each class.

    Args:
        names: The names of the classes, which head the columns of their probabilities; behind "probability" where one
            is that of another column.
        parts: Lists of what `each_prediction` gives.
        with_split: Whether the first column, ``split``, has the names of these.
    """
    first = ("split",) * with_split
    heading = [*first, *_COLUMNS]
    prefix = "probability " if {"split", *_COLUMNS} & {*names} else ""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*heading, *(prefix + name for name in names)])
    for part, rows in parts.items():
        for row in rows:
            writer.writerow([part] * with_split + [row[key] for key in _COLUMNS] + row["probabilities"])
    return text.getvalue()
