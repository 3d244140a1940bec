"""The results.json of a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from .._common import __version__
from ..analysis.cost import BATCH_SIZE, machine, multiply_adds, throughput, versions
from ..engine.epochs import best_row
from ..engine.recipe import Recipe
from ..equivariance import equivariance_error, equivariance_report
from ..evaluation.metrics import DIGITS
from ..groups import P4
from ..models import EquivariantNet

__all__ = ["checkpoint_results"]


def checkpoint_results(
    model: EquivariantNet,
    recipe: Recipe,
    *,
    checkpoint: str,
    split_sizes: Mapping[str, int],
    label_names: Sequence[str],
    command: str,
    rows: list[dict[str, Any]],
    test_error: float,
    metrics: Mapping[str, Any],
    rotated_images: int,
    training_seconds: int,
    weights_sha256: str,
    weights_dtype: str = "float32",
    test_errors: Sequence[float] = (),
    test_error_std: float | None = None,
    base_model: str | None = None,
    earlier: Sequence[Recipe] = (),
    preprocessing: Mapping[str, Any] | None = None,
    timed_batch: int = BATCH_SIZE,
    x: Tensor | None = None,
) -> dict[str, Any]:
    """What results.json holds: everything that a card, the README's table and the Hub show of a checkpoint.

    Args:
        model: The network with the weights of the checkpoint, in evaluation mode.
        recipe: The recipe that it was trained by.
        checkpoint: Its name, ``<model>.<data set>``.
        split_sizes: The number of images in each split.
        label_names: The names of the classes.
        command: The command that trains it.
        rows: The rows of log.jsonl.
        test_error: The error on the whole test split, in percent.
        metrics: The metrics on the test split: those of ``scores`` in metrics.py, without the confusion matrix,
            `eqzoo.evaluation.metrics.quarter_rotation_metrics` and ``rotation_curve``.
        rotated_images: The number of test images that were rotated by multiples of 90°.
        training_seconds: The training time, in seconds.
        weights_sha256: The hash of its weights file.
        weights_dtype: ``"float32"`` or ``"float16"``.
        test_errors: The test errors of all seeds, where there are several.
        test_error_std: Their standard deviation.
        base_model: The Hub repo of the checkpoint that it was fine-tuned from.
        earlier: The recipes of the runs whose weights it went on with; where one of them, or ``recipe``, has teachers,
            ``distilled`` is true.
        preprocessing: ``input_size``, ``mean`` and ``std``, where they are not those of the registered network.
        timed_batch: The number of images in a batch whose throughput is measured.
        x: The images on which the equivariance error is measured; None for noise.

    Returns:
        JSON values; errors and accuracies in percent. The machine and the versions of Python, torch and timm are those
        of the training, where the rows have them. ``valid_accuracies`` has a value for each epoch, those on images at
        half size too.
    """
    best = best_row(rows)
    accuracies = [row["valid_accuracy"] for row in rows]
    size = tuple((preprocessing or {}).get("input_size", model.input_size))
    found: dict[str, Any] = {
        "checkpoint": checkpoint,
        "group": model.group.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "multiply_adds": multiply_adds(model, size),
        "throughput": throughput(model, size, timed_batch),
        "dataset": {"name": recipe.dataset} | dict(split_sizes),
        "label_names": list(label_names),
        "command": command,
        "recipe": asdict(recipe),
        "selected_epoch": best["epoch"],
        "valid_error": None if None in accuracies else round(100 - best["valid_accuracy"], DIGITS),
        "valid_accuracies": [] if None in accuracies else [round(accuracy, DIGITS) for accuracy in accuracies],
        "test_error": test_error,
        "macro_f1": metrics["macro_f1"],
        "balanced_accuracy": metrics["balanced_accuracy"],
        "classes": metrics["classes"],
        "rotated_images": rotated_images,
        "test_error_of_rotated_copies": [round(100 - value, DIGITS) for value in metrics["accuracy_of_rotated_copies"]],
        "same_class_at_all_quarter_rotations": metrics["same_class_at_all_quarter_rotations"],
        "rotation_curve": metrics["rotation_curve"],
        "equivariance_error": equivariance_report(model, x).largest,
        "equivariance_error_p4": equivariance_error(model, x, P4),
        "training_seconds": training_seconds,
        "machine": _of_epochs(rows, "machine") or machine(next(model.parameters()).device),
        "versions": {name: _of_epochs(rows, name) or here for name, here in versions().items()}
        | {"eqzoo": __version__},
    }
    found |= {"base_model": base_model} if base_model else {}
    found |= {"distilled": True} if any(each.teachers or each.soft_labels for each in (recipe, *earlier)) else {}
    found |= {
        "seeds": len(test_errors) or 1,
        "test_errors": list(test_errors) or [test_error],
        "test_error_std": test_error_std,
        "weights_dtype": weights_dtype,
        "weights_sha256": weights_sha256,
    }
    return found | dict(preprocessing or {})


def _of_epochs(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Where, or with what, the epochs were trained; empty if the record is older than this entry."""
    return " and ".join(dict.fromkeys(row[key] for row in rows if key in row))
