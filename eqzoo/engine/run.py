"""The folder of a training run: recipe, record of the epochs, best weights, state to resume from."""

import io
import json
import pickle
import statistics
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .._common import atomic, json_text, write_json
from ..data.hashes import TRAINED_NAME, settings_differences
from ..hub import WEIGHTS_NAME as MODEL_NAME
from ..hub import sha256_of
from ..models.load import weights_file
from .epochs import best_row, is_finished, patience_is_over
from .other_recipe import check_same
from .recipe import Recipe

__all__ = [
    "RECIPE_NAME",
    "RECORD_NAME",
    "REPORT_NAME",
    "SETTINGS_NAME",
    "FinishedRun",
    "RunDirectory",
    "write_json",
]

RECIPE_NAME, RECORD_NAME, WEIGHTS_NAME, STATE_NAME = "recipe.json", "record.jsonl", "best.safetensors", "state.pt"
SETTINGS_NAME, LOCK_NAME = "finetune.json", ".lock"
REPORT_NAME = "report.json"


class _WeightsError(ValueError):
    """best.safetensors is missing, damaged or changed."""


class RunDirectory:
    """The files of a run: recipe.json, record.jsonl (a line an epoch), best.safetensors and state.pt.

    Every file is written atomically, but for record.jsonl, which grows by a line: an interrupted run can be resumed.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe, self.record = path / RECIPE_NAME, path / RECORD_NAME
        self.weights, self.state = path / WEIGHTS_NAME, path / STATE_NAME
        self._longer: Recipe | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other commands from training in the folder, until the block or the process ends.

        Blocks of one thread may be nested. The file .lock stays where there is a run: it is the system that locks it,
        and two commands could both hold a lock if one of them had removed the file of the other.

        Raises:
            ValueError: If another command trains there.
            OSError: If the folder cannot be written.
        """
        path = self.path / LOCK_NAME
        lock = FileLock(path, is_singleton=True)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot make the folder {self.path}: {error.strerror or error}; name another one") from error
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise ValueError(
                f"another command trains in {self.path}; wait until it has ended, or name another folder; "
                f"if no command does, remove {path}"
            ) from error
        except OSError as error:
            raise _write_error(path, error) from error
        try:
            yield
        finally:
            if lock.lock_counter == 1 and not self.recipe.exists():  # there is no run, so the folder is left as it was
                with suppress(OSError):
                    path.unlink()
            lock.release()

    def start(self, recipe: Recipe) -> None:
        """Writes recipe.json if there is none; else it has to be of this recipe or of one that this one continues.

        A recipe that continues another one is written after the state of its first epoch: until then the folder is
        that of the run that has ended.

        Raises:
            ValueError: If recipe.json is of another recipe or is missing beside files of a run, or its run ended early,
                so that nothing can follow it.
        """
        for name in (RECIPE_NAME, RECORD_NAME, WEIGHTS_NAME, STATE_NAME, SETTINGS_NAME, TRAINED_NAME):
            for temporary in self.path.glob(f".{name}.*.tmp"):  # of a run that was killed while it wrote
                temporary.unlink()
        self.check(recipe)
        if not self.recipe.exists():
            self._write(self.recipe, json_text(asdict(recipe)).encode())
            return
        if recipe.continues(Recipe.read(self.recipe)):
            self._longer = recipe

    def check(self, recipe: Recipe) -> None:
        """Raises ValueError if the folder holds a run that this recipe cannot continue, or one without its recipe."""
        if not self.recipe.exists():
            if left := [path.name for path in (self.state, self.record, self.weights) if path.exists()]:
                raise ValueError(
                    f"{self.path} holds {', '.join(left)} of a run whose {RECIPE_NAME} is missing: restore that file, "
                    "or name another folder"
                )
            return
        there = Recipe.read(self.recipe)  # missing keys have their defaults
        if not recipe.continues(there):
            check_same(recipe, there, self.path)
            return
        rows, why = self.rows(), None
        last = rows[-1]["epoch"] if rows else 0
        if rows and patience_is_over(there, best_row(rows)["epoch"], last):
            why = f"was ended by patience={there.patience}, after epoch {last}, and so would be a longer one"
        elif self.has_ended() and not self.state.exists():
            why = f"cannot go on after epoch {last} without {self.state}, which is missing"
        if why:
            raise ValueError(
                f"the run in {self.path} {why}: start a new run in another folder, from its weights by "
                f"start=run:{self.path}, or by eqzoo finetune {self.path} if it was a fine-tuning"
            )

    def release(self) -> None:
        """Removes recipe.json if no epoch was finished, so that the folder is free for another recipe."""
        if not self.state.exists() and not self.record.exists():
            self.recipe.unlink(missing_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of record.jsonl, one for each epoch; none if there is no file.

        A last line that is no JSON is left out: the process was killed while it wrote it.
        """
        lines, rows = self._lines(), []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if number < len(lines):
                    raise ValueError(f"line {number} of {self.record} is not JSON ({error})") from error
        return rows

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Adds an epoch to record.jsonl."""
        try:
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise _write_error(self.record, error) from error

    def save_weights(self, data: bytes) -> None:
        """Writes best.safetensors, whose content `weights_file` gives."""
        self._write(self.weights, data)

    def restore_weights(self, state_dict: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> None:
        """Writes best.safetensors unless it is the file of the best epoch already."""
        with suppress(ValueError):
            self.load_weights(rows)
            if _digest(rows):
                return
        self.save_weights(weights_file(state_dict))

    def load_weights(self, rows: list[dict[str, Any]] | None = None) -> dict[str, Tensor]:
        """The weights of best.safetensors.

        Args:
            rows: The rows of the run's epochs; None for those of record.jsonl.

        Raises:
            ValueError: If the file is missing or damaged, or is not the one that was saved after the best epoch.
        """
        if not self.weights.is_file():
            raise _WeightsError(f"{self.weights} is missing")
        try:
            weights = load_file(self.weights)
        except (OSError, SafetensorError) as error:
            raise _WeightsError(f"{self.weights} is damaged: {error}") from error
        if (digest := _digest(self.rows() if rows is None else rows)) and sha256_of(self.weights) != digest:
            raise _WeightsError(f"{self.weights} has been changed: its SHA-256 is not the one in {RECORD_NAME}")
        return weights

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Writes state.pt: the states of model, optimizer and average, the epochs done and the row of the last one."""
        # Through memory, because torch's own writing to a full disk raises no OSError.
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        self._write(self.state, buffer.getbuffer())
        if self._longer:
            self._write(self.recipe, json_text(asdict(self._longer)).encode())
            self._longer = None

    def load_state(self, main_process: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The state of an interrupted run and the rows of its epochs; None if no epoch was finished.

        Without state.pt an interrupted run begins anew, and a run that has ended stays: its state is ``epoch`` alone.

        Args:
            main_process: Whether this process writes files: record.jsonl gets a line for each epoch of the state.

        Raises:
            ValueError: If the files of the run are damaged or missing.
        """
        if not self.state.exists() and not self.has_ended():
            if main_process:
                self.record.unlink(missing_ok=True)
            return None
        try:
            rows = self.rows()
            state: dict[str, Any] = {"epoch": len(rows)}
            if self.state.exists():
                state = _read_state(self.state)
            rows = rows[: state["epoch"]]
            if len(rows) == state["epoch"] - 1 and "row" in state:  # killed before the record
                rows.append(state["row"])
            if len(rows) < state["epoch"]:
                raise ValueError(f"{RECORD_NAME} has {len(rows)} of {state['epoch']} lines")
            for number, row in enumerate(rows, 1):
                if row["epoch"] != number:  # as of two commands that wrote at once
                    raise ValueError(f"line {number} of {RECORD_NAME} is of epoch {row['epoch']}")
            if best_row(rows)["epoch"] < state["epoch"] or not self.state.exists():  # else the state has these weights
                self.load_weights(rows)
        except (*_STATE_ERRORS, KeyError) as error:
            raise self.resume_error(error) from error
        if main_process:
            self._write(self.record, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        return state, rows

    def has_ended(self) -> bool:
        """Whether the folder holds the weights of a run that has ended; a damaged record may be that of such a run."""
        if not (self.recipe.is_file() and self.record.is_file() and self.weights.is_file()):
            return False
        try:
            return is_finished(Recipe.read(self.recipe), self.rows())
        except (ValueError, KeyError, TypeError):
            return True

    def resume_error(self, error: Exception) -> ValueError:
        """The error for a run that cannot be resumed."""
        ways = f"remove it, or {self.state} to start from the first epoch"
        copy = self.path / MODEL_NAME
        if isinstance(error, _WeightsError):
            ways = f"remove it and train again, or restore {WEIGHTS_NAME}"
            if copy.is_file() and sha256_of(copy) == _digest(self.rows()):
                ways = f"copy {copy} to {self.weights}, whose weights it has"
        elif self.has_ended():
            ways = f"train in another folder (--output), so that {self.weights} stays as it is"
        return ValueError(f"{self.path} cannot be resumed ({error}); {ways}")

    def start_fine_tuning(self, settings: Mapping[str, Any]) -> None:
        """Writes finetune.json, or raises ValueError if the folder holds another run or other files."""
        path = self.path / SETTINGS_NAME
        if self.is_unused():
            self.recipe.unlink(missing_ok=True)
        elif path.is_file():
            if said := "; ".join(settings_differences(self.settings(), settings)):
                raise ValueError(
                    f"{self.path} holds a run with other images, weights or settings ({said}); name another folder"
                )
            return
        else:
            raise self._occupied()
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)

    def settings(self) -> dict[str, Any]:
        """The content of finetune.json; empty if the folder holds no fine-tuning that has finished an epoch.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self.path / SETTINGS_NAME
        if self.is_unused() or not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}); remove {self.path} or name another folder") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path} is no JSON object; remove {self.path} or name another folder")
        return found

    def write_trained(self, codes: np.ndarray) -> None:
        """Writes trained_on.npy: the `image_codes` of all images that the weights were trained on, each once."""
        buffer = io.BytesIO()
        np.save(buffer, np.unique(codes), allow_pickle=False)
        self._write(self.path / TRAINED_NAME, buffer.getvalue())

    def check_is_free(self) -> None:
        """Raises ValueError if the folder holds other files, and no run."""
        if not self.recipe.exists() and not self.is_unused():
            raise self._occupied()

    def _occupied(self) -> ValueError:
        return ValueError(f"{self.path} holds other files ({', '.join(self._files()[:5])}); name a new folder")

    def is_unused(self) -> bool:
        """Whether the folder holds nothing but the files of a fine-tuning that ended before its first epoch."""
        return set(self._files()) in (set(), {SETTINGS_NAME}, {SETTINGS_NAME, RECIPE_NAME})

    def _files(self) -> list[str]:
        return sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".")) if self.path.is_dir() else []

    def _lines(self) -> list[str]:
        return self.record.read_text(encoding="utf-8").splitlines() if self.record.is_file() else []

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            atomic(path, lambda temporary: temporary.write_bytes(data))
        except OSError as error:
            raise _write_error(path, error) from error


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Args:
        folder: Its folder.
        recipe: Its recipe.
        rows: Its record, a row for each epoch.
    """

    folder: Path
    recipe: Recipe
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "FinishedRun":
        """Reads a run's folder.

        Raises:
            ValueError: If it is not the folder of a run, the run is not finished, or its weights are missing.
        """
        run = RunDirectory(folder)
        if not run.recipe.is_file():
            raise ValueError(f"{folder} is not the folder of a run: it has no {RECIPE_NAME}")
        recipe, rows = Recipe.read(run.recipe), run.rows()
        if not is_finished(recipe, rows):
            raise ValueError(f"{folder} has {len(rows)} of {recipe.epochs} epochs; train.py resumes it")
        if not run.weights.is_file():
            raise ValueError(f"{folder} has no {WEIGHTS_NAME}, which holds its weights; restore it or train again")
        if (digest := _digest(rows)) and sha256_of(run.weights) != digest:
            raise ValueError(
                f"{run.weights} has been changed: its SHA-256 is not that in {RECORD_NAME}; restore it or train again"
            )
        return cls(folder, recipe, rows)

    @property
    def weights(self) -> Path:
        """The file of the weights of its best epoch."""
        return RunDirectory(self.folder).weights

    @property
    def best(self) -> dict[str, Any]:
        """The row of the epoch whose weights were kept."""
        return best_row(self.rows)

    def image_digests(self) -> dict[str, str]:
        """The digests of its training and validation images in state.pt; empty if that file is gone or has none.

        Raises:
            ValueError: If state.pt is damaged.
        """
        path = RunDirectory(self.folder).state
        if not path.is_file():
            return {}
        try:
            found: dict[str, str] = _read_state(path).get("data_sha256", {})
        except (*_STATE_ERRORS, AttributeError) as error:
            raise ValueError(f"{path} is damaged; restore it or remove it") from error
        return found

    @property
    def launcher(self) -> str:
        """The program that started the training, by the number of processes in most epochs.

        It matters on CPUs, where a batch norm sees the share of one process.
        """
        processes = statistics.mode([row["processes"] for row in self.rows if "processes" in row] or [1])
        return "python" if processes == 1 else f"torchrun --nproc_per_node={processes}"

    @property
    def seconds(self) -> int:
        """The training time, in seconds."""
        return round(sum(row["seconds"] for row in self.rows))


def _digest(rows: list[dict[str, Any]]) -> str | None:
    """The SHA-256 of best.safetensors by the rows; None if they have none, as those of earlier versions."""
    return best_row(rows).get("weights_sha256") if rows else None


_STATE_ERRORS = (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error)


def _read_state(path: Path) -> dict[str, Any]:
    """The content of a state.pt; torch.load alone does not compare its checksums."""
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"{path} is damaged, in its part {damaged}")
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def _write_error(path: Path, error: OSError) -> OSError:
    return OSError(
        f"cannot write {path}: {error.strerror or error}; free space or make the folder writable, and the same command "
        "resumes from the last finished epoch"
    )
