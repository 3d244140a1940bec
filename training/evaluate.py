"""Reads the test split once, for a finished run: `python training/evaluate.py runs/p4_cnn.rotmnist/seed0`.

Several runs of one recipe, which differ by their seeds, give a mean and a standard deviation; the run with the best
validation accuracy is the one that is evaluated in full. Writes `results.json`, `config.json`, the card and its figures
into the folder of that run, which is then a checkpoint as the Hub has it; `--half` into a folder beside it, with
parameters rounded to float16. `eqzoo finetune` evaluates its runs itself.
"""

import argparse
import dataclasses
import functools
import json
import math
import shlex
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from common import (
    OF_A_DATASET,
    add_data_arguments,
    is_configured,
    load_recipe,
    recipe_names,
    recipe_text,
    run_name,
    splits_of,
)
from safetensors.torch import load_file, save_file

from eqzoo._common import __version__, atomic, json_text, write_json
from eqzoo.cards import network_results, training_results, write_card, write_figures
from eqzoo.data import AnySplit
from eqzoo.data.hashes import split_differences, split_digests
from eqzoo.engine import Recipe, RunDirectory, best_row, build_network
from eqzoo.engine.recipe import selection_key
from eqzoo.evaluation import Predictor, check_device, measure, sample, top1
from eqzoo.evaluation.rotation import SAMPLE_SEED
from eqzoo.hub import CONFIG_NAME, RESULTS_NAME, base_model, sha256_of, shipped_folder
from eqzoo.models.builder import configured_name, default_checkpoint

CHECKED = 500  # images on which a network is checked before the test
CHANGED = 2.0  # percent of them that rounding may change


def main(argv: list[str] | None = None) -> None:
    """Parses, evaluates and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs that differ by their seeds")
    parser.add_argument("--images", type=int, metavar="N", help="test images, drawn with a fixed seed (default: all)")
    parser.add_argument("--rotated", type=int, metavar="N", help="test images that are rotated too (default: all)")
    parser.add_argument("--half", action="store_true", help="round the parameters to float16 before they are evaluated")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images that are not in memory (4)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    add_data_arguments(parser)
    args = parser.parse_args(argv)
    if args.images is not None and args.images < 1:
        parser.error(f"--images is 1 or more, got {args.images}")
    if args.rotated is not None and args.rotated < 0:
        parser.error(f"--rotated is 0 or more, got {args.rotated}")
    try:
        check_device(args.device)
        runs = sorted(map(RunDirectory.finished, args.runs), key=lambda run: run.recipe().seed)
        if len({json.dumps(dataclasses.asdict(dataclasses.replace(run.recipe(), seed=0))) for run in runs}) > 1:
            raise ValueError(f"{', '.join(map(str, args.runs))} are not runs of one recipe with different seeds")
        if tuned := [run.path for run in runs if "data" in run.saved()]:
            raise ValueError(f"{tuned[0]} is a fine-tuning, which eqzoo finetune has evaluated")
        splits = splits_of(runs[0].recipe(), args)
        _check_runs(runs, splits)
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        folder, results = evaluate_runs(runs, splits, device, args.half, args.images, args.rotated, args.workers)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    print(json_text(results))
    print(folder)


def evaluate_runs(
    runs: Sequence[RunDirectory],
    splits: Mapping[str, AnySplit],
    device: str = "cpu",
    half: bool = False,
    images: int | None = None,
    rotated: int | None = None,
    workers: int = 0,
) -> tuple[Path, dict[str, Any]]:
    """Evaluates the best run on the test split, measures the accuracy of the others, and writes the files.

    Args:
        runs: The runs of a recipe, with different seeds.
        splits: The splits of their data set.
        device: Where the networks run.
        half: Whether parameters are rounded to float16 before the evaluation.
        images: The number of test images, drawn with a fixed seed; None for all.
        rotated: The number of test images that are rotated too; None for all.
        workers: The processes that read images that are not in memory.

    Returns:
        The folder of the checkpoint, and the content of results.json.

    Raises:
        ValueError: If a network has lost the accuracy that its run had on validation images.
    """
    run = max(runs, key=lambda each: selection_key(best_row(each.rows()))[:3])
    recipe, rows = run.recipe(), run.rows()
    every, earlier = splits["test"], _runs_before(recipe)
    test = every if images is None else sample(every, images)
    fewer = f"{len(test):,} of the {len(every):,} test images were evaluated, drawn with seed {SAMPLE_SEED}."
    name = run_name(run.path.resolve().parent.name, recipe)
    folder = _rounded(run) if half else run.path
    model = build_network(recipe, checkpoint_path=folder).to(device).eval()
    predictor = Predictor.of(model)
    _check_accuracy(run, predictor, splits, workers, CHANGED if half else 1.0)
    found = measure(predictor, test, rotated=rotated, workers=workers)
    accuracies = [
        found.metrics["accuracy"] if other is run else _accuracy(other, test, device, workers) for other in runs
    ]
    weights = RunDirectory(folder).weights
    results = {
        "checkpoint": name,
        **found.metrics,
        "evaluated_on": "test",
        "data": recipe.dataset,
        "images": {split: len(part) for split, part in {**splits, "test": test}.items()},
        **({"notes": [fewer]} if len(test) < len(every) else {}),
        "accuracies": accuracies,
        **training_results(rows, model),
        **network_results(model),
        "start": recipe.start,
        "base_model": _started_from(earlier[-1] if earlier else recipe),
        **({} if recipe.lr else {"converted": True}),
        **({"distilled": True} if any(map(_is_distilled, (recipe, *earlier))) else {}),
        "command": f"{_launcher(rows)} training/train.py {arguments_of(recipe, name)}",
        "weights_sha256": sha256_of(weights),
        "weights_dtype": "float16" if half else "float32",
    }
    _write_config(folder, run, predictor.cfg, results)
    write_json(folder / RESULTS_NAME, results)
    write_figures(folder)
    write_card(folder)
    return folder, results


def license_of(recipe: Recipe) -> str:
    """The license of the weights: that of the registered checkpoint, else that of the code."""
    registered = timm.get_pretrained_cfg(configured_name(recipe.model, recipe.dataset))
    return (registered and registered.license) or "mit"


def _write_config(folder: Path, run: RunDirectory, cfg: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Completes config.json by what was evaluated, and training.json by the text about the recipe."""
    name = results["checkpoint"]
    config = json.loads(run.config.read_text(encoding="utf-8"))
    config["pretrained_cfg"] |= {"tag": name.partition(".")[2], "license": license_of(run.recipe())}
    known = {key: results[key] for key in ("weights_sha256", "weights_dtype")}
    config["eqzoo"] |= known | {"version": __version__}
    labels = cfg.get("label_names") or [row["name"] for row in results["classes"]]
    write_json(folder / CONFIG_NAME, config | {"label_names": list(labels)})
    path = RunDirectory(folder).training
    text = recipe_text(name) if name in recipe_names() else ""
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"text": text})


def _check_runs(runs: Sequence[RunDirectory], splits: Mapping[str, AnySplit]) -> None:
    digests = split_digests(splits)
    if "test" not in splits:
        raise ValueError(f"{runs[0].recipe().dataset} has no test images to evaluate on")
    for run in runs:
        if differences := "; ".join(split_differences(run.data_sha256() or digests, digests)):
            raise ValueError(f"{run.path} was trained on other images than these ({differences}); see --data-dir")


def _check_accuracy(
    run: RunDirectory, predictor: Predictor, splits: Mapping[str, AnySplit], workers: int, margin: float
) -> None:
    """Raises ValueError if a network is far less accurate on validation images than the log of its run says.

    The margin is some percentage points and five standard deviations of an accuracy of 50 % on as many images: a
    network that no longer computes what was trained is further off.
    """
    expected = best_row(run.rows())["valid_accuracy"]
    if expected is None or "valid" not in splits:
        return
    some = sample(splits["valid"], CHECKED)
    found = top1(predictor.logits(some, workers).argmax(1), some.labels)
    if found < expected - margin - 5 * 100 * math.sqrt(0.25 / len(some)):
        raise ValueError(
            f"the network of {run.path} recognizes {found:.1f} % of {len(some)} validation images, and its log says "
            f"{expected:.1f} %; it was not evaluated on the test images"
        )


def _accuracy(run: RunDirectory, test: AnySplit, device: str, workers: int) -> float:
    model = build_network(run.recipe(), checkpoint_path=run.path).to(device).eval()
    return round(top1(Predictor.of(model).logits(test, workers).argmax(1), test.labels.cpu()), 6)


def _runs_before(recipe: Recipe) -> list[Recipe]:
    """The recipes of the runs whose weights a run goes on with, the latest first."""
    found: list[Recipe] = []
    while recipe.start_run is not None:
        recipe = RunDirectory(recipe.start_run).recipe()
        found.append(recipe)
    return found


def _is_distilled(recipe: Recipe) -> bool:
    """Whether the weights of a run, or those of its start on the same images, learned from other networks."""
    path = shipped_folder() / str(_start(recipe)) / RESULTS_NAME
    start = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    taught = start.get("distilled") and start["data"] == recipe.dataset
    return bool(recipe.teachers or recipe.soft_labels or taught)


def _start(recipe: Recipe) -> str | None:
    """The start of a recipe, a network's bare name as that of its checkpoint."""
    start = recipe.start
    return default_checkpoint(start) if start and "." not in start and timm.models.is_model(start) else start


def _started_from(recipe: Recipe) -> str | None:
    """The Hub repo of the checkpoint that a recipe starts from, unless it is an earlier one of the same name."""
    start = _start(recipe)
    if start in (None, f"{recipe.model}.{recipe.dataset}"):
        return None
    cfg = timm.get_pretrained_cfg(start)
    return base_model(start, cfg and cfg.hf_hub_id)


def _rounded(run: RunDirectory) -> Path:
    """A folder beside that of a run, with its parameters rounded to float16.

    Running statistics keep float32, as do parameters beyond the range of float16: variances of deep networks can be
    larger than 65,504, the largest number of float16.
    """
    parameters = {name for name, _ in build_network(run.recipe()).named_parameters()}
    weights = load_file(run.weights)
    for name in parameters:
        half = weights[name].half()
        weights[name] = half if half.isfinite().all() else weights[name]
    folder = run.path.with_name(f"{run.path.name}-half")
    folder.mkdir(exist_ok=True)
    new = RunDirectory(folder)
    for source, target in ((run.training, new.training), (run.log, new.log)):
        shutil.copyfile(source, target)
    atomic(new.weights, functools.partial(save_file, weights))
    return folder


def _launcher(rows: Sequence[Mapping[str, Any]]) -> str:
    """The program that started a training, by the number of processes in most epochs.

    It matters on CPUs, where a batch norm sees the share of one process.
    """
    processes = statistics.mode(row.get("processes", 1) for row in rows)
    return "python" if processes == 1 else f"torchrun --nproc_per_node={processes}"


def arguments_of(recipe: Recipe, name: str) -> str:
    """What follows training/train.py in the command of a run of a name: a recipe, and all that differs from it."""
    known = recipe_names()
    if name not in known:  # of another data set, or of a network without a recipe
        own = (other for other in known if other.startswith(f"{recipe.model}.") and not load_recipe(other).start_run)
        name = min(own, key=lambda other: len(_differences(recipe, vars(load_recipe(other)))), default=known[0])
    plain, words, args = vars(load_recipe(name)), [name], dict(recipe.model_args)
    if recipe.dataset != plain["dataset"]:
        plain = plain | OF_A_DATASET
        words += ["--dataset", Path(recipe.dataset).name]
    if not is_configured(recipe):
        args = {key: value for key, value in args.items() if key not in ("num_classes", "in_chans")}
    changed = _differences(recipe, plain)
    changed |= {"model_args": args} if args != plain["model_args"] else {}
    words += ["--seed", str(recipe.seed)]
    words += ["--set", *(f"{key}={json.dumps(value)}" for key, value in changed.items())] if changed else []
    return shlex.join(words)


def _differences(recipe: Recipe, others: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe that differ from others, besides its data set, seed and model_args."""
    kept = ("dataset", "seed", "model_args")
    return {key: value for key, value in vars(recipe).items() if key not in kept and value != others[key]}


if __name__ == "__main__":
    main()
