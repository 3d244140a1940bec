"""The report of a fine-tuning: what is evaluated, and the files of its checkpoint."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._common import atomic, write_json, write_text
from ..cards.results import checkpoint_results
from ..data import AnySplit
from ..data.hashes import SPLIT_NAMES, USES
from ..data.user_data import FOLDERS
from ..engine.epochs import best_row
from ..engine.recipe import Recipe
from ..engine.run import REPORT_NAME, RunDirectory
from ..engine.speed import Speed
from ..equivariance import equivariance_report
from ..evaluation.metrics import (
    BATCH_SIZE,
    DIGITS,
    STEPS,
    classifier_metrics,
    evaluation_bar,
    predict_split,
    split_logits,
    top1,
)
from ..evaluation.predictions_file import each_prediction, write_predictions
from ..evaluation.rotation import inputs, sample
from ..hub import CONFIG_NAME, RESULTS_NAME, sha256_of
from ..models import EquivariantNet
from ..models.config import checkpoint_config
from .advice import advice_after, chosen
from .comparison import train_baseline
from .report import markdown, write_figures

__all__ = ["write_report"]

PAGE_NAME, PREDICTIONS_NAME = "report.md", "predictions.csv"
_REPORT_SECONDS = 30.0  # that the report may take, or a tenth of the training if that is more
_EVALUATION = 0.6  # of these: the rest is for the equivariance error, the throughput and the figures
_TIES_SAMPLE = 100  # images whose logits are compared
_TIMED_BATCH = 64  # of the throughput; smaller where this takes more than a second
_TRAINING_SAMPLE = 100  # training images whose accuracy is compared with that of validation


def write_report(
    model: EquivariantNet,
    recipe: Recipe,
    splits: Mapping[str, AnySplit],
    settings: dict[str, Any],
    directory: RunDirectory,
    *,
    workers: int,
    speed: Speed,
    made_by: str,
    advice: list[str],
    notes: Sequence[str] = (),
    sources: Mapping[str, int] | None = None,
    image_side: int | None = None,
    against: str | None = None,
    formats: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Evaluates a fine-tuned network and writes the files of its checkpoint.

    Args:
        model: The network, with the weights of its best epoch.
        recipe: The recipe of the run.
        splits: The images; those of the test split are evaluated, or else of the validation or training split.
        settings: The content of finetune.json.
        directory: The run directory.
        workers: The processes that read images that are not in memory.
        speed: What was measured before the run.
        made_by: The command of the run.
        advice: What was said before the run.
        notes: Sentences on the images, for the report.
        sources: The number of sources, such as patients, that the images of each split come from, if they were split
            by these.
        image_side: The shorter side of the images before they were resized, in pixels; None if it is unknown.
        against: A network to train in the same time and to compare with; None for none.
        formats: ``precision`` and ``channels_last`` of that one; what is left out is measured.
        device: Where that one is trained; None for a GPU where there is one.

    Returns:
        The report, as report.json holds it.
    """
    split = next(name for name in ("test", "valid", "train") if name in splits)
    folder, rows, names = directory.path, directory.rows(), settings["label_names"]
    best = best_row(rows)
    training_seconds = round(sum(row["seconds"] for row in rows))
    found = _evaluated(model, recipe, splits, split, names, training_seconds, workers)
    advice = advice + advice_after(
        found.metrics,
        found.training_accuracy,
        best["valid_accuracy"],
        recipe,
        model.group.reflections,
        settings["minutes"],
    )
    report: dict[str, Any] = {
        "model": recipe.model,
        "group": model.group.name,
        "data": recipe.dataset,
        "start": settings["start"],
        "classes_count": len(names),
        "input_size": settings["input_size"],
        "images": {USES[name]: len(part) for name, part in splits.items()},
        "epochs": len(rows),  # patience may end a run before those of its recipe
        "selected_epoch": best["epoch"],
        "evaluated_on": f"{SPLIT_NAMES[split]} images",
        "notes": [*notes, *found.notes],
        "advice": advice,
        **found.metrics,
        "training_accuracy": round(found.training_accuracy, DIGITS),
        "valid_accuracy": None if best["valid_accuracy"] is None else round(best["valid_accuracy"], DIGITS),
        "equivariance_error": found.equivariance_error,
        "training_seconds": training_seconds,
        "speed": speed.as_dict(),
        "settings": chosen(recipe, splits),
    }
    digest = _write_checkpoint(model, recipe, settings, directory, image_side)
    if split == "test":
        results = checkpoint_results(
            model,
            recipe,
            checkpoint=f"{recipe.model}.{recipe.dataset}",
            split_sizes={name: len(part) for name, part in splits.items()},
            label_names=names,
            command=made_by,
            rows=rows,
            test_error=round(100 - found.metrics["accuracy"], DIGITS),
            metrics=found.metrics,
            rotated_images=found.metrics["rotated_images"],
            training_seconds=training_seconds,
            weights_sha256=digest,
            base_model=settings["base_model"],
            preprocessing=_preprocessing(settings),
            timed_batch=max(1, min(_TIMED_BATCH, int(speed.images_per_second))),
            x=found.x,
        )
        of_images = {"image_side": image_side, "sources": dict(sources or {})}
        write_json(folder / RESULTS_NAME, results | {key: value for key, value in of_images.items() if value})
    if against is None and (before := _comparison(folder, report)):
        report["against"] = before
    _write_pages(report, folder)
    known = {split: found.logits}
    _write_predictions(model, splits, names, folder / PREDICTIONS_NAME, known, recipe.channels_last, workers)
    if against is not None:  # after the files of the network, which are whole if the other one fails or is interrupted
        report["against"] = train_baseline(
            against, recipe, splits, settings, directory, device, workers, split, found.metrics, formats or {}
        )
        _write_pages(report, folder)
    return report


@dataclass(frozen=True)
class _Evaluation:
    """What was measured of a fine-tuned network: scores, logits of the split, sentences on them, and on which images.

    ``x`` are images for the equivariance error, where noise gives zeros; None otherwise.
    """

    metrics: dict[str, Any]
    logits: Tensor
    notes: list[str]
    training_accuracy: float
    equivariance_error: float
    x: Tensor | None


def _evaluated(
    model: EquivariantNet,
    recipe: Recipe,
    splits: Mapping[str, AnySplit],
    split: str,
    names: list[str],
    training_seconds: float,
    workers: int,
) -> _Evaluation:
    """Evaluates a network on the split ``split``, and on some training images."""
    notes: list[str] = []
    if split != "test":
        notes.append(
            f"There is no test split: metrics on the {SPLIT_NAMES[split]} images are better than on new images."
        )
    metrics, logits = classifier_metrics(
        model,
        splits[split],
        names,
        workers=workers,
        seconds=_EVALUATION * max(_REPORT_SECONDS, training_seconds / 10),
        channels_last=recipe.channels_last,
    )
    notes += _shortened(metrics, len(splits[split]))
    some = sample(splits["train"], _TRAINING_SAMPLE)
    training_accuracy = top1(predict_split(model, some, workers), some.labels.cpu())
    seen, ties = _with_logits(model, (splits[split], splits["train"]), recipe, names, workers)
    error, x = _equivariance(model, seen)
    return _Evaluation(metrics, logits, notes + ties, training_accuracy, error, x)


def _preprocessing(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("input_size", "mean", "std")}


def _write_checkpoint(
    model: EquivariantNet,
    recipe: Recipe,
    settings: Mapping[str, Any],
    directory: RunDirectory,
    image_side: int | None,
) -> str:
    """Writes config.json, and returns the SHA-256 of model.safetensors."""
    digest = sha256_of(directory.weights)
    # Weights that started from none have no license but what their owner gives them.
    owned = {} if settings["start"] else {"license": None}
    config = checkpoint_config(
        model,
        model.pretrained_cfg | _preprocessing(settings) | {"tag": settings["data"]} | owned,
        model_args=recipe.model_args,
        label_names=settings["label_names"],
        group=model.group.name,
        weights_sha256=digest,
        image_side=image_side,
    )
    write_json(directory.path / CONFIG_NAME, config)
    return digest


def _write_predictions(
    model: EquivariantNet,
    splits: Mapping[str, AnySplit],
    names: list[str],
    path: Path,
    known: Mapping[str, Tensor],
    channels_last: bool,
    workers: int,
) -> None:
    """Writes a line for each validation and test image, or for each training image if there are no others."""
    parts = {name: splits[name] for name in ("valid", "test") if name in splits} or {"train": splits["train"]}
    logits = dict(known)
    for name in parts.keys() - known.keys():
        with evaluation_bar(model, len(parts[name]), channels_last, "predictions"):
            logits[name] = split_logits(model, parts[name], workers)
    rows: dict[str | None, Iterable[dict[str, Any]]] = {
        FOLDERS[name]: each_prediction(part, logits[name], names) for name, part in parts.items()
    }

    def write(to: Path) -> None:
        # Names of files may be bytes that are no text.
        with to.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            write_predictions(file, names, rows)

    atomic(path, write)


@torch.no_grad()
def _with_logits(
    model: EquivariantNet, splits: tuple[AnySplit, AnySplit], recipe: Recipe, names: list[str], workers: int
) -> tuple[Tensor, list[str]]:
    """Two images whose logits are not all equal, and a line if there are others among those that are evaluated.

    The head of some networks, such as p4_cnn, has no bias: where all features are 0, as after too high a learning rate,
    so are all logits.

    Args:
        model: The network.
        splits: The images that are evaluated, and the training images, which are looked at if all those are equal.
        recipe: The recipe of the run.
        names: The names of the classes.
        workers: The processes that read images that are not in memory.
    """
    notes: list[str] = []
    for split in splits:
        parts = [(x, model(x)) for x in inputs(model, sample(split, _TIES_SAMPLE), BATCH_SIZE, workers)]
        images, logits = (torch.cat(found).cpu() for found in zip(*parts, strict=True))
        equal = (logits == logits[:, :1]).all(1)
        if equal.any() and not notes:
            notes.append(
                f"On {int(equal.sum()):,} of {len(equal):,} images all classes have the same logit, and {names[0]!r}, "
                "the first one, counts as predicted: such images are empty, or the network was trained for too short a "
                "time or with too high a learning rate."
            )
        if not equal.all():
            return images[~equal][:2], notes
    raise ValueError(
        f"all classes have the same logit on all of {len(equal):,} training images: the network has collapsed in "
        f"training; train it anew in another folder, with a lower lr than {recipe.lr:g}"
    )


def _equivariance(model: EquivariantNet, seen: Tensor) -> tuple[float, Tensor | None]:
    """The equivariance error on noise, or on images where noise gives zeros, and these images."""
    try:
        return equivariance_report(model).largest, None
    except ValueError:
        return equivariance_report(model, seen).largest, seen


def _comparison(folder: Path, report: Mapping[str, Any]) -> dict[str, Any] | None:
    """The comparison in the report that the folder has, if that is of the same run."""
    try:
        old = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
        keys = ("data", "images", "epochs", "selected_epoch", "training_seconds", "evaluated_on", "rotated_images")
        same = all(old[key] == report[key] for key in keys)
        curves = [found["rotation_curve"] for found in (old, report)]
        same = same and all(curves[0][key] == curves[1][key] for key in ("angles", "images"))
        return old["against"] if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_pages(report: dict[str, Any], folder: Path) -> None:
    """Writes report.json, report.md and its figures."""
    figures = write_figures(report, folder)
    write_text(folder / PAGE_NAME, markdown(report, figures))
    write_json(folder / REPORT_NAME, report)


def _shortened(metrics: Mapping[str, Any], count: int) -> list[str]:
    """A line that says what was left out of an evaluation to save time."""
    curve, images = metrics["rotation_curve"], metrics["rotated_images"]
    if len(curve["angles"]) == 360 // STEPS[0] and images == count:
        return []
    parts = [f"{images:,} of the {count:,} images were rotated by 90°, 180° and 270°"] if images < count else []
    some = f"{curve['images']:,} of the {count:,}" if curve["images"] < count else f"all {count:,}"
    parts.append(f"the curve has {len(curve['angles'])} angles, of {some} images")
    return [f"To save time, {', and '.join(parts)}."]
