"""Evaluation of finished runs on the test split."""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .._common import atomic
from ..data import AnySplit
from ..data.hashes import split_differences, split_digests
from ..engine.epochs import rank
from ..engine.recipe import Recipe, build_network
from ..engine.run import LOG_NAME, TRAINING_NAME, FinishedRun, RunDirectory
from ..evaluation.metrics import (
    BATCH_SIZE,
    DIGITS,
    predict_quarter_rotations,
    predict_split,
    quarter_rotation_metrics,
    scores,
    top1,
)
from ..evaluation.rotation import SAMPLE_SIZE, accuracy_over_rotations, sample
from ..hub import base_model, sha256_of
from ..models import EquivariantNet
from ..models.builder import default_checkpoint
from .results import checkpoint_results

__all__ = ["best_run", "check_no_fine_tuning", "evaluate_run"]

_CHECKED = 500  # images on which a network is checked before the test
_CHANGED = 2.0  # percent of them that rounding may change


def best_run(runs: Sequence[FinishedRun]) -> FinishedRun:
    """The run whose kept epoch has the highest `rank` on validation images; the test errors play no part."""
    return max(runs, key=lambda run: rank(run.best)[:3])


def check_no_fine_tuning(runs: Sequence[FinishedRun]) -> None:
    """Raises ValueError if a run is a fine-tuning, whose images and their size no recipe tells."""
    for run in runs:
        if RunDirectory(run.folder).settings():
            raise ValueError(
                f"{run.folder} is a fine-tuning, with images of its own size and splits: eqzoo finetune has evaluated "
                "it (report.json and, where there are test images, results.json), and the same command writes these "
                "files anew"
            )


def evaluate_run(
    run: FinishedRun,
    runs: Sequence[FinishedRun],
    splits: Mapping[str, AnySplit],
    *,
    checkpoint: str,
    arguments: str | None = None,
    device: str | torch.device = "cpu",
    half: bool = False,
    rotated: int | None = None,
    curve: int = SAMPLE_SIZE,
    workers: int = 0,
) -> dict[str, Any]:
    """Evaluates a run on the test split, and measures the test error of all runs of its recipe.

    Args:
        run: The run that is evaluated in full, such as the `best_run`.
        runs: The runs of the recipe, with different seeds; it is one of them.
        splits: The splits of their data set.
        checkpoint: The name of their recipe, ``<model>.<data set>[_<variant>]``.
        arguments: What follows training/train.py in the command of the run; None for the name and the seed.
        device: Where the networks run.
        half: Whether parameters are rounded to float16 before the evaluation; model.half.safetensors then holds them.
        rotated: The number of test images that are rotated by multiples of 90° too; None for all.
        curve: The number of test images of the rotation curve.
        workers: The processes that read images that are not in memory.

    Returns:
        What results.json holds, see `checkpoint_results`.

    Raises:
        ValueError: If a run is a fine-tuning, the data set has no test split, its training or validation images are not
            those of the run, the folder of a run that it goes on with is missing, a network has lost the accuracy that
            its run had on validation images, or rounding to float16 changes its predictions.
    """
    check_no_fine_tuning(runs)
    if "test" not in splits:
        raise ValueError(
            f"{run.recipe.dataset} has no test images to evaluate on: add them, in a folder test/<class>; the accuracy "
            f"on validation images is in {run.folder / LOG_NAME}"
        )
    _check_images(runs, splits)
    earlier = _runs_before(run.recipe)
    networks = [_network(each, half, device) for each in runs]
    for each, network in zip(runs, networks, strict=True):
        _check_accuracy(each, network, splits, workers)
        if half:
            _check_rounding(each, network, splits, workers)
    model, test = networks[runs.index(run)], splits["test"]
    of_rotated = test if rotated is None else sample(test, rotated)
    rotations = predict_quarter_rotations(model, of_rotated, workers)
    predicted = rotations[0] if of_rotated is test else predict_split(model, test, workers)
    error = _error(predicted, test)
    found = scores(test.labels, predicted, test.classes or tuple(map(str, range(model.num_classes))))
    found |= quarter_rotation_metrics(rotations, of_rotated.labels)
    errors = [
        error if other is run else _error(predict_split(network, test, workers), test)
        for other, network in zip(runs, networks, strict=True)
    ]
    over_angles = accuracy_over_rotations(model, test, curve, BATCH_SIZE, workers)
    return checkpoint_results(
        model,
        run.recipe,
        checkpoint=checkpoint,
        split_sizes={name: len(split) for name, split in splits.items()},
        label_names=test.classes,
        command=f"{run.launcher} training/train.py {arguments or f'{checkpoint} --seed {run.recipe.seed}'}",
        rows=run.rows,
        test_error=error,
        metrics=found | {"rotation_curve": over_angles},
        rotated_images=len(of_rotated),
        training_seconds=run.seconds,
        weights_sha256=sha256_of(_weights(run, half)),
        weights_dtype="float16" if half else "float32",
        test_errors=errors,
        test_error_std=round(statistics.stdev(errors), 3) if len(errors) > 1 else None,
        base_model=_started_from(earlier[-1] if earlier else run.recipe),
        earlier=earlier,
    )


def _check_images(runs: Sequence[FinishedRun], splits: Mapping[str, AnySplit]) -> None:
    """Raises ValueError if runs were trained or validated on other images than those of the splits."""
    here = split_digests(splits)
    for run in runs:
        if said := "; ".join(split_differences(run.image_digests() or here, here)):
            raise ValueError(
                f"{run.folder} was trained on other images than these ({said}); give those again, with --data-dir "
                f"FOLDER, or, if they are the same files, read by other versions, remove data_sha256 from "
                f"{run.folder / TRAINING_NAME}"
            )


def _check_accuracy(run: FinishedRun, model: EquivariantNet, splits: Mapping[str, AnySplit], workers: int) -> None:
    """Raises ValueError if a network is far less accurate on validation images than the record of its run says.

    The margin is one percentage point and five standard deviations of an accuracy of 50 % on as many images, together
    12 points on 500: a network that no longer computes what was trained is further off.
    """
    expected = run.best.get("valid_accuracy")
    if expected is None or "valid" not in splits:
        return
    some = sample(splits["valid"], _CHECKED)
    found = top1(predict_split(model, some, workers), some.labels)
    if found < expected - 1 - 5 * 100 * math.sqrt(0.25 / len(some)):
        raise ValueError(
            f"the network of {run.folder} recognizes {found:.1f} % of {len(some)} validation images, and its record "
            f"says {expected:.1f} %; it was not evaluated on the test images. Evaluate it on the device and with the "
            "version that trained it, or train it anew"
        )


def _check_rounding(run: FinishedRun, model: EquivariantNet, splits: Mapping[str, AnySplit], workers: int) -> None:
    """Raises ValueError if rounding to float16 changes the class of more than 2 % of validation or training images."""
    some = sample(splits["valid" if "valid" in splits else "train"], _CHECKED)
    whole = _network(run, False, next(model.parameters()).device)
    changed = 100 - top1(predict_split(model, some, workers), predict_split(whole, some, workers))
    if changed > _CHANGED:
        raise ValueError(
            f"rounding the parameters of {run.folder} to float16 changes the class of {changed:.1f} % of {len(some)} "
            "images; evaluate it without --half"
        )


def _runs_before(recipe: Recipe, seen: tuple[Path, ...] = ()) -> list[Recipe]:
    """The recipes of the runs whose weights a run goes on with, the latest first.

    Raises:
        ValueError: If the folder of one of them is missing, or now holds a run that went on with it in turn.
    """
    if recipe.start_run is None:
        return []
    path = recipe.start_run / TRAINING_NAME
    if path in seen:
        raise ValueError(f"the run in {path.parent} starts from itself, by way of others; restore the run of before")
    if not path.is_file():
        raise ValueError(
            f"the results name what the weights started from, and {path} of the run before is not here; restore it, or "
            "evaluate in the folder in which the run was trained"
        )
    before = RunDirectory(path.parent).recipe()
    return [before, *_runs_before(before, (*seen, path))]


def _started_from(recipe: Recipe) -> str | None:
    """The Hub repo of the checkpoint that a recipe starts from, unless it is an earlier one of the same name."""
    start = recipe.start
    if start is not None and "." not in start and timm.models.is_model(start):
        start = default_checkpoint(start)
    if start in (None, f"{recipe.model}.{recipe.dataset}"):
        return None
    cfg = timm.get_pretrained_cfg(start)
    return base_model(start, cfg and cfg.hf_hub_id)


def _weights(run: FinishedRun, half: bool) -> Path:
    """The file of a run's weights, with parameters rounded to float16 on request.

    Running statistics keep float32, as do parameters beyond the range of float16: variances of deep networks can be
    larger than 65,504, the largest number of float16.
    """
    if not half:
        return run.weights
    parameters = {name for name, _ in build_network(run.recipe).named_parameters()}
    weights = load_file(run.weights)
    rounded = {name: _rounded(value) if name in parameters else value for name, value in weights.items()}
    atomic(run.folder / "model.half.safetensors", functools.partial(save_file, rounded))
    return run.folder / "model.half.safetensors"


def _rounded(value: Tensor) -> Tensor:
    """A tensor in float16, or as it is if a number of it would become infinite."""
    half = value.half()
    return half if half.isfinite().all() else value


def _network(run: FinishedRun, half: bool, device: str | torch.device) -> EquivariantNet:
    """The network of a run with the weights of its best epoch."""
    model = build_network(run.recipe, checkpoint_path=_weights(run, half))
    assert isinstance(model, EquivariantNet)
    return model.to(device).eval()


def _error(predicted: Tensor, split: AnySplit) -> float:
    """The error, in percent."""
    return round(100 - top1(predicted, split.labels), DIGITS)
