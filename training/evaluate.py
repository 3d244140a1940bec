"""Reads the test split once, for a finished run: `python training/evaluate.py runs/p4_cnn.rotmnist/seed0`.

Several runs of one recipe, which differ by their seeds, give a mean and a standard deviation; the weights of the run
with the best validation accuracy are the ones that are evaluated in full. Writes `results.json` into the folder of that
run: what the card, the README's table and the Hub show comes from there.
"""

import argparse
import dataclasses
import functools
import hashlib
import statistics
from pathlib import Path

import timm
import torch
from common import add_data_arguments, recipe_names, splits_of
from safetensors.torch import load_file, save_file

from eqzoo._common import atomic, write_json
from eqzoo.analysis import accuracy_over_rotations, sample
from eqzoo.analysis.rotation import SAMPLE_SIZE
from eqzoo.data import AnySplit
from eqzoo.engine import FinishedRun, Recipe, build_network, checkpoint_results, top1
from eqzoo.engine.metrics import BATCH_SIZE, predict_quarter_rotations, predict_split, quarter_rotation_metrics
from eqzoo.hub import base_model
from eqzoo.models import EquivariantNet


def main() -> None:
    """Parses, evaluates and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs that differ by their seeds")
    parser.add_argument("--rotated", type=int, metavar="N", help="test images rotated by 90 degrees too (default: all)")
    parser.add_argument("--half", action="store_true", help="round the weights to float16 before they are evaluated")
    parser.add_argument(
        "--curve", type=int, default=SAMPLE_SIZE, metavar="N", help=f"images of the rotation curve ({SAMPLE_SIZE})"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes that read images that are not in memory (4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_data_arguments(parser)
    args = parser.parse_args()
    for name in ("curve", "rotated"):
        if (count := getattr(args, name)) is not None and count < 1:
            parser.error(f"--{name} takes a number of images, at least 1, got {count}")
    try:
        runs = sorted(map(FinishedRun.read, args.runs), key=lambda run: run.recipe.seed)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if any(dataclasses.replace(run.recipe, seed=0) != dataclasses.replace(runs[0].recipe, seed=0) for run in runs):
        raise SystemExit(f"{', '.join(map(str, args.runs))} are not runs of one recipe with different seeds")
    if len({run.recipe.seed for run in runs}) < len(runs):
        raise SystemExit(f"two of {', '.join(map(str, args.runs))} have the same seed")
    splits = splits_of(runs[0].recipe, args)
    # The run is chosen by its validation accuracy; the test errors play no part.
    chosen = max(runs, key=lambda run: run.best["valid_accuracy"] or 0.0)
    write_results(chosen, runs, splits, args)
    print((chosen.folder / "results.json").read_text())


def write_results(
    run: FinishedRun, runs: list[FinishedRun], splits: dict[str, AnySplit], args: argparse.Namespace
) -> None:
    """Evaluates a run, and the test error of all runs, and writes results.json."""
    model, test = load(run, args), splits["test"]
    rotated = test if args.rotated is None else sample(test, args.rotated)
    predicted = predict_quarter_rotations(model, rotated, args.workers)
    error = error_rate(predicted[0] if rotated is test else predict_split(model, test, args.workers), test)
    errors = [
        error if other is run else error_rate(predict_split(load(other, args), test, args.workers), test)
        for other in runs
    ]
    curve = accuracy_over_rotations(model, test, args.curve, BATCH_SIZE, args.workers)
    results = checkpoint_results(
        model,
        run.recipe,
        checkpoint=name_of(run),
        split_sizes={name: len(split) for name, split in splits.items()},
        label_names=test.classes,
        command=f"{run.launcher} training/train.py {name_of(run)} --seed {run.recipe.seed}",
        best=run.best,
        test_error=error,
        metrics=quarter_rotation_metrics(predicted, rotated.labels) | {"rotation_curve": curve},
        rotated_images=len(rotated),
        training_seconds=run.seconds,
        weights_sha256=hashlib.sha256(weights(run, args.half).read_bytes()).hexdigest(),
        weights_dtype="float16" if args.half else "float32",
        test_errors=errors,
        test_error_std=round(statistics.stdev(errors), 3) if len(errors) > 1 else None,
        base_model=started_from(run.recipe),
    )
    write_json(run.folder / "results.json", results)


def name_of(run: FinishedRun) -> str:
    """The name of a run's recipe: that of the folder above the seed's, if it is one; else model and data set."""
    plain = f"{run.recipe.model}.{Path(run.recipe.dataset).stem}"
    above = run.folder.resolve().parent.name
    return above if above in recipe_names() and above.startswith(plain) else plain


def started_from(recipe: Recipe) -> str | None:
    """The Hub repo of the checkpoint that a recipe starts from."""
    cfg = timm.get_pretrained_cfg(recipe.start or "")
    return base_model(recipe.start, cfg and cfg.hf_hub_id) if recipe.start else None


def weights(run: FinishedRun, half: bool) -> Path:
    """The file of a run's weights, rounded to float16 on request."""
    path = run.folder / "best.safetensors"
    if not half:
        return path
    rounded = {name: value.half() if value.is_floating_point() else value for name, value in load_file(path).items()}
    atomic(run.folder / "best.half.safetensors", functools.partial(save_file, rounded))
    return run.folder / "best.half.safetensors"


def load(run: FinishedRun, args: argparse.Namespace) -> EquivariantNet:
    """The network of a run with the weights of its best epoch."""
    model = build_network(run.recipe, checkpoint_path=weights(run, args.half))
    assert isinstance(model, EquivariantNet)
    return model.to(args.device).eval()


def error_rate(predicted: torch.Tensor, split: AnySplit) -> float:
    """The error, in percent."""
    return round(100 - top1(predicted, split.labels), 3)


if __name__ == "__main__":
    main()
