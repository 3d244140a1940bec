"""Metrics of a classifier: accuracy, scores by class, accuracy on rotated images."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

DIGITS = 6  # of a percentage that is kept; fewer would be rounded a second time where two are shown


def top1(predicted: Tensor, labels: Tensor) -> float:
    """The accuracy, in percent."""
    return 100 * (predicted == labels).double().mean().item()


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
        "accuracy_of_rotated_copies": [round(top1(classes, labels.cpu()), DIGITS) for classes in predicted],
        "same_class_at_all_quarter_rotations": round(100 * same, DIGITS),
    }


def scores(labels: Tensor, predicted: Tensor, names: Sequence[str], logits: Tensor | None = None) -> dict[str, Any]:
    """Accuracy, precision, recall, F1, area under the ROC curve and confusion matrix of a classifier, in percent.

    Args:
        labels: The true classes, ``(n,)``.
        predicted: The predicted classes, ``(n,)``.
        names: The names of the classes.
        logits: ``(n, classes)``, for the area under the curve; None leaves it out.

    Returns:
        ``accuracy``, and its ``accuracy_interval`` by `wilson_interval`, as if each image stood alone;
        ``balanced_accuracy``, the mean recall of the classes that have images; ``macro_f1``, the mean F1 of the same;
        ``classes``, for each its precision, recall, F1 and number of images, None where it is undefined; and
        ``confusion``, counts by true and predicted class. With ``logits`` also the ``auc`` of each class, the
        probability that an image of it is given a higher probability of the class than an image of another class,
        where equal ones count half (the area under the receiver operating characteristic), None if all images are of
        the class or none, or a logit is not a number; and ``macro_auc``, their mean, None without any.

    Example:
        >>> scores(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), "ab")["confusion"]
        [[1, 1], [0, 1]]
    """
    count = len(names)
    matrix = torch.bincount(labels.cpu() * count + predicted.cpu(), minlength=count * count).view(count, count)
    correct, actual, predicted_as = matrix.diagonal().double(), matrix.sum(1), matrix.sum(0)
    classes: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        precision = percent(correct[i], predicted_as[i])
        recall = percent(correct[i], actual[i])
        f1 = percent(2 * correct[i], predicted_as[i] + actual[i])
        classes.append({"name": name, "precision": precision, "recall": recall, "f1": f1, "images": int(actual[i])})
    present = [row for row in classes if row["images"]]
    found = {
        "accuracy": percent(correct.sum(), matrix.sum()),
        "accuracy_interval": wilson_interval(int(correct.sum()), int(matrix.sum())),
        "balanced_accuracy": round(sum(row["recall"] for row in present) / len(present), DIGITS),
        "macro_f1": round(sum(row["f1"] for row in present) / len(present), DIGITS),
        "classes": classes,
        "confusion": matrix.tolist(),
    }
    if logits is None:
        return found
    odds = _odds(logits)
    for label, row in enumerate(classes):
        row["auc"] = _auc(odds[:, label], labels.cpu() == label)
    areas = [row["auc"] for row in classes if row["auc"] is not None]
    return found | {"macro_auc": round(sum(areas) / len(areas), DIGITS) if areas else None}


def _odds(logits: Tensor) -> Tensor:
    """The logarithms of the odds of the classes, ``(n, classes)``, which order images as probabilities do.

    Probabilities near 1 would round to it. ``log(p / (1 - p)) = z - log(sum of exp(z) of the other classes)``, of which
    the sum runs over those before and those behind.
    """
    logits = logits.double().cpu()
    none = torch.full_like(logits[:, :1], -torch.inf)
    before = torch.cat([none, logits.logcumsumexp(1)[:, :-1]], 1)
    behind = torch.cat([logits.flip(1).logcumsumexp(1).flip(1)[:, 1:], none], 1)
    return logits - torch.logaddexp(before, behind)


def _auc(score: Tensor, positive: Tensor) -> float | None:
    """The area under the receiver operating characteristic, in percent, by ranks (Mann and Whitney)."""
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others or score.isnan().any():
        return None
    _, place, equal = score.unique(return_inverse=True, return_counts=True)
    ranks = equal.cumsum(0) - (equal.double() - 1) / 2  # of equal scores the mean of theirs, from 1
    return percent(ranks[place][positive].sum() - count * (count + 1) / 2, torch.tensor(count * others))


def percent(part: Tensor, whole: Tensor) -> float | None:
    """A share in percent; None of nothing."""
    return round(100 * float(part) / float(whole), DIGITS) if whole else None


def wilson_interval(hits: int, count: int) -> list[float] | None:
    """The 95 % confidence interval of a share, in percent; None of nothing.

    With z = 1.96 and the share p of n: ``(p + z²/2n ± z √(p (1 − p)/n + z²/4n²)) / (1 + z²/n)``. It is not empty where
    all are hits. It takes the n for independent: of images of few patients the true one is wider.

    References:
        Probable Inference, the Law of Succession, and Statistical Inference (Wilson, 1927)
        https://doi.org/10.1080/01621459.1927.10502953

    Example:
        >>> wilson_interval(24, 24)
        [86.2, 100.0]
    """
    if not count:
        return None
    share, z = hits / count, 1.959964
    middle, half = share + z**2 / (2 * count), z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    low, high = ((middle + sign * half) / (1 + z**2 / count) for sign in (-1, 1))
    return [round(100 * max(0.0, low), 1), round(100 * min(1.0, high), 1)]


def averaged_classes(classes: Sequence[Mapping[str, Any]]) -> str:
    """The classes that means over classes are of, in words: those of ``scores()["classes"]`` that have images."""
    return "the classes" if all(row["images"] for row in classes) else "the classes that have images"
