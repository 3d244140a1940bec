"""Trains a network by its recipe: `python training/train.py p4_cnn.rotmnist --data-dir DATA`.

The run goes to `runs/<recipe>/seed<seed>/`; the same command goes on with a run that was stopped.
"""

import argparse
import dataclasses
from pathlib import Path

import torch
from common import add_data_arguments, load_recipe, read_splits

import eqzoo
from eqzoo.engine import train


def main() -> None:
    """Parses, reads the data and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="<model>.<data set>, a file of training/recipes")
    parser.add_argument("--seed", type=int, help="another seed than the recipe's")
    parser.add_argument("--epochs", type=int, help="another length than the recipe's")
    parser.add_argument("--output", type=Path, help="the run's folder (default: runs/<recipe>/seed<seed>)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_data_arguments(parser)
    args = parser.parse_args()

    changes = {name: value for name in ("seed", "epochs") if (value := getattr(args, name)) is not None}
    recipe = dataclasses.replace(load_recipe(args.recipe), **changes)
    run_dir = args.output or Path("runs") / args.recipe / f"seed{recipe.seed}"
    splits = read_splits(recipe.dataset, args)
    train(recipe, lambda: eqzoo.create_model(recipe.model, **recipe.model_args).to(args.device), splits, run_dir)
    print(f"trained; next: python training/evaluate.py {run_dir}")


if __name__ == "__main__":
    main()
