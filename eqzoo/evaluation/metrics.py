"""Metrics of a classifier: accuracy, scores by class, accuracy on rotated images."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..analysis._mode import evaluation_mode
from ..data import AnySplit
from ..groups import P4, Group
from ..models.orbit import copy_logits
from .rotation import SAMPLE_SEED, SAMPLE_SIZE, finite, inputs, rotation_curve, sample

__all__ = [
    "BATCH_SIZE",
    "DIGITS",
    "classifier_metrics",
    "copy_probabilities",
    "evaluation_bar",
    "in_faster_layout",
    "percent",
    "predict_quarter_rotations",
    "predict_split",
    "predictions",
    "progress_bar",
    "quarter_rotation_metrics",
    "scores",
    "split_logits",
    "top1",
    "wilson_interval",
]

# Larger batches are slower on a CPU, where the activations between two layers no longer fit its caches.
BATCH_SIZE = 500 if torch.cuda.is_available() else 50
DIGITS = 6  # of a percentage that is kept; fewer would be rounded a second time where two are shown
STEPS = (15, 30, 45)  # degrees between the angles of a rotation curve: the first that there is time for
LEAST_IMAGES = 50  # that are rotated, however slow the network


@torch.no_grad()
def predictions(model: nn.Module, images: Tensor, batch_size: int = 500) -> Tensor:
    """The predicted classes of normalized images, ``(n,)`` int64; the model's modules keep their modes."""
    with evaluation_mode(model):
        return torch.cat([model(batch).argmax(1) for batch in images.split(batch_size)])


def top1(predicted: Tensor, labels: Tensor) -> float:
    """The accuracy, in percent."""
    return 100 * (predicted == labels).double().mean().item()


@torch.no_grad()
def split_logits(model: nn.Module, split: AnySplit, workers: int = 0) -> Tensor:
    """The logits of a split, ``(n, classes)``, on the CPU.

    Raises:
        ValueError: If they are not finite: the class with the largest of them would be the first one for all images.
    """
    return finite(torch.cat([model(x).cpu() for x in inputs(model, split, BATCH_SIZE, workers)]))


def predict_split(model: nn.Module, split: AnySplit, workers: int = 0) -> Tensor:
    """The predicted classes of a split, ``(n,)``, on the CPU."""
    return split_logits(model, split, workers).argmax(1)


@torch.no_grad()
def predict_quarter_rotations(model: nn.Module, split: AnySplit, workers: int = 0) -> Tensor:
    """The predicted classes of a split rotated by 0°, 90°, 180° and 270°, ``(4, n)``, on the CPU.

    Raises:
        ValueError: If logits are not finite.
    """
    return _copy_logits(model, split, P4, workers).argmax(2)


@torch.no_grad()
def copy_probabilities(model: nn.Module, split: AnySplit, group: Group, workers: int = 0) -> Tensor:
    """The probabilities for all rotated and reflected copies of each image, ``(|H|, n, classes)``, on the CPU.

    Those of the images themselves come first. The mean over the copies, ``Σ_g softmax(Φ(g x)) / |H|`` (test-time
    augmentation), is the same for each copy of an image.

    Args:
        model: The network.
        split: The images.
        group: A group H of the pixel grid.
        workers: The processes that read images that are not in memory.

    Raises:
        ValueError: If logits are not finite.
    """
    return _copy_logits(model, split, group, workers).double().softmax(2)


def _copy_logits(model: nn.Module, split: AnySplit, group: Group, workers: int) -> Tensor:
    """The finite logits for the copies of each image by all elements of a group, ``(|H|, n, classes)``, on the CPU."""
    batches = [copy_logits(model, x, group).cpu() for x in inputs(model, split, BATCH_SIZE, workers)]
    return finite(torch.cat(batches, 1))


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


def classifier_metrics(
    model: nn.Module,
    split: AnySplit,
    names: Sequence[str],
    curve_size: int = SAMPLE_SIZE,
    workers: int = 0,
    seconds: float | None = None,
    channels_last: bool | None = None,
    rotated: int | None = None,
    title: str = "report",
) -> tuple[dict[str, Any], Tensor]:
    """The metrics of a classifier on a split, all in percent. A progress bar on stderr counts evaluated images.

    Args:
        model: The network, in evaluation mode; its ``pretrained_cfg`` has the mean and standard deviation.
        split: The images.
        names: The names of the classes.
        curve_size: The number of images in the rotation curve, at most.
        workers: The processes that read images that are not in memory.
        seconds: The time that it may take: there are fewer rotated images and fewer angles where the network is slow.
            None for no limit. All images are evaluated unrotated, whatever the time.
        channels_last: Whether the network is evaluated on images in the channels-last memory format; None for the
            format of `in_faster_layout`.
        rotated: The number of images that are rotated, at most; 0 for none, which leaves their metrics out, None for
            all.
        title: That of the progress bar.

    Returns:
        Those of `scores`, `quarter_rotation_metrics`, their number of images as ``rotated_images``, and as
        ``rotation_curve`` the ``accuracy`` at ``angles`` in degrees on ``images`` of these, see
        `eqzoo.analysis.accuracy_over_rotations`. And the logits of the unrotated images, ``(n, classes)``.
    """
    if seconds is not None:  # kernels are compiled at the first pass, which would look slow
        split_logits(model, sample(split, 1), workers)
    with evaluation_bar(model, len(split), channels_last, title) as bar:
        began = time.perf_counter()
        logits = split_logits(model, split, workers)
        each = (time.perf_counter() - began) / len(split)
        found = scores(split.labels, logits.argmax(1), names, logits)
        if rotated == 0:
            return found, logits
        most = len(split) if rotated is None else min(rotated, len(split))
        plan = _Rotations.plan(most, curve_size, None if seconds is None else seconds / each - len(split))
        bar.total = len(split) + plan.cost
        drawn = sample(split, plan.images)
        labels = drawn.labels.cpu()
        quarters = predict_quarter_rotations(model, drawn, workers)
        curve_images = sample(drawn, plan.curve_images)
        x = torch.cat(list(inputs(model, curve_images, BATCH_SIZE, workers)))
        degrees = range(0, 360, plan.step)
        curve = rotation_curve(model, x, curve_images.labels.to(x.device), degrees, BATCH_SIZE)
    metrics = {
        **found,
        **quarter_rotation_metrics(quarters, labels),
        "rotated_images": len(drawn),
        "rotation_curve": {
            "angles": list(degrees),
            "accuracy": [round(value, 2) for value in curve],
            "images": len(curve_images),
            "sample": f"drawn with seed {SAMPLE_SEED}",
        },
    }
    return metrics, logits


class _Rotations(NamedTuple):
    """How many images are rotated by multiples of 90°, and how many by multiples of ``step`` degrees."""

    images: int
    curve_images: int
    step: int

    @property
    def cost(self) -> int:
        """The number of images that are evaluated."""
        return 4 * self.images + 360 // self.step * self.curve_images

    @classmethod
    def plan(cls, count: int, curve_size: int, affordable: float | None) -> "_Rotations":
        """The most that can be evaluated, of ``count`` images."""
        whole = cls(count, min(count, curve_size), STEPS[0])
        if affordable is None or whole.cost <= affordable:
            return whole
        least = min(count, LEAST_IMAGES)
        images = max(least, min(count, int(affordable * 0.4) // 4))
        left = affordable - 4 * images
        most = min(images, curve_size)
        step = next((step for step in STEPS if 360 // step * most <= left), STEPS[-1])
        return cls(images, max(least, min(most, int(left) // (360 // step))), step)


def in_faster_layout(model: nn.Module, images: Tensor) -> Tensor:
    """Images ``(B, C, height, width)`` in the memory format in which a network predicts faster.

    On a CPU that is channels last where the network's ``faster_channels_last`` says so (docs/speed.md).

    In float64 neither is much faster, so that images stay as they are.
    """
    faster = getattr(model, "faster_channels_last", False) and images.dtype != torch.float64
    return images.to(memory_format=torch.channels_last) if faster and images.device.type == "cpu" else images


@contextmanager
def evaluation_bar(
    model: nn.Module, count: int, channels_last: bool | None, title: str = "report"
) -> Iterator["tqdm[Any]"]:
    """A progress bar that advances by the images that the network is given, in the memory format asked for."""

    def before(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        if channels_last is None:
            return in_faster_layout(model, args[0])
        return args[0].to(memory_format=torch.channels_last) if channels_last else args[0]

    with progress_bar(title, count) as bar:
        hooks = [
            model.register_forward_pre_hook(before),
            model.register_forward_hook(lambda _, args, __: bar.update(len(args[0])) and None),
        ]
        try:
            yield bar
        finally:
            for hook in hooks:
                hook.remove()


def progress_bar(title: str, total: int, start: int = 0, shown: bool = True) -> "tqdm[Any]":
    """A progress bar on stderr that counts images.

    Args:
        title: What is under way.
        total: The number of images.
        start: Those that are done.
        shown: Whether there is a bar at all.
    """
    return tqdm(
        total=total,
        initial=start,
        desc=title,
        unit=" images",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 60,  # a log file keeps every line
        disable=not shown,
    )


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
