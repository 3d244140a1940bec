"""The recipe of a training run: typed settings, the learning rate schedule, and which epoch is kept."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from timm.optim import list_optimizers
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.step_lr import StepLRScheduler
from torch import nn

from ..data import AUGMENTATIONS
from ..models import create_model
from ..models.builder import configured_name

RUN_PREFIX = "run:"  # before the folder of a run, in a recipe's `start`


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run.

    The learning rate rises linearly over the warm-up from 0 to ``lr``; then it is constant (``"constant"``), falls
    along half a cosine to 0 at the last step (``"cosine"``), or is multiplied by ``decay_rate`` after each of the
    ``milestones`` (``"multistep"``).

    Args:
        model: The registered name of the network.
        dataset: The name of the data set, or of the user's folder or .npz file.
        epochs: The number of epochs.
        batch_size: The images in a step, over all processes; the last, smaller batch of an epoch is left
            out.
        optimizer: One of timm's optimizers; ``"sgd"`` has Nesterov momentum, ``"momentum"`` plain momentum.
        lr: The highest learning rate. With ``start`` and one epoch it may be 0: the weights of the start are then
            validated and saved as they are.
        weight_decay: The weight decay of the optimizer, on all parameters but those that the network's
            ``no_weight_decay()`` names, as octic ViTs do.
        schedule: ``"constant"``, ``"cosine"`` or ``"multistep"``.
        warmup_epochs: The length of the warm-up, which may be a fraction of an epoch.
        seed: The seed of the initial weights, the order of the images, their augmentation and dropout.
        model_args: Arguments of the network; JSON values.
        optimizer_args: Further arguments of the optimizer, such as ``{"momentum": 0.9}``; JSON values.
        milestones: The epochs after which a multistep schedule decays, ascending.
        decay_rate: The factor of the learning rate at each milestone.
        label_smoothing: The probability that is distributed over all classes.
        class_weights: A factor of the loss for each class; () for none.
        augment: One of `eqzoo.data.AUGMENTATIONS`.
        ema_decay: The decay of an exponential moving average of the weights, which is then validated and saved; None
            for none. In step n the decay is min(ema_decay, 1 - n^(-2/3)), which reaches 0.9 after 32 steps, 0.99 after
            1,000 and 0.999 after 31,623; a higher value has no effect in a shorter run.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast with parameters in float32.
        channels_last: Whether images, and the fields of layers that support it, have the channels-last memory format.
            Results change by round-off, and by the draws of dropout, which follow the memory.
        cuda_graphs: Whether the pass of a batch, and the step of an optimizer that can be (Adam, AdamW and Muon, not
            SGD), are recorded once as CUDA graphs and replayed, which spares small networks the launch of their many
            kernels from Python; of no effect on a CPU. It goes with
            one process, and without ``freeze``.
        half_size_epochs: The first epochs, in which images are scaled to half their side, by 2 x 2 means, in training
            and in validation; an epoch then takes a fourth of the time. The best epoch is one of the others.
        deterministic: Whether to use deterministic CUDA kernels where there are any.
        valid_size: The images held out of the training split for validation, if the data set has no validation split;
            None for a tenth, 0 for none: then the weights of the last epoch are saved.
        samples_per_class: The training images of each class that are used; None for all.
        patience: The epochs at full size without a better one, by `selection_key`, before the run ends early; None
            for never.
        layer_decay: The factor of the learning rate for each layer further from the classifier; None for one rate.
        lr_factors: Factors of the learning rate, above 0, of the parameters whose names match a pattern of `fnmatch`,
            such as ``{"*.query.*": 0.3}``; where several match, their product, times the factor of ``layer_decay``.
            Each pattern matches a parameter that is trained. AdamW and Muon decay weights by rate times weight decay,
            so that the factor is also one of the decay.
        freeze: The modules whose weights and running statistics are not changed, such as ``("stem", "blocks.0")``.
        start: The checkpoint whose weights the network starts from, by its name in `eqzoo.create_model`, adapted to the
            classes, channels and group of the network as with ``pretrained=True``, with a new classifier where the
            names of the classes differ, and with initial weights in layers that only the network has; or, as
            ``run:FOLDER``, a finished run on the same images, whose best weights it starts from (``{seed}`` in it
            stands for the seed); None for initial weights.
        teachers: The checkpoints whose mean probabilities the network learns beside the labels (distillation), by
            their names in `eqzoo.create_model`, or folders of fine-tuned networks; () for none. See `Teachers`.
        soft_labels: A .npy file of probabilities, ``(n, classes)``, a row for each image of the training split in its
            order, that the network learns beside the labels: those of teachers that are no networks of eqzoo or too
            slow for every epoch. Under augmentation the rows stay the same. None for none.
        teacher_weight: The share of the teachers or soft labels in the loss, in (0, 1]; only with these. The rest is
            the share of the labels, whose loss is then cross-entropy.

    Raises:
        ValueError: If a value has another type, is out of range, or has no effect beside the others.
        TypeError: If there is a key of another name.
    """

    model: str
    dataset: str
    epochs: int
    batch_size: int = 128
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 1e-4
    schedule: Literal["constant", "cosine", "multistep"] = "cosine"
    warmup_epochs: float = 0
    seed: int = 0
    model_args: dict[str, Any] = field(default_factory=dict)
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    milestones: tuple[int, ...] = ()
    decay_rate: float = 0.1
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    augment: str = "none"
    ema_decay: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    cuda_graphs: bool = False
    half_size_epochs: int = 0
    deterministic: bool = True
    valid_size: int | None = None
    samples_per_class: int | None = None
    patience: int | None = None
    layer_decay: float | None = None
    lr_factors: dict[str, float] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    start: str | None = None
    teachers: tuple[str, ...] = ()
    soft_labels: str | None = None
    teacher_weight: float = 0.5

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):  # JSON has no tuples
                value = tuple(value)
            elif isinstance(value, dict):
                value = json.loads(json.dumps(value))
            object.__setattr__(self, item.name, value)
            if not _fits(value, hints[item.name]):
                expected = getattr(hints[item.name], "__name__", hints[item.name])
                raise ValueError(f"{item.name} should be of the type {expected}, got {value!r}")
        for name, valid, words in (*self._ranges(), *self._combinations()):
            if not valid:
                raise ValueError(f"{name} should be {words}, got {getattr(self, name)!r}")

    def rate(self, epoch: float) -> float:
        """The learning rate after a number of epochs, which may be fractional."""
        optimizer = torch.optim.SGD([torch.zeros(1)], self.lr)
        scheduler(self, optimizer).step(epoch)  # timm's schedulers take fractions of epochs
        return float(optimizer.param_groups[0]["lr"])

    @property
    def start_run(self) -> Path | None:
        """The folder of the run whose best weights this one starts from, where ``start`` names a run."""
        if not (self.start or "").startswith(RUN_PREFIX):
            return None
        return Path(str(self.start).removeprefix(RUN_PREFIX).replace("{seed}", str(self.seed)))

    def _ranges(self) -> list[tuple[str, bool, str]]:
        """The settings, whether each is in its range, and this range in words."""
        infinity, weights = float("inf"), self.class_weights
        kept = self.lr == 0 and self.start is not None
        return [
            ("epochs", self.epochs >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("optimizer", self.optimizer in list_optimizers(), "one of timm.optim.list_optimizers()"),
            ("lr", 0 < self.lr < infinity or kept, "a finite number above 0, or 0 with start"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("warmup_epochs", 0 <= self.warmup_epochs < self.epochs, f"0 to less than the {self.epochs} epochs"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
            ("decay_rate", 0 < self.decay_rate < 1, "between 0 and 1"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and below 1"),
            ("class_weights", min(weights, default=1) >= 0 < max(weights, default=1), "at least 0, one of them above"),
            ("augment", self.augment in AUGMENTATIONS, f"one of {', '.join(AUGMENTATIONS)}"),
            ("ema_decay", self.ema_decay is None or 0 < self.ema_decay < 1, "null or between 0 and 1"),
            ("half_size_epochs", 0 <= self.half_size_epochs < self.epochs, f"0 to less than the {self.epochs} epochs"),
            ("valid_size", (self.valid_size or 0) >= 0, "null or at least 0"),
            ("samples_per_class", self.samples_per_class is None or self.samples_per_class >= 1, "null or at least 1"),
            ("patience", self.patience is None or self.patience >= 1, "null or at least 1"),
            ("layer_decay", self.layer_decay is None or 0 < self.layer_decay <= 1, "null, or above 0 and at most 1"),
            ("lr_factors", all(0 < x < infinity for x in self.lr_factors.values()), "factors above 0"),
            ("teacher_weight", 0 < self.teacher_weight <= 1, "above 0 and at most 1"),
        ]

    def _combinations(self) -> list[tuple[str, bool, str]]:
        """The settings, whether each has an effect beside the others, and when it has in words."""
        ascending = list(self.milestones) == sorted({epoch for epoch in self.milestones if 0 < epoch < self.epochs})
        multistep = bool(self.milestones) == (self.schedule == "multistep")
        taught, default = bool(self.teachers or self.soft_labels), type(self).teacher_weight
        labels_count = self.teacher_weight < 1
        return [
            ("milestones", ascending and multistep, f"ascending epochs below {self.epochs} of a multistep schedule"),
            ("epochs", self.lr > 0 or self.epochs == 1, "1 where lr is 0"),
            ("teachers", self.lr > 0 or not self.teachers, "empty where lr is 0"),
            ("soft_labels", self.lr > 0 or not self.soft_labels, "null where lr is 0"),
            ("cuda_graphs", not (self.cuda_graphs and self.freeze), "false where modules are frozen"),
            ("patience", self.patience is None or self.valid_size != 0, "null without validation images"),
            ("teacher_weight", taught or self.teacher_weight == default, f"{default} without teachers or soft_labels"),
            ("teachers", not (self.teachers and self.soft_labels), "empty beside soft_labels"),
            ("label_smoothing", labels_count or not self.label_smoothing, "0 where teacher_weight is 1"),
            ("class_weights", labels_count or not self.class_weights, "empty where teacher_weight is 1"),
        ]


def build_network(recipe: Recipe, **kwargs: Any) -> nn.Module:
    """The network of a recipe, with the configuration for its data set where it has one.

    Arguments of the network's class come from that configuration, and those of the recipe override them.

    Args:
        recipe: The recipe.
        **kwargs: Further arguments of `eqzoo.create_model`, such as ``checkpoint_path``; they override both.
    """
    return create_model(configured_name(recipe.model, recipe.dataset), **recipe.model_args | kwargs)


def scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Scheduler:
    """The scheduler of a recipe, with timm's interface, stepped with a number of epochs that may be fractional."""
    warmup: dict[str, Any] = {"warmup_t": recipe.warmup_epochs, "warmup_lr_init": 0.0}
    if recipe.schedule == "cosine":
        length = recipe.epochs - recipe.warmup_epochs
        # There is one cycle, so cycle_decay has no effect, but 1.0 makes timm warn of a length of one epoch.
        return CosineLRScheduler(optimizer, length, cycle_decay=0.5, warmup_prefix=True, **warmup)
    if recipe.schedule == "multistep":
        # timm decays an epoch early: when 1 + the epoch reaches a milestone.
        later = [milestone + 1 for milestone in recipe.milestones]
        return MultiStepLRScheduler(optimizer, later, recipe.decay_rate, warmup_prefix=False, **warmup)
    return StepLRScheduler(optimizer, 1, 1.0, warmup_prefix=False, **warmup)  # the rate stays


def best_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the epoch whose weights are kept, the highest by `selection_key`."""
    return max(rows, key=selection_key)


def selection_key(row: Mapping[str, Any]) -> tuple[bool, float, float, int]:
    """Sort key of model selection: validation accuracy, then lower validation loss, then the later epoch.

    Where the loss weights classes, the mean recall of the classes counts in place of the accuracy, which an epoch that
    predicts the largest class alone may have. Epochs on images at half size rank below all others. Without validation
    images the last epoch has the highest rank.

    Args:
        row: Its ``epoch``, ``valid_accuracy`` and, where they are known, ``valid_recall``, ``valid_loss`` and
            ``half_size``.
    """
    full_size = not row.get("half_size", False)
    return (
        full_size,
        row.get("valid_recall", row["valid_accuracy"]) or 0.0,
        -(row.get("valid_loss") or 0.0),
        row["epoch"],
    )


def is_finished(recipe: Recipe, rows: list[dict[str, Any]]) -> bool:
    """Whether a log is that of a run that has ended, by its recipe or early."""
    return bool(rows) and (
        len(rows) >= recipe.epochs or patience_is_over(recipe, best_row(rows)["epoch"], rows[-1]["epoch"])
    )


def patience_is_over(recipe: Recipe, best: int, epoch: int) -> bool:
    """Whether a run ends early after an epoch, where ``best`` is the best epoch. Epochs at half size do not count."""
    return recipe.patience is not None and epoch - max(best, recipe.half_size_epochs) >= recipe.patience


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of an annotated type: unions, literals, tuples of one type and plain classes."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(part, get_args(hint)[0]) for part in value)
    if hint == dict[str, float]:
        return isinstance(value, dict) and all(_fits(part, float) for part in value.values())
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else origin or hint)
