"""Fine-tuning on the user's images: training, evaluation, and a checkpoint that everything else loads."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from .._common import atomic
from ..analysis.sizes import check_side, weightless
from ..data import AnySplit, Split, check, complete_splits, num_classes, read_images
from ..equivariance import equivariance_error
from ..groups import P4, Group
from ..hub import CONFIG_NAME, RESULTS_NAME, WEIGHTS_NAME, WeightsNotFoundError, base_model
from ..models import EquivariantNet
from ..models.loading import instantiate
from ..models.resolve import ModelSource, resolve
from .loop import check_device, train
from .metrics import evaluate
from .recipe import Recipe
from .report import command, markdown, write_figures
from .results import checkpoint_config, checkpoint_results
from .run_directory import SETTINGS_NAME, SPLIT_NAMES, RunDirectory, best_row, split_digest, write_json
from .state import freeze as freeze_modules

__all__ = ["FineTuned", "finetune", "trunk"]

REPORT_NAME, PAGE_NAME = "report.json", "report.md"
_DEFAULTS: dict[str, Any] = {"epochs": 30, "patience": 10, "augment": "shifts"}
_FRACTION = 0.15


@dataclass(frozen=True)
class FineTuned:
    """The result of a fine-tuning.

    Args:
        model: The network in evaluation mode, with the weights of its best epoch.
        report: The metrics, as report.json holds them, on the images that it names.
        folder: The checkpoint's folder: ``eqzoo.create_model(f"local-dir:{folder}", pretrained=True)`` reads it.
    """

    model: nn.Module
    report: dict[str, Any]
    folder: Path


def finetune(
    name: str | os.PathLike[str],
    data: str | os.PathLike[str] | Mapping[str, AnySplit],
    output: str | os.PathLike[str],
    *,
    size: int | None = None,
    channels: int | None = None,
    pretrained: bool | None = None,
    freeze: bool | Sequence[str] = False,
    balance: bool = False,
    valid_fraction: float = _FRACTION,
    test_fraction: float = _FRACTION,
    data_dir: str | os.PathLike[str] = "data",
    download: bool = False,
    device: str | None = None,
    workers: int = 4,
    **recipe: Any,
) -> FineTuned:
    """Trains a network on the user's images, evaluates it, and writes the folder of a checkpoint.

    The same call resumes an interrupted run; if the run is finished, nothing is trained.

    Args:
        name: A network, a checkpoint, ``hf-hub:<owner>/<repo>`` or the folder of a checkpoint.
        data: The images, as `eqzoo.data.read_images` takes them; or a mapping with the splits ``train``, and possibly
            ``valid`` and ``test``.
        output: The folder to write: model.safetensors, config.json, results.json, report.json, report.md, its figures
            if matplotlib is installed, and the files of the run.
        size: The side of the images in pixels; None for the network's own.
        channels: 1, 3 or 4 channels of image files; None for those that they have.
        pretrained: Whether to start from trained weights; None if there are any.
        freeze: What is not trained: True for all but the classifier, or names of modules.
        balance: Whether the loss weights classes by the inverse of their number of images.
        valid_fraction: The fraction of the images to choose the epoch by, if the data has no validation split; 0 for
            none.
        test_fraction: The same for the test split.
        data_dir: The folder of data sets that have a name.
        download: Whether these may be downloaded.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        workers: The processes that read images that are not in memory.
        **recipe: Anything else of `eqzoo.engine.Recipe`: ``epochs`` (default 30), ``batch_size`` (32, of few images
            less), ``lr`` (1e-3), ``patience`` (10), ``layer_decay``, ``ema_decay``, ``augment`` (``"shifts"``;
            ``"missing"`` is the 90° rotations and reflections that are not in the network's group), ``seed`` ...

    Returns:
        The network, the report and the folder.

    Raises:
        ValueError: If an image, a size, a class or a setting is invalid, or the folder holds other files.
        FileNotFoundError: If there are no such images.
        WeightsNotFoundError: If weights are asked for and found nowhere.
        ImportError: If the packages of the training loop are missing.
        OSError: If the folder cannot be written.
    """
    _check_call(output, data, recipe, device)
    _check_values(recipe, balance, valid_fraction, test_fraction)
    source = resolve(name)
    blank = weightless(source)
    side = size or blank.input_size[1]
    check_side(source, side)
    if not isinstance(freeze, bool):
        freeze_modules(weightless(source), tuple(freeze))
    splits = _splits(data, side, channels, data_dir, download, (valid_fraction, test_fraction))
    label = _label(data)
    directory = RunDirectory(Path(output))
    settings = _settings(source, blank, label, splits, directory, pretrained)
    plan = _recipe(source, blank, label, splits, recipe, freeze, balance, settings)

    def build() -> nn.Module:
        return _built(source, plan.model_args, settings)

    directory.start_fine_tuning(settings)
    try:
        train_splits = {key: split for key, split in splits.items() if key != "test"}
        model = train(plan, build, train_splits, directory.path, device, workers).eval()
    except (ValueError, RuntimeError) as error:
        if "DataLoader worker" not in str(error):
            raise
        # The message of a reading process comes with its traceback; the last line is the error.
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from error
    options = {
        "size": None if side == blank.input_size[1] else side,
        "channels": channels,
        "no-pretrained": settings["start"] is None,
        "freeze": freeze,
        "balance": balance,
        "valid": None if valid_fraction == _FRACTION else valid_fraction,
        "test": None if test_fraction == _FRACTION else test_fraction,
    }
    made_by = command(settings["name"], _given(data), options, _chosen(recipe))
    report = _report(cast(EquivariantNet, model), plan, splits, settings, directory, workers, made_by)
    return FineTuned(model, report, directory.path)


def trunk(model: EquivariantNet) -> tuple[str, ...]:
    """The top-level modules with parameters, except for that of the classifier."""
    last = model.get_classifier()
    return tuple(
        name
        for name, child in model.named_children()
        if any(True for _ in child.parameters()) and not any(module is last for module in child.modules())
    )


def _check_call(output: str | os.PathLike[str], data: object, recipe: Mapping[str, Any], device: str | None) -> None:
    known = {item.name for item in fields(Recipe)} - {"model", "dataset", "freeze", "class_weights", "start"}
    for key in recipe.keys() - known:
        near = get_close_matches(key, known, n=3) or sorted(known)
        raise ValueError(f"fine-tuning has no setting {key!r}; near it are {', '.join(near)}")
    check_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("fine-tuning runs in one process; training/train.py trains in several")
    folder = Path(output).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{output} is a file; name a new folder")
    if not isinstance(data, Mapping):
        images = Path(cast(str, data)).resolve()
        if images.is_dir() and folder.is_relative_to(images):
            raise ValueError(
                f"{output} is inside the images {data}, where it would be read as a class; name another folder"
            )


def _check_values(recipe: Mapping[str, Any], balance: bool, valid: float, test: float) -> None:
    """Raises ValueError for values that are invalid for any images, before images are read."""
    if min(valid, test) < 0 or valid + test >= 1:
        raise ValueError(
            f"the fractions valid and test are at least 0 and together less than 1, got {valid} and {test}"
        )
    # accumulate and valid_size depend on the number of images.
    values = {key: v for key, v in (_DEFAULTS | dict(recipe)).items() if key not in ("accumulate", "valid_size")}
    if values.get("batch_size") is None:
        values.pop("batch_size", None)
    if values["augment"] == "missing":
        values["augment"] = "none"
    Recipe("", "", class_weights=(1.0,) if balance else (), **values)


def _splits(
    data: str | os.PathLike[str] | Mapping[str, AnySplit],
    side: int,
    channels: int | None,
    data_dir: str | os.PathLike[str],
    download: bool,
    fractions: tuple[float, float],
) -> dict[str, AnySplit]:
    """The training, validation and test splits, resized."""
    if not isinstance(data, Mapping):
        return complete_splits(read_images(data, side, channels, data_dir, download), *fractions)
    check(data, "data")
    if tuple(data["train"].shape[1:]) != (side, side):
        raise ValueError(f"splits need images of {side} x {side} pixels, got {data['train'].shape}; or set size")
    return complete_splits(data, *fractions)


def _label(data: object) -> str:
    """The name of a data set in letters, digits and dashes, as in the name of a checkpoint."""
    if isinstance(data, Mapping):
        return "own"
    path = Path(cast(str, data))
    last = path.resolve().name if path.is_dir() else Path(str(data).rpartition(":")[2]).name.removesuffix(".npz")
    return re.sub(r"[^a-z0-9_-]+", "-", last.lower()).strip("-") or "own"


def _given(data: object) -> str:
    """The data in a command; files and folders without their parent folders."""
    if isinstance(data, Mapping):
        return "own"
    path = Path(cast(str, data))
    return path.resolve().name if path.exists() else str(data)


def _chosen(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe that are not at their defaults."""
    usual = {item.name: item.default for item in fields(Recipe)} | _DEFAULTS
    usual |= {"batch_size": None, "model_args": {}, "optimizer_args": {}}
    return {key: value for key, value in recipe.items() if value != usual[key]}


def _settings(
    source: ModelSource,
    blank: EquivariantNet,
    label: str,
    splits: Mapping[str, AnySplit],
    directory: RunDirectory,
    pretrained: bool | None,
) -> dict[str, Any]:
    """Everything that a run depends on besides its recipe, as finetune.json holds it."""
    cfg, train = blank.pretrained_cfg, splits["train"]
    before = directory.path / SETTINGS_NAME
    name = source.timm_name if Path(source.name).is_dir() else source.name
    if before.is_file() and pretrained is None and not directory.is_unused():
        start = json.loads(before.read_text()).get("start")
    else:
        start = _start(source, name, cfg, pretrained)
    classes = train.classes or tuple(map(str, range(num_classes(splits))))
    if len(classes) < 2:
        raise ValueError(f"there is one class, {classes[0]!r}; two or more are needed")
    if len(classes) != num_classes(splits):
        raise ValueError(f"there are {len(classes)} names for {num_classes(splits)} classes: {', '.join(classes)}")
    if start and len(cfg["mean"]) in (1, train.shape[0]) and blank.in_chans == train.shape[0]:
        mean, std = list(cfg["mean"]), list(cfg["std"])
        mean, std = (values * (train.shape[0] // len(values)) for values in (mean, std))
    else:
        mean, std = _statistics(train)
    return {
        "name": name,
        "start": start,
        "base_model": base_model(source.timm_name, cfg.get("hf_hub_id")) if start else None,
        "data": label,
        "data_sha256": {part: split_digest(split) for part, split in splits.items()},
        "input_size": list(train.shape),
        "mean": mean,
        "std": std,
        "label_names": list(classes),
    }


def _start(source: ModelSource, name: str, cfg: Mapping[str, Any], pretrained: bool | None) -> str | None:
    """The checkpoint to start from, or None for random weights."""
    if pretrained is False:
        return None
    try:
        instantiate(source, pretrained=True)
    except WeightsNotFoundError:
        if pretrained:
            raise
        print(f"eqzoo: there are no weights for {name}; training from random ones", file=sys.stderr)
        return None
    return name if source.config or not cfg.get("tag") else f"{cfg['architecture']}.{cfg['tag']}"


def _statistics(split: AnySplit) -> tuple[list[float], list[float]]:
    """The mean and the standard deviation of each channel, for pixel values in 0 to 1, of at most 2,000 images."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:2000].sort().values
    if isinstance(split, Split):
        images = split.images[order]
    else:
        images = torch.stack([split.read(int(place)) for place in split.places[order]])
    values = images.transpose(0, 1).flatten(1).double() / 255
    # The standard deviation of a constant channel would be zero.
    return [round(v, 4) for v in values.mean(1).tolist()], [max(round(v, 4), 1e-2) for v in values.std(1).tolist()]


def _recipe(
    source: ModelSource,
    blank: EquivariantNet,
    label: str,
    splits: Mapping[str, AnySplit],
    given: Mapping[str, Any],
    freeze: bool | Sequence[str],
    balance: bool,
    settings: Mapping[str, Any],
) -> Recipe:
    values = _DEFAULTS | dict(given)
    train = splits["train"]
    if values["augment"] == "missing":
        values["augment"] = _missing(blank.group)
    # With few images batches are smaller, so that an epoch has some steps.
    values["batch_size"] = min(values.get("batch_size") or min(32, max(8, len(train) // 8)), len(train))
    if "valid" not in splits:
        values |= {"valid_size": 0, "patience": None}
    if freeze and settings["start"] is None:
        raise ValueError("freeze needs trained weights, and this run starts from random ones; leave freeze out")
    frozen = trunk(blank) if freeze is True else tuple(freeze or ())
    weights: tuple[float, ...] = ()
    if balance:
        counts = train.labels.bincount(minlength=num_classes(splits)).double()
        weights = tuple(round(v, 6) for v in (counts.sum() / (len(counts) * counts)).tolist())
    sizes = {"num_classes": len(settings["label_names"]), "in_chans": train.shape[0]}
    values["model_args"] = source.model_args | dict(values.get("model_args") or {}) | sizes
    return Recipe(str(blank.pretrained_cfg["architecture"]), label, freeze=frozen, class_weights=weights, **values)


def _missing(group: Group) -> str:
    """The augmentation by the symmetries of the pixel grid that are not in a group."""
    rotations = any(group.element(P4.matrix(g)) is None for g in P4.elements)
    return "quarter_rotations_flips" if rotations else "none" if group.reflections else "flips"


def _built(source: ModelSource, args: Mapping[str, Any], settings: Mapping[str, Any]) -> nn.Module:
    """The network with its initial weights and a ``pretrained_cfg`` of the user's images and classes."""
    model = cast(EquivariantNet, instantiate(source, pretrained=settings["start"] is not None, **args))
    cfg = dict(model.pretrained_cfg)
    if settings["start"] and list(cfg.get("label_names") or ()) != settings["label_names"]:
        model.reset_classifier(int(args["num_classes"]))  # the trained one is of other classes
    known = {key: tuple(settings[key]) for key in ("input_size", "mean", "std", "label_names")}
    model.pretrained_cfg = cfg | known | {"num_classes": args["num_classes"]}
    return model


def _report(
    model: EquivariantNet,
    recipe: Recipe,
    splits: Mapping[str, AnySplit],
    settings: dict[str, Any],
    directory: RunDirectory,
    workers: int,
    made_by: str,
) -> dict[str, Any]:
    """Evaluates the network and writes the files of the checkpoint."""
    split = next(name for name in ("test", "valid", "train") if name in splits)
    folder, rows, names = directory.path, directory.rows(), settings["label_names"]
    best = best_row(rows)
    sizes = {name: len(part) for name, part in splits.items()}
    uses = {"train": "train", "valid": "choose the epoch", "test": "test"}
    notes = []
    if split != "test":
        notes.append(
            f"There is no test split: metrics on the {SPLIT_NAMES[split]} images are better than on new images."
        )
    report: dict[str, Any] = {
        "model": recipe.model,
        "group": model.group.name,
        "data": recipe.dataset,
        "start": settings["start"],
        "classes_count": len(names),
        "input_size": settings["input_size"],
        "images": {uses[name]: count for name, count in sizes.items()},
        "epochs": recipe.epochs,
        "selected_epoch": best["epoch"],
        "evaluated_on": f"{SPLIT_NAMES[split]} images",
        "notes": notes,
        **evaluate(model, splits[split], names, workers=workers),
        "equivariance_error": equivariance_error(model),
        "training_seconds": round(sum(row["seconds"] for row in rows)),
    }
    weights = directory.weights.read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    atomic(folder / WEIGHTS_NAME, lambda path: path.write_bytes(weights))
    preprocessing = {key: settings[key] for key in ("input_size", "mean", "std")}
    config = checkpoint_config(
        model,
        model.pretrained_cfg | preprocessing | {"tag": settings["data"]},
        model_args=recipe.model_args,
        label_names=names,
        group=model.group.name,
        weights_sha256=digest,
    )
    write_json(folder / CONFIG_NAME, config)
    if split == "test":
        results = checkpoint_results(
            model,
            recipe,
            checkpoint=f"{recipe.model}.{recipe.dataset}",
            split_sizes=sizes,
            label_names=names,
            command=made_by,
            best=best,
            test_error=round(100 - report["accuracy_of_rotated_copies"][0], 3),
            metrics=report,
            rotated_images=sizes["test"],
            training_seconds=report["training_seconds"],
            weights_sha256=digest,
            base_model=settings["base_model"],
            preprocessing=preprocessing,
        )
        write_json(folder / RESULTS_NAME, results)
    figures = write_figures(report, folder)
    atomic(folder / PAGE_NAME, lambda path: path.write_text(markdown(report, figures), encoding="utf-8"))
    write_json(folder / REPORT_NAME, report)
    return report
