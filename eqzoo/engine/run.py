"""The folder of a run: training.json, log.jsonl, its best weights as a checkpoint, and state.pt until it has ended."""

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file
from torch import Tensor

from .._common import atomic, write_json
from ..data.hashes import TRAINED_NAME, split_differences
from ..hub import CONFIG_NAME, STATE_NAME, WEIGHTS_NAME, sha256_of
from ..models.load import weights_file
from .recipe import Recipe, best_row, is_finished

TRAINING_NAME, LOG_NAME, LOCK_NAME = "training.json", "log.jsonl", ".lock"
TAUGHT_NAME = "teachers.npy"
TRACKED_NAME = "eqzoo"  # the run's name in a tracker, such as TensorBoard, which makes a folder of it


class RunDirectory:
    """The files of a run, which are those of a checkpoint from its first epoch on.

    ``training.json`` has the recipe and digests of the images, ``log.jsonl`` a line for each epoch,
    ``model.safetensors`` and ``config.json`` the weights of the best epoch so far and their network, and ``state.pt``
    what an interrupted run goes on from, with ``teachers.npy`` where teachers predict each image once. A fine-tuning
    also has ``trained_on.npy``, hashes of its training images. All are written atomically, but for log.jsonl, which
    grows by a line.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.training, self.log, self.state = path / TRAINING_NAME, path / LOG_NAME, path / STATE_NAME
        self.weights, self.config = path / WEIGHTS_NAME, path / CONFIG_NAME
        self.taught = path / TAUGHT_NAME  # what teachers predict for each training image, (n, classes)
        self.trained_on = path / TRAINED_NAME

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other commands from training in the folder, until the block or the process ends.

        Blocks of one thread may be nested. The file .lock stays where there is a run: it is the system that locks it,
        and two commands could both hold a lock if one of them had removed the file of the other.

        Raises:
            ValueError: If another command trains there.
        """
        path = self.path / LOCK_NAME
        lock = FileLock(path, is_singleton=True)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise ValueError(f"another command trains in {self.path}; name another folder") from error
        try:
            yield
        finally:
            if lock.lock_counter == 1 and not self.training.exists():  # there is no run: the folder is left as it was
                with suppress(OSError):
                    path.unlink()
            lock.release()

    @classmethod
    def finished(cls, path: Path) -> "RunDirectory":
        """The folder of a run that has ended.

        Raises:
            FileNotFoundError: If it is not the folder of a run, or its weights are missing.
            ValueError: If the run has not ended, or its weights have been changed.
        """
        run = cls(path)
        recipe, rows = run.recipe(), run.rows()
        if not is_finished(recipe, rows):
            raise ValueError(f"{path} has {len(rows)} of {recipe.epochs} epochs; train.py resumes it")
        run.load_weights(rows)
        return run

    def recipe(self) -> Recipe:
        """The recipe in training.json."""
        return Recipe(**_read_json(self.training)["recipe"])

    def data_sha256(self) -> dict[str, str]:
        """The digests in training.json of the training and validation images, see `split_digests`."""
        found = _read_json(self.training).get("data_sha256", {})
        return {split: found[split] for split in ("train", "valid") if split in found}

    def check(self, recipe: Recipe, data_sha256: Mapping[str, str] | None = None) -> None:
        """Raises ValueError if the folder holds another run, or other files.

        Args:
            recipe: The recipe of the run that is to be trained there.
            data_sha256: The digests of its images; None to compare the recipes alone.
        """
        self.check_is_free()
        if self.is_unused():
            return
        saved, values = asdict(self.recipe()), asdict(recipe)
        found = [f"{key} {saved[key]!r}, not {values[key]!r}" for key in values if saved[key] != values[key]]
        if data_sha256 is not None:
            found += split_differences(self.data_sha256() or data_sha256, data_sha256)
        if found:
            raise ValueError(
                f"{self.path} holds another run ({', '.join(found)}); name another folder. To begin from its "
                f"weights once it has ended: `eqzoo finetune {self.path} IMAGES`, or start=run:{self.path} of a recipe"
            )

    def start(
        self, recipe: Recipe, data_sha256: Mapping[str, str], config: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> None:
        """Writes training.json and config.json, unless they are there, as of a run that is resumed.

        Args:
            recipe: The recipe.
            data_sha256: The digests of the images.
            config: The content of config.json, by which `eqzoo.create_model` loads the folder.
            facts: What else training.json holds.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for temporary in self.path.glob(".*.tmp"):  # of a run that was killed while it wrote
            temporary.unlink()
        if self.is_unused():
            self.taught.unlink(missing_ok=True)
            write_json(self.config, config)
            write_json(self.training, {"recipe": asdict(recipe), "data_sha256": dict(data_sha256), **facts})

    def release(self) -> None:
        """Removes what `start` wrote if no epoch was finished, so that the folder is free for another recipe."""
        if not self.state.exists() and not self.log.exists():
            for path in (self.training, self.config, self.taught, self.trained_on):
                path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Removes state.pt and teachers.npy, which a run that has ended no longer needs."""
        self.state.unlink(missing_ok=True)
        self.taught.unlink(missing_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of log.jsonl, one for each epoch; none if there is no file.

        A last line that is no JSON is left out: the process was killed while it wrote it.
        """
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.is_file() else []
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if number < len(lines):
                    raise ValueError(f"line {number} of {self.log} is not JSON ({error})") from error
        return rows

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Adds an epoch to log.jsonl."""
        if self.log.is_file() and not self.log.read_bytes().endswith(b"\n"):  # killed while it wrote a line
            self._write_rows(self.rows())
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def save_weights(self, data: bytes) -> None:
        """Writes model.safetensors, whose content `weights_file` gives."""
        self._write(self.weights, data)

    def restore_weights(self, state_dict: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> None:
        """Writes model.safetensors unless it is the file of the best epoch already."""
        try:
            self.load_weights(rows)
        except (OSError, ValueError):
            self.save_weights(weights_file(state_dict))

    def load_weights(self, rows: list[dict[str, Any]] | None = None) -> dict[str, Tensor]:
        """The weights of model.safetensors.

        Args:
            rows: The rows of the run's epochs; None for those of log.jsonl.

        Raises:
            ValueError: If the file is not the one that was saved after the best epoch.
        """
        if sha256_of(self.weights) != best_row(self.rows() if rows is None else rows)["weights_sha256"]:
            raise ValueError(f"{self.weights} has been changed: its SHA-256 is not the one in {LOG_NAME}")
        return load_file(self.weights)

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Writes state.pt: the states of model, optimizer and average, the epochs done and the row of the last one."""
        # Through memory, because torch's own writing to a full disk raises no OSError.
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        self._write(self.state, buffer.getbuffer())

    def save_array(self, path: Path, array: np.ndarray) -> None:
        """Writes a .npy file."""
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        self._write(path, buffer.getbuffer())

    def load_state(self, main_process: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The state of an interrupted run and the rows of its epochs; None if no epoch was finished.

        Without state.pt an interrupted run begins anew, and a run that has ended stays: its state is ``epoch`` alone.

        Args:
            main_process: Whether this process writes files: log.jsonl gets a line for each epoch of the state.

        Raises:
            ValueError: If the files of the run are damaged or missing.
        """
        if not self.state.exists() and not self.has_ended():
            if main_process:
                self.log.unlink(missing_ok=True)
            return None
        try:
            rows = self.rows()
            state: dict[str, Any] = _read_state(self.state) if self.state.exists() else {"epoch": len(rows)}
            rows = rows[: state["epoch"]]
            if len(rows) == state["epoch"] - 1:  # killed before the line was written
                rows.append(state["row"])
            if [row["epoch"] for row in rows] != list(range(1, state["epoch"] + 1)):
                raise ValueError(f"{LOG_NAME} does not have a line for each of {state['epoch']} epochs")
            if best_row(rows)["epoch"] < state["epoch"] or not self.state.exists():  # else the state has these weights
                self.load_weights(rows)
        except Exception as error:  # damaged files raise errors of many kinds
            raise self.resume_error(error) from error
        if main_process:
            self._write_rows(rows)
        return state, rows

    def has_ended(self) -> bool:
        """Whether the folder holds the weights of a run that has ended; a damaged log may be that of such a run."""
        if not (self.training.is_file() and self.log.is_file() and self.weights.is_file()):
            return False
        try:
            return is_finished(self.recipe(), self.rows())
        except (ValueError, KeyError, TypeError):
            return True

    def resume_error(self, error: Exception) -> ValueError:
        """The error for a run that cannot be resumed."""
        return ValueError(f"{self.path} cannot be resumed ({error}); restore its files, or train in another folder")

    def saved(self) -> dict[str, Any]:
        """The content of training.json; empty without a finished epoch."""
        return {} if self.is_unused() or not self.training.is_file() else _read_json(self.training)

    def check_is_free(self) -> None:
        """Raises ValueError if the folder holds other files, and no run."""
        if not self.training.exists() and not self.is_unused():
            raise ValueError(f"{self.path} holds other files ({', '.join(self._files()[:5])}); name a new folder")

    def is_unused(self) -> bool:
        """Whether the folder holds nothing but the files of a run that ended before its first epoch."""
        return set(self._files()) <= {TRAINING_NAME, CONFIG_NAME, TAUGHT_NAME, TRAINED_NAME, TRACKED_NAME}

    def _files(self) -> list[str]:
        return sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".")) if self.path.is_dir() else []

    def _write_rows(self, rows: list[dict[str, Any]]) -> None:
        self._write(self.log, "".join(f"{json.dumps(row)}\n" for row in rows).encode())

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        atomic(path, lambda temporary: temporary.write_bytes(data))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no JSON object ({error}); restore it, or name another folder") from error


def _read_state(path: Path) -> dict[str, Any]:
    """The content of a state.pt; torch.load alone does not compare its checksums."""
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"{path} is damaged, in its part {damaged}")
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found
