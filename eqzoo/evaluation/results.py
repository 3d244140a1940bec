"""Evaluation of a network on labeled images."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .._common import network_name
from ..analysis._mode import evaluation_mode
from ..data import AnySplit, files_left_out, labeled_images, native_sides
from ..data.folder import composed
from ..data.hashes import image_codes, trained_images
from ..export.onnx_network import OnnxNetwork
from ..models import OrbitNet
from .metrics import STEPS, classifier_metrics, scores
from .notes import brightness_notes, cut_off, other_side
from .predictions_file import each_prediction
from .predictor import Network, Predictor, averaged, check_device, load_predictor
from .thresholds import check_thresholds, chosen_classes, threshold_scores

__all__ = ["evaluate"]

_ROTATED = 200  # images, if there is time
_SECONDS = 120  # after which fewer are rotated


def evaluate(
    model: str | os.PathLike[str] | Network,
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
        model: A checkpoint by name, folder or file; an .onnx file of this package, also of 8-bit numbers, or its
            `eqzoo.export.OnnxNetwork`; or a network of this package, or any in an `eqzoo.models.OrbitNet`, which is
            evaluated on the device on which it is, in evaluation mode, and has its own modes afterwards.
        data: The images, as `eqzoo.data.labeled_images` takes them: a folder of class folders, or of ``train``, ``val``
            and ``test`` with such; a .npz file; a data set by name; or an `eqzoo.data.Split`.
        split: ``"test"``, ``"val"`` or ``"train"``; None for the first of these that there is, or all images.
        rotated: The number of images that are rotated, at most, four of their copies for the classes at all 90°
            rotations and 24 for the curve; 0 for none, which leaves their metrics out. None for 200, or fewer and
            fewer angles if the evaluation would take more than about two minutes.
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
        TypeError: If the model or the data is of another type.

    Example:
        >>> import eqzoo
        >>> from eqzoo.data import Split
        >>> digits = Split(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.arange(4))
        >>> found = evaluate(eqzoo.create_model("p4_cnn", pretrained=True), digits)
        >>> found["images"], found["same_class_at_all_quarter_rotations"]
        (4, 100.0)
    """
    check_device(device)
    if workers < 0:
        raise ValueError(f"workers is a number of processes, 0 or more, got {workers}")
    if rotated is not None and rotated < 0:
        raise ValueError(f"rotated is a number of images, 0 or more, got {rotated}")
    predictor = _predictor_of(model, device) if isinstance(model, nn.Module) else load_predictor(model, device)
    classes = _classes(predictor.network, predictor.name)
    if tta is not None:
        (predictor,) = averaged([predictor], tta)
    network, name = predictor.network, predictor.name
    check_thresholds(thresholds or {}, classes, name)
    channels, height, width = network.input_size
    if height != width:
        raise ValueError(f"{name} takes images of {height} x {width} pixels, and images are read as squares")
    read, part = labeled_images(data, width, channels, split, data_dir, download)
    source = str(data) if isinstance(data, str | os.PathLike) else "the images"
    images, notes = _relabeled(read, network, name, classes, source)
    notes += _notes(predictor, data, part, data_dir, images)
    with evaluation_mode(network):
        most = _ROTATED if rotated is None else rotated
        limit = _SECONDS if rotated is None else None
        found, logits = classifier_metrics(
            network, images, classes, workers=workers, seconds=limit, rotated=most, title="evaluate"
        )
    if rotated is None:
        notes += _shortened(found, min(most, len(images)))
    if thresholds:
        probabilities, labels = logits.double().softmax(1), images.labels.cpu()
        found["thresholds"] = threshold_scores(probabilities, labels, classes, thresholds)
        if len(thresholds) == len(classes):
            notes.append("All classes have a threshold, so that no class is chosen by them.")
        else:
            found["by_thresholds"] = scores(labels, chosen_classes(probabilities, classes, thresholds), classes)
    if predictions:
        found["predictions"] = list(each_prediction(images, logits, classes))
    return {"network": name, "data": source, "split": part, "images": len(images), "notes": notes} | found


def _predictor_of(model: nn.Module, device: str | None) -> Predictor:
    """A network that is given itself, and not by name, after checks."""
    if not isinstance(model, Network):
        raise TypeError(
            "model is a checkpoint by name, folder or file, an .onnx file, or a network of this package itself, not a "
            f"wrapper but OrbitNet, got {type(model).__name__}"
        )
    if missing := {"mean", "std", "input_size"} - {*getattr(model, "pretrained_cfg", ())}:
        raise ValueError(
            f"the network's pretrained_cfg says how its images are normalized, and lacks {', '.join(sorted(missing))}"
        )
    if lacks := [key for key in ("num_classes", "input_size") if not hasattr(model, key)]:
        raise ValueError(f"the network in the OrbitNet has no {' and no '.join(lacks)}; set it there")
    inside = model.network if isinstance(model, OrbitNet) else model
    is_file = isinstance(inside, OnnxNetwork)
    if device is not None:
        way = "an ONNX file runs on the CPU" if is_file else f"move the network with model.to({device!r})"
        raise ValueError(f"device is for a checkpoint; {way}, and leave it out")
    name = str(inside.path) if isinstance(inside, OnnxNetwork) else network_name(inside)
    if isinstance(model, OrbitNet) and model.copies != 1:
        name += f" (mean of {model.copies or model.group.order})"
    return Predictor(model, name, name)


def _notes(
    predictor: Predictor,
    data: str | os.PathLike[str] | AnySplit,
    part: str | None,
    data_dir: str | os.PathLike[str],
    images: AnySplit,
) -> list[str]:
    """What a user should know of the images: whether they were trained on, how they were scaled, what was left out."""
    network, name = predictor.network, predictor.name
    trained: list[str] = []
    if predictor.folder:
        trained = _trained_on(images, predictor.folder, name)
    elif isinstance(network.network if isinstance(network, OrbitNet) else network, OnnxNetwork):
        trained = [f"{name} does not tell which images it was trained on; its checkpoint does, if it was fine-tuned"]
    native = native_sides(data, part, data_dir)
    return [
        *trained,
        *cut_off(native),
        *other_side(native[0] if native else None, predictor.image_side),
        *files_left_out(data, part),
        *brightness_notes(images, network.pretrained_cfg["mean"], network.pretrained_cfg["std"]),
    ]


def _classes(network: Network, name: str) -> tuple[str, ...]:
    """The names of the classes that a network predicts."""
    count = network.num_classes
    if not count:
        raise ValueError(f"{name} has no classifier, so it predicts nothing; eqzoo finetune trains one")
    if count == 1:
        raise ValueError(f"{name} has a single output, a number and not a class, so it has no accuracy")
    names = tuple(network.pretrained_cfg.get("label_names") or ())
    return names if len(names) == count else tuple(map(str, range(count)))


def _relabeled(
    split: AnySplit, network: Network, name: str, classes: tuple[str, ...], source: str
) -> tuple[AnySplit, list[str]]:
    """The split with the labels of the network, matched by name, or by number where the data has no names."""
    labels = split.labels
    if split.classes:
        known = {composed(item): number for number, item in enumerate(classes)}
        names = {composed(item).casefold(): item for item in classes}
        theirs = [composed(item) for item in split.classes]
        if unknown := [item for i, item in enumerate(theirs) if item not in known and (labels == i).any()]:
            raise ValueError(
                f"{source} has images of {', '.join(map(repr, unknown[:5]))}{', ...' * (len(unknown) > 5)}, which "
                f"{name} does not predict: its classes are {', '.join(map(repr, classes[:12]))}"
                f"{', ...' * (len(classes) > 12)}; give the classes the same names, such as of their folders, or leave "
                f"their images out{_in_other_case(unknown, names)}"
            )
        numbers = [known.get(item, 0) for item in theirs]
        return replace(split, labels=torch.tensor(numbers)[labels.cpu()], classes=classes), []
    if int(labels.max()) >= len(classes):
        raise ValueError(f"{source} has labels up to {int(labels.max())}, and {name} has {len(classes)} classes")
    note = f"the labels of {source} have no names: 0 is taken for {classes[0]!r}, and so on in the network's order"
    return replace(split, classes=classes), [note] if network.pretrained_cfg.get("label_names") else []


def _shortened(found: Mapping[str, Any], most: int) -> list[str]:
    """A note where fewer images or angles were evaluated than usual."""
    curve, rotated = found["rotation_curve"], found["rotated_images"]
    if rotated == most and len(curve["angles"]) == 360 // STEPS[0]:
        return []
    return [
        f"To save time, {rotated:,} images were rotated by 90°, 180° and 270°, and {curve['images']:,} by "
        f"{len(curve['angles'])} angles; with rotated (--rotated) given, as many are as it says, by 24 angles"
    ]


def _in_other_case(unknown: Sequence[str], names: Mapping[str, str]) -> str:
    found = next((item for item in unknown if item.casefold() in names), None)
    return f"; names are case-sensitive: rename {found!r} to {names[found.casefold()]!r}" if found else ""


def _trained_on(split: AnySplit, folder: Path, name: str) -> list[str]:
    """A note where the network of a folder was fine-tuned on some of the images."""
    count = int(np.isin(image_codes(split), trained_images(folder)).sum())
    return [f"{name} was trained on {count:,} of these {len(split):,} images, so the metrics are too good"] * (
        count > 0
    )
