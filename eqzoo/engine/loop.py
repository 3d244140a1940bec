"""The training loop: epochs, validation, checkpoints, resuming."""

import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..analysis.cost import machine, versions
from ..data import AnySplit, Split, batches, draw
from ..data.hashes import split_digests
from ..data.splits import resized
from ..evaluation.predictor import check_device
from ..evaluation.progress import progress_bar
from ..models import EquivariantNet, OrbitNet
from ..models.builder import per_channel
from ..models.config import checkpoint_config
from ..models.load import weights_file
from ._accelerate import accelerate
from .allocator import keep_freed_memory
from .device import emulates_bfloat16, flushed_subnormals
from .recipe import Recipe, best_row, patience_is_over, selection_key
from .run import TRACKED_NAME, RunDirectory
from .state import TrainingState

CHECK_STEPS = 50  # between checks that the loss is finite; on a GPU each waits for the device
_EMULATED = (
    "this processor does not multiply bfloat16; where torch emulates it, training may take several times as long as in "
    "float32, for which there is --set precision=float32 with train.py, --precision float32 with eqzoo finetune"
)


def train(
    recipe: Recipe,
    build: Callable[[], nn.Module],
    splits: Mapping[str, AnySplit],
    run_dir: Path,
    device: str | None = None,
    workers: int = 4,
    track: str | None = None,
    facts: Mapping[str, Any] | None = None,
    read: Callable[[int], AnySplit] | None = None,
) -> nn.Module:
    """Trains a network by a recipe, and loads the weights of its best epoch on the validation split.

    The run directory receives ``training.json`` (the recipe and digests of the images), ``log.jsonl`` (a line for each
    epoch: training loss, validation loss and accuracy in percent, learning rate, processes, seconds, and of the best so
    far the SHA-256 of its weights), the checkpoint of the best epoch so far, ``model.safetensors`` and ``config.json``,
    and until the run has ended ``state.pt``, from which an interrupted one is resumed. All random numbers depend on the
    seed and the epoch alone, so a resumed run ends with the weights of an uninterrupted one. Of equally accurate epochs
    the one with the lowest validation loss is kept; without validation images, the last epoch. The test split is not
    read.

    Under ``torchrun``, processes share every batch and its gradient, with the losses of one process up to round-off.
    Batch norms share their statistics on GPUs, where `torch.nn.SyncBatchNorm` works; on CPUs each process normalizes
    its own share of a batch. The run directory has to be the same for all of them.

    On a CPU with glibc, the process keeps freed memory from then on (`eqzoo.engine.allocator.keep_freed_memory`);
    ``EQZOO_MALLOC=0`` in the environment prevents it. While it trains, this thread takes numbers below the smallest
    normal one for 0.

    Args:
        recipe: The recipe.
        build: Builds the network; called after the seed is set.
        splits: ``train``, and ``valid`` unless nothing was held out.
        run_dir: The run directory, new or of the same recipe.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        workers: The processes that read images that are not in memory.
        track: One of accelerate's trackers, such as ``"trackio"`` or ``"tensorboard"``, to log to as well.
        facts: What training.json holds besides the recipe and the digests of the images.
        read: Reads the training images with another side in pixels, for teachers of that size; None to resize those of
            ``splits``.

    Returns:
        The network in evaluation mode, with the best weights.

    Raises:
        ValueError: If another command trains in the folder, it holds a run of another recipe or a damaged state, the
            images do not suit the network or do not fill a batch, the batch cannot be shared among the processes, or
            the tracker is not installed.
        OSError: If the folder cannot be written; the run can be resumed from the last finished epoch.
        FloatingPointError: If the training or validation loss is not finite or, without validation images, a weight
            after the last step of an epoch; the best weights so far stay in the folder.
    """
    accelerator = accelerator_of(device, track, run_dir)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    directory, is_main = RunDirectory(run_dir), accelerator.is_main_process
    with (
        directory.locked() if is_main else nullcontext(),
        flushed_subnormals(),
        _deterministic() if recipe.deterministic and accelerator.device.type == "cuda" else nullcontext(),
    ):
        digests = split_digests(splits) if is_main else {}
        if is_main:
            directory.check(recipe, digests)
        resumed = directory.state.exists() or directory.has_ended()
        emulated = recipe.precision == "bfloat16" and emulates_bfloat16(accelerator.device)
        if emulated and not resumed and is_main:
            print(f"eqzoo: {_EMULATED}", file=sys.stderr)
        state = TrainingState(recipe, build, splits, accelerator, workers, resumed)
        if is_main:
            directory.start(recipe, digests, run_config(state.model, recipe, splits["train"]), facts or {})
        try:
            accelerator.wait_for_everyone()
            if not directory.has_ended():
                _keep_predictions(directory, state, read or (lambda side: resized(splits["train"], (side, side))))
            _train_epochs(directory, state, track)
            accelerator.wait_for_everyone()
        except (Exception, KeyboardInterrupt):
            if is_main:
                directory.release()
            raise
        if is_main:
            directory.finish()
        return state.finished_model(directory.load_weights())


def run_config(model: nn.Module, recipe: Recipe, split: AnySplit) -> dict[str, Any]:
    """The config.json of a network that is trained; what is evaluated later writes a complete one."""
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    mean, std = (list(per_channel(cfg[key], split.shape[0])) for key in ("mean", "std"))
    known = {"architecture": recipe.model.partition(".")[0], "tag": recipe.dataset, "license": None}
    return checkpoint_config(
        model,
        {**cfg, **known, "num_classes": model.num_classes, "input_size": split.shape, "mean": mean, "std": std},
        model_args=recipe.model_args,
        label_names=cfg.get("label_names") or split.classes,
        group=model.group.name if isinstance(model, EquivariantNet | OrbitNet) else None,
    )


def _keep_predictions(directory: RunDirectory, state: TrainingState, read: Callable[[int], AnySplit]) -> None:
    """Sets the soft labels of teachers that predict each training image once, where there are any."""
    if directory.taught.exists():
        state.soft_labels = torch.from_numpy(np.load(directory.taught, allow_pickle=False))
    elif (found := state.teachers.of_training_images(read, state.workers)) is not None:
        state.soft_labels = found
        if state.accelerator.is_main_process:
            directory.save_array(directory.taught, found.numpy())


def _train_epochs(directory: RunDirectory, state: TrainingState, track: str | None) -> None:
    """Trains from the first epoch that is not finished to the last."""
    recipe, accelerator = state.recipe, state.accelerator
    start, best = _resume(directory, state)
    if track is not None:
        values = {k: v if isinstance(v, int | float | str) else str(v) for k, v in asdict(recipe).items()}
        accelerator.init_trackers(TRACKED_NAME, config=values)
    size = state.steps * recipe.batch_size
    with progress_bar(recipe.model, recipe.epochs * size, start * size, accelerator.is_main_process) as bar:
        for epoch in range(start, recipe.epochs):
            if patience_is_over(recipe, best.get("epoch", 0), epoch):
                break
            began = time.perf_counter()
            try:
                loss = _train_epoch(state, epoch, best, bar)
                best = _finish_epoch(directory, state, epoch, loss, best, began)
            except FloatingPointError as error:
                found = f"the best weights, of epoch {best['epoch']}, are in {directory.weights}" if best else ""
                advice = f"{found or 'no epoch was finished'}; a smaller lr than {recipe.lr} or a warm-up may help"
                raise FloatingPointError(f"{error}; {advice}") from None
            bar.set_postfix(_postfix(epoch, loss, best))
    for tracker in accelerator.trackers:
        tracker.finish()


def _train_epoch(state: TrainingState, epoch: int, best: dict[str, Any], bar: "tqdm[Any]") -> float | None:
    """Trains on all images once; returns the mean loss, or raises FloatingPointError if it is not finite.

    Without a learning rate nothing is trained, and the loss is None.
    """
    recipe, accelerator, split = state.recipe, state.accelerator, state.splits["train"]
    if not recipe.lr:
        bar.update(state.steps * recipe.batch_size)
        return None
    state.begin_epoch(epoch)
    seed = recipe.seed * 1_000_003 + epoch
    parts, numbers = _process_shares(recipe, accelerator, len(split), seed)
    if isinstance(split, Split):
        parts = [part.to(state.device) for part in parts]
    if accelerator.process_index:  # processes share the order, but not dropout
        torch.manual_seed(seed * 1_009 + accelerator.process_index)
    total = torch.zeros((), dtype=torch.float64, device=state.device)
    mean = 0.0
    stream = batches(split, parts, state.workers, pin=state.device.type == "cuda")
    for step, (part, images, augmentation) in enumerate(zip(parts, stream, numbers, strict=True), 1):
        soft = None if state.soft_labels is None else state.soft_labels[part.cpu()]
        total += state.backward(images, split.labels[part], augmentation, soft)
        state.step(epoch, step - 1)
        bar.update(recipe.batch_size)
        if step % CHECK_STEPS == 0 or step == state.steps:
            mean = state.reduced(total) / step
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss of epoch {epoch + 1} is {mean}")
            bar.set_postfix(_postfix(epoch, mean, best), refresh=False)
    return mean


def _finish_epoch(
    directory: RunDirectory, state: TrainingState, epoch: int, loss: float | None, best: dict[str, Any], began: float
) -> dict[str, Any]:
    """Validates, saves state, weights and log; returns the row of the best epoch so far.

    An epoch is in the log once its weights are saved. A run that was killed before that goes on from the state, which
    has the row and, of the last epoch, the weights.

    Raises:
        FloatingPointError: If the last steps made the network useless; nothing of the epoch is saved.
    """
    accelerator = state.accelerator
    scores = state.validate()
    _check_finite(state, epoch, scores["valid_loss"])
    row: dict[str, Any] = {"epoch": epoch + 1, "loss": loss, **scores}
    if epoch < state.recipe.half_size_epochs:
        row["half_size"] = True
    improved = not best or selection_key(row) > selection_key(best)
    best = dict(row) if improved else best
    row |= {"lr": state.recipe.rate(epoch + 1)}
    if accelerator.is_main_process:
        seconds = round(time.perf_counter() - began, 2)
        made = {"machine": machine(state.device)} | versions()
        line = row | {"processes": accelerator.num_processes, "seconds": seconds, **made}
        if improved:
            weights = weights_file(state.eval_model.state_dict())
            line["weights_sha256"] = hashlib.sha256(weights).hexdigest()
        directory.save_state(state.state_dict() | {"epoch": epoch + 1, "row": line})
        if improved:
            directory.save_weights(weights)
        directory.append_row(line)
    accelerator.log({k: v for k, v in row.items() if v is not None}, step=epoch + 1)
    return best


def _check_finite(state: TrainingState, epoch: int, valid_loss: float | None) -> None:
    """Raises FloatingPointError if the validation loss or, without one, a weight or running statistic is not finite.

    The training loss does not show it where the last step of an epoch went wrong.
    """
    if valid_loss is not None:
        if not math.isfinite(valid_loss):
            raise FloatingPointError(f"the validation loss of epoch {epoch + 1} is {valid_loss}")
        return
    for name, value in state.eval_model.state_dict().items():
        if not value.isfinite().all():
            raise FloatingPointError(f"epoch {epoch + 1} ends with weights that are not finite, of {name}")


def _process_shares(
    recipe: Recipe, accelerator: accelerate.Accelerator, count: int, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """This process's share of each batch of an epoch: the indices of the images, and their augmentation numbers.

    The images are in random order; the last, smaller batch is left out. Dropout draws from the same seed.
    """
    processes, this, steps = accelerator.num_processes, accelerator.process_index, count // recipe.batch_size
    used = steps * recipe.batch_size
    indices = torch.randperm(count, generator=torch.manual_seed(seed))[:used]
    numbers = torch.empty(used, 0)
    if recipe.augment != "none":
        numbers = draw(used, torch.Generator().manual_seed(seed + 2**40))
    shape = (steps, processes, recipe.batch_size // processes)
    return list(indices.view(shape)[:, this]), list(numbers.view(*shape, -1)[:, this])


def accelerator_of(device: str | None, track: str | None = None, run_dir: Path | None = None) -> accelerate.Accelerator:
    """The device and the processes of a run."""
    check_device(device)
    if track is not None:
        known = {str(tracker) for tracker in accelerate.tracking.get_available_trackers()}
        if track not in known:
            raise ValueError(f"no tracker {track!r} is installed; there are: {', '.join(sorted(known)) or 'none'}")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    # Precision is autocast's, in the loop: accelerate fixes its own for the whole process at the first run.
    accelerator = accelerate.Accelerator(
        cpu=on_cpu, mixed_precision="no", log_with=track, project_dir=run_dir if track else None
    )
    if (accelerator.device.type == "cpu") != on_cpu:  # accelerate keeps the device of the first run
        raise ValueError(f"this process has trained on {accelerator.device.type} before and keeps to it; start another")
    return accelerator


@contextmanager
def _deterministic() -> Iterator[None]:
    """Uses deterministic CUDA kernels; where there is none, torch warns and uses another."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS sums in one order only with a fixed workspace
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _postfix(epoch: int, loss: float | None, best: dict[str, Any]) -> dict[str, str]:
    shown = {"epoch": str(epoch + 1)} | ({} if loss is None else {"loss": f"{loss:.4f}"})
    score = best.get("valid_recall", best.get("valid_accuracy"))  # by which an epoch is kept
    return shown if score is None else shown | {"best": f"{score:.2f}"}


def _resume(directory: RunDirectory, state: TrainingState) -> tuple[int, dict[str, Any]]:
    """Loads an interrupted run: the number of finished epochs, and the row of the best one if any."""
    found = directory.load_state(state.accelerator.is_main_process)
    if found is None:
        return 0, {}
    saved, rows = found
    best = best_row(rows)
    if directory.state.exists():  # else it has ended
        try:
            state.load_state_dict(saved)
        except (RuntimeError, ValueError, KeyError) as error:
            raise directory.resume_error(error) from error
        if best["epoch"] == saved["epoch"] and state.accelerator.is_main_process:
            directory.restore_weights(state.eval_model.state_dict(), rows)  # it may have been killed before it saved
    return saved["epoch"], best
