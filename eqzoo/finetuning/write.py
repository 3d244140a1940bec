"""The files of a fine-tuned checkpoint: results, configuration, predictions, figures and card."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._common import atomic, write_json
from ..analysis import throughput
from ..cards import network_results, training_results, write_card, write_figures
from ..data import AnySplit
from ..data.hashes import SPLIT_NAMES
from ..data.splits import part_of
from ..data.user_data import FOLDERS
from ..engine.speed import AUTOMATIC
from ..evaluation import Predictor, measure, sample, top1
from ..evaluation.metrics import DIGITS
from ..evaluation.predictions_file import each_prediction, write_predictions
from ..evaluation.progress import counting
from ..hub import CONFIG_NAME, RESULTS_NAME, sha256_of
from ..models.config import checkpoint_config
from .advice import advice_after
from .images import data_argument
from .plan import Plan

PREDICTIONS_NAME = "predictions.csv"
_SECONDS = 18.0  # that the metrics may take, or 6 % of the training if that is more
_SHARE = 0.06
_TIMED_BATCH = 64  # of the throughput; smaller where this takes more than a second
_TRAINING_SAMPLE = 100  # training images whose accuracy is compared with that of validation


def write_checkpoint(plan: Plan, model: nn.Module, advice: Sequence[str]) -> dict[str, Any]:
    """Evaluates a fine-tuned network and writes the files of its checkpoint beside the weights.

    Args:
        plan: The plan of the run.
        model: The network, with the weights of its best epoch.
        advice: What was said before the run.

    Returns:
        The content of results.json, whose advice names no files.
    """
    assert plan.speed is not None
    folder, rows = plan.directory.path, plan.directory.rows()
    predictor = Predictor.of(model, plan.recipe.channels_last)
    training = training_results(rows, model)
    timed_batch = max(1, min(_TIMED_BATCH, int(plan.speed.images_per_second)))
    seconds = max(_SECONDS, _SHARE * training["training_seconds"])
    split = plan.splits[plan.evaluated_on]
    found = measure(predictor, split, seconds=seconds, workers=plan.request.workers)
    some = sample(plan.splits["train"], _TRAINING_SAMPLE)
    logits = predictor.logits(some, plan.request.workers)
    training_accuracy = top1(logits.argmax(1), some.labels.cpu())
    with_features, ties = _with_features(plan, predictor, [(split, found.logits), (some, logits)])
    results = {
        "checkpoint": f"{plan.recipe.model}.{plan.recipe.dataset}",
        **found.metrics,
        "evaluated_on": plan.evaluated_on,
        "data": plan.recipe.dataset,
        "images": {name: len(part) for name, part in plan.splits.items()},
        **({"sources": dict(plan.images.sources)} if plan.images.sources else {}),
        **training,
        "training_accuracy": round(training_accuracy, DIGITS),
        **network_results(model, with_features),
        "throughput": throughput(model, predictor.input_size, timed_batch),
        "start": plan.settings["start"],
        "base_model": plan.settings["base_model"],
        **({"distilled": True} if plan.recipe.teachers or plan.recipe.soft_labels else {}),
        "command": command(plan),
        "weights_sha256": sha256_of(plan.directory.weights),
        "weights_dtype": "float32",
        "notes": [*_notes(plan), *found.notes, *ties],
        "advice": [*advice, *advice_after(plan, found.metrics, training_accuracy, training["valid_accuracy"])],
    }
    published = [getattr(line, "published", line) for line in results["advice"]]
    _write_config(plan, model, results["weights_sha256"])
    write_predictions_file(plan, predictor, {plan.evaluated_on: found.logits})
    write_json(folder / RESULTS_NAME, results | {"advice": published})
    write_figures(folder)
    write_card(folder)
    return results


def _notes(plan: Plan) -> list[str]:
    """Sentences on the images that were evaluated, and on their sources."""
    notes = [f"{line[0].upper()}{line[1:]}." for line in plan.images.source_lines]
    if plan.evaluated_on != "test":
        which = SPLIT_NAMES[plan.evaluated_on]
        notes.append(f"There is no test split: metrics on the {which} images are better than on new images.")
    return notes


def _write_config(plan: Plan, model: nn.Module, weights_sha256: str) -> None:
    preprocessing = {key: plan.settings[key] for key in ("input_size", "mean", "std")}
    cfg = {**model.pretrained_cfg, **preprocessing, "tag": plan.settings["data"]}  # type: ignore[dict-item]
    # Weights from random ones, or from a file, have no license but what their owner gives them.
    if not plan.settings["start"] or plan.request.weights:
        cfg["license"] = None
    config = checkpoint_config(
        model,
        cfg,
        model_args=plan.recipe.model_args,
        label_names=plan.names,
        group=Predictor.of(model).group.name,
        weights_sha256=weights_sha256,
        image_side=plan.native[0] if plan.native else None,
    )
    write_json(plan.directory.path / CONFIG_NAME, config)


def write_predictions_file(plan: Plan, predictor: Predictor, known: Mapping[str, Tensor] | None = None) -> None:
    """Writes a line for each validation and test image, or for each training image if there are no others.

    Args:
        plan: The plan of the run.
        predictor: The network.
        known: The logits of splits that are computed already.
    """
    parts = {name: part for name, part in plan.splits.items() if name != "train"} or {"train": plan.splits["train"]}
    logits = dict(known or {})
    for name in parts.keys() - logits.keys():
        with counting(predictor.network, "predictions", len(parts[name])):
            logits[name] = predictor.logits(parts[name], plan.request.workers)
    rows = {FOLDERS[name]: each_prediction(part, logits[name], plan.names) for name, part in parts.items()}

    def write(path: Path) -> None:
        # Names of files may be bytes that are no text.
        with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            write_predictions(file, plan.names, rows)  # type: ignore[arg-type]

    atomic(plan.directory.path / PREDICTIONS_NAME, write)


def _with_features(
    plan: Plan, predictor: Predictor, parts: Sequence[tuple[AnySplit, Tensor]]
) -> tuple[Tensor, list[str]]:
    """Two normalized images of parts, by their logits, with features other than 0, and a line on those without any.

    The head of some networks, such as p4_cnn, has no bias: where all features are 0, as after too high a learning rate,
    so are all logits.

    Raises:
        ValueError: If all logits of all images are equal.
    """
    notes: list[str] = []
    for split, logits in parts:
        equal = (logits == logits[:, :1]).all(1)
        if equal.any() and not notes:
            notes.append(
                f"On {int(equal.sum()):,} of {len(equal):,} images all classes have the same logit, and "
                f"{plan.names[0]!r}, the first one, counts as predicted: such images are empty, or the network was "
                "trained for too short a time or with too high a learning rate."
            )
        if not equal.all():
            return next(predictor.inputs(part_of(split, (~equal).nonzero()[:2, 0]))).cpu(), notes
    raise ValueError(
        f"all classes have the same logit on all of {len(equal):,} training images: the network has collapsed in "
        f"training; train it anew in another folder, with a lower lr than {plan.recipe.lr:g}"
    )


def command(plan: Plan) -> str:
    """The `eqzoo finetune` command of a fine-tuning."""
    request, recipe = plan.request, plan.recipe
    # What was measured here may be measured otherwise on another machine.
    chosen = {} if plan.fits_classifier else {key: getattr(recipe, key) for key in AUTOMATIC}
    given = request.given | chosen | ({} if request.minutes is None else {"epochs": recipe.epochs})
    settings = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
    words = ["eqzoo", "finetune", plan.settings["name"], data_argument(request.data), "--output", "DIR"]
    options: dict[str, Any] = {
        "invariant": request.invariant,
        "copies": request.copies,
        "weights": request.weights and Path(request.weights).name,
        "size": request.size,
        "channels": request.channels,
        "no-pretrained": plan.settings["start"] is None,
        "freeze": request.freeze,
        "balance": request.balance,
        "valid": request.valid_fraction,
        "test": request.test_fraction,
        "split-by": request.split_by if isinstance(request.split_by, str) else None,
    }
    for key, value in options.items():
        if value is not None and value is not False:
            values = [] if value is True else list(value) if isinstance(value, list | tuple) else [value]
            words += [f"--{key}", *map(str, values)]
    return shlex.join([*words, "--set", *settings] if settings else words)
