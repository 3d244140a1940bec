"""Recipes and data sets by name and the rows of studies, for the scripts."""

import argparse
import json
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from recipes import RECIPES, Entry

from eqzoo._common import write_text as write_text_file
from eqzoo.analysis import machine
from eqzoo.data import CATALOG, AnySplit, Split, draw, load_splits
from eqzoo.data.arrays import without_npz
from eqzoo.data.folder import folder_colors
from eqzoo.engine import Recipe
from eqzoo.engine.processor import flushed_subnormals
from eqzoo.engine.state import TrainingState
from eqzoo.hub import find_weights, sha256_of
from eqzoo.models._builder import configured_name

__all__ = [
    "DOCS",
    "OF_A_DATASET",
    "add_data_arguments",
    "add_run",
    "filled",
    "find_run",
    "input_size",
    "is_first",
    "is_own",
    "is_recipe_of",
    "load_recipe",
    "made_elsewhere",
    "made_here",
    "read_splits",
    "read_table",
    "recipe_names",
    "recipe_text",
    "run_name",
    "shuffled",
    "splits_of",
    "spread",
    "statistics_of",
    "step_seconds",
    "weights_sha256",
    "write_page",
    "write_text",
]

DOCS = Path(__file__).resolve().parents[1] / "docs"
ELSEWHERE = " Made on {machine}: {runs} of the {count} runs{torch}."
# What a recipe says of its own data set, and no run on another: the sizes of its splits, and weights that may have been
# trained on images that another data set validates or tests on.
OF_A_DATASET: dict[str, Any] = {"valid_size": None, "samples_per_class": None, "start": None}
OF_A_DATASET |= {"teachers": (), "teacher_weight": Recipe.teacher_weight}


def load_recipe(name: str) -> Recipe:
    """The recipe of a name, ``<model>.<data set>[_<variant>]``."""
    return _entry(name).recipe


def recipe_text(name: str) -> str:
    """The text about a recipe: which settings are the paper's, which are ours."""
    return _entry(name).text


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return sorted(RECIPES)


def is_recipe_of(name: str, model: str, dataset: str) -> bool:
    """Whether a name is that of a recipe for a network and a data set."""
    return name in RECIPES and (RECIPES[name].recipe.model, RECIPES[name].recipe.dataset) == (model, dataset)


def run_name(name: str, recipe: Recipe) -> str:
    """The name of a run: the given one if it is that of a recipe for the network and the data set; else these two."""
    plain = f"{recipe.model}.{without_npz(recipe.dataset)}"
    return name if is_recipe_of(name, recipe.model, recipe.dataset) else plain


def _entry(name: str) -> Entry:
    if name not in RECIPES:
        model = name.partition(".")[0]
        near = [other for other in recipe_names() if other.startswith(f"{model}.")] or recipe_names()
        raise SystemExit(f"no recipe {name!r}; there are: {', '.join(near)}")
    return RECIPES[name]


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the data folder."""
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="the folder of data sets (default: data)")
    parser.add_argument("--download", action="store_true", help="download what is missing there")


def read_splits(dataset: str, args: argparse.Namespace, **kwargs: Any) -> dict[str, AnySplit]:
    """The splits of a data set; further arguments are those of `eqzoo.data.load_splits`."""
    try:
        return load_splits(dataset, args.data_dir, args.download, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(str(error)) from error


def splits_of(recipe: Recipe, args: argparse.Namespace) -> dict[str, AnySplit]:
    """The splits of a recipe's data set, with the images held out and kept that it names."""
    return read_splits(
        recipe.dataset,
        args,
        input_size=_images_size(recipe, args.data_dir),
        valid_size=recipe.valid_size,
        samples_per_class=recipe.samples_per_class,
    )


def _images_size(recipe: Recipe, data_dir: Path) -> tuple[int, int, int] | None:
    """What images are scaled to: the input size of the checkpoint, or of the network for the user's own images.

    Images of the user's own folder keep their channels: one if all are gray, else three.
    """
    name = configured_name(recipe.model, recipe.dataset)
    configured, folder = name != recipe.model, data_dir / recipe.dataset
    if not configured and not is_own(recipe.dataset):
        return None
    own = {"in_chans": folder_colors(folder)[0]} if is_own(recipe.dataset) and folder.is_dir() else {}
    return input_size(name, own | recipe.model_args)


def input_size(model: str, model_args: Mapping[str, Any]) -> tuple[int, int, int]:
    """The input size of a network: channels, height and width."""
    cfg = timm.get_pretrained_cfg(model)
    if cfg is None:
        raise SystemExit(f"no network {model!r}; `eqzoo list` shows all names")
    channels, height, width = cfg.input_size
    return model_args.get("in_chans", channels), height, width


def is_own(dataset: str) -> bool:
    """Whether a data set is the user's own folder or file, which determines the network's classes and channels."""
    return dataset not in CATALOG


def shuffled(split: Split, seed: int, size: int | None = None) -> Split:
    """The images in a random order that depends on the seed; the first ``size`` of them."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    return split[order[:size]]


def spread(values: Sequence[float]) -> str:
    """Percentages as their mean ± standard deviation; ``"not run"`` if there are none."""
    if not values:
        return "not run"
    return (
        f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %" if len(values) > 1 else f"{values[0]:.1f} %"
    )


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_file(path, text)


def weights_sha256(name: str) -> str:
    """The SHA-256 of the weights that a checkpoint, ``<model>.<data set>``, has here."""
    return sha256_of(find_weights(name, timm.get_pretrained_cfg(name).hf_hub_id))


def made_here() -> dict[str, str]:
    """The machine and the packages of the runs that are made here."""
    return {"machine": machine(torch.device("cpu")), "torch": torch.__version__, "timm": timm.__version__}


def read_table(path: Path, **more: Any) -> dict[str, Any]:
    """The rows of a study so far and where they were made; an empty table of this machine if there is no such file.

    Args:
        path: The JSON.
        **more: What an empty table holds besides.
    """
    if path.is_file():
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return table
    return {**made_here(), **more, "runs": []}


def write_page(folder: Path, name: str, page: Callable[[dict[str, Any]], str]) -> None:
    """Writes the page of a study, ``<name>.md``, from the rows in ``<name>.json``.

    Args:
        folder: The folder of both files.
        name: The name of the study.
        page: Makes Markdown of the table.

    Raises:
        SystemExit: If there are no rows.
    """
    path = folder / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: there are no runs to make a page of")
    write_text(folder / f"{name}.md", page(read_table(path)))


def find_run(table: Mapping[str, Any], **key: Any) -> dict[str, Any] | None:
    """The row of a run, by what identifies it; None if it was not run."""
    return next((run for run in table["runs"] if key.items() <= run.items()), None)


def add_run(path: Path, table: dict[str, Any], run: Mapping[str, Any]) -> None:
    """Adds the row of a run, with its machine and packages where they are not the table's, and writes the JSON."""
    others = {key: value for key, value in made_here().items() if table.get(key, value) != value}
    table["runs"].append({**run, **others})
    write_text(path, json.dumps(table, indent=1) + "\n")
    print(json.dumps(table["runs"][-1]), flush=True)


def is_first(run: Mapping[str, Any]) -> bool:
    """Whether a run was made where the table was begun: others say their machine and their torch."""
    return not {"machine", "torch"} & run.keys()


def made_elsewhere(table: Mapping[str, Any], sentence: str = ELSEWHERE) -> str:
    """The sentence of a page on the runs that were made on other machines or with another torch; empty without any."""
    found = [run for run in table["runs"] if not is_first(run)]
    if not found:
        return ""
    names = " or ".join(dict.fromkeys(run.get("machine", table["machine"]) for run in found))
    others = [run["torch"] for run in found if "torch" in run]
    more = f", {len(others)} of them with torch {' or '.join(dict.fromkeys(others))}" if others else ""
    return sentence.format(runs=len(found), count=len(table["runs"]), machine=names, torch=more)


def filled(text: str) -> str:
    """Markdown with lines of at most 120 characters in paragraphs and lists; headings and tables stay as they are."""
    wrapper = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
    parts = []
    for paragraph in text.split("\n\n"):
        for item in re.split(r"\n(?=[-|#!])", paragraph):
            wrapper.subsequent_indent = "  " if item.startswith("- ") else ""
            parts += [[item] if item[:1] in ("|", "#", "!") else wrapper.wrap(" ".join(item.split()))]
        parts.append([""])
    return "\n".join(line for part in parts[:-1] for line in part)


def statistics_of(split: Split) -> dict[str, tuple[float, ...]]:
    """The mean and the standard deviation of each channel, as a network's configuration has them."""
    values = split.images.transpose(0, 1).flatten(1).double() / 255
    return {"mean": tuple(values.mean(1).tolist()), "std": tuple(values.std(1).tolist())}


@flushed_subnormals()
def step_seconds(states: Mapping[str, TrainingState], rounds: int) -> dict[str, float]:
    """The seconds of processor time that a training step takes: medians of steps taken alternately.

    Args:
        states: The networks that are compared; all training images of a state are a batch.
        rounds: The timed steps of each network; the first is left out.
    """
    taken: dict[str, list[float]] = {name: [] for name in states}
    for turn in range(rounds):
        for name, state in states.items():
            split = state.splits["train"]
            assert isinstance(split, Split)
            numbers = draw(len(split), torch.Generator().manual_seed(0))
            state.begin_epoch(0, [])
            began = time.process_time()
            state.backward(split.images, split.labels, numbers)
            state.step(0, 0)
            if turn:
                taken[name].append(time.process_time() - began)
    return {name: statistics.median(values) for name, values in taken.items()}
