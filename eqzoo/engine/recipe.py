"""The recipe of a training run: typed settings, and the learning rate schedule."""

import json
import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from timm.optim import get_optimizer_info, list_optimizers
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.step_lr import StepLRScheduler
from torch import nn

from ..data import AUGMENTATIONS
from ..models import create_model
from ..models.builder import configured_name

__all__ = ["RUN_PREFIX", "Recipe", "build_network", "scheduler"]

RUN_PREFIX = "run:"  # before the folder of a run, in a recipe's `start`
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    dict: "an object",
    type(None): "none",
}


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run.

    The learning rate rises linearly over the warm-up from 0 to ``lr``; then it is constant (``"constant"``), falls
    along half a cosine to 0 at the last step (``"cosine"``), or is multiplied by ``decay_rate`` after each of the
    ``milestones`` (``"multistep"``) or after more than ``plateau_patience`` epochs in a row without a lower validation
    loss (``"plateau"``, as `torch.optim.lr_scheduler.ReduceLROnPlateau` counts them with ``threshold=0``).

    Args:
        model: The registered name of the network.
        dataset: The name of the data set, or of the user's folder or .npz file.
        epochs: The number of epochs.
        batch_size: The images in a step, over all processes and passes; the last, smaller batch of an epoch is left
            out.
        optimizer: One of timm's optimizers; ``"sgd"`` has Nesterov momentum, ``"momentum"`` plain momentum.
        lr: The highest learning rate.
        weight_decay: The weight decay of the optimizer, on all parameters but those that the network's
            ``no_weight_decay()`` names, as octic ViTs do.
        schedule: ``"constant"``, ``"cosine"``, ``"multistep"`` or ``"plateau"``.
        warmup_epochs: The length of the warm-up, which may be a fraction of an epoch.
        seed: The seed of the initial weights, the order of the images, their augmentation and dropout.
        model_args: Arguments of the network; JSON values.
        optimizer_args: Further arguments of the optimizer, such as ``{"momentum": 0.9}``; JSON values.
        milestones: The epochs after which a multistep schedule decays, ascending.
        decay_rate: The factor of the learning rate at each decay of a multistep or plateau schedule.
        plateau_patience: The epochs without a lower validation loss that a plateau schedule waits for; it decays after
            one more. The lowest loss is that of the epochs of one size: behind half-size epochs it starts anew.
        loss: One of timm's losses: ``"ce"``, cross-entropy, ``"bce"``, ``"poly"`` or ``"asl"``.
        label_smoothing: The probability that is distributed over all classes.
        class_weights: A factor of the loss for each class; () for none. Cross-entropy only.
        augment: One of `eqzoo.data.AUGMENTATIONS`.
        ema_decay: The decay of an exponential moving average of the weights, which is then validated and saved; None
            for none. In step n the decay is min(ema_decay, 1 - n^(-2/3)), which reaches 0.9 after 32 steps, 0.99 after
            1,000 and 0.999 after 31,623; a higher value has no effect in a shorter run.
        clip_grad: The largest norm of the gradient; None for no clipping.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast with parameters in float32.
        channels_last: Whether images, and the fields of layers that support it, have the channels-last memory format.
            Results change by round-off, and by the draws of dropout, which follow the memory.
        compile: Whether `torch.compile` compiles the network.
        cuda_graphs: Whether the pass of a batch, and the step of an optimizer that can be (Adam, AdamW and Muon, not
            SGD), are recorded once as CUDA graphs and replayed, which spares small networks the launch of their many
            kernels from Python; of no effect on a CPU. It goes with one process, and without ``compile``,
            ``accumulate``, ``checkpointing`` and ``freeze``.
        half_size_epochs: The first epochs, in which images are scaled to half their side, by 2 x 2 means, in training
            and in validation; an epoch then takes a fourth of the time. The best epoch is one of the others.
        full_size_lr: The learning rate at which a cosine schedule starts anew behind them, after it has
            fallen to 0; None for one cycle over all epochs.
        restarts: The epochs after which a cosine schedule starts anew, ascending; it falls to 0 before each of them
            (Loshchilov and Hutter, 2017, https://arxiv.org/abs/1608.03983, section 3).
        restart_lrs: The learning rates of the restarts, one each; () for ``lr`` each time.
        accumulate: The passes that a batch is split into, to use less memory; batch norms see the parts.
        checkpointing: Whether blocks are recomputed in the backward pass, to use less memory; batch norms then count
            each batch twice in their running statistics.
        deterministic: Whether to use deterministic CUDA kernels where there are any.
        valid_size: The images held out of the training split for validation, if the data set has no validation split;
            None for a tenth, 0 for none: then the weights of the last epoch are saved.
        samples_per_class: The training images of each class that are used; None for all.
        patience: The epochs at full size without a better one, as `rank` compares them, before the run ends early; None
            for never.
        layer_decay: The factor of the learning rate for each layer further from the classifier; None for one rate.
        lr_factors: Factors of the learning rate, above 0, of the parameters whose names match a pattern of `fnmatch`,
            such as ``{"*.query.*": 0.3}``; where several match, their product, times the factor of ``layer_decay``.
            Each pattern matches a parameter that is trained. AdamW and Muon decay weights by rate times weight decay,
            so that the factor is also one of the decay.
        freeze: The modules whose weights and running statistics are not changed, such as ``("stem", "blocks.0")``.
        start: The checkpoint whose weights the network starts from, by its name in `eqzoo.create_model`, adapted to the
            classes, channels and group of the network as with ``pretrained=True``, and with a new classifier where the
            names of the classes differ; or, as ``run:FOLDER``, a finished run on the same images, whose best weights it
            starts from (``{seed}`` in it stands for the seed); None for initial weights.
        teachers: The checkpoints whose mean probabilities the network learns beside the labels (distillation), by
            their names in `eqzoo.create_model`; () for none. They see images at full size.
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
    schedule: Literal["constant", "cosine", "multistep", "plateau"] = "cosine"
    warmup_epochs: float = 0
    seed: int = 0
    model_args: dict[str, Any] = field(default_factory=dict)
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    milestones: tuple[int, ...] = ()
    decay_rate: float = 0.1
    plateau_patience: int = 10
    loss: Literal["ce", "bce", "poly", "asl"] = "ce"
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    augment: str = "none"
    ema_decay: float | None = None
    clip_grad: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    half_size_epochs: int = 0
    full_size_lr: float | None = None
    restarts: tuple[int, ...] = ()
    restart_lrs: tuple[float, ...] = ()
    accumulate: int = 1
    checkpointing: bool = False
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
            elif isinstance(value, np.generic):
                value = value.item()
            object.__setattr__(self, item.name, value)
            if not _fits(value, hints[item.name]):
                raise ValueError(f"{item.name} is {_words(hints[item.name])}, got {value!r}")
        for name in ("model_args", "optimizer_args"):
            if json.loads(_json(name, getattr(self, name))) != getattr(self, name):
                raise ValueError(f"{name} are kept as JSON: lists instead of tuples; got {getattr(self, name)!r}")
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a whole number of at least 1, got {getattr(self, name)}")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"warmup_epochs is at least 0 and less than the epochs, {self.epochs}; got {self.warmup_epochs}"
            )
        if not 0 < self.lr < float("inf"):  # NaN is not
            raise ValueError(f"lr is a finite number above 0, got {self.lr}")
        self._check_ranges()
        self._check_names()

    def rate(self, epoch: float) -> float:
        """The learning rate after a number of epochs, which may be fractional; without the decays of a plateau."""
        optimizer = torch.optim.SGD([torch.zeros(1)], self.lr)
        scheduler(self, optimizer).step(epoch)  # timm's schedulers take fractions of epochs
        return float(optimizer.param_groups[0]["lr"])

    @property
    def start_run(self) -> Path | None:
        """The folder of the run whose best weights this one starts from, where ``start`` names a run."""
        if not (self.start or "").startswith(RUN_PREFIX):
            return None
        return Path(str(self.start).removeprefix(RUN_PREFIX).replace("{seed}", str(self.seed)))

    def decays(self, losses: Sequence[float]) -> int:
        """The number of decays of a plateau schedule after these validation losses, one for each epoch."""
        best, waited, count = float("inf"), 0, 0
        for epoch, loss in enumerate(losses if self.schedule == "plateau" else ()):
            if epoch == self.half_size_epochs:
                best, waited = float("inf"), 0
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if waited > self.plateau_patience:
                waited, count = 0, count + 1
        return count

    @property
    def all_restart_lrs(self) -> tuple[float, ...]:
        """The learning rates of the restarts, one each."""
        return self.restart_lrs or (self.lr,) * len(self.restarts)

    def _check_ranges(self) -> None:
        ranges = {
            "seed": (0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "decay_rate": (0 < self.decay_rate < 1, "between 0 and 1"),
            "plateau_patience": (self.plateau_patience >= 0, "at least 0"),
            "label_smoothing": (0 <= self.label_smoothing < 1, "at least 0 and below 1"),
            "class_weights": (
                min(self.class_weights, default=1) >= 0 < max(self.class_weights, default=1),
                "a list of numbers of at least 0, one of them above 0",
            ),
            "ema_decay": (self.ema_decay is None or 0 < self.ema_decay < 1, "null or between 0 and 1"),
            "clip_grad": (self.clip_grad is None or self.clip_grad > 0, "null or above 0"),
            "half_size_epochs": (
                0 <= self.half_size_epochs < self.epochs,
                f"at least 0 and less than the {self.epochs} epochs",
            ),
            "full_size_lr": (self.full_size_lr is None or self.full_size_lr > 0, "null or above 0"),
            "accumulate": (
                self.accumulate >= 1 and self.batch_size % self.accumulate == 0,
                f"a divisor of the batch size, {self.batch_size}",
            ),
            "valid_size": (self.valid_size is None or self.valid_size >= 0, "null or at least 0"),
            "samples_per_class": (self.samples_per_class is None or self.samples_per_class >= 1, "null or at least 1"),
            "patience": (self.patience is None or self.patience >= 1, "null or at least 1"),
            "layer_decay": (self.layer_decay is None or 0 < self.layer_decay <= 1, "null, or above 0 and at most 1"),
            "lr_factors": (
                all(isinstance(name, str) and 0 < x < float("inf") for name, x in self.lr_factors.items()),
                "an object of patterns of names and factors above 0",
            ),
            "teacher_weight": (0 < self.teacher_weight <= 1, "above 0 and at most 1"),
            "milestones": (
                list(self.milestones) == sorted(set(self.milestones)) and min(self.milestones, default=1) > 0,
                "a list of ascending epochs above 0",
            ),
        }
        for name, (right, said) in ranges.items():
            if not right:
                raise ValueError(f"{name} is {said}, got {getattr(self, name)!r}")
        if bool(self.milestones) != (self.schedule == "multistep"):
            raise ValueError(f"milestones belong to a multistep schedule, got {self.milestones} and {self.schedule!r}")
        if self.milestones and self.milestones[-1] >= self.epochs:
            raise ValueError(f"milestones are less than the {self.epochs} epochs, got {self.milestones}; give others")
        for name, schedules in (("decay_rate", ("multistep", "plateau")), ("plateau_patience", ("plateau",))):
            if self.schedule not in schedules and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{name} belongs to a schedule {' or '.join(schedules)}, got {getattr(self, name)} and "
                    f"{self.schedule!r}"
                )
        if self.full_size_lr is not None and (self.schedule != "cosine" or self.half_size_epochs <= self.warmup_epochs):
            raise ValueError(
                "full_size_lr needs a cosine schedule, and more epochs at half size than in the warm-up; got "
                f"{self.schedule!r}, {self.half_size_epochs} and {self.warmup_epochs}"
            )
        without = ("compile", "accumulate", "checkpointing", "freeze")
        if self.cuda_graphs and (
            others := [name for name in without if getattr(self, name) != getattr(type(self), name)]
        ):
            got = ", ".join(f"{name}={getattr(self, name)!r}" for name in others)
            raise ValueError(f"cuda_graphs goes without {', '.join(without)}; got {got}; set it to false")
        self._check_restarts()
        if self.class_weights and self.loss != "ce":
            raise ValueError(f"class_weights go with loss='ce', got {self.loss!r}")
        self._check_teachers()
        if self.valid_size == 0 and (self.patience is not None or self.schedule == "plateau"):
            raise ValueError("patience and the plateau schedule need validation images, got valid_size=0")

    def _check_restarts(self) -> None:
        if (self.restarts or self.restart_lrs) and self.schedule != "cosine":
            raise ValueError(f"restarts belong to a cosine schedule, got {self.restarts} and {self.schedule!r}")
        first = self.warmup_epochs if self.full_size_lr is None else self.half_size_epochs
        if sorted(set(self.restarts)) != list(self.restarts) or not all(first < e < self.epochs for e in self.restarts):
            raise ValueError(
                f"restarts are ascending and between {first:g} and the {self.epochs} epochs, got {self.restarts}"
            )
        if self.restart_lrs and len(self.restart_lrs) != len(self.restarts):
            raise ValueError(
                f"restart_lrs is empty or has a rate for each restart, got {self.restart_lrs} for {self.restarts}"
            )
        if not all(0 < lr < float("inf") for lr in self.restart_lrs):
            raise ValueError(f"restart_lrs is a list of rates above 0, got {self.restart_lrs!r}")

    def _check_teachers(self) -> None:
        if not self.teachers and not self.soft_labels and self.teacher_weight != type(self).teacher_weight:
            raise ValueError(
                f"teacher_weight belongs to teachers, got {self.teacher_weight} and none; name teachers, or set "
                f"teacher_weight={type(self).teacher_weight}"
            )
        if self.teachers and self.soft_labels:
            raise ValueError("a network learns from teachers or from soft_labels, got both; leave one out")
        if self.teachers and self.loss != "ce":
            raise ValueError(f"teachers go with loss='ce', got {self.loss!r}")
        ways = ["label_smoothing=0"] if self.label_smoothing else []
        ways += ["class_weights=[], without --balance"] if self.class_weights else []
        if self.teachers and self.teacher_weight == 1 and ways:
            raise ValueError(
                "with teacher_weight=1 the labels have no part in the loss, so smoothing and weighting them has no "
                f"effect: set {' and '.join(ways)}, or a lower teacher_weight"
            )

    def _check_names(self) -> None:
        if self.augment not in AUGMENTATIONS:
            near = get_close_matches(str(self.augment), AUGMENTATIONS, n=1)
            raise ValueError(
                f"augment is one of {', '.join(AUGMENTATIONS)}, in eqzoo finetune also missing; got {self.augment!r}"
                f"{', near it is ' * bool(near)}{''.join(near)}"
            )
        if self.optimizer not in list_optimizers():
            near = get_close_matches(self.optimizer, list_optimizers(), n=5, cutoff=0.3)
            raise ValueError(
                f"optimizer is one of timm's, such as {', '.join(near or ['adam', 'sgd'])}, and all that "
                f"timm.optim.list_optimizers() names; got {self.optimizer!r}"
            )
        if get_optimizer_info(self.optimizer).second_order:
            raise ValueError(f"optimizer {self.optimizer!r} needs second derivatives, got a loop with first ones only")


def build_network(recipe: Recipe, **kwargs: Any) -> nn.Module:
    """The network of a recipe, with the configuration for its data set where it has one.

    Arguments of the network's class come from that configuration, and those of the recipe override them.

    Args:
        recipe: The recipe.
        **kwargs: Further arguments of `eqzoo.create_model`, such as ``checkpoint_path``; they override both.

    Raises:
        ValueError: If the network takes no such arguments.
    """
    try:
        return create_model(configured_name(recipe.model, recipe.dataset), **recipe.model_args | kwargs)
    except TypeError as error:  # of the signature of its class
        raise ValueError(f"model_args={recipe.model_args} do not suit {recipe.model}: {error}") from error


def scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Scheduler:
    """The scheduler of a recipe, with timm's interface, stepped with a number of epochs that may be fractional."""
    warmup: dict[str, Any] = {"warmup_t": recipe.warmup_epochs, "warmup_lr_init": 0.0}
    if recipe.schedule == "cosine":
        return _CosineScheduler(recipe, optimizer)
    if recipe.schedule == "multistep":
        # timm decays an epoch early: when 1 + the epoch reaches a milestone.
        later = [milestone + 1 for milestone in recipe.milestones]
        return MultiStepLRScheduler(optimizer, later, recipe.decay_rate, warmup_prefix=False, **warmup)
    return StepLRScheduler(optimizer, 1, 1.0, warmup_prefix=False, **warmup)  # the rate stays


class _CosineScheduler(Scheduler):  # type: ignore[misc]
    """A linear warm-up, then half cosines to 0, one for each cycle; timm's have lengths in geometric progression."""

    def __init__(self, recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, param_group_field="lr")
        again = [] if recipe.full_size_lr is None else [(recipe.half_size_epochs, recipe.full_size_lr)]
        again += zip(recipe.restarts, recipe.all_restart_lrs, strict=True)
        self.warmup = recipe.warmup_epochs
        self.starts = [self.warmup, *(epoch for epoch, _ in again), recipe.epochs]
        self.scales = [1.0, *(lr / recipe.lr for _, lr in again)]
        self.step(0)

    def _get_lr(self, t: float) -> list[float]:
        if t < self.warmup:
            share = t / self.warmup
        else:
            cycle = min(bisect(self.starts, t), len(self.scales)) - 1
            start, end = self.starts[cycle : cycle + 2]
            share = self.scales[cycle] * 0.5 * (1 + math.cos(math.pi * (min(t, end) - start) / (end - start)))
        return [share * value for value in self.base_values]


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


def _words(hint: Any) -> str:
    """An annotated type in words."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(part) for part in get_args(hint))
    if origin is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if origin is tuple:
        return f"a list in [], each {_words(get_args(hint)[0])}"
    if hint == dict[str, float]:
        return 'an object of names and numbers, such as {"head.*": 0.3}'
    return _WORDS[origin or hint]


def _json(name: str, values: dict[str, Any]) -> str:
    try:
        return json.dumps(values)
    except TypeError as error:
        raise ValueError(f"{name} are JSON values, got {values!r} ({error})") from error
