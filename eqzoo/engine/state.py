"""Training state: model, moving average, optimizer, schedule and data on the device."""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from ..data import AnySplit, Split, Streamed, augment, batches
from ..data.hashes import split_differences, split_digests
from ..data.images import normalized
from ..evaluation.predictor import BATCH_SIZE
from ..models import create_model
from ..models.builder import per_channel
from ..models.sizes import blank, refusal
from ._accelerate import accelerate
from .cuda_graph import RecordedPass, RecordedStep, set_capturable
from .device import emulates_bfloat16, muon_in_float32
from .distillation import Teachers, soft_labels
from .recipe import Recipe, build_network, scheduler
from .run import RunDirectory


class TrainingState:
    """What changes in training, and the data: model, moving average, optimizer, schedule, splits on the device.

    Args:
        recipe: The recipe.
        build: Builds the network; called after the seed is set.
        splits: ``train``, and ``valid`` unless nothing was held out.
        accelerator: The device and the processes.
        workers: The processes that read images that are not in memory.
        resumed: Whether `load_state_dict` follows, so that the weights of ``recipe.start`` are not needed.

    Raises:
        ValueError: If the labels do not suit the network or its teachers, or there are fewer images than in a batch.
    """

    def __init__(
        self,
        recipe: Recipe,
        build: Callable[[], nn.Module],
        splits: Mapping[str, AnySplit],
        accelerator: accelerate.Accelerator,
        workers: int,
        resumed: bool = False,
    ) -> None:
        self.recipe, self.build, self.accelerator, self.workers = recipe, build, accelerator, workers
        self.device = accelerator.device
        torch.manual_seed(recipe.seed)
        self.model = build()
        if recipe.start and not resumed:
            _load_start(self.model, recipe, splits)
        self.model = self.model.to(self.device)
        _check_splits(recipe, splits, self.model, accelerator.num_processes)
        if self._records and accelerator.num_processes > 1:
            raise ValueError(f"cuda_graphs goes with one process, got {accelerator.num_processes}; set it to false")
        self.splits = {
            name: split if isinstance(split, Streamed) else split.to(self.device)
            for name, split in splits.items()
            if name in ("train", "valid")
        }
        self.steps = len(splits["train"]) // recipe.batch_size
        synchronized = accelerator.num_processes > 1 and self.device.type == "cuda"
        if synchronized:  # before modules are frozen: it replaces them
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.frozen = freeze(self.model, recipe.freeze)
        self.optimizer = _optimizer(self.model, recipe)
        self._emulates_bfloat16 = emulates_bfloat16(self.device)
        self.scheduler: Scheduler = scheduler(recipe, self.optimizer)
        self.ema = ModelEmaV3(self.model, recipe.ema_decay, use_warmup=True) if recipe.ema_decay else None
        self.half_size = False
        self._recorded: RecordedPass | None = None
        self._recorded_step: RecordedStep | None = None
        self._recorded_for: object = None
        self.net = accelerator.prepare_model(self.model)
        self.criterion = _criterion(recipe, self.device)
        classes, train = int(self.model.num_classes), splits["train"]  # type: ignore[arg-type]
        self.teachers = Teachers(recipe, train.classes, self.device)
        self.soft_labels = soft_labels(recipe.soft_labels, len(train), classes) if recipe.soft_labels else None
        cfg: dict[str, Any] = self.model.pretrained_cfg  # type: ignore[assignment]
        dtype = next(self.model.parameters()).dtype
        mean, std = (per_channel(cfg[key], train.shape[0]) for key in ("mean", "std"))  # timm's are those of 3 channels
        self.mean, self.std = (torch.tensor(values, dtype=dtype, device=self.device) for values in (mean, std))

    @property
    def _records(self) -> bool:
        return self.recipe.cuda_graphs and self.device.type == "cuda"

    @property
    def eval_model(self) -> nn.Module:
        """The network that is validated and saved: the moving average if there is one."""
        return self.ema.module if self.ema else self.model

    def as_input(self, images: Tensor) -> Tensor:
        """Normalized images, at half size in the first epochs where the recipe says so."""
        images = images.to(self.device, non_blocking=True).to(self.mean.dtype)
        if self.half_size:
            images = F.avg_pool2d(images, 2)
        x = normalized(images, self.mean, self.std, self.mean.dtype)
        return x.to(memory_format=torch.channels_last) if self.recipe.channels_last else x

    def autocast(self) -> Any:
        """Autocast to bfloat16 if the recipe asks for it."""
        wanted = self.recipe.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if wanted else nullcontext()

    def begin_epoch(self, epoch: int) -> None:
        """Sets training mode, except for frozen modules, and the size of images."""
        self.half_size = epoch < self.recipe.half_size_epochs
        self.net.train()
        for module in self.frozen:
            module.eval()

    def backward(self, images: Tensor, labels: Tensor, numbers: Tensor, soft: Tensor | None = None) -> Tensor:
        """Computes the gradient of a batch, or of this process's part of it; returns its mean loss.

        Args:
            images: The images, uint8.
            labels: Their classes.
            numbers: The random numbers of their augmentation, see `eqzoo.data.augment`.
            soft: Their rows of the soft labels, if the recipe has any.
        """
        given = (images, labels, numbers, *([] if soft is None else [soft]))
        inputs = [tensor.to(self.device, non_blocking=True) for tensor in given]
        if not self._records:
            return self._run(*inputs)
        recorded_for = (self.recipe, self.half_size, [(given.shape, given.dtype) for given in inputs])
        if recorded_for != self._recorded_for:
            self._recorded = self._recorded_for = self._recorded_step = None  # first, to free their memory
            self._recorded, self._recorded_for = RecordedPass(self._run, self.model, inputs), recorded_for
        assert self._recorded is not None
        return self._recorded(*inputs)

    def _run(self, images: Tensor, labels: Tensor, numbers: Tensor, soft: Tensor | None = None) -> Tensor:
        images = augment(self.recipe.augment, images, numbers)
        with self.autocast():
            logits = self.net(self.as_input(images))
        logits = logits if self.recipe.precision == "float32" else logits.float()
        loss = self.criterion(logits, labels)
        taught = self.teachers.probabilities(images, soft, self.autocast(), self.recipe.channels_last)
        if taught is not None:
            loss = self.teachers.loss(loss, logits, taught)
        loss.backward()
        return loss.detach()

    def step(self, epoch: int, step: int) -> None:
        """Updates the weights, at the learning rate of the middle of the step."""
        self.scheduler.step(epoch + (step + 0.5) / self.steps)  # timm's schedulers take fractions of epochs
        self._update()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(self.model, step=epoch * self.steps + step + 1)

    def _update(self) -> None:
        if not (self._records and RecordedStep.fits(self.optimizer)):
            with muon_in_float32() if self._emulates_bfloat16 else nullcontext():
                self.optimizer.step()
            return
        if self._recorded_step is None:
            self._recorded_step = RecordedStep(self.optimizer)
        self._recorded_step()

    def reduced(self, total: Tensor) -> float:
        """A sum of losses, averaged over the processes."""
        if self.accelerator.num_processes > 1:
            total = self.accelerator.reduce(total, "mean")
        return total.item()

    @torch.no_grad()
    def validate(self) -> dict[str, float | None]:
        """How well the network does on the validation images.

        Returns:
            ``valid_loss``, the mean cross-entropy, and ``valid_accuracy`` in percent; None without validation images.
            Where the loss weights classes also ``valid_recall``, the mean over the classes that have validation images
            of the percentage of them that is recognized.
        """
        if "valid" not in self.splits:
            return {"valid_loss": None, "valid_accuracy": None}
        split, world = self.splits["valid"], self.accelerator.num_processes
        model = self.eval_model.eval()
        if world > 1:
            for buffer in model.buffers():
                accelerate.utils.broadcast(buffer)
        share = torch.arange(len(split)).tensor_split(world)[self.accelerator.process_index]
        parts = [part.to(self.device) if isinstance(split, Split) else part for part in share.split(BATCH_SIZE)]
        classes = int(self.model.num_classes)  # type: ignore[arg-type]
        sums = torch.zeros(1 + classes, dtype=torch.float64, device=self.device)  # of the loss, of right ones by class
        for part, images in zip(parts, batches(split, parts, self.workers), strict=True):
            with self.autocast():
                logits = model(self.as_input(images))
            labels = split.labels[part].to(self.device)
            sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum").double()
            sums[1:] += labels[logits.argmax(1) == labels].bincount(minlength=classes)
        loss, *right = self.accelerator.reduce(sums).tolist() if world > 1 else sums.tolist()
        found: dict[str, float | None] = {
            "valid_loss": loss / len(split),
            "valid_accuracy": 100 * (sum(right) / len(split)),
        }
        if self.recipe.class_weights:
            counts = split.labels.bincount(minlength=classes).tolist()
            recalls = [hits / count for hits, count in zip(right, counts, strict=True) if count]
            found["valid_recall"] = 100 * (sum(recalls) / len(recalls))
        return found

    def state_dict(self) -> dict[str, Any]:
        """The states of model, optimizer and moving average, as state.pt holds them."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state | ({"ema": self.ema.module.state_dict()} if self.ema else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the states of model, optimizer and moving average."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_capturable(self.optimizer, False)  # as a run whose steps are recorded left it
        self._recorded_step = None
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])

    def finished_model(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The network in evaluation mode with the best weights, without wrappers that only training needs."""
        plain = self.accelerator.num_processes == 1 and not self.recipe.freeze
        model = self.model if plain else self.build().to(self.device)
        model.load_state_dict(weights)
        return model.eval()


def _load_start(model: nn.Module, recipe: Recipe, splits: Mapping[str, AnySplit]) -> None:
    """Loads the weights of the checkpoint that the recipe starts from; its classifier only for the same classes.

    Layers that the checkpoint does not have keep their initial weights: the bottlenecks that a deeper ResNet has more
    begin as the identity, as the scale of their last norm is 0.

    The classes of a checkpoint or of images without names are the same if there are equally many, as are those of a
    run on the same images.
    """
    if recipe.start_run:
        _load_run(model, RunDirectory.finished(recipe.start_run), splits)
        return
    args: dict[str, Any] = {"num_classes": model.num_classes, "in_chans": splits["train"].shape[0]}
    if "group" in inspect.signature(type(model)).parameters:  # that of an octic ViT is p4m
        args["group"] = model.group
    start: Any = create_model(str(recipe.start), pretrained=True, **args)
    model.load_state_dict(model.state_dict() | start.state_dict())
    names, classes = start.pretrained_cfg.get("label_names") or (), splits["train"].classes
    if names and classes and list(names) != list(classes):
        model.reset_classifier(model.num_classes)  # type: ignore[operator]


def _load_run(model: nn.Module, run: RunDirectory, splits: Mapping[str, AnySplit]) -> None:
    """Loads the best weights of a finished run of the same network on the same training and validation images."""
    if differences := "; ".join(split_differences(run.data_sha256(), split_digests(splits))):
        raise ValueError(
            f"{run.path} is a run on other images ({differences}), so its weights may have been trained on "
            f"validation images of this one; start=local-dir:{run.path} takes them for a checkpoint"
        )
    model.load_state_dict(build_network(run.recipe(), checkpoint_path=run.weights).state_dict())


def _check_splits(recipe: Recipe, splits: Mapping[str, AnySplit], model: nn.Module, processes: int) -> None:
    """Raises ValueError unless the labels suit the network and the images can be shared among steps and processes."""
    classes = int(model.num_classes)  # type: ignore[arg-type]
    used = [splits[name] for name in ("train", "valid") if name in splits]
    if any(split.labels.min() < 0 or split.labels.max() >= classes for split in used):
        raise ValueError(f"labels are from 0 to {classes - 1} in a network of {classes} classes (its num_classes)")
    if recipe.class_weights and len(recipe.class_weights) != classes:
        raise ValueError(f"class_weights has {len(recipe.class_weights)} factors for {classes} classes")
    if len(splits["train"]) < recipe.batch_size or recipe.batch_size % processes:
        raise ValueError(
            f"a batch_size of {recipe.batch_size} needs as many training images, of which there are "
            f"{len(splits['train'])}, and the same number in each of {processes} processes"
        )
    height, width = splits["train"].shape[1:]
    if recipe.half_size_epochs and (height % 2 or width % 2):
        raise ValueError(f"half_size_epochs={recipe.half_size_epochs} needs even sides, images are {height} x {width}")
    for h, w in ((height // 2, width // 2), (height, width)) if recipe.half_size_epochs else ():
        if reason := refusal(blank(model), h, w):
            raise ValueError(f"half_size_epochs={recipe.half_size_epochs} trains on {h} x {w} pixels too: {reason}")


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    optimizer = create_optimizer_v2(
        model,
        recipe.optimizer,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        filter_bias_and_bn=False,
        layer_decay=recipe.layer_decay,
        **recipe.optimizer_args,
    )
    if recipe.lr_factors:
        _set_factors(optimizer, model, recipe.lr_factors)
    return optimizer


def _set_factors(optimizer: torch.optim.Optimizer, model: nn.Module, factors: Mapping[str, float]) -> None:
    """Splits groups of parameters by the factors of their learning rates, as ``lr_scale``, which schedulers read."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pattern in factors:
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            words = dict.fromkeys(word for name in names.values() for word in name.split(".") if not word.isdigit())
            raise ValueError(f"lr_factors: {pattern!r} matches no trained parameter; names hold {', '.join(words)}")
    groups = []
    for group in optimizer.param_groups:
        parts: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            matching = (factor for pattern, factor in factors.items() if fnmatchcase(names[parameter], pattern))
            parts.setdefault(math.prod(matching, start=group.get("lr_scale", 1.0)), []).append(parameter)
        groups += [group | {"params": parameters, "lr_scale": scale} for scale, parameters in parts.items()]
    optimizer.param_groups[:] = groups


def _criterion(recipe: Recipe, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The cross-entropy of a recipe, the mean over the images."""
    weight = torch.tensor(recipe.class_weights, device=device) if recipe.class_weights else None

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        if weight is None:
            return F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
        # The factor is that of the label alone: cross_entropy(weight=) has the part of a smoothed label that goes to
        # another class times the factor of that class, so that a rare one would be the better answer everywhere.
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=recipe.label_smoothing)
        return (losses * weight.to(logits.dtype)[labels]).mean()

    return criterion


def freeze(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Freezes the parameters of modules, and returns the modules.

    Raises:
        ValueError: If the network has no module of a name.
    """
    modules = dict(model.named_modules())
    if unknown := [name for name in names if not name or name not in modules]:
        tops = ", ".join(name for name, _ in model.named_children())
        raise ValueError(f"freeze names modules of the network such as {tops}; got {unknown[0]!r}")
    return [modules[name].requires_grad_(False) for name in names]
