"""The recipe of a fine-tuning: rules for what the user leaves open."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..data import num_classes
from ..engine.recipe import Recipe
from ..evaluation import Predictor
from ..groups import P4, Group
from ..models import OrbitNet

if TYPE_CHECKING:
    from .plan import Plan

_OPTIMIZER = "adamw"
_WEIGHT_DECAY = 0.01
_RATES = {"adamw": 1e-2, "adam": 1e-2, "nadamw": 1e-2, "sgd": 5e-2, "momentum": 5e-2, "muon": 2e-2, "nmuon": 2e-2}
# Networks without batch norm take these shares of the rates above, from trained weights and from random ones. That
# from random weights was measured with ConvNeXt; that from trained ones is usual for transformers, and not measured.
_WITHOUT_BATCH_NORM = {True: 0.01, False: 0.1}
# Timm networks start from weights of many photographs: measured with EfficientNet-Lite0.
_OF_TIMM = {"lr": 3e-3, "weight_decay": 0.05, "layer_decay": 0.75}
_SIDE_OF_TIMM = 128  # pixels
_WARMUP = 0.15  # of the epochs
_SMOOTHING = 0.1
_BATCH, _LEAST_BATCH, _BATCHES = 32, 8, 8
_STEPS = {True: 700, False: 1400}  # at least, from trained weights and from random ones
_EPOCHS = (10, 100)  # fewest and most by the number of steps


def least_epochs(images: int, batch_size: int, pretrained: bool) -> int:
    """The epochs of a run by its number of steps: 700 from trained weights, 1,400 from random ones; 10 to 100.

    Args:
        images: The number of training images.
        batch_size: The number of images in a step.
        pretrained: Whether the run starts from trained weights.
    """
    epochs = math.ceil(_STEPS[pretrained] / max(1, images // batch_size))
    return min(max(epochs, _EPOCHS[0]), _EPOCHS[1])


def with_rules(given: Mapping[str, Any], factor: float = 1.0) -> dict[str, Any]:
    """The settings of a recipe that do not depend on the images, with those given by the user first.

    AdamW with weight decay 0.01 and labels smoothed by 0.1; a learning rate by optimizer; a cosine schedule after a
    warm-up of 15 % of the epochs.

    Args:
        given: The keys of a recipe that the user gives.
        factor: What the learning rate of the rules is multiplied by: 1 with batch norms, less without.
    """
    values = {"optimizer": _OPTIMIZER, **given}
    if values.get("lr") is None:
        rate = _RATES.get(values["optimizer"])
        values |= {} if rate is None else {"lr": round(rate * factor, 8)}
    if values["optimizer"] == "adamw":
        values.setdefault("weight_decay", _WEIGHT_DECAY)
    if values.get("teacher_weight") != 1:
        values.setdefault("label_smoothing", _SMOOTHING)
    if "epochs" in values and values.get("schedule", "cosine") == "cosine" and isinstance(values["epochs"], int):
        values.setdefault("warmup_epochs", round(_WARMUP * values["epochs"], 4))
    return values


def fine_tuning_recipe(plan: "Plan", measured: Mapping[str, Any]) -> Recipe:
    """The recipe of a fine-tuning, with what the user gives and what was measured first.

    Args:
        plan: The plan, but for its recipe.
        measured: The keys of a recipe that depend on the machine.
    """
    settings, splits, group = plan.settings, plan.splits, Predictor.of(plan.blank).group
    train, pretrained = splits["train"], settings["start"] is not None
    values = dict(measured) | plan.request.given | ({"epochs": 1} if plan.fits_classifier else {})
    # With few images batches are smaller, so that an epoch has some steps.
    batch = values.get("batch_size") or min(_BATCH, max(_LEAST_BATCH, len(train) // _BATCHES))
    values["batch_size"] = min(batch, len(train))
    values.setdefault("epochs", least_epochs(len(train), values["batch_size"], pretrained))
    if isinstance(plan.blank, OrbitNet):
        values = (_OF_TIMM if pretrained and values.get("optimizer", _OPTIMIZER) == _OPTIMIZER else {}) | values
        if plan.blank.copies is not None:  # a canonical copy is the same for all rotations already
            values.setdefault("augment", "shifts")
    values.setdefault("augment", suitable_augmentation(group))
    values = with_rules(values, 1.0 if _has_batch_norm(plan.blank) else _WITHOUT_BATCH_NORM[pretrained])
    if values["augment"] == "missing":
        values["augment"] = missing_symmetries(group)
    if "valid" not in splits:
        values["valid_size"] = 0
    weights: tuple[float, ...] = ()
    if plan.request.balance:
        counts = train.labels.bincount(minlength=num_classes(splits)).double()
        weights = tuple(round(v, 6) for v in (counts.sum() / (len(counts) * counts)).tolist())
    sizes = {"num_classes": len(settings["label_names"]), "in_chans": train.shape[0]}
    values["model_args"] = plan.source.model_args | dict(values.get("model_args") or {}) | sizes
    freeze = frozen_modules(plan.blank, plan.request.freeze)
    return Recipe(plan.source.architecture, settings["data"], freeze=freeze, class_weights=weights, **values)


def frozen_modules(model: nn.Module, freeze: bool | str | Sequence[str]) -> tuple[str, ...]:
    """The names of the modules that are not trained: those that are given; with True all but the classifier.

    These are the top-level modules with parameters, of an `OrbitNet` those of its network, without the classifier's.
    """
    if not isinstance(freeze, bool):
        return (freeze,) if isinstance(freeze, str) else tuple(freeze)
    classifier = cast(Any, model).get_classifier()  # or several of them
    heads = classifier if isinstance(classifier, tuple | list | nn.ModuleList) else [classifier]
    last = {module for head in heads for module in head.modules()}
    inside, prefix = (model.network, "network.") if isinstance(model, OrbitNet) else (model, "")
    return tuple(
        f"{prefix}{name}"
        for name, child in inside.named_children()
        if freeze and list(child.parameters()) and last.isdisjoint(child.modules())
    )


def default_side(model: nn.Module) -> int:
    """The side of the images in pixels: that of the network, but at most 128 where a timm network takes any."""
    cfg: Any = model.pretrained_cfg
    side = int(cfg["input_size"][1])
    return min(side, _SIDE_OF_TIMM) if isinstance(model, OrbitNet) and not cfg.get("fixed_input_size") else side


def suitable_augmentation(group: Group) -> str:
    """The augmentation by the continuous counterpart of a group: shifts, rotations by any angle, reflections."""
    if group.rotations == 1:
        return "shifts"
    return "affine" if group.reflections else "rotations_shifts"


def missing_symmetries(group: Group) -> str:
    """The augmentation by the symmetries of the pixel grid that are not in a group."""
    rotations = any(group.element(P4.matrix(g)) is None for g in P4.elements)
    return "quarter_rotations_flips" if rotations else "none" if group.reflections else "flips"


def keeps_statistics(model: nn.Module) -> bool:
    """Whether images are normalized by the mean and deviation that the network's weights were trained with.

    Batch norms adapt to the statistics of the images; a network without them keeps those of its weights, and so does
    one of timm.
    """
    return isinstance(model, OrbitNet) or not _has_batch_norm(model)


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
