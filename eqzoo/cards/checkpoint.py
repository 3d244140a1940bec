"""The folder of a checkpoint: its files, and the check that they belong together."""

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import DataSet, dataset
from ..data.hashes import SPLIT_NAMES
from ..engine.run import TRAINING_NAME
from ..hub import CONFIG_NAME, RESULTS_NAME, WEIGHTS_NAME, sha256_of, shipped_folder

CARD_NAME = "README.md"
FIGURES = ("rotation_curve.png", "training_curve.png", "confusion.png")


@dataclass(frozen=True)
class Checkpoint:
    """The texts and facts of a checkpoint's folder.

    Args:
        results: The content of results.json.
        config: That of config.json.
        training: That of training.json.
        size: The size of model.safetensors, in bytes.
        figures: The names of the figures in the folder.
        zoo: Whether it is a checkpoint of this package, which goes by its bare name.
    """

    results: Mapping[str, Any]
    config: Mapping[str, Any]
    training: Mapping[str, Any]
    size: int
    figures: tuple[str, ...] = ()
    zoo: bool = False

    @property
    def name(self) -> str:
        """Its name, ``<network>.<data set>``."""
        return str(self.results["checkpoint"])

    @property
    def is_trained(self) -> bool:
        """Whether its run trained it; else its weights are those of the start, converted to its group."""
        return not self.results.get("converted")

    @property
    def data(self) -> DataSet:
        """What is known of its data set."""
        return dataset(self.results["data"])

    @property
    def evaluated(self) -> str:
        """The images that were evaluated, in words, such as ``test digits``."""
        return f"{SPLIT_NAMES[self.results['evaluated_on']]} {self.data.noun}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder that training, fine-tuning or conversion wrote.

    Raises:
        FileNotFoundError: If a file is missing, as before the end of a run.
        ValueError: If a file is not JSON, its name is a path, or the results are of other weights.
    """
    if missing := [name for name in (WEIGHTS_NAME, CONFIG_NAME, RESULTS_NAME) if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}: the run is not finished or not evaluated")
    texts = [(folder / name).read_text(encoding="utf-8") for name in (RESULTS_NAME, CONFIG_NAME, TRAINING_NAME)]
    try:
        results, config, training = map(json.loads, texts)
        check_name(results["checkpoint"])
        same = sha256_of(folder / WEIGHTS_NAME) == results["weights_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds no results of a checkpoint ({error})") from error
    if not same:
        raise ValueError(f"{folder / RESULTS_NAME} is of other weights than {WEIGHTS_NAME}, by their SHA-256")
    figures = tuple(name for name in FIGURES if (folder / name).is_file())
    zoo = folder.resolve().parent == shipped_folder().resolve()
    return Checkpoint(results, config, training, (folder / WEIGHTS_NAME).stat().st_size, figures, zoo)


def check_name(name: str) -> None:
    """Raises ValueError unless a checkpoint's name, which is that of its folder and of its Hub repo, is no path."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"names of checkpoints have letters, digits, underscores, dots and dashes, got {name!r}")


def counts_of(r: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of training, validation and test images, as they are printed."""
    counts = {split: r["images"].get(split) for split in ("train", "valid", "test")}
    return {split: f"{count:,}" if count else "no" for split, count in counts.items()}


def error_text(r: Mapping[str, Any], digits: int) -> str:
    """The error, where there are several seeds their mean and spread."""
    spread = f" ± {statistics.stdev(r['accuracies']):.{digits}f}" if has_spread(r) else ""
    error = 100 - statistics.fmean(r.get("accuracies") or [r["accuracy"]])
    return f"{error:.{digits}f}{spread} %{marks(r)}"


def has_spread(r: Mapping[str, Any]) -> bool:
    """Whether there are several seeds."""
    return len(r.get("accuracies", ())) > 1


def marks(r: Mapping[str, Any]) -> str:
    """Marks behind an error: converted, not trained; distilled, from the predictions of other networks too."""
    words = [word for word in ("converted", "distilled") if r.get(word)]
    return f" ({', '.join(words)})" if words else ""
