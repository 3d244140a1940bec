"""Reads the test split once, for a finished run: `python training/evaluate.py runs/p4_cnn.rotmnist/seed0`.

Several runs of one recipe, which differ by their seeds, give a mean and a standard deviation; the weights of the run
with the best validation accuracy are the ones that are evaluated in full. Writes `results.json` into the folder of that
run: what the card, the tables and the Hub show comes from there. `eqzoo finetune` evaluates its runs itself.
"""

import argparse
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import torch
from common import (
    OF_A_DATASET,
    add_data_arguments,
    is_own,
    load_recipe,
    recipe_names,
    run_name,
    splits_of,
)

from eqzoo._common import json_text, write_json
from eqzoo.cards.run_evaluation import best_run, check_no_fine_tuning, evaluate_run
from eqzoo.engine import FinishedRun, Recipe
from eqzoo.evaluation import check_device
from eqzoo.evaluation.rotation import SAMPLE_SIZE
from eqzoo.hub import RESULTS_NAME


def main(argv: list[str] | None = None) -> None:
    """Parses, evaluates and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs that differ by their seeds")
    parser.add_argument("--rotated", type=int, metavar="N", help="test images rotated by 90 degrees too (default: all)")
    parser.add_argument("--half", action="store_true", help="round the parameters to float16 before they are evaluated")
    parser.add_argument(
        "--curve", type=int, default=SAMPLE_SIZE, metavar="N", help=f"images of the rotation curve ({SAMPLE_SIZE})"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes that read images that are not in memory (4)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    add_data_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("curve", "rotated"):
        if (count := getattr(args, name)) is not None and count < 1:
            parser.error(f"--{name} takes a number of images, at least 1, got {count}")
    try:
        check_device(args.device)
        runs = sorted(map(FinishedRun.read, args.runs), key=lambda run: run.recipe.seed)
        check_no_fine_tuning(runs)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if any(dataclasses.replace(run.recipe, seed=0) != dataclasses.replace(runs[0].recipe, seed=0) for run in runs):
        raise SystemExit(f"{', '.join(map(str, args.runs))} are not runs of one recipe with different seeds")
    if len({run.recipe.seed for run in runs}) < len(runs):
        raise SystemExit(f"two of {', '.join(map(str, args.runs))} have the same seed")
    splits = splits_of(runs[0].recipe, args)
    run = best_run(runs)
    try:
        results = evaluate_run(
            run,
            runs,
            splits,
            checkpoint=name_of(run),
            arguments=arguments_of(run),
            device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            half=args.half,
            rotated=args.rotated,
            curve=args.curve,
            workers=args.workers,
        )
    except ValueError as error:
        raise SystemExit(str(error)) from error
    write_json(run.folder / RESULTS_NAME, results)
    print(json_text(results))


def arguments_of(run: FinishedRun) -> str:
    """What follows training/train.py in the command of a run: a recipe, and all that differs from it."""
    recipe, known, name = run.recipe, recipe_names(), name_of(run)
    if name not in known:  # of another data set, or of a network without a recipe
        own = (other for other in known if other.startswith(f"{recipe.model}.") and not load_recipe(other).start_run)
        name = min(own, key=lambda other: len(_differences(recipe, load_recipe(other))), default=known[0])
    plain, words, args = load_recipe(name), [name], dict(recipe.model_args)
    if recipe.dataset != plain.dataset:
        plain = dataclasses.replace(plain, **OF_A_DATASET)
        words += ["--dataset", Path(recipe.dataset).name]
    if is_own(recipe.dataset):
        args = {key: value for key, value in args.items() if key not in ("num_classes", "in_chans")}
    changed = _differences(recipe, plain)
    changed |= {"model_args": args} if args != plain.model_args else {}
    words += ["--seed", str(recipe.seed)]
    words += ["--set", *(f"{key}={json.dumps(value)}" for key, value in changed.items())] if changed else []
    return shlex.join(words)


def _differences(recipe: Recipe, plain: Recipe) -> dict[str, Any]:
    """The values of a recipe that another one does not have, besides its data set, seed and model_args."""
    values, others = vars(recipe), vars(plain)
    kept = ("dataset", "seed", "model_args")
    return {key: value for key, value in values.items() if key not in kept and value != others[key]}


def name_of(run: FinishedRun) -> str:
    """The name of a run's recipe: that of the folder above the seed's, if it is one; else model and data set."""
    return run_name(run.folder.resolve().parent.name, run.recipe)


if __name__ == "__main__":
    main()
