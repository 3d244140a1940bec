"""The one training loop: a typed recipe, a JSONL record, atomic checkpoints, and resuming where it was killed."""

import io
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from tqdm import tqdm

from .data import AnySplit, Split, batches, draw
from .recipe import Recipe
from .run import Run, unwritable, write

__all__ = ["Recipe", "check_device", "finished", "predictions", "selected", "top1", "train"]

CHECK_STEPS = 50  # how often the loss is looked at inside an epoch, which on a GPU waits for it


def train(
    recipe: Recipe,
    build: Callable[[], nn.Module],
    splits: Mapping[str, AnySplit],
    run_dir: Path,
    device: str | None = None,
    workers: int = 4,
    track: str | None = None,
) -> nn.Module:
    """Trains a network by a recipe, and gives it the weights of its best epoch on the validation split.

    The run folder receives ``recipe.json``, ``record.jsonl`` (a line an epoch: training loss, validation loss and
    accuracy in percent, learning rate, processes, seconds), ``best.safetensors`` and ``state.pt``, from which a killed
    run goes on. All randomness is drawn anew from seed and epoch, so a run that goes on ends with the weights of one
    that was never stopped. Of equal epochs the later is kept; without validation pictures that is the last. The test
    split is not read.

    Under ``torchrun``, processes share every batch and its gradient, with the losses of one process up to rounding.
    Batch norms share their statistics on GPUs, where `torch.nn.SyncBatchNorm` works; on CPUs each process normalises
    its own share of a batch. The run folder has to be the same for all of them.

    Args:
        recipe: The recipe.
        build: Builds the network; called after the seed is set.
        splits: ``train``, and ``valid`` unless nothing was held out.
        run_dir: The run's folder, new or of the same recipe.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        workers: The processes that read pictures that are not in memory.
        track: One of the trackers that accelerate knows, such as ``"trackio"`` or ``"tensorboard"``, to log to as well.

    Returns:
        The network in evaluation mode, with the weights that were kept.

    Raises:
        ValueError: If the folder holds a run of another recipe or a broken state, the pictures do not suit the network
            or do not fill a batch, the batch cannot be shared out, or the tracker is not installed.
        OSError: If the folder cannot be written; what is there stays whole, and the run can go on from it.
        FloatingPointError: If the loss is no longer finite; the best weights so far stay in the folder.
    """
    accelerator = _accelerator(device, track, run_dir)
    fresh = accelerator.is_main_process and _claim(run_dir, recipe)
    accelerator.wait_for_everyone()
    with _deterministic(recipe.deterministic and accelerator.device.type == "cuda"):
        try:
            run = Run(recipe, build, splits, run_dir, accelerator, workers)
        except Exception:  # the folder stays free for the command without its mistake
            if fresh:
                (run_dir / "recipe.json").unlink(missing_ok=True)
            raise
        start, best, history = _resume(run_dir, run)
        _track(accelerator, recipe, run_dir, track)
        with _bar(run, start) as bar:
            for epoch in range(start, recipe.epochs):
                if _waited_enough(recipe, best["epoch"], epoch):
                    break
                began = time.perf_counter()
                loss = _epoch(run, epoch, history, best, bar)
                accuracy, valid_loss = run.validate()
                if accuracy is None or accuracy >= best["accuracy"]:
                    best = {"epoch": epoch + 1, "accuracy": -1.0 if accuracy is None else accuracy}
                    run.keep_weights()
                history.append(valid_loss or 0.0)
                row = {"epoch": epoch + 1, "loss": loss, "valid_loss": valid_loss, "valid_accuracy": accuracy}
                row |= {"lr": run.base_rate(epoch + 1, history)}
                if accelerator.is_main_process:
                    seconds = round(time.perf_counter() - began, 2)
                    _record(run_dir, row | {"processes": accelerator.num_processes, "seconds": seconds})
                    _save_state(run_dir, run, epoch + 1, best)
                accelerator.log({k: v for k, v in row.items() if v is not None}, step=epoch + 1)
                bar.set_postfix(_facts(epoch, loss, best))
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.wait_for_everyone()
        return run.finished_model()


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


def selected(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a record whose weights are in best.safetensors: the best on validation pictures, else the last."""
    return max(rows, key=lambda row: (row["valid_accuracy"] or 0.0, row["epoch"]))


def check_device(device: str | None) -> None:
    """Raises ValueError unless there is such a device to train on."""
    if device not in (None, "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device is 'cpu', or 'cuda' where there is a GPU, got {device!r}")


def finished(recipe: Recipe, rows: list[dict[str, Any]]) -> bool:
    """Whether a record is that of a run that has come to its end, early or not."""
    return bool(rows) and (
        len(rows) >= recipe.epochs or _waited_enough(recipe, selected(rows)["epoch"], rows[-1]["epoch"])
    )


def _epoch(run: Run, epoch: int, history: list[float], best: dict[str, Any], bar: "tqdm[Any]") -> float:
    """Goes through the training pictures once; returns the mean loss."""
    recipe, accelerator, split = run.recipe, run.accelerator, run.splits["train"]
    run.begin_epoch(history)
    generator = torch.manual_seed(recipe.seed * 1_000_003 + epoch)
    order = list(_batches(len(split), recipe.batch_size, generator))
    parts, numbers = _shares(recipe, accelerator, order, epoch)
    if isinstance(split, Split):
        parts = [part.to(run.device) for part in parts]
    if accelerator.process_index:  # the order is shared, what dropout drops is not
        torch.manual_seed((recipe.seed * 1_000_003 + epoch) * 1_009 + accelerator.process_index)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    mean = 0.0
    pictures = batches(split, parts, run.workers, pin=run.device.type == "cuda")
    for done, (part, images, changes) in enumerate(zip(parts, pictures, numbers, strict=True), 1):
        step, rest = divmod(done, recipe.accumulate)
        with accelerator.no_sync(run.net) if rest else nullcontext():
            total += run.backward(images, split.labels[part], changes)
        if rest:
            continue
        run.step(epoch, step - 1)
        bar.update(recipe.batch_size)
        if step % CHECK_STEPS == 0 or step == run.steps:
            mean = run.reduced(total) / done
            if not math.isfinite(mean):
                raise FloatingPointError(_not_finite(run, mean, epoch, best))
            bar.set_postfix(_facts(epoch, mean, best), refresh=False)
    return mean


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    order = torch.randperm(count, generator=generator)
    return iter(order[: count // size * size].split(size))


def _shares(
    recipe: Recipe, accelerator: accelerate.Accelerator, order: list[Tensor], epoch: int
) -> tuple[list[Tensor], list[Tensor]]:
    """This process's part of each pass of each batch: the places of the pictures, and the numbers that change them."""
    passes, processes, this = recipe.accumulate, accelerator.num_processes, accelerator.process_index
    count = sum(map(len, order))
    numbers = torch.empty(count, 0)
    if recipe.augment != "none":
        numbers = draw(count, torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch + 2**40))
    shape = (len(order), passes, processes, -1)
    places = torch.cat(order).view(shape)[:, :, this].flatten(0, 1)
    changes = numbers.view(*shape[:3], recipe.batch_size // passes // processes, -1)[:, :, this].flatten(0, 1)
    return list(places), list(changes)


def _accelerator(device: str | None, track: str | None, run_dir: Path) -> accelerate.Accelerator:
    check_device(device)
    if track is not None:
        known = {str(tracker) for tracker in accelerate.tracking.get_available_trackers()}
        if track not in known:
            raise ValueError(f"no tracker {track!r} is installed; there are: {', '.join(sorted(known)) or 'none'}")
    # Precision is autocast's, in the loop: accelerate fixes its own for the whole process at the first run.
    accelerator = accelerate.Accelerator(
        cpu=device == "cpu" or not torch.cuda.is_available(),
        mixed_precision="no",
        log_with=track,
        project_dir=run_dir if track else None,
    )
    if accelerator.num_processes != (started := int(os.environ.get("WORLD_SIZE", "1"))):
        raise ValueError(f"{started} processes were started, and accelerate joins {accelerator.num_processes} of them")
    return accelerator


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Keeps CUDA to deterministic kernels; where there is none, torch warns and takes another."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS sums in one order only with a fixed workspace
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _waited_enough(recipe: Recipe, best: int, epoch: int) -> bool:
    return recipe.patience is not None and epoch - best >= recipe.patience


def _bar(run: Run, start: int) -> "tqdm[Any]":
    size = run.steps * run.recipe.batch_size
    return tqdm(
        total=run.recipe.epochs * size,
        initial=start * size,
        desc=run.recipe.model,
        unit=" pictures",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 60,  # a log file keeps every line
        disable=not run.accelerator.is_main_process,
    )


def _facts(epoch: int, loss: float, best: dict[str, Any]) -> dict[str, str]:
    accuracy = {"best": f"{best['accuracy']:.2f}"} if best["accuracy"] >= 0 else {}
    return {"epoch": str(epoch + 1), "loss": f"{loss:.4f}"} | accuracy


def _not_finite(run: Run, loss: float, epoch: int, best: dict[str, Any]) -> str:
    path = run.run_dir / "best.safetensors"
    good = f"the best weights, of epoch {best['epoch']}, are in {path}"
    none = f"no epoch was finished, so there is no {path} yet"
    return (
        f"the loss of epoch {epoch + 1} is {loss}; {good if best['epoch'] else none}; a smaller lr than "
        f"{run.recipe.lr}, a warm-up or clip_grad may help"
    )


def _track(accelerator: accelerate.Accelerator, recipe: Recipe, run_dir: Path, track: str | None) -> None:
    if track is not None:
        values = {
            name: value if isinstance(value, (int, float, str)) else str(value)
            for name, value in asdict(recipe).items()
        }
        accelerator.init_trackers("eqzoo", config=values)


def _claim(run_dir: Path, recipe: Recipe) -> bool:
    """Writes recipe.json if there is none, and says so; raises ValueError if the one there is of another recipe."""
    for left in run_dir.glob(".*.tmp"):  # of a run that was killed while it wrote
        left.unlink()
    path = run_dir / "recipe.json"
    if not path.exists():
        write(path, (json.dumps(asdict(recipe), indent=2) + "\n").encode())
        return True
    there = Recipe.read(path)  # keys that it leaves out have their defaults
    if other := [item.name for item in fields(Recipe) if getattr(there, item.name) != getattr(recipe, item.name)]:
        values = ", ".join(f"{name}: {getattr(there, name)!r} there, {getattr(recipe, name)!r} here" for name in other)
        raise ValueError(f"{run_dir} holds a run of another recipe ({values}); name another folder or remove that one")
    return False


def _resume(run_dir: Path, run: Run) -> tuple[int, dict[str, Any], list[float]]:
    """Loads the state of a run that was stopped: the epochs done, the best one, and the validation losses."""
    path, record = run_dir / "state.pt", run_dir / "record.jsonl"
    if not path.exists():
        if run.accelerator.is_main_process:
            record.unlink(missing_ok=True)
        return 0, {"epoch": 0, "accuracy": -1.0}, []
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        run.load_state(state)
        # The record may be one epoch ahead of the state, if the run was killed between the two.
        lines = record.read_text().splitlines()[: state["epoch"]]
        losses = [json.loads(line).get("valid_loss") or 0.0 for line in lines]
        if len(lines) < state["epoch"] or not (run_dir / "best.safetensors").is_file():
            raise ValueError(f"{len(lines)} of {state['epoch']} lines of record.jsonl, or best.safetensors is missing")
    except (RuntimeError, ValueError, KeyError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{run_dir} cannot be gone on with ({error}); remove it, or {path} to start anew") from error
    if run.accelerator.is_main_process:
        write(record, "".join(f"{line}\n" for line in lines).encode())
    return state["epoch"], state["best"], losses


def _save_state(run_dir: Path, run: Run, epoch: int, best: dict[str, Any]) -> None:
    # Through memory, because torch's own writing to a full disk raises no OSError.
    buffer = io.BytesIO()
    torch.save(run.state() | {"epoch": epoch, "best": best}, buffer)
    write(run_dir / "state.pt", buffer.getbuffer())


def _record(run_dir: Path, row: dict[str, Any]) -> None:
    path = run_dir / "record.jsonl"
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise unwritable(path, error) from error
