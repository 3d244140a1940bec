"""Reads the test split once, for a finished run: `python training/evaluate.py runs/p4_cnn.rotmnist/seed0`.

Several runs of one recipe, which differ by their seeds, give a mean and a standard deviation; the weights of the run
with the best validation accuracy are the ones that are evaluated in full. Writes `results.json` into the folder of that
run: what the card, the README's table and the Hub show comes from there.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from common import add_data_arguments, build, recipe_names, splits_of
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo.data import AnySplit, batches, normalise
from eqzoo.engine import Recipe, finished, selected, top1
from eqzoo.files import atomic
from eqzoo.groups import P4, transform
from eqzoo.hub import base_model
from eqzoo.models import EquivariantNet
from eqzoo.report import ANGLES, machine, throughput

# Larger ones are slower on a CPU, where what is between two layers leaves its caches.
BATCH = 500 if torch.cuda.is_available() else 50


def main() -> None:
    """Parses, evaluates and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs that differ by their seeds")
    parser.add_argument(
        "--turned", type=int, metavar="N", help="test pictures seen at quarter turns too (default: all)"
    )
    parser.add_argument("--half", action="store_true", help="round the weights to float16 before they are evaluated")
    parser.add_argument("--curve", type=int, default=5000, metavar="N", help="test pictures in the turn curve")
    parser.add_argument("--workers", type=int, default=4, help="processes that read what is not in memory (default: 4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_data_arguments(parser)
    args = parser.parse_args()
    for name in ("curve", "turned"):
        if (count := getattr(args, name)) is not None and count < 1:
            parser.error(f"--{name} takes a number of pictures, at least 1, got {count}")

    runs = sorted((read_run(run) for run in args.runs), key=lambda run: run.recipe.seed)
    if any(dataclasses.replace(run.recipe, seed=0) != dataclasses.replace(runs[0].recipe, seed=0) for run in runs):
        raise SystemExit(f"{', '.join(map(str, args.runs))} are not runs of one recipe with different seeds")
    if len({run.recipe.seed for run in runs}) < len(runs):
        raise SystemExit(f"two of {', '.join(map(str, args.runs))} have the same seed")
    splits = splits_of(runs[0].recipe, args)
    # The weights that go on are the best on the validation pictures; the test errors play no part.
    chosen = max(runs, key=lambda run: run.best["valid_accuracy"] or 0.0)
    results = evaluate(load(chosen, args), chosen, splits, args)
    errors = [
        results["test_error"] if run is chosen else error_rate(load(run, args), splits["test"], args.workers)
        for run in runs
    ]
    results |= {
        "seeds": len(runs),
        "test_errors": errors,
        "test_error_std": round(statistics.stdev(errors), 3) if len(errors) > 1 else None,
        "weights_dtype": "float16" if args.half else "float32",
        "weights_sha256": hashlib.sha256(weights(chosen, args.half).read_bytes()).hexdigest(),
    }
    text = json.dumps(results, indent=2) + "\n"
    atomic(chosen.folder / "results.json", lambda path: path.write_text(text))
    print(text)


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        folder: Where it is.
        recipe: Its recipe.
        rows: Its record, a row an epoch.
    """

    folder: Path
    recipe: Recipe
    rows: list[dict[str, Any]]

    @property
    def best(self) -> dict[str, Any]:
        """The epoch whose weights were kept."""
        return selected(self.rows)

    @property
    def started(self) -> str:
        """What started the training, by the processes of most epochs: on CPUs a batch norm sees the share of one."""
        processes = statistics.mode([row["processes"] for row in self.rows if "processes" in row] or [1])
        return "python" if processes == 1 else f"torchrun --nproc_per_node={processes}"

    @property
    def name(self) -> str:
        """The recipe's name: that of the folder above the seed's, if it is one; else model and data set."""
        plain = f"{self.recipe.model}.{Path(self.recipe.dataset).stem}"
        above = self.folder.resolve().parent.name
        return above if above in recipe_names() and above.startswith(plain) else plain


def read_run(folder: Path) -> Run:
    """The recipe and the record of a finished run."""
    if not (folder / "recipe.json").is_file():
        raise SystemExit(f"{folder} is not the folder of a run: it has no recipe.json")
    recipe = Recipe.read(folder / "recipe.json")
    record = folder / "record.jsonl"
    rows = [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    if not finished(recipe, rows):
        raise SystemExit(f"{folder} has {len(rows)} of {recipe.epochs} epochs; train.py goes on with it")
    return Run(folder, recipe, rows)


def weights(run: Run, half: bool) -> Path:
    """The file of a run's weights, rounded to float16 on request."""
    path = run.folder / "best.safetensors"
    if not half:
        return path
    rounded = {name: value.half() if value.is_floating_point() else value for name, value in load_file(path).items()}
    atomic(run.folder / "best.half.safetensors", functools.partial(save_file, rounded))
    return run.folder / "best.half.safetensors"


def load(run: Run, args: argparse.Namespace) -> EquivariantNet:
    """The network of a run with the weights of its best epoch."""
    model = build(run.recipe, checkpoint_path=weights(run, args.half))
    assert isinstance(model, EquivariantNet)
    return model.to(args.device).eval()


def evaluate(model: EquivariantNet, run: Run, splits: dict[str, AnySplit], args: argparse.Namespace) -> dict[str, Any]:
    """The results of a run, as results.json holds them; percentages are of the split named."""
    recipe, test = run.recipe, splits["test"]
    part = test if args.turned is None else first(test, args.turned)
    turned = quarter_turns(model, part, args.workers)
    errors = [round(100 - top1(classes, part.labels), 3) for classes in turned]
    valid = run.best["valid_accuracy"]
    cfg = timm.get_pretrained_cfg(recipe.start or "")
    base = base_model(recipe.start, cfg and cfg.hf_hub_id) if recipe.start else None
    return {
        "checkpoint": run.name,
        "group": model.group.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "multiply_adds": eqzoo.multiply_adds(model),
        "throughput": throughput(model, model.input_size),
        "dataset": {"name": recipe.dataset} | {name: len(split) for name, split in splits.items()},
        "label_names": list(test.classes),
        "command": f"{run.started} training/train.py {run.name} --seed {recipe.seed}",
        "recipe": dataclasses.asdict(recipe),
        "selected_epoch": run.best["epoch"],
        "valid_error": None if valid is None else round(100 - valid, 3),
        "test_error": errors[0] if len(part) == len(test) else error_rate(model, test, args.workers),
        "turned_pictures": len(part),
        "test_error_of_turned_copies": errors,
        "same_class_at_all_quarter_turns": round(100 * (turned == turned[0]).all(0).double().mean().item(), 3),
        "turn_curve": turn_curve(model, test, args),
        "equivariance_error": eqzoo.equivariance_error(model),
        "equivariance_error_p4": eqzoo.equivariance_error(model, group=P4),
        "training_seconds": round(sum(row["seconds"] for row in run.rows)),
        "machine": machine(next(model.parameters()).device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            "eqzoo": eqzoo.__version__,
        },
    } | ({"base_model": base} if base else {})


def inputs(model: EquivariantNet, split: AnySplit, workers: int = 0) -> Iterator[torch.Tensor]:
    """The pictures of a split, a batch at a time, as the network takes them, in float32."""
    cfg, device = model.pretrained_cfg, next(model.parameters()).device
    for images in batches(split, torch.arange(len(split)).split(BATCH), workers):
        yield normalise(images.to(device), cfg["mean"], cfg["std"], torch.float32)


def first(split: AnySplit, count: int) -> AnySplit:
    """The first pictures of a split, at most as many as there are."""
    part = split[torch.arange(min(count, len(split)))]
    assert not isinstance(part, torch.Tensor)
    return part


@torch.no_grad()
def error_rate(model: EquivariantNet, split: AnySplit, workers: int = 0) -> float:
    """The share of wrong answers, in percent."""
    classes = [model(images).argmax(1).cpu() for images in inputs(model, split, workers)]
    return round(100 - top1(torch.cat(classes), split.labels), 3)


@torch.no_grad()
def quarter_turns(model: EquivariantNet, split: AnySplit, workers: int = 0) -> torch.Tensor:
    """The classes of all pictures and of their quarter turns, ``(4, n)``, in float32."""
    parts = []
    for images in inputs(model, split, workers):
        turned = [model(transform(images, P4, g, "trivial")).argmax(1).cpu() for g in P4.elements]
        parts.append(torch.stack(turned))
    return torch.cat(parts, 1)


def turn_curve(model: EquivariantNet, split: AnySplit, args: argparse.Namespace) -> dict[str, Any]:
    """The accuracy in percent on the first pictures of a split, turned by angles in degrees."""
    part = first(split, args.curve)
    images = torch.cat(list(inputs(model, part, args.workers)))
    curve = eqzoo.turn_curve(model, images, part.labels.to(images.device), ANGLES, BATCH)
    return {"angles": list(ANGLES), "accuracy": [round(a, 2) for a in curve], "pictures": len(part)}


if __name__ == "__main__":
    main()
