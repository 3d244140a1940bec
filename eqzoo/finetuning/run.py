"""Fine-tuning on the user's images: plan, training, evaluation, and the folder of a checkpoint."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from ..cards import CARD_NAME
from ..data import AnySplit, files_left_out
from ..data.hashes import image_codes, settings_differences
from ..engine import RunDirectory, is_finished, train
from ..engine.device import limited_threads
from ..evaluation import Predictor
from ..hub import RESULTS_NAME, sha256_of
from ..models.load import list_pretrained
from .advice import advice_before, advice_on_time, summary
from .frozen import train_classifier
from .plan import Plan, Request, make_plan, with_speed
from .write import PREDICTIONS_NAME, write_checkpoint, write_predictions_file


@dataclass(frozen=True)
class FineTuned:
    """The result of a fine-tuning.

    Args:
        model: The network in evaluation mode, with the weights of its best epoch.
        results: The metrics, as results.json holds them, on the images that ``evaluated_on`` names.
        folder: The checkpoint's folder: ``eqzoo.create_model(f"local-dir:{folder}", pretrained=True)`` reads it.
    """

    model: nn.Module
    results: dict[str, Any]
    folder: Path


def finetune(
    name: str | os.PathLike[str],
    data: str | os.PathLike[str] | Mapping[str, AnySplit],
    output: str | os.PathLike[str],
    *,
    invariant: str | None = None,
    copies: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    size: int | None = None,
    channels: int | None = None,
    pretrained: bool | None = None,
    freeze: bool | str | Sequence[str] = False,
    balance: bool = False,
    minutes: float | None = None,
    valid_fraction: float | None = None,
    test_fraction: float | None = None,
    split_by: str | Sequence[object] | Mapping[str, object] | None = None,
    data_dir: str | os.PathLike[str] = "data",
    download: bool = False,
    device: str | None = None,
    workers: int = 4,
    **recipe: Any,
) -> FineTuned:
    """Trains a network on the user's images, evaluates it, and writes the folder of a checkpoint.

    The same call resumes an interrupted run; if the run is finished, nothing is trained.

    Args:
        name: A network, a checkpoint, ``hf-hub:<owner>/<repo>`` or the folder of a checkpoint; or a timm
            classification network, which is trained in an `eqzoo.models.OrbitNet`.
        data: The images, as `eqzoo.data.read_images` takes them; or a mapping with the splits ``train``, and possibly
            ``valid`` and ``test``.
        output: The folder to write: the weights model.safetensors, config.json, results.json, the card README.md, its
            figures if matplotlib is installed, predictions.csv, training.json and log.jsonl.
        invariant: ``"p4"``, ``"p4m"`` or ``"z2m"``: the group under which an `eqzoo.models.OrbitNet` makes the
            network invariant; None for the network as it is.
        copies: The number of rotated or reflected copies of an image in a prediction, 1 for a canonical one; None for
            all.
        weights: A file of weights in timm's names to start from, .safetensors or .pth; None for timm's own.
        size: The side of the images in pixels; None for the network's own, or 128 for one of timm.
        channels: 1, 3 or 4 channels of image files; None for those that they have.
        pretrained: Whether to start from trained weights; None if there are any. A name with its data set, such as
            ``p4_cnn.rotmnist``, has to have them.
        freeze: What is not trained: True for all but the classifier, or a name or names of modules. With True and
            neither epochs nor minutes, the features of each image are computed once, without augmentation, and the
            classifier is fitted by logistic regression, see `eqzoo.finetuning.frozen`.
        balance: Whether the loss weights classes by the inverse of their number of images.
        minutes: The time to train for: the number of epochs follows from the speed of the first steps. None for a
            number of epochs that depends on the number of images.
        valid_fraction: The fraction of the images to choose the epoch by, 0 for none; None for 0.15 if the data has no
            validation split.
        test_fraction: The same for the test split.
        split_by: What the images come from, such as patients, slides or scenes, to draw the validation and test splits
            by whole sources, so that the images of one are in one split only, and to check the splits of a folder for
            it: ``"folder"`` for the folders inside of the class folders, a regular expression for a part of the files'
            names, a dictionary of these by the files' paths, the name of an array of a .npz file, or a value for each
            training image, see `eqzoo.data.image_sources`. None if each image stands alone.
        data_dir: The folder of data sets that have a name.
        download: Whether these may be downloaded.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        workers: The processes that read images that are not in memory.
        **recipe: Anything else of `eqzoo.engine.Recipe`, such as ``epochs``, ``batch_size``, ``lr``, ``precision``,
            ``channels_last``, ``patience``, ``layer_decay``, ``lr_factors``, ``ema_decay``, ``seed`` or ``augment``,
            where ``"missing"`` is the 90° rotations and reflections that are not in the network's group. What is left
            out or None follows the rules of `eqzoo.finetuning.rules`; ``precision`` and ``channels_last`` are what is
            fastest in a few steps, see `eqzoo.engine.speed`. A line on stderr says what was chosen.

    Returns:
        The network, its results and the folder.

    Raises:
        TypeError: If the data is of another type.
        ValueError: If an image, a size, a class or a setting is invalid or without effect, the folder holds other
            files, or another command trains there.
        FileNotFoundError: If there are no such images.
        WeightsNotFoundError: If weights are asked for and found nowhere, or there are some that cannot be fetched.
        ImportError: If the packages of the training loop are missing.
        OSError: If the folder cannot be written.
    """
    plan = make_plan(Request(**locals()))  # whose fields are the arguments
    directory = plan.directory
    with directory.locked(), limited_threads():
        plan = with_speed(plan, _saved(plan))
        directory.check(plan.recipe)
        advice = [*advice_before(plan), *advice_on_time(plan), *plan.images.colors, *files_left_out(data)]
        _say(*summary(plan), *plan.images.source_lines, *_start_lines(plan), *advice)
        if not (directory.rows() and directory.trained_on.is_file()):  # before there are weights that have seen them
            codes = np.union1d(image_codes(plan.splits["train"]), plan.trained_before)
            directory.save_array(directory.trained_on, codes)
        model = train_plan(plan)
        results = _written(directory)
        if results is None:
            results = write_checkpoint(plan, model, advice)
        elif not (directory.path / PREDICTIONS_NAME).is_file():
            write_predictions_file(plan, Predictor.of(model, plan.recipe.channels_last))
    return FineTuned(model, results, directory.path)


def _written(directory: RunDirectory) -> dict[str, Any] | None:
    """The content of results.json if the files of these weights are complete, of which the card is written last.

    They may have been edited since, and `eqzoo publish` may have written a license or names of classes.
    """
    path = directory.path / RESULTS_NAME
    if not (path.is_file() and path.with_name(CARD_NAME).is_file()):
        return None
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results if results["weights_sha256"] == sha256_of(directory.weights) else None


def train_plan(plan: Plan) -> nn.Module:
    """The network of a plan whose speed is known, trained in its folder, with the weights of its best epoch."""
    assert plan.speed is not None
    facts = dict(plan.settings) | {"speed": asdict(plan.speed)}
    if plan.fits_classifier:
        return train_classifier(plan, facts)
    return train(
        plan.recipe,
        plan.build,
        {key: split for key, split in plan.splits.items() if key != "test"},
        plan.directory.path,
        plan.request.device,
        plan.request.workers,
        facts=facts,
        read=lambda side: plan.images_at(side)["train"],
    )


def _saved(plan: Plan) -> Mapping[str, Any]:
    """The content of training.json of the run that is resumed; empty for a new one.

    Raises:
        ValueError: If the folder holds another run or other files.
    """
    directory = plan.directory
    directory.check_is_free()
    saved = directory.saved()
    if saved and (differences := "; ".join(settings_differences(saved, plan.settings))):
        raise ValueError(
            f"{directory.path} holds a run with other images, weights or settings ({differences}); name another folder"
        )
    return saved


def _start_lines(plan: Plan) -> list[str]:
    """Lines on what the run starts from, and whether it is finished."""
    rows, start = plan.directory.rows(), plan.settings["start"]
    lines = []
    if not rows and start:
        if not plan.keeps_classifier:
            begins = "is fitted anew" if plan.fits_classifier else "starts from random weights"
            lines.append(f"the classifier {begins}; that of {start} may be of other classes")
        name = plan.request.name
        others = [] if "." in str(name) else [found for found in list_pretrained(f"{name}.*") if found != start]
        if others:
            lines.append(f"{name} takes the weights of {start}; there are {', '.join(others)} as well")
        terms = cast(Any, plan.blank).pretrained_cfg.get("license") or ""
        if ("-nc" in terms or "noncommercial" in terms) and not plan.request.weights:
            lines.append(f"the weights of {start} are for non-commercial use ({terms}), and so are the fine-tuned ones")
    if is_finished(plan.recipe, rows):
        lines.append(f"the run in {plan.directory.path} has all of its epochs: none is trained")
    return lines


def _say(*lines: str) -> None:
    for line in lines:
        print(f"eqzoo: {line}", file=sys.stderr)
