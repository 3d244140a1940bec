"""Trains a network by its recipe: `python training/train.py p4_cnn.rotmnist --data-dir DATA`.

The run goes to `runs/<recipe>/seed<seed>/`; the same command resumes an interrupted run. Several processes share a
run: `torchrun --nproc_per_node=2 training/train.py ...`. `--list` prints the recipes.
"""

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from accelerate import PartialState
from common import OF_A_DATASET, add_data_arguments, is_configured, load_recipe, recipe_names, run_name, splits_of

from eqzoo._common import parse_settings
from eqzoo.data import AnySplit, num_classes
from eqzoo.engine import Recipe, build_network, train


def main(argv: list[str] | None = None) -> None:
    """Parses, reads the data and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="<model>.<data set>[_<variant>]")
    parser.add_argument("--list", nargs="?", const="*", metavar="PATTERN", help="print the recipes, and stop")
    parser.add_argument("--seed", type=int, help="another seed than the recipe's")
    parser.add_argument(
        "--epochs",
        type=int,
        help="another length than the recipe's: its milestones move in proportion, and a warm-up and epochs at half "
        "size that would fill it are shortened",
    )
    parser.add_argument(
        "--dataset", help="another data set, by its name, or a folder of images or a .npz file in the data folder"
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="other values, as JSON: lr=0.01"
    )
    parser.add_argument("--output", type=Path, help="the run's folder (default: runs/<model>.<data set>/seed<seed>)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    parser.add_argument(
        "--workers", type=int, default=4, help="processes that read images that are not in memory (default: 4)"
    )
    parser.add_argument("--track", metavar="TRACKER", help="log to trackio, tensorboard or another of accelerate's too")
    add_data_arguments(parser)
    args = parser.parse_args(argv)
    if args.list:
        print_recipes(args.list)
        return
    if not args.recipe:
        parser.error("name a recipe; --list prints them")

    try:
        recipe = changed(load_recipe(args.recipe), args)
        splits = splits_of(recipe, args)
        if num_classes(splits) < 2:
            raise ValueError(f"{recipe.dataset} has images of one class; two or more are needed")
        if not is_configured(recipe):
            recipe = fitted(recipe, splits)
        run_dir = args.output or Path("runs") / run_name(args.recipe, recipe) / f"seed{recipe.seed}"
        train(recipe, lambda: build_network(recipe), splits, run_dir, args.device, args.workers, args.track)
    except (OSError, ValueError, FloatingPointError) as error:
        raise SystemExit(f"train.py: {error}") from error
    state = PartialState()
    if state.is_main_process:
        data = [] if args.data_dir == parser.get_default("data_dir") else ["--data-dir", str(args.data_dir)]
        further = f"next: {shlex.join(['python', 'training/evaluate.py', str(run_dir), *data])}"
        print(f"trained; {further if 'test' in splits else 'there are no test images'}")
    state.destroy_process_group()


def print_recipes(pattern: str) -> None:
    """Prints a line for each recipe."""
    for name in recipe_names():
        if fnmatch(name, pattern):
            recipe = load_recipe(name)
            print(f"{name:44} {recipe.epochs:4} epochs  batch {recipe.batch_size:4}  {recipe.optimizer} {recipe.lr:g}")


def changed(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """The recipe with the values that the command line gives."""
    changes = parse_settings(args.set)
    keys = [field.name for field in dataclasses.fields(Recipe)]
    if unknown := [key for key in changes if key not in keys]:
        raise ValueError(f"--set takes KEY=VALUE with a key of a recipe, {', '.join(keys)}; got {', '.join(unknown)}")
    named = {name: getattr(args, name) for name in ("seed", "epochs", "dataset")}
    changes |= {name: value for name, value in named.items() if value is not None}
    if args.epochs is not None:
        changes = _scaled(recipe, args.epochs) | changes
    if "teachers" in changes and not changes["teachers"]:
        changes.setdefault("teacher_weight", Recipe.teacher_weight)
    other = changes.get("dataset", recipe.dataset) != recipe.dataset
    return dataclasses.replace(recipe, **(OF_A_DATASET if other else {}) | changes)


def _scaled(recipe: Recipe, epochs: int) -> dict[str, Any]:
    """The milestones at their shares of another length, and a warm-up and half-size epochs that would fill it."""
    share = epochs / recipe.epochs
    found: dict[str, Any] = {}
    if recipe.milestones:
        places = sorted({round(milestone * share) for milestone in recipe.milestones})
        kept = tuple(place for place in places if 0 < place < epochs)
        found = {"milestones": kept} if kept else {"milestones": (), "schedule": "constant"}
    if recipe.warmup_epochs >= epochs:
        found["warmup_epochs"] = round(recipe.warmup_epochs * share, 4)
    if recipe.half_size_epochs >= epochs:
        found["half_size_epochs"] = int(recipe.half_size_epochs * share)
    return found


def fitted(recipe: Recipe, splits: Mapping[str, AnySplit]) -> Recipe:
    """The recipe with the numbers of classes and channels of the data set."""
    sizes = {"num_classes": num_classes(splits), "in_chans": splits["train"].shape[0]}
    return dataclasses.replace(recipe, model_args=sizes | recipe.model_args)


if __name__ == "__main__":
    main()
