"""The fastest number format and memory format for a training run, measured on a few steps."""

import hashlib
import io
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import AnySplit, Split, batches, draw
from ..models.load import weights_file
from .allocator import keep_freed_memory
from .device import flushed_subnormals, has_bfloat16
from .loop import accelerator_of
from .recipe import Recipe
from .state import TrainingState

AUTOMATIC = ("precision", "channels_last")  # the settings that are measured on the machine

WORTH_IT = 60.0  # seconds of training in plain float32; shorter runs stay with it, and give the same weights everywhere
_GAIN = 1.05  # that another format must bring
_LOSS_TOLERANCE = 0.02  # of bfloat16, relative to 1 + the loss in float32
_TRIAL = 4  # a trial has this fraction of a batch
_VALIDATION = 3  # images that are evaluated in the time in which one is trained
_MOST_EPOCHS = 1_000  # of a run by time
_READ = 32  # images from files whose reading is timed


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Args:
        precision: The ``precision`` of a recipe.
        channels_last: The ``channels_last`` of a recipe.
        images_per_second: The training images in a second.
        saving_seconds: The seconds in which the files of an epoch are written.
    """

    precision: str
    channels_last: bool
    images_per_second: float
    saving_seconds: float = 0.0

    def epoch_seconds(self, splits: Mapping[str, AnySplit]) -> float:
        """The expected seconds of an epoch with its validation, and with the writing of its files where it is known."""
        valid = len(splits["valid"]) / _VALIDATION if "valid" in splits else 0
        return (len(splits["train"]) + valid) / self.images_per_second + self.saving_seconds

    def epochs_within(self, seconds: float, splits: Mapping[str, AnySplit]) -> int:
        """The number of epochs that fit into a time with the writing of their files, 1 to 1,000."""
        return min(_MOST_EPOCHS, max(1, int(seconds / self.epoch_seconds(splits))))


@flushed_subnormals()
def measure(
    recipe: Recipe,
    build: Callable[[], nn.Module],
    splits: Mapping[str, AnySplit],
    given: Mapping[str, Any],
    device: str | None = None,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    workers: int = 0,
    folder: Path | None = None,
) -> Speed:
    """Times training steps in float32, with channels last, and in bfloat16 where the device multiplies it.

    A format is chosen if it is at least 5 % faster; bfloat16 also only if the loss of the same images stays within 2 %.
    The network that is timed is discarded.

    Args:
        recipe: The recipe.
        build: Builds the network.
        splits: ``train``, and ``valid`` if there are validation images.
        given: ``precision`` and ``channels_last``, where they are not to be chosen.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        seconds: The time that the run will take, if that is known; None for what its epochs take.
        clock: The clock, in seconds; `time.process_time` for one thread on a core that it shares.
        workers: The processes that read images that are not in memory, while others are trained on.
        folder: The folder of the run, where the writing of an epoch's files is timed if ``seconds`` are given; None for
            no such time.
    """
    trial = _Trial(recipe, build, splits, device, clock)
    chosen = replace(recipe, **given)
    each = trial.seconds(chosen, 2)
    worth_it = (seconds or recipe.epochs * len(splits["train"]) * each) > WORTH_IT
    if worth_it:
        for key, value in (("channels_last", True), ("precision", "bfloat16")):
            candidate = replace(chosen, **{key: value})  # type: ignore[arg-type]
            if key in given or (key == "precision" and not trial.takes_bfloat16(chosen)):
                continue
            if (timed := trial.seconds(candidate, 2)) * _GAIN < each:
                chosen, each = candidate, timed
    if worth_it or seconds is not None:  # the number of epochs follows from it
        trial.take(recipe.batch_size)
        each = trial.seconds(chosen, 1 if worth_it else 3)
    reading = _reading_seconds(splits["train"])
    each = max(each, reading / workers) if workers else each + reading
    saving = 0.0 if seconds is None or folder is None else float(f"{trial.saving_seconds(folder):.2g}")
    return Speed(chosen.precision, chosen.channels_last, float(f"{1 / each:.3g}"), saving)


def _reading_seconds(split: AnySplit) -> float:
    """The seconds in which one process reads an image that is not in memory; 0 for images in memory."""
    if isinstance(split, Split):
        return 0.0
    places = split.places[torch.linspace(0, len(split) - 1, min(_READ, len(split))).long()].tolist()
    began = time.perf_counter()
    for place in places:
        split.read(place)
    return (time.perf_counter() - began) / len(places)


class _Trial:
    """Steps of training on the first images, for their time."""

    def __init__(
        self,
        recipe: Recipe,
        build: Callable[[], nn.Module],
        splits: Mapping[str, AnySplit],
        device: str | None,
        clock: Callable[[], float],
    ) -> None:
        accelerator = accelerator_of(device)
        if accelerator.device.type == "cpu":
            keep_freed_memory()
        self.state = TrainingState(recipe, build, splits, accelerator, 0)
        self.clock = clock
        self.splits = splits
        # Batch norms of a network that reduces the images to a pixel need two.
        self.take(min(recipe.batch_size, max(2, recipe.batch_size // _TRIAL)))

    def take(self, count: int) -> None:
        """Goes on with so many images in a step."""
        split, index = self.splits["train"], torch.arange(count)
        (images,) = batches(split, [index])
        self.batch: tuple[Tensor, Tensor, Tensor] = images, split.labels[index], draw(count, torch.Generator())

    def seconds(self, recipe: Recipe, times: int) -> float:
        """The seconds of training for an image: the fastest step after one to warm up."""
        found = []
        for _ in range(1 + times):
            began = self.clock()
            self._backward(recipe)
            self.state.step(0, 0)
            if self.state.device.type == "cuda":
                torch.cuda.synchronize()
            found.append(self.clock() - began)
        return min(found[1:]) / len(self.batch[1])

    def saving_seconds(self, folder: Path) -> float:
        """The seconds in which the state and the weights of an epoch are written, the faster of two times."""
        found = []
        for _ in range(2):
            began = self.clock()
            with tempfile.TemporaryFile(dir=folder) as file:
                torch.save(self.state.state_dict(), buffer := io.BytesIO())  # as `RunDirectory.save_state` does
                weights = weights_file(self.state.eval_model.state_dict())
                hashlib.sha256(weights)
                file.write(buffer.getbuffer())
                file.write(weights)
                file.flush()
            found.append(self.clock() - began)
        return min(found)

    def _backward(self, recipe: Recipe) -> float:
        self.state.recipe = recipe  # says the formats; the rest is the same
        self.state.begin_epoch(recipe.half_size_epochs)
        return float(self.state.backward(*self.batch))

    def takes_bfloat16(self, recipe: Recipe) -> bool:
        """Whether the device multiplies bfloat16, and the loss of the images is nearly that in float32."""
        if not has_bfloat16(self.state.device):
            return False
        losses = []
        for precision in ("float32", "bfloat16"):
            torch.manual_seed(0)  # of dropout
            losses.append(self._backward(replace(recipe, precision=precision)))
        self.state.optimizer.zero_grad()
        return abs(losses[1] - losses[0]) <= _LOSS_TOLERANCE * (1 + losses[0])
