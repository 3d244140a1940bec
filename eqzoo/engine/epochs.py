"""The epochs of a run, by the rows of its log: which one is kept, and when the run has ended."""

from collections.abc import Mapping
from typing import Any

from .recipe import Recipe

__all__ = ["best_row", "is_finished", "patience_is_over", "selection_key"]


def best_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the epoch whose weights are kept, the highest by `selection_key`."""
    return max(rows, key=selection_key)


def selection_key(row: Mapping[str, Any]) -> tuple[bool, float, float, int]:
    """Sort key of model selection: validation accuracy, then lower validation loss, then the later epoch.

    Where the loss weights classes, the mean recall of the classes counts in place of the accuracy, which an epoch that
    predicts the largest class alone may have. Epochs on images at half size rank below all others. Without validation
    images the last epoch has the highest rank.

    Args:
        row: Its ``epoch``, ``valid_accuracy`` and, where they are known, ``valid_recall``, ``valid_loss`` and
            ``half_size``.
    """
    full_size = not row.get("half_size", False)
    return (
        full_size,
        row.get("valid_recall", row["valid_accuracy"]) or 0.0,
        -(row.get("valid_loss") or 0.0),
        row["epoch"],
    )


def is_finished(recipe: Recipe, rows: list[dict[str, Any]]) -> bool:
    """Whether a log is that of a run that has ended, by its recipe or early."""
    return bool(rows) and (
        len(rows) >= recipe.epochs or patience_is_over(recipe, best_row(rows)["epoch"], rows[-1]["epoch"])
    )


def patience_is_over(recipe: Recipe, best: int, epoch: int) -> bool:
    """Whether a run ends early after an epoch, where ``best`` is the best epoch. Epochs at half size do not count."""
    return recipe.patience is not None and epoch - max(best, recipe.half_size_epochs) >= recipe.patience
