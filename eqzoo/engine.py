"""The one training loop: a typed recipe, a JSONL record, atomic checkpoints, and resuming where it was killed."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from tqdm import tqdm

from .data import Split, normalise
from .files import atomic

__all__ = ["Recipe", "predictions", "top1", "train"]


@dataclass(frozen=True)
class Recipe:
    """Everything that a training run depends on, besides its data.

    The learning rate rises over the warm-up, step by step, from 0 to ``lr``; then it stays (``"constant"``) or falls
    along half a cosine to 0 at the last step (``"cosine"``). The batch norms and the data decide the rest.

    Args:
        model: The network's registered name.
        dataset: The name of the data set.
        epochs: How often the training pictures are gone through.
        batch_size: Pictures a step; the last, smaller batch of an epoch is left out.
        optimizer: One of timm's optimizers.
        lr: The highest learning rate.
        weight_decay: The weight decay of the optimizer, on all parameters.
        schedule: ``"constant"`` or ``"cosine"``.
        warmup_epochs: The length of the warm-up.
        seed: What the first weights, the order of the pictures and the dropout come from.
        model_args: Arguments of the network.

    Raises:
        ValueError: If a number is out of range.
    """

    model: str
    dataset: str
    epochs: int
    batch_size: int = 128
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 1e-4
    schedule: str = "cosine"
    warmup_epochs: int = 0
    seed: int = 0
    model_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule is 'constant' or 'cosine', got {self.schedule!r}")
        if min(self.epochs, self.batch_size) < 1 or not 0 <= self.warmup_epochs < self.epochs or self.lr <= 0:
            raise ValueError(
                "a recipe needs epochs >= 1, batch_size >= 1, 0 <= warmup_epochs < epochs and lr > 0, got "
                f"{self.epochs}, {self.batch_size}, {self.warmup_epochs} and {self.lr}"
            )

    def rate(self, epoch: float) -> float:
        """The learning rate after a number of epochs, which need not be whole."""
        if epoch < self.warmup_epochs:
            return self.lr * epoch / self.warmup_epochs
        if self.schedule == "constant":
            return self.lr
        done = (epoch - self.warmup_epochs) / (self.epochs - self.warmup_epochs)
        return self.lr * (1 + math.cos(math.pi * done)) / 2


def train(recipe: Recipe, build: Callable[[], nn.Module], splits: dict[str, Split], run_dir: Path) -> nn.Module:
    """Trains a network by a recipe, and gives it the weights of its best epoch on the validation split.

    The run folder receives ``recipe.json``, ``record.jsonl`` (a line an epoch: loss, validation accuracy in percent,
    learning rate, seconds), ``best.safetensors`` and ``state.pt``, from which a killed run goes on. All randomness is
    drawn anew from seed and epoch, so a run that goes on ends with the weights of one that was never stopped. Of equal
    epochs the later is kept. The test split is not read.

    Args:
        recipe: The recipe.
        build: Builds the network; called after the seed is set.
        splits: ``train`` and ``valid``.
        run_dir: The run's folder, new or of the same recipe.

    Returns:
        The network in evaluation mode, with the weights of the best epoch.

    Raises:
        ValueError: If the folder holds a run of another recipe, or there are fewer pictures than a batch.
        FloatingPointError: If the loss is no longer finite; the best weights so far stay in the folder.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    _claim(run_dir, recipe)
    torch.manual_seed(recipe.seed)
    model = build()
    optimizer = create_optimizer_v2(
        model, recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay, filter_bias_and_bn=False
    )
    start, best = _resume(run_dir, model, optimizer)
    data = {name: _as_input(model, splits[name]) for name in ("train", "valid")}
    steps = len(splits["train"]) // recipe.batch_size
    if not steps:
        raise ValueError(f"{len(splits['train'])} training pictures do not fill a batch of {recipe.batch_size}")
    with tqdm(total=recipe.epochs * steps, initial=start * steps, unit="step", desc=recipe.model) as bar:
        for epoch in range(start, recipe.epochs):
            began = time.perf_counter()
            loss = _epoch(recipe, model, optimizer, data["train"], epoch, bar)
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss of epoch {epoch + 1} is {loss}; the best weights, of epoch {best['epoch']}, are in "
                    f"{run_dir / 'best.safetensors'}; a smaller lr than {recipe.lr} may help"
                )
            accuracy = top1(predictions(model, data["valid"][0]), data["valid"][1])
            if accuracy >= best["accuracy"]:
                best = {"epoch": epoch + 1, "accuracy": accuracy}
                weights = {name: value.contiguous() for name, value in model.state_dict().items()}
                atomic(run_dir / "best.safetensors", partial(save_file, weights))
            row = {"epoch": epoch + 1, "loss": loss, "valid_accuracy": accuracy, "lr": recipe.rate(epoch + 1)}
            _record(run_dir, row | {"seconds": round(time.perf_counter() - began, 2)})
            _save_state(run_dir, model, optimizer, epoch + 1, best)
            bar.set_postfix(
                epoch=epoch + 1, loss=f"{loss:.4f}", valid=f"{accuracy:.2f}", best=f"{best['accuracy']:.2f}"
            )
    model.load_state_dict(load_file(run_dir / "best.safetensors"))
    return model.eval()


@torch.no_grad()
def predictions(model: nn.Module, images: Tensor, batch_size: int = 500) -> Tensor:
    """The classes that a network sees in pictures that are ready as its input, ``(n,)`` int64; restores its mode."""
    was_training = model.training
    model.eval()
    classes = torch.cat([model(batch).argmax(1) for batch in images.split(batch_size)])
    model.train(was_training)
    return classes


def top1(predicted: Tensor, labels: Tensor) -> float:
    """The share of right answers, in percent."""
    return 100 * (predicted == labels).double().mean().item()


def _epoch(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    epoch: int,
    bar: "tqdm[Any]",
) -> float:
    """Goes through the training pictures once; returns the mean loss."""
    model.train()
    generator = torch.manual_seed(recipe.seed * 1_000_003 + epoch)
    images, labels = data
    batches = list(_batches(len(labels), recipe.batch_size, generator))
    total = torch.zeros((), dtype=torch.float64)
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(epoch + (step + 0.5) / len(batches))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach().double().cpu()
        bar.update()
    return total.item() / len(batches)


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    order = torch.randperm(count, generator=generator)
    return iter(order[: count // size * size].split(size))


def _as_input(model: nn.Module, split: Split) -> tuple[Tensor, Tensor]:
    parameter = next(model.parameters())
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    images = normalise(split.images.to(parameter.device), cfg["mean"], cfg["std"], parameter.dtype)
    return images, split.labels.to(parameter.device)


def _claim(run_dir: Path, recipe: Recipe) -> None:
    path = run_dir / "recipe.json"
    text = json.dumps(asdict(recipe), indent=2) + "\n"
    if path.exists() and path.read_text() != text:
        raise ValueError(f"{run_dir} holds a run of another recipe ({path}); name another folder or remove that one")
    atomic(path, lambda temporary: temporary.write_text(text))


def _resume(run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]]:
    path = run_dir / "state.pt"
    if not path.exists():
        (run_dir / "record.jsonl").unlink(missing_ok=True)
        return 0, {"epoch": 0, "accuracy": -1.0}
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # The record may be one epoch ahead of the state, if the run was killed between the two.
    lines = (run_dir / "record.jsonl").read_text().splitlines()[: state["epoch"]]
    atomic(run_dir / "record.jsonl", lambda temporary: temporary.write_text("".join(f"{line}\n" for line in lines)))
    return state["epoch"], state["best"]


def _save_state(
    run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, best: dict[str, Any]
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "best": best}
    atomic(run_dir / "state.pt", lambda path: torch.save(state, path))


def _record(run_dir: Path, row: dict[str, Any]) -> None:
    with (run_dir / "record.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
