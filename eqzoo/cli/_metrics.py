"""Metrics of a classifier as rows of a table, and the thresholds that some are measured at."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluation.metrics import averaged_classes

FEW_CLASSES = 12  # that a line or two, or a table as wide as a terminal, hold
_WIDTH = 80  # of a terminal, in characters


def metric_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """What `eqzoo.evaluation.measure` found, a row for each metric of all classes."""
    which = averaged_classes(found["classes"])
    low, high = found["accuracy_interval"]
    rows = [
        ["accuracy", f"{found['accuracy']:.2f} % (95 % interval {low:.1f} to {high:.1f} %)"],
        [f"mean recall of {which}", f"{found['balanced_accuracy']:.2f} %"],
        [f"mean F1 of {which}", f"{found['macro_f1']:.2f} %"],
    ]
    if found.get("macro_auc") is not None:
        rows.append([f"mean AUC of {which}", f"{found['macro_auc']:.2f} %"])
    if "rotation_curve" not in found:
        return rows
    curve, kept = found["rotation_curve"]["accuracy"], found["same_class_at_all_quarter_rotations"]
    of_curve, of_kept = (f", of {n:,} images" for n in (found["rotation_curve"]["images"], found["rotated_images"]))
    return [
        *rows,
        ["accuracy on rotated images", f"{min(curve):.2f} to {max(curve):.2f} %{of_curve}"],
        ["same prediction at all 90° rotations", f"{kept:.2f} %{of_kept}"],
    ]


def class_rows(classes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A heading and, for each class that has images or is predicted, its scores."""
    rows = [["class", "precision", "recall", "F1", "AUC", "images"]]
    for row in classes:
        if row["images"] or row["precision"] is not None:
            scores = ["" if row[key] is None else f"{row[key]:.2f} %" for key in ("precision", "recall", "f1", "auc")]
            rows.append([row["name"], *scores, f"{row['images']:,}"])
    return rows


def confusion_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """The number of images by true and predicted class, with a heading; none for more than `FEW_CLASSES`.

    Where the names are too long for a terminal, the columns have numbers and the rows begin with them.
    """
    names = [row["name"] for row in found["classes"]]
    if len(names) > FEW_CLASSES:
        return []
    heading, rows = names, names
    if sum(map(len, names)) + max(map(len, names)) + 3 * len(names) > _WIDTH:
        heading, rows = [str(i) for i in range(len(names))], [f"{i} {name}" for i, name in enumerate(names)]
    counts = [[name, *map(str, row)] for name, row in zip(rows, found["confusion"], strict=True) if sum(row)]
    return [["true \\ predicted", *heading], *counts]


def threshold_rows(thresholds: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A heading and, for each class with a threshold, how it is told from all others."""
    rows = [["found where the probability is at least", "", "recall", "specificity", "precision", "found"]]
    for row in thresholds:
        scores = ["" if row[key] is None else f"{row[key]:.2f} %" for key in ("recall", "specificity", "precision")]
        rows.append([row["name"], f"{row['threshold']:g}", *scores, f"{row['found']:,}"])
    return rows


def thresholds_of(items: Sequence[tuple[str, float]]) -> dict[str, float]:
    """The thresholds by class.

    Raises:
        ValueError: If a class comes twice.
    """
    found = dict(items)
    if len(found) < len(items):
        raise ValueError("--threshold takes each class once")
    return found
