"""Recipes and data sets by name, for the scripts."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from recipes import RECIPES, Entry

from eqzoo.data import CATALOG, AnySplit, load_splits
from eqzoo.data.arrays import without_npz
from eqzoo.data.folder import channels_found
from eqzoo.engine import Recipe
from eqzoo.models.builder import configured_name

# What a recipe says of its own data set, and no run on another: the sizes of its splits, and weights that may have been
# trained on images that another data set validates or tests on.
OF_A_DATASET: dict[str, Any] = {"valid_size": None, "samples_per_class": None, "start": None}
OF_A_DATASET |= {"teachers": (), "soft_labels": None, "teacher_weight": Recipe.teacher_weight}


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


def _images_size(recipe: Recipe, data_dir: Path) -> tuple[int, int, int]:
    """What images are scaled to: the input size that the network has for the data set, else its default.

    Images of the user's own folder keep their channels: one if all are gray, else three.
    """
    folder = data_dir / recipe.dataset
    own = {"in_chans": channels_found(folder)[0]} if recipe.dataset not in CATALOG and folder.is_dir() else {}
    return input_size(configured_name(recipe.model, recipe.dataset), own | recipe.model_args)


def input_size(model: str, model_args: Mapping[str, Any]) -> tuple[int, int, int]:
    """The input size of a network: channels, height and width."""
    cfg = timm.get_pretrained_cfg(model)
    if cfg is None:
        raise SystemExit(f"no network {model!r}; `eqzoo list` shows all names")
    channels, height, width = cfg.input_size
    return model_args.get("in_chans", channels), height, width


def is_configured(recipe: Recipe) -> bool:
    """Whether the network has a configuration for a data set of the catalog; else the images say its classes."""
    return recipe.dataset in CATALOG and configured_name(recipe.model, recipe.dataset) != recipe.model
