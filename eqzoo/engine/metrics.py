"""Metrics of a classifier: accuracy, scores by class, accuracy on rotated images."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis.rotation import SAMPLE_SIZE, accuracy_over_rotations, inputs
from ..data import AnySplit
from ..groups import P4, transform

__all__ = [
    "BATCH_SIZE",
    "evaluate",
    "predict_quarter_rotations",
    "predict_split",
    "predictions",
    "quarter_rotation_metrics",
    "scores",
    "top1",
]

# Larger batches are slower on a CPU, where the activations between two layers no longer fit its caches.
BATCH_SIZE = 500 if torch.cuda.is_available() else 50


@torch.no_grad()
def predictions(model: nn.Module, images: Tensor, batch_size: int = 500) -> Tensor:
    """The predicted classes of normalized images, ``(n,)`` int64; the model's mode is restored."""
    was_training = model.training
    model.eval()
    classes = torch.cat([model(batch).argmax(1) for batch in images.split(batch_size)])
    model.train(was_training)
    return classes


def top1(predicted: Tensor, labels: Tensor) -> float:
    """The accuracy, in percent."""
    return 100 * (predicted == labels).double().mean().item()


@torch.no_grad()
def predict_split(model: nn.Module, split: AnySplit, workers: int = 0) -> Tensor:
    """The predicted classes of a split, ``(n,)``, on the CPU."""
    return torch.cat([model(x).argmax(1).cpu() for x in inputs(model, split, BATCH_SIZE, workers)])


@torch.no_grad()
def predict_quarter_rotations(model: nn.Module, split: AnySplit, workers: int = 0) -> Tensor:
    """The predicted classes of a split rotated by 0°, 90°, 180° and 270°, ``(4, n)``, on the CPU."""
    batches = [
        torch.stack([model(transform(x, P4, g, "trivial")).argmax(1).cpu() for g in P4.elements])
        for x in inputs(model, split, BATCH_SIZE, workers)
    ]
    return torch.cat(batches, 1)


def quarter_rotation_metrics(predicted: Tensor, labels: Tensor) -> dict[str, Any]:
    """Metrics of the predictions on images rotated by 0°, 90°, 180° and 270°.

    Args:
        predicted: The predicted classes, ``(4, n)``.
        labels: The true classes, ``(n,)``.

    Returns:
        ``accuracy_of_rotated_copies``, one for each rotation, and ``same_class_at_all_quarter_rotations``, the share of
        the images with four equal predictions; in percent.
    """
    same = (predicted == predicted[0]).all(0).double().mean().item()
    return {
        "accuracy_of_rotated_copies": [round(top1(classes, labels.cpu()), 3) for classes in predicted],
        "same_class_at_all_quarter_rotations": round(100 * same, 3),
    }


def evaluate(
    model: nn.Module, split: AnySplit, names: Sequence[str], curve_size: int = SAMPLE_SIZE, workers: int = 0
) -> dict[str, Any]:
    """The metrics of a classifier on a split, all in percent.

    Args:
        model: The network, in evaluation mode; its ``pretrained_cfg`` has the mean and standard deviation.
        split: The images.
        names: The names of the classes.
        curve_size: The number of images in the rotation curve.
        workers: The processes that read images that are not in memory.

    Returns:
        Those of `scores`, `quarter_rotation_metrics`, and as ``rotation_curve`` those of
        `eqzoo.analysis.accuracy_over_rotations`.
    """
    predicted = predict_quarter_rotations(model, split, workers)
    return {
        **scores(split.labels, predicted[0], names),
        **quarter_rotation_metrics(predicted, split.labels),
        "rotation_curve": accuracy_over_rotations(model, split, curve_size, BATCH_SIZE, workers),
    }


def scores(labels: Tensor, predicted: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Accuracy, precision, recall, F1 and confusion matrix of a classifier, in percent.

    Args:
        labels: The true classes, ``(n,)``.
        predicted: The predicted classes, ``(n,)``.
        names: The names of the classes.

    Returns:
        ``accuracy``; ``balanced_accuracy``, the mean recall of the classes that have images; ``macro_f1``, the mean F1
        of the same; ``classes``, for each its precision, recall, F1 and number of images, None where it is undefined;
        and ``confusion``, counts by true and predicted class.

    Example:
        >>> scores(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), "ab")["confusion"]
        [[1, 1], [0, 1]]
    """
    count = len(names)
    matrix = torch.bincount(labels.cpu() * count + predicted.cpu(), minlength=count * count).view(count, count)
    correct, actual, predicted_as = matrix.diagonal().double(), matrix.sum(1), matrix.sum(0)
    classes: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        precision = _percent(correct[i], predicted_as[i])
        recall = _percent(correct[i], actual[i])
        f1 = _percent(2 * correct[i], predicted_as[i] + actual[i])
        classes.append({"name": name, "precision": precision, "recall": recall, "f1": f1, "images": int(actual[i])})
    present = [row for row in classes if row["images"]]
    return {
        "accuracy": _percent(correct.sum(), matrix.sum()),
        "balanced_accuracy": round(sum(row["recall"] for row in present) / len(present), 3),
        "macro_f1": round(sum(row["f1"] for row in present) / len(present), 3),
        "classes": classes,
        "confusion": matrix.tolist(),
    }


def _percent(part: Tensor, whole: Tensor) -> float | None:
    return round(100 * float(part) / float(whole), 3) if whole else None
