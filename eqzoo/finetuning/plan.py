"""The plan of a fine-tuning: everything that it depends on, decided before its first step."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from ..analysis.sizes import check_side, weightless
from ..data import AnySplit, native_sides, num_classes
from ..data.hashes import split_digest, trained_images
from ..engine import Recipe, RunDirectory
from ..engine.speed import AUTOMATIC, Speed, measure
from ..engine.state import freeze as freeze_modules
from ..evaluation.predictor import check_device
from ..hub import WEIGHTS_NAME, WeightsNotFoundError, base_model, sha256_of
from ..models.any_network import orbit_source
from ..models.load import ModelSource, instantiate, resolve
from ..models.sizes import blank as blank_copy
from .images import OwnImages, data_label, image_statistics, own_images
from .rules import default_side, fine_tuning_recipe, frozen_modules, with_rules

# Keys of a recipe that follow from other arguments, or that choose images of a data set in training/train.py.
_OTHERS = {"model", "dataset", "freeze", "class_weights", "start", "samples_per_class", "valid_size"}
# Keys of a recipe that a classifier that is fitted at once depends on: its features are always float32.
_WHERE_FITTED = {"seed", "model_args"}
# How images are scaled here, whatever timm's configuration of the network says.
_WHOLE_IMAGES = {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bicubic"}


@dataclass(frozen=True)
class Request:
    """The arguments of a call of `eqzoo.finetune`, which describes them; ``recipe`` are the keys of a recipe."""

    name: str | os.PathLike[str]
    data: str | os.PathLike[str] | Mapping[str, AnySplit]
    output: str | os.PathLike[str]
    invariant: str | None = None
    copies: int | None = None
    weights: str | os.PathLike[str] | None = None
    size: int | None = None
    channels: int | None = None
    pretrained: bool | None = None
    freeze: bool | str | Sequence[str] = False
    balance: bool = False
    minutes: float | None = None
    valid_fraction: float | None = None
    test_fraction: float | None = None
    split_by: str | Sequence[object] | Mapping[str, object] | None = None
    data_dir: str | os.PathLike[str] = "data"
    download: bool = False
    device: str | None = None
    workers: int = 4
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ValueError for what is wrong whatever the images, before these are read."""
        check_device(self.device)
        known = {item.name for item in fields(Recipe)} - _OTHERS
        if unknown := sorted(self.recipe.keys() - known):
            raise ValueError(f"fine-tuning has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        if self.weights is not None and self.pretrained is False:
            raise ValueError(f"pretrained=False would leave out the weights {self.weights}; leave out one of the two")
        images = None if isinstance(self.data, Mapping) else Path(self.data)
        if images and images.is_dir() and Path(self.output).resolve().is_relative_to(images.resolve()):
            raise ValueError(f"{self.output} is inside the images {images} and would be read as a class; name another")
        if self.minutes is not None and ("epochs" in self.given or not 0 < self.minutes < float("inf")):
            raise ValueError(f"minutes is a time above 0, instead of a number of epochs; got {self.minutes}")
        # The length of a warm-up, the epochs and the augmentation may depend on the images.
        later = {} if "epochs" in self.given else {"epochs": sys.maxsize, "warmup_epochs": 0}
        values = with_rules(later | self.given)
        if values.get("augment") == "missing":
            values["augment"] = "none"
        Recipe("", "", class_weights=(1.0,) if self.balance else (), **values)

    @property
    def given(self) -> dict[str, Any]:
        """The keys of a recipe that are not left to the rules."""
        return {key: value for key, value in self.recipe.items() if value is not None}

    @property
    def source_of_splits(self) -> str | None:
        """How the sources are named that splits are drawn by, such as patients; None if each image stands alone."""
        return self.split_by if self.split_by is None or isinstance(self.split_by, str) else "listed"


@dataclass(frozen=True)
class Plan:
    """A fine-tuning.

    Args:
        request: What was asked for.
        source: The network.
        blank: The network without weights, on the meta device.
        images: The user's images.
        settings: What training.json holds besides the recipe: ``name``, ``start``, ``base_model``, ``data``,
            ``data_sha256``, ``input_size``, ``mean``, ``std``, ``label_names``, ``split_by`` and ``minutes``.
        recipe: The recipe.
        speed: What was measured before the run; None before that.
    """

    request: Request
    source: ModelSource
    blank: nn.Module
    images: OwnImages
    settings: Mapping[str, Any]
    recipe: Recipe
    speed: Speed | None = None

    @property
    def splits(self) -> Mapping[str, AnySplit]:
        """The images by split."""
        return self.images.splits

    @property
    def directory(self) -> RunDirectory:
        """The folder of the run."""
        return RunDirectory(Path(self.request.output))

    @property
    def side(self) -> int:
        """The side of the images, in pixels."""
        return int(self.settings["input_size"][-1])

    @property
    def names(self) -> list[str]:
        """The names of the classes."""
        return list(self.settings["label_names"])

    @property
    def evaluated_on(self) -> str:
        """The split that is evaluated: test, or else validation or training images."""
        return next(name for name in ("test", "valid", "train") if name in self.splits)

    @cached_property
    def native(self) -> tuple[int, int] | None:
        """The shorter and the longer side of the images before they were resized, in pixels; None if unknown."""
        return native_sides(self.request.data, data_dir=self.request.data_dir)

    @cached_property
    def images_at(self) -> Callable[[int], Mapping[str, AnySplit]]:
        """The same images by split with another side in pixels, for teachers of that size; read anew, once a side."""

        @cache
        def read(side: int) -> Mapping[str, AnySplit]:
            if side == self.side:
                return self.splits
            return own_images(self.request, side).splits

        return read

    @cached_property
    def trained_before(self) -> np.ndarray:
        """The `image_codes` of the images that the initial weights were trained on, as far as they are known."""
        return trained_images(self.source.folder if self.settings["start"] else None)

    @property
    def keeps_classifier(self) -> bool:
        """Whether the classifier of the initial weights is of the classes of the images, in whatever order.

        Numbers are no names: the classes 0 to 9 of a file are not the digits of a published checkpoint, and training
        that starts from a classifier of digits is much less accurate. The user's own checkpoints may have numbered
        classes.
        """
        cfg: Any = self.blank.pretrained_cfg
        trained = list(self.source.config.get("label_names") or cfg.get("label_names") or ())
        numbered = self.names == [str(label) for label in range(len(self.names))]
        same = sorted(trained) == sorted(self.names)
        return same and (not numbered or bool(self.source.config.get("label_names")))

    @property
    def fits_classifier(self) -> bool:
        """Whether the classifier alone is fitted, on features that are computed once, instead of trained in epochs."""
        keys = {"epochs", "teachers", "soft_labels"}
        in_epochs = keys & self.request.given.keys() or self.request.minutes is not None
        classifier: Any = cast(Any, self.blank).get_classifier()
        affine = isinstance(classifier, nn.Linear) and classifier.bias is not None
        return self.request.freeze is True and affine and not in_epochs

    def build(self) -> nn.Module:
        """The network with its initial weights and a ``pretrained_cfg`` of the user's images and classes."""
        args, started = self.recipe.model_args, self.settings["start"] is not None
        model = instantiate(self.source, pretrained=started, **args)
        cfg: dict[str, Any] = dict(model.pretrained_cfg)  # type: ignore[arg-type]
        if started and not self.keeps_classifier:
            cast(Any, model).reset_classifier(int(args["num_classes"]))
        elif started and (trained := list(cfg.get("label_names") or ())) != self.names:
            order = [trained.index(name) for name in self.names]
            for parameter in cast(Any, model).get_classifier().parameters():
                parameter.data = parameter.data[order]
        known = {key: tuple(self.settings[key]) for key in ("input_size", "mean", "std", "label_names")}
        cfg = {key: value for key, value in cfg.items() if not key.startswith("test_")} | _WHOLE_IMAGES
        model.pretrained_cfg = cfg | known | {"num_classes": args["num_classes"]}  # type: ignore[assignment]
        return model


def make_plan(request: Request) -> Plan:
    """Resolves the network, reads the images, and chooses the recipe but for what is measured on the machine."""
    request.check()
    weights = Path(request.weights) if request.weights else None
    source = orbit_source(resolve(request.name), request.invariant, request.copies, weights)
    blank = weightless(source, **dict(request.recipe.get("model_args") or {}))
    side = request.size or default_side(blank)
    check_side(source, side, blank)
    freeze_modules(blank_copy(blank), frozen_modules(blank, request.freeze))  # raises if there is no such module
    images = own_images(request, side)
    settings = _settings(request, source, blank, images)
    if request.freeze and settings["start"] is None:
        raise ValueError("freeze needs trained weights, and this run starts from random ones; leave freeze out")
    plan = Plan(request, source, blank, images, settings, Recipe("", "", epochs=1))
    if plan.fits_classifier and (unused := sorted(request.given.keys() - _WHERE_FITTED)):
        raise ValueError(
            f"freeze fits the classifier at once, which {', '.join(unused)} would not change; leave it out, or give "
            "epochs to train the classifier in these"
        )
    return replace(plan, recipe=fine_tuning_recipe(plan, {}))


def with_speed(plan: Plan, saved: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter) -> Plan:
    """The plan with the speed of the run, measured or that of a run that is resumed, and the epochs that follow.

    Args:
        plan: The plan.
        saved: The content of training.json of a run that is resumed; empty for a new one.
        clock: The clock of the measurement, see `eqzoo.engine.speed.measure`.
    """
    request = plan.request
    if "speed" in saved:
        speed = Speed(**saved["speed"])
    else:
        values = vars(plan.recipe) if plan.fits_classifier else request.given
        fixed = {key: values[key] for key in AUTOMATIC if key in values}
        seconds = None if request.minutes is None else 60 * request.minutes
        folder = plan.directory.path
        speed = measure(
            plan.recipe, plan.build, plan.splits, fixed, request.device, seconds, clock, request.workers, folder
        )
    measured: dict[str, Any] = {"precision": speed.precision, "channels_last": speed.channels_last}
    if request.minutes is not None:
        measured["epochs"] = speed.epochs_within(60 * request.minutes, plan.splits)
    return replace(plan, recipe=fine_tuning_recipe(plan, measured), speed=speed)


def _settings(request: Request, source: ModelSource, blank: nn.Module, images: OwnImages) -> dict[str, Any]:
    """Everything that a run depends on besides its recipe, as training.json holds it."""
    cfg: Any = blank.pretrained_cfg
    train = images.splits["train"]
    before = RunDirectory(Path(request.output)).saved()
    before = before if "data" in before else {}  # of another kind of run, which is refused later
    name = _name(source)
    start = before["start"] if before and request.pretrained is None else _start(source, name, cfg, request.pretrained)
    classes = train.classes or tuple(map(str, range(num_classes(images.splits))))
    if len(classes) < 2:
        raise ValueError(
            f"there is one class, {classes[0]!r}; two or more are needed. If it is the folder that holds those of the "
            "classes, give that one"
        )
    mean, std = image_statistics(
        blank, train, started=bool(start), frozen=bool(request.freeze), workers=request.workers
    )
    weights = None if request.weights is None else Path(request.weights)
    folder = source.folder if source.config else None  # whose weights may be those of another run later
    file = (source.weights or (folder and folder / WEIGHTS_NAME)) if start else None
    return {
        "name": name,
        "start": weights.name if weights and start else start,
        "base_model": base_model(source.timm_name, cfg.get("hf_hub_id")) if start and not weights else None,
        **({"weights_sha256": sha256_of(file)} if file and file.is_file() else {}),
        "data": before.get("data") or data_label(request.data),  # a run that is resumed keeps its name
        "data_sha256": {part: split_digest(split) for part, split in images.splits.items()},
        "input_size": list(train.shape),
        "mean": mean,
        "std": std,
        "label_names": list(classes),
        "split_by": request.source_of_splits,
        "minutes": request.minutes,
    }


def _name(source: ModelSource) -> str:
    """What the run calls its start: of a path the last folder, as those around it may name persons."""
    path = Path(source.name.removeprefix("local-dir:")).resolve()
    if source.config and path.is_file():
        return f"{path.parent.name}/{path.name}"
    return f"local-dir:{path.name}" if source.config and path.is_dir() else source.name


def _start(source: ModelSource, name: str, cfg: Mapping[str, Any], pretrained: bool | None) -> str | None:
    """The checkpoint to start from, or None for random weights."""
    if pretrained is False:
        return None
    if not (pretrained or source.has_weights or (not source.config and "." in source.name)):  # nor asked for by a tag
        print(f"eqzoo: there are no weights for {name}; training from random ones", file=sys.stderr)
        return None
    try:
        instantiate(source, pretrained=True)
    except WeightsNotFoundError as error:
        if pretrained:
            raise
        raise WeightsNotFoundError(f"{error}; --no-pretrained trains from random weights") from error
    return name if source.config or not cfg.get("tag") else f"{cfg['architecture']}.{cfg['tag']}"
