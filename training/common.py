"""What the scripts share: finding recipes and reading data sets."""

import argparse
import runpy
from pathlib import Path
from typing import Any

from eqzoo.data import Split, rotmnist
from eqzoo.engine import Recipe

RECIPES = Path(__file__).parent / "recipes"


def load_recipe(name: str) -> Recipe:
    """The recipe ``<model>.<data set>``, from its file in training/recipes."""
    recipe = _read(name)["recipe"]
    assert isinstance(recipe, Recipe)
    return recipe


def recipe_text(name: str) -> str:
    """What the file of a recipe says of it, on one line."""
    return " ".join(_read(name)["__doc__"].split())


def _read(name: str) -> dict[str, Any]:
    path = RECIPES / f"{name.replace('.', '_')}.py"
    if not path.is_file():
        raise SystemExit(f"no recipe {name!r}; there are: {', '.join(sorted(recipe_names()))}")
    return runpy.run_path(str(path))


def recipe_names() -> list[str]:
    """The names of all recipes."""
    recipes = (runpy.run_path(str(path))["recipe"] for path in RECIPES.glob("*.py"))
    return [f"{recipe.model}.{recipe.dataset}" for recipe in recipes]


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say where data is."""
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="the folder of data sets (default: data)")
    parser.add_argument("--download", action="store_true", help="fetch what is missing there")


def read_splits(dataset: str, args: argparse.Namespace) -> dict[str, Split]:
    """The splits of a data set."""
    readers = {"rotmnist": rotmnist}
    if dataset not in readers:
        raise SystemExit(f"no data set {dataset!r}; there are: {', '.join(readers)}")
    try:
        return readers[dataset](args.data_dir, args.download)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
