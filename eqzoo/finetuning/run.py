"""Fine-tuning on the user's images: training, evaluation, and a checkpoint that everything else loads."""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from ..analysis.sizes import blank as blank_copy
from ..analysis.sizes import check_side, weightless
from ..data import AnySplit, files_left_out, folders_in_classes, native_sides, num_classes
from ..data.hashes import image_codes, split_digest, trained_images
from ..engine.epochs import is_finished
from ..engine.loop import train
from ..engine.processor import limited_threads
from ..engine.recipe import Recipe
from ..engine.run import RunDirectory
from ..engine.speed import AUTOMATIC, recorded_speed
from ..engine.state import freeze as freeze_modules
from ..hub import WeightsNotFoundError, base_model
from ..models import EquivariantNet
from ..models.load import ModelSource, instantiate, list_pretrained, resolve
from .advice import advice_before, advice_on_time, summary
from .checks import check_call, check_values
from .comparison import check_baseline
from .images import data_argument, data_label, image_statistics, own_images
from .report import command
from .report_files import write_report
from .rules import fine_tuning_recipe

__all__ = ["FineTuned", "finetune", "initial_network", "trunk"]


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
    freeze: bool | str | Sequence[str] = False,
    balance: bool = False,
    minutes: float | None = None,
    against: str | None = None,
    valid_fraction: float | None = None,
    test_fraction: float | None = None,
    split_by: str | Sequence[object] | None = None,
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
            if matplotlib is installed, predictions.csv, and the files of the run.
        size: The side of the images in pixels; None for the network's own.
        channels: 1, 3 or 4 channels of image files; None for those that they have.
        pretrained: Whether to start from trained weights; None if there are any. A name with its data set, such as
            ``p4_cnn.rotmnist``, has to have them.
        freeze: What is not trained: True for all but the classifier, or a name or names of modules.
        balance: Whether the loss weights classes by the inverse of their number of images.
        minutes: The time to train for: the number of epochs follows from the speed of the first steps. None for a
            number of epochs that depends on the number of images.
        against: Another network, timm's or of the zoo (``"resnet18"``, ``"z2_resnet29.cifar10"``; with a tag, it starts
            from trained weights), to train on the same images in the same time, augmented as suits the group of the
            fine-tuned network: the report compares the two. None for no comparison.
        valid_fraction: The fraction of the images to choose the epoch by, 0 for none; None for 0.15 if the data has no
            validation split.
        test_fraction: The same for the test split.
        split_by: What the images come from, such as patients, slides or scenes, to draw the validation and test splits
            by whole sources, so that the images of one are in one split only, and to check the splits of a folder for
            it: ``"folder"`` for the folders inside of the class folders, a regular expression for a part of the files'
            names, the name of an array of a .npz file, or a value for each training image, see
            `eqzoo.data.image_sources`. None if each image stands alone.
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
        The network, the report and the folder.

    Raises:
        TypeError: If the data is of another type.
        ValueError: If an image, a size, a class or a setting is invalid or without effect, the folder holds other
            files, or another command trains there.
        FileNotFoundError: If there are no such images.
        WeightsNotFoundError: If weights are asked for and found nowhere.
        ImportError: If the packages of the training loop are missing.
        OSError: If the folder cannot be written, or weights of ``against`` are found nowhere.
    """
    if size is not None and size < 1:
        raise ValueError(f"size is the side of the images, at least one pixel; got {size}")
    check_call(output, data, recipe, device)
    check_values(recipe, balance, minutes, valid_fraction, test_fraction)
    source = resolve(name)
    blank = weightless(source, **dict(recipe.get("model_args") or {}))
    side = size or blank.input_size[1]
    check_side(source, side, blank)
    freeze = (freeze,) if isinstance(freeze, str) else freeze
    if not isinstance(freeze, bool):
        freeze_modules(blank_copy(blank), tuple(freeze))
    images = own_images(data, side, channels, valid_fraction, test_fraction, split_by, data_dir, download)
    splits = images.splits
    if against is not None:
        check_baseline(against, splits["train"].shape)
    directory = RunDirectory(Path(output))
    label = directory.settings().get("data") or data_label(data)  # a run that is resumed keeps its name
    by = split_by if split_by is None or isinstance(split_by, str) else "listed"
    settings = {"split_by": by} | _settings(source, blank, label, splits, directory, pretrained, bool(freeze), workers)
    settings |= {"minutes": minutes}
    if freeze and settings["start"] is None:
        raise ValueError("freeze needs trained weights, and this run starts from random ones; leave freeze out")
    given = {key: value for key, value in recipe.items() if value is not None}
    frozen = trunk(blank) if freeze is True else tuple(freeze or ())

    planned = functools.partial(
        fine_tuning_recipe,
        blank,
        label,
        splits,
        model_args=source.model_args,
        freeze=frozen,
        balance=balance,
        settings=settings,
    )
    plan = planned(given)
    before = trained_images(source.folder) if settings["start"] and source.folder else None

    def build() -> nn.Module:
        return initial_network(source, plan.model_args, settings)

    with directory.locked(), limited_threads():
        speed = recorded_speed(directory, settings, plan, build, splits, given, device, workers)
        measured: dict[str, Any] = {"precision": speed.precision, "channels_last": speed.channels_last}
        if minutes is not None:
            measured["epochs"] = speed.epochs_within(60 * minutes, splits)
        plan = planned(given | measured)
        directory.check(plan)
        native = native_sides(data, data_dir=data_dir)
        advice = [
            *advice_before(
                splits,
                blank,
                native,
                side,
                balance,
                drawn=images.drawn,
                inner=folders_in_classes(data),
                trained=before,
                sized=size is not None,
                by_source=by,
                trained_side=source.image_side if settings["start"] else None,
                augment=None if "augment" in given else plan.augment,
            ),
            *advice_on_time(minutes, speed, splits),
            *images.colors,
            *files_left_out(data),
        ]
        notes = _run_lines(name, source, blank, plan, settings, directory, against)
        _say(*summary(plan, splits, settings, speed), *images.source_lines, *notes, *advice)
        train_splits = {key: split for key, split in splits.items() if key != "test"}
        model = train(plan, build, train_splits, directory.path, device, workers).eval()
        codes = image_codes(splits["train"])
        directory.write_trained(codes if before is None else np.concatenate([codes, before]))
        options = {
            "size": None if side == blank.input_size[1] else side,
            "channels": channels,
            "no-pretrained": settings["start"] is None,
            "freeze": freeze,
            "balance": balance,
            "against": against,
            "valid": valid_fraction,
            "test": test_fraction,
            "split-by": split_by if isinstance(split_by, str) else None,
        }
        # What was measured here may be measured otherwise on another machine.
        usual = {"precision": "float32", "channels_last": False}
        made_by = given | {key: value for key, value in measured.items() if value != usual.get(key)}
        line = command(settings["name"], data_argument(data), options, made_by)
        report = write_report(
            cast(EquivariantNet, model),
            plan,
            splits,
            settings,
            directory,
            workers=workers,
            speed=speed,
            made_by=line,
            advice=advice,
            image_side=native[0] if native else None,
            notes=[f"{line[0].upper()}{line[1:]}." for line in images.source_lines],
            sources=images.sources,
            against=against,
            formats={key: given[key] for key in AUTOMATIC if key in given},
            device=device,
        )
    return FineTuned(model, report, directory.path)


def _run_lines(
    name: str | os.PathLike[str],
    source: ModelSource,
    blank: EquivariantNet,
    plan: Recipe,
    settings: Mapping[str, Any],
    directory: RunDirectory,
    against: str | None,
) -> list[str]:
    """Lines on what the run starts from, what follows it, and whether it is finished."""
    rows = directory.rows()
    lines = [f"{against} is trained afterwards for as long, to compare with"] if against else []
    if not rows:
        if _new_classifier(source, blank.pretrained_cfg, settings):
            lines.append(
                f"the classifier starts from random weights; that of {settings['start']} may be of other classes"
            )
        lines += _other_weights(name, settings["start"])
    if is_finished(plan, rows):
        lines.append(f"the run in {directory.path} has all of its epochs: none is trained, the report is written anew")
    return lines


def _other_weights(name: str | os.PathLike[str], start: str | None) -> list[str]:
    """A line where a name without a tag took the weights of one data set and there are those of others."""
    if not isinstance(name, str) or not start or "." in name:
        return []
    others = [found for found in list_pretrained(f"{name}.*") if found != start]
    return [f"{name} takes the weights of {start}; there are {', '.join(others)} as well"] if others else []


def trunk(model: EquivariantNet) -> tuple[str, ...]:
    """The top-level modules with parameters, except for that of the classifier."""
    last = model.get_classifier()
    return tuple(
        name
        for name, child in model.named_children()
        if any(True for _ in child.parameters()) and not any(module is last for module in child.modules())
    )


def initial_network(source: ModelSource, args: Mapping[str, Any], settings: Mapping[str, Any]) -> nn.Module:
    """The network with its initial weights and a ``pretrained_cfg`` of the user's images and classes.

    Args:
        source: The network.
        args: Its arguments, ``num_classes`` among them.
        settings: The ``start``, ``input_size``, ``mean``, ``std`` and ``label_names`` of finetune.json.
    """
    model = cast(EquivariantNet, instantiate(source, pretrained=settings["start"] is not None, **args))
    cfg = dict(model.pretrained_cfg)
    if _new_classifier(source, cfg, settings):
        model.reset_classifier(int(args["num_classes"]))
    known = {key: tuple(settings[key]) for key in ("input_size", "mean", "std", "label_names")}
    model.pretrained_cfg = cfg | known | {"num_classes": args["num_classes"]}
    return model


def _new_classifier(source: ModelSource, cfg: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the run starts from weights whose classifier is not known to be of the classes of the images.

    Numbers are no names: the classes 0 to 9 of a file are not the digits of a published checkpoint, and training that
    starts from a classifier of digits is much less accurate. The user's own checkpoints may have numbered classes.
    """
    names, trained = list(settings["label_names"]), list(cfg.get("label_names") or ())
    numbered = names == [str(label) for label in range(len(names))]
    return bool(settings["start"]) and (trained != names or (numbered and not source.config))


def _settings(
    source: ModelSource,
    blank: EquivariantNet,
    label: str,
    splits: Mapping[str, AnySplit],
    directory: RunDirectory,
    pretrained: bool | None,
    frozen: bool,
    workers: int,
) -> dict[str, Any]:
    """Everything that a run depends on besides its recipe, as finetune.json holds it."""
    cfg, train = blank.pretrained_cfg, splits["train"]
    before = directory.settings()
    name = source.timm_name if Path(source.name).is_dir() else source.name
    start = before.get("start") if before and pretrained is None else _start(source, name, cfg, pretrained)
    classes = train.classes or tuple(map(str, range(num_classes(splits))))
    if len(classes) < 2:
        raise ValueError(
            f"there is one class, {classes[0]!r}; two or more are needed. If it is the folder that holds those of the "
            "classes, give that one"
        )
    if len(classes) != num_classes(splits):
        raise ValueError(f"there are {len(classes)} names for {num_classes(splits)} classes: {', '.join(classes)}")
    mean, std = image_statistics(blank, train, started=bool(start), frozen=frozen, workers=workers)
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
    except WeightsNotFoundError as error:
        if pretrained:
            raise
        if not source.config and "." in source.name:  # asked for by its tag
            raise WeightsNotFoundError(f"{error}; --no-pretrained trains from random weights") from error
        print(f"eqzoo: there are no weights for {name}; training from random ones", file=sys.stderr)
        return None
    return name if source.config or not cfg.get("tag") else f"{cfg['architecture']}.{cfg['tag']}"


def _say(*lines: str) -> None:
    for line in lines:
        print(f"eqzoo: {line}", file=sys.stderr)
