"""Fine-tuning on pictures of one's own: from a folder to a checked checkpoint."""

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

from .claim import SETTINGS_NAME, WORDS, claim, digest_of, unused, write_json
from .data import AnySplit, Split, check, divided, num_classes, read_pictures
from .equivariance import equivariance_error
from .files import atomic
from .groups import P4, Group
from .hub import CONFIG_NAME, RESULTS_NAME, WEIGHTS_NAME, WeightsNotFoundError, base_model, fetch_config
from .models import EquivariantNet, create_model
from .recipe import Recipe
from .report import command, config, markdown, measured, results, write_figures
from .sizes import check_side, weightless

__all__ = ["FineTuned", "finetune", "trunk"]

REPORT_NAME, PAGE_NAME = "report.json", "report.md"
_DEFAULTS: dict[str, Any] = {"epochs": 30, "patience": 10, "augment": "shifts"}
_FRACTION = 0.15


@dataclass(frozen=True)
class FineTuned:
    """What fine-tuning gives.

    Args:
        model: The network in evaluation mode, with the weights of its best epoch.
        report: The scores, as report.json holds them; percentages are of the pictures that it names.
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
    """Trains a network on pictures of one's own, measures it, and writes a checkpoint that others can load.

    A call that was stopped goes on where it was when it is made again; one that was finished trains nothing.

    Args:
        name: A network, a checkpoint, ``hf-hub:<owner>/<repo>`` or the folder of a checkpoint.
        data: The pictures, as `eqzoo.data.read_pictures` takes them; or the splits ``train`` and others themselves.
        output: The folder to make: model.safetensors, config.json, results.json, report.json, report.md, its
            pictures if matplotlib is there, and the files of the run.
        size: The side of the pictures in pixels; None for the network's own.
        channels: 1, 3 or 4 channels of picture files; None for what they have.
        pretrained: Whether to start from trained weights; None if there are any.
        freeze: What stays as it is: True for all but the classifier, or names of modules.
        balance: Whether classes weigh the same in the loss, however many pictures they have.
        valid_fraction: The pictures to choose the epoch by, of data that has no such part; 0 for none.
        test_fraction: The pictures to test on, likewise.
        data_dir: The folder of data sets that go by a name.
        download: Whether these may be fetched.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        workers: The processes that read pictures that are not in memory.
        **recipe: Anything else of `eqzoo.engine.Recipe`: ``epochs`` (default 30), ``batch_size`` (32, of few pictures
            less), ``lr`` (1e-3), ``patience`` (10), ``layer_decay``, ``ema_decay``, ``augment`` (``"shifts"``;
            ``"missing"`` stands for the quarter turns and mirrors that the network does not keep), ``seed`` ...

    Returns:
        The network, the report and the folder.

    Raises:
        ValueError: If a picture, a size, a class or a setting does not go; or the folder holds something else.
        FileNotFoundError: If there are no such pictures.
        WeightsNotFoundError: If weights are asked for and found nowhere.
        ImportError: If the packages of the training loop are missing.
        OSError: If the folder cannot be written.
    """
    _check_call(output, data, recipe, device)
    _check_values(recipe, balance, valid_fraction, test_fraction)
    name = f"local-dir:{name}" if (Path(name) / CONFIG_NAME).is_file() else str(name)
    blank = weightless(name)
    side = size or blank.input_size[1]
    check_side(name, side)
    _check_freeze(name, freeze)
    splits = _splits(data, side, channels, data_dir, download, (valid_fraction, test_fraction))
    label = _label(data)
    folder = Path(output)
    settings = _settings(name, blank, label, splits, folder, pretrained)
    plan = _recipe(blank, label, splits, recipe, freeze, balance, settings)

    def build() -> nn.Module:
        return _built(name, plan.model_args, settings)

    from .engine import train

    claim(folder, settings)
    try:
        model = train(plan, build, {k: v for k, v in splits.items() if k != "test"}, folder, device, workers).eval()
    except (ValueError, RuntimeError) as error:
        if "DataLoader worker" not in str(error):
            raise
        # What a reading process says comes with its traceback; the last line is what went wrong.
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
    made_by = command(name, _given(data), options, _chosen(recipe))
    report = _report(cast(EquivariantNet, model), plan, splits, settings, folder, workers, made_by)
    return FineTuned(model, report, folder)


def trunk(model: EquivariantNet) -> tuple[str, ...]:
    """The modules with parameters at the top of a network, but for that of the classifier."""
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
    try:
        import accelerate  # noqa: F401
        import tqdm  # noqa: F401
    except ImportError as error:
        raise ImportError(f"training needs accelerate and tqdm: pip install 'eqzoo[train]' ({error})") from error
    from .engine import check_device

    check_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("fine-tuning is one process; training/train.py shares a run out to several")
    folder = Path(output).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{output} is a file, and a checkpoint is a folder; name a new one")
    if not isinstance(data, Mapping):
        pictures = Path(cast(str, data)).resolve()
        if pictures.is_dir() and folder.is_relative_to(pictures):
            raise ValueError(f"{output} is inside the pictures {data}, and would be taken for a class; name another")


def _check_values(recipe: Mapping[str, Any], balance: bool, valid: float, test: float) -> None:
    """Raises ValueError for values that go with no pictures, before any are read."""
    if min(valid, test) < 0 or valid + test >= 1:
        raise ValueError(f"the parts to validate and to test on are 0 or more, together less than 1: {valid}, {test}")
    # How a batch is split and what is held out depends on the number of pictures.
    values = {key: v for key, v in (_DEFAULTS | dict(recipe)).items() if key not in ("accumulate", "valid_size")}
    if values.get("batch_size") is None:
        values.pop("batch_size", None)
    if values["augment"] == "missing":
        values["augment"] = "none"
    Recipe("", "", class_weights=(1.0,) if balance else (), **values)


def _check_freeze(name: str, names: bool | Sequence[str]) -> None:
    if not isinstance(names, bool):
        from .run import freeze

        freeze(weightless(name), tuple(names))


def _splits(
    data: str | os.PathLike[str] | Mapping[str, AnySplit],
    side: int,
    channels: int | None,
    data_dir: str | os.PathLike[str],
    download: bool,
    fractions: tuple[float, float],
) -> dict[str, AnySplit]:
    """The pictures in up to three parts, at their size."""
    if not isinstance(data, Mapping):
        return divided(read_pictures(data, side, channels, data_dir, download), *fractions)
    check(data, "data")
    if tuple(data["train"].shape[1:]) != (side, side):
        raise ValueError(
            f"pictures that are given as splits are {side} x {side}, got {data['train'].shape}; or say size="
        )
    return divided(data, *fractions)


def _label(data: object) -> str:
    """What a data set is called: letters, digits and dashes, as in a checkpoint's name."""
    if isinstance(data, Mapping):
        return "own"
    path = Path(cast(str, data))
    last = path.resolve().name if path.is_dir() else Path(str(data).rpartition(":")[2]).name.removesuffix(".npz")
    return re.sub(r"[^a-z0-9_-]+", "-", last.lower()).strip("-") or "own"


def _given(data: object) -> str:
    """What a command calls the data: files and folders by their last name alone."""
    if isinstance(data, Mapping):
        return "own"
    path = Path(cast(str, data))
    return path.resolve().name if path.exists() else str(data)


def _chosen(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe that are not what they are by default."""
    usual = {item.name: item.default for item in fields(Recipe)} | _DEFAULTS
    usual |= {"batch_size": None, "model_args": {}, "optimizer_args": {}}
    return {key: value for key, value in recipe.items() if value != usual[key]}


def _settings(
    name: str,
    blank: EquivariantNet,
    label: str,
    splits: Mapping[str, AnySplit],
    folder: Path,
    pretrained: bool | None,
) -> dict[str, Any]:
    """What a run depends on besides its recipe, as finetune.json holds it."""
    cfg, train = blank.pretrained_cfg, splits["train"]
    before = folder / SETTINGS_NAME
    if before.is_file() and pretrained is None and not unused(folder):
        start = json.loads(before.read_text()).get("start")
    else:
        start = _start(name, cfg, pretrained)
    classes = train.classes or tuple(map(str, range(num_classes(splits))))
    if len(classes) < 2:
        raise ValueError(f"there is one class, {classes[0]!r}, and nothing to tell it from; two or more are needed")
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
        "base_model": base_model(name, cfg.get("hf_hub_id")) if start else None,
        "data": label,
        "data_sha256": {part: digest_of(split) for part, split in splits.items()},
        "input_size": list(train.shape),
        "mean": mean,
        "std": std,
        "label_names": list(classes),
    }


def _start(name: str, cfg: Mapping[str, Any], pretrained: bool | None) -> str | None:
    """The checkpoint that is started from, or None for random weights."""
    if pretrained is False:
        return None
    try:
        create_model(name, pretrained=True)
    except WeightsNotFoundError:
        if pretrained:
            raise
        print(f"eqzoo: there are no weights for {name}; training from random ones", file=sys.stderr)
        return None
    return name if ":" in name or not cfg.get("tag") else f"{cfg['architecture']}.{cfg['tag']}"


def _statistics(split: AnySplit) -> tuple[list[float], list[float]]:
    """The mean and the standard deviation of every channel over 255, of at most 2,000 pictures."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:2000].sort().values
    if isinstance(split, Split):
        pictures = split.images[order]
    else:
        pictures = torch.stack([split.read(int(place)) for place in split.places[order]])
    values = pictures.transpose(0, 1).flatten(1).double() / 255
    # A channel without contrast would be divided by zero.
    return [round(v, 4) for v in values.mean(1).tolist()], [max(round(v, 4), 1e-2) for v in values.std(1).tolist()]


def _recipe(
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
    # A batch of few pictures is small, so that there are some steps an epoch.
    values["batch_size"] = min(values.get("batch_size") or min(32, max(8, len(train) // 8)), len(train))
    if "valid" not in splits:
        values |= {"valid_size": 0, "patience": None}
    if freeze and settings["start"] is None:
        raise ValueError("freeze keeps trained weights, and this starts from random ones; leave it away")
    frozen = trunk(blank) if freeze is True else tuple(freeze or ())
    weights: tuple[float, ...] = ()
    if balance:
        counts = train.labels.bincount(minlength=num_classes(splits)).double()
        weights = tuple(round(v, 6) for v in (counts.sum() / (len(counts) * counts)).tolist())
    kept = _saved_args(settings["name"])
    sizes = {"num_classes": len(settings["label_names"]), "in_chans": train.shape[0]}
    values["model_args"] = kept | dict(values.get("model_args") or {}) | sizes
    return Recipe(str(blank.pretrained_cfg["architecture"]), label, freeze=frozen, class_weights=weights, **values)


def _saved_args(name: str) -> dict[str, Any]:
    """The arguments that a folder or a repo builds its network with."""
    source, _, place = name.partition(":")
    if not place:
        return {}
    config = json.loads((Path(place) / CONFIG_NAME).read_text()) if source == "local-dir" else fetch_config(place)
    return dict(config.get("model_args") or {})


def _missing(group: Group) -> str:
    """The augmentation by what the pixel grid's symmetries have and a group has not."""
    turns = any(group.element(P4.matrix(g)) is None for g in P4.elements)
    return "quarter_turns_flips" if turns else "none" if group.mirrors else "flips"


def _built(name: str, args: Mapping[str, Any], settings: Mapping[str, Any]) -> nn.Module:
    """The network with its first weights, and what config.json says of its pictures and classes."""
    model = cast(EquivariantNet, create_model(name, pretrained=settings["start"] is not None, **args))
    cfg = dict(model.pretrained_cfg)
    if settings["start"] and list(cfg.get("label_names") or ()) != settings["label_names"]:
        model.reset_classifier(int(args["num_classes"]))  # one that is of other classes
    known = {key: tuple(settings[key]) for key in ("input_size", "mean", "std", "label_names")}
    model.pretrained_cfg = cfg | known | {"num_classes": args["num_classes"]}
    return model


def _report(
    model: EquivariantNet,
    recipe: Recipe,
    splits: Mapping[str, AnySplit],
    settings: dict[str, Any],
    folder: Path,
    workers: int,
    made_by: str,
) -> dict[str, Any]:
    """Measures the network and writes all that the folder is to hold."""
    from .engine import selected

    part = next(name for name in ("test", "valid", "train") if name in splits)
    rows = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    best = selected(rows)
    counts = {name: len(split) for name, split in splits.items()}
    uses = {"train": "train", "valid": "choose the epoch", "test": "test"}
    notes = []
    if part != "test":
        notes.append(
            f"No pictures were held out for a test: scores on the {WORDS[part]} pictures are better than on others."
        )
    report: dict[str, Any] = {
        "model": recipe.model,
        "group": model.group.name,
        "data": recipe.dataset,
        "start": settings["start"],
        "classes_count": len(settings["label_names"]),
        "input_size": settings["input_size"],
        "pictures": {uses[name]: count for name, count in counts.items()},
        "epochs": recipe.epochs,
        "selected_epoch": best["epoch"],
        "measured_on": f"{WORDS[part]} pictures",
        "notes": notes,
        **measured(model, splits[part], settings["label_names"], workers),
        "equivariance_error": equivariance_error(model),
        "training_seconds": round(sum(row["seconds"] for row in rows)),
    }
    weights = (folder / "best.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    atomic(folder / WEIGHTS_NAME, lambda path: path.write_bytes(weights))
    write_json(folder / CONFIG_NAME, config(model, recipe, settings, digest))
    if part == "test":
        write_json(folder / RESULTS_NAME, results(model, recipe, counts, settings, report, best, digest, made_by))
    figures = write_figures(report, folder)
    atomic(folder / PAGE_NAME, lambda path: path.write_text(markdown(report, figures), encoding="utf-8"))
    write_json(folder / REPORT_NAME, report)
    return report
