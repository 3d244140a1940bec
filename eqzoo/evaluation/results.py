"""Evaluation of a classifier on labeled images."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import AnySplit, files_left_out, labeled_images, native_sides
from ..data.folder import composed, some_names
from ..data.hashes import image_codes, trained_images
from ..export.onnx_network import OnnxNetwork
from ..groups import P4
from .metrics import quarter_rotation_metrics, scores
from .notes import brightness_notes, cut_off, other_side
from .predictions_file import each_prediction
from .predictor import BATCH_SIZE, Predictor, averaged, check_device, load_predictor
from .progress import counting
from .rotation import SAMPLE_SEED, rotation_curve, sample
from .thresholds import check_thresholds, chosen_classes, threshold_scores

MAX_ROTATED_IMAGES = 200  # by `evaluate`, if there is time
MAX_SECONDS = 120  # after which fewer are rotated
_LEAST_IMAGES = 25  # that are rotated, however slow the network
_ANGLES = range(0, 360, 15)  # of the rotation curve, in degrees


@dataclass(frozen=True)
class Results:
    """What was measured of a classifier on labeled images.

    Args:
        metrics: In percent ``accuracy`` and its ``accuracy_interval``, ``balanced_accuracy``, ``macro_f1``,
            ``macro_auc``; ``classes`` and ``confusion``, see `eqzoo.evaluation.metrics.scores`; and of rotated images
            ``accuracy_of_rotated_copies``, ``same_class_at_all_quarter_rotations``, their number ``rotated_images``,
            and the ``rotation_curve``.
        logits: Those of the images, ``(n, classes)``.
        notes: Sentences on what was left out to save time.
    """

    metrics: dict[str, Any]
    logits: Tensor
    notes: tuple[str, ...] = ()


def measure(
    predictor: Predictor, split: AnySplit, *, rotated: int | None = None, seconds: float | None = None, workers: int = 0
) -> Results:
    """Evaluates a classifier on a split. A progress bar on stderr counts evaluated images.

    Args:
        predictor: The classifier.
        split: The images, with the labels of the classifier's classes.
        rotated: The number of images that are rotated, at most; 0 for none, which leaves their metrics out, None for
            all. The rotation curve is of at most 1,000 of them.
        seconds: The time that it may take: fewer images are rotated where the network is slow. None for no limit. All
            images are evaluated unrotated, whatever the time.
        workers: The processes that read images that are not in memory.

    Raises:
        ValueError: If a logit is not finite.
    """
    names = split.classes or predictor.classes
    if seconds is not None:  # kernels are compiled at the first pass, which would look slow
        predictor.logits(sample(split, 1), workers)
    with counting(predictor.network, "evaluate", len(split)) as bar:
        began = time.perf_counter()
        logits = predictor.logits(split, workers)
        each = (time.perf_counter() - began) / len(split)
        metrics = scores(split.labels, logits.argmax(1), names, logits)
        if rotated == 0:
            return Results(metrics, logits)
        most = count = len(split) if rotated is None else min(rotated, len(split))
        if seconds is not None:
            affordable = (seconds / each - len(split)) / (P4.order + len(_ANGLES))
            count = min(most, max(_LEAST_IMAGES, int(affordable)))
        drawn = sample(split, count)
        of_curve = sample(drawn)
        bar.total = len(split) + P4.order * len(drawn) + len(_ANGLES) * len(of_curve)
        quarters = predictor.copies_logits(drawn, P4, workers).argmax(2)
        curve = _curve(predictor, of_curve, workers)
    metrics |= quarter_rotation_metrics(quarters, drawn.labels.cpu())
    metrics |= {"rotated_images": count, "rotation_curve": curve}
    return Results(metrics, logits, () if count == most else (f"To save time, {count:,} images were rotated.",))


def _curve(predictor: Predictor, split: AnySplit, workers: int) -> dict[str, Any]:
    """The accuracy at angles in degrees, as results.json holds it."""
    x = torch.cat(list(predictor.inputs(split, workers)))
    accuracies = rotation_curve(predictor.network, x, split.labels.to(x.device), _ANGLES, BATCH_SIZE)
    return {
        "angles": list(_ANGLES),
        "accuracy": [round(value, 2) for value in accuracies],
        "images": len(split),
        "sample": f"drawn with seed {SAMPLE_SEED}",
    }


def evaluate(
    model: str | os.PathLike[str] | nn.Module | Predictor,
    data: str | os.PathLike[str] | AnySplit,
    *,
    split: str | None = None,
    rotated: int | None = None,
    predictions: bool = False,
    thresholds: Mapping[str, float] | None = None,
    tta: str | None = None,
    data_dir: str | os.PathLike[str] = "data",
    download: bool = False,
    device: str | None = None,
    workers: int = 4,
) -> dict[str, Any]:
    """The metrics of a network on labeled images. A progress bar on stderr counts evaluated images.

    Classes are matched by name, such as of the folders that the images are in; where the data has no names, label 0 is
    the first class of the network, and so on. Images are scaled to the input size of the network. This is what the
    command ``eqzoo evaluate`` prints.

    Args:
        model: A checkpoint by name, folder or file; an .onnx file of this package, also of 8-bit numbers; or a network
            with a ``pretrained_cfg`` that has ``mean``, ``std`` and ``input_size``, which is evaluated on the device on
            which it is, in evaluation mode, and has its own modes afterwards.
        data: The images, as `eqzoo.data.labeled_images` takes them: a folder of class folders, or of ``train``, ``val``
            and ``test`` with such; a .npz file; a data set by name; or an `eqzoo.data.Split`.
        split: ``"test"``, ``"val"`` or ``"train"``; None for the first of these that there is, or all images.
        rotated: The number of images that are rotated, at most, four of their copies for the classes at all 90°
            rotations and 24 for the curve; 0 for none, which leaves their metrics out. None for 200, or fewer if the
            evaluation would take more than about two minutes.
        predictions: Whether the prediction for each image is returned as well.
        thresholds: Probabilities of classes above 0 and below 1, to measure how each of these is told from all others
            where an image is said to be of it if its probability reaches that.
        tta: Test-time augmentation: ``"p4"``, ``"p4m"`` or ``"z2m"`` for the mean of the probabilities over the copies
            of each image, rotated by multiples of 90°, reflected too, or reflected alone, see
            `eqzoo.models.OrbitNet`. It makes a plain network invariant, at 4, 8 or 2 times the cost. None for
            single predictions.
        data_dir: The folder of data sets that have a name.
        download: Whether these may be downloaded.
        device: ``"cpu"`` or ``"cuda"``, for a checkpoint; None for a GPU where there is one. ONNX files run on the CPU.
        workers: The processes that read images that are not in memory.

    Returns:
        In percent ``accuracy``, ``balanced_accuracy`` (the mean recall of the classes that have images) and
        ``macro_f1`` (their mean F1); ``macro_auc`` (the mean area under the ROC curve of the classes, each against
        the others); ``classes``, a list of the ``name``, ``precision``, ``recall``, ``f1``, ``auc`` and number
        of ``images`` of each; ``confusion``, the numbers of images by true and predicted class;
        ``same_class_at_all_quarter_rotations`` and ``accuracy_of_rotated_copies`` (0°, 90°, 180°, 270°), in percent of
        ``rotated_images``; ``rotation_curve``, the ``accuracy`` at ``angles`` in degrees; and ``network``, ``data``,
        ``split``, the number of ``images`` and ``notes``, a list of sentences. If asked for, also ``predictions``, a
        list of the ``file`` of each image, below the folder, or its number where images have no files, its ``class``,
        the ``prediction`` and the ``probabilities`` of the classes; and ``thresholds``, a list of the ``name``,
        ``threshold``, ``recall`` (sensitivity), ``specificity`` and ``precision`` in percent, and the number of images
        ``found``, of each class that has one; and, unless all have one, ``by_thresholds``, the accuracy, scores and
        confusion of the classes that `eqzoo predict` gives with them. All others are those of the most probable class.

    Raises:
        ValueError: If an argument is invalid, the network has no classifier or takes images that are not square, or the
            images have another number of channels, or classes that the network does not predict.
        FileNotFoundError: If there are no such images, or no such checkpoint.
        WeightsNotFoundError: If the checkpoint has no weights.
        TypeError: If the data is of another type.

    Example:
        >>> import eqzoo
        >>> from eqzoo.data import Split
        >>> digits = Split(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.arange(4))
        >>> found = evaluate(eqzoo.create_model("p4_cnn", pretrained=True), digits)
        >>> found["images"], found["same_class_at_all_quarter_rotations"]
        (4, 100.0)
    """
    check_device(device)
    if rotated is not None and rotated < 0:
        raise ValueError(f"rotated is a number of images, 0 or more, got {rotated}")
    if isinstance(model, nn.Module):
        predictor = Predictor.of(model)
    else:
        predictor = model if isinstance(model, Predictor) else load_predictor(model, device)
    classes = predictor.classes
    if tta is not None:
        (predictor,) = averaged([predictor], tta)
    check_thresholds(thresholds or {}, classes, predictor.name)
    channels, height, width = predictor.input_size
    if height != width:
        raise ValueError(f"{predictor.name} takes images of {height} x {width} pixels, and images are read as squares")
    read, part = labeled_images(data, width, channels, split, data_dir, download)
    source = str(data) if isinstance(data, str | os.PathLike) else "the images"
    images, notes = _relabeled(read, predictor, classes, source)
    notes += _notes(predictor, data, part, data_dir, images)
    limits = {"rotated": MAX_ROTATED_IMAGES, "seconds": MAX_SECONDS} if rotated is None else {"rotated": rotated}
    results = measure(predictor, images, workers=workers, **limits)
    found = dict(results.metrics)
    notes += results.notes
    if thresholds:
        found |= _by_thresholds(results.logits, images, classes, thresholds)
    if predictions:
        found["predictions"] = list(each_prediction(images, results.logits, classes))
    return {"network": predictor.name, "data": source, "split": part, "images": len(images), "notes": notes} | found


def _notes(
    predictor: Predictor,
    data: str | os.PathLike[str] | AnySplit,
    part: str | None,
    data_dir: str | os.PathLike[str],
    images: AnySplit,
) -> list[str]:
    """What a user should know of the images: whether they were trained on, how they were scaled, what was left out."""
    trained: list[str] = []
    if predictor.folder:
        trained = _trained_on(images, predictor.folder, predictor.name)
    elif any(isinstance(module, OnnxNetwork) for module in predictor.network.modules()):
        trained = [
            f"{predictor.name} does not tell which images it was trained on; its checkpoint does, if it was fine-tuned"
        ]
    native = native_sides(data, part, data_dir)
    cfg: dict[str, Any] = dict(predictor.cfg)
    return [
        *trained,
        *cut_off(native),
        *other_side(native[0] if native else None, predictor.image_side),
        *files_left_out(data, part),
        *brightness_notes(images, cfg["mean"], cfg["std"]),
    ]


def _by_thresholds(
    logits: Tensor, images: AnySplit, classes: Sequence[str], thresholds: Mapping[str, float]
) -> dict[str, Any]:
    """The scores of the classes that have a threshold, and of the classes that are chosen by them."""
    probabilities, labels = logits.double().softmax(1), images.labels.cpu()
    found: dict[str, Any] = {"thresholds": threshold_scores(probabilities, labels, classes, thresholds)}
    if len(thresholds) < len(classes):
        found["by_thresholds"] = scores(labels, chosen_classes(probabilities, classes, thresholds), classes)
    return found


def _relabeled(
    split: AnySplit, predictor: Predictor, classes: tuple[str, ...], source: str
) -> tuple[AnySplit, list[str]]:
    """The split with the labels of the network, matched by name, or by number where the data has no names."""
    labels = split.labels
    if split.classes:
        known = {composed(item): number for number, item in enumerate(classes)}
        names = {composed(item).casefold(): item for item in classes}
        theirs = [composed(item) for item in split.classes]
        if unknown := [item for i, item in enumerate(theirs) if item not in known and (labels == i).any()]:
            raise ValueError(
                f"{source} has images of {some_names(unknown)}, which {predictor.name} does not predict: its classes "
                f"are {some_names(classes)}; give the classes the same names, such as of their folders, or leave their "
                f"images out{_in_other_case(unknown, names)}"
            )
        numbers = [known.get(item, 0) for item in theirs]
        return replace(split, labels=torch.tensor(numbers)[labels.cpu()], classes=classes), []
    if int(labels.max()) >= len(classes):
        raise ValueError(
            f"{source} has labels up to {int(labels.max())}, and {predictor.name} has {len(classes)} classes"
        )
    note = f"the labels of {source} have no names: 0 is taken for {classes[0]!r}, and so on in the network's order"
    return replace(split, classes=classes), [note] if predictor.cfg.get("label_names") else []


def _in_other_case(unknown: Sequence[str], names: Mapping[str, str]) -> str:
    found = next((item for item in unknown if item.casefold() in names), None)
    return f"; names are case-sensitive: rename {found!r} to {names[found.casefold()]!r}" if found else ""


def _trained_on(split: AnySplit, folder: Path, name: str) -> list[str]:
    """A note where the network of a folder was fine-tuned on some of the images."""
    if count := int(np.isin(image_codes(split), trained_images(folder)).sum()):
        return [f"{name} was trained on {count:,} of these {len(split):,} images, so the metrics are too good"]
    return []
