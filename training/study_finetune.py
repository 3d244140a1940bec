"""What to fine-tune with: `python training/study_finetune.py --data-dir DATA`.

Trains networks on 20, 100 or 300 images of each class of EuroSAT, Chula RBC-12, CIFAR-10 and rotated MNIST, by the
rules of `eqzoo finetune` and with one factor changed at a time, and on EuroSAT two networks of timm in the same time.
The rules are chosen by validation accuracy; test accuracies are shown of the rules and of networks of timm alone.
Writes docs/finetuning_study.json and .md. Finished runs are not repeated, so the same command resumes the study.

The grid is reduced to what takes about three hours on one core; `--full` runs all cells with three seeds, `--render`
only writes the page.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from common import add_data_arguments, statistics_of
from torch import nn

import eqzoo
from eqzoo._common import atomic
from eqzoo.analysis import machine
from eqzoo.analysis.rotation import inputs
from eqzoo.data import AnySplit, Split, hold_out, per_class, read_images
from eqzoo.engine import Recipe, best_row, top1, train
from eqzoo.engine.defaults import least_epochs, with_rules
from eqzoo.engine.processor import has_bfloat16
from eqzoo.engine.run_directory import RunDirectory

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIDES = {"p4_cnn": 28, "p4_resnet29": 32, "p4_e4net": 28, "p4m_densenet": 80}
DATA = {"eurosat": "EuroSAT", "chula_rbc12": "Chula RBC-12", "cifar10": "CIFAR-10", "rotmnist": "rotated MNIST"}
# Trained on the images of the task, so the network starts from random weights there.
SEEN = {("p4_cnn", "rotmnist"), ("p4_e4net", "rotmnist"), ("p4_resnet29", "cifar10")}
VALID, TEST, BATCH = 600, 1_000, 32
PLAIN = {"resnet18": 64, "convnext_atto": 64}  # of timm, and the side of its images

FACTORS: dict[str, dict[str, Any]] = {
    "the rules": {},
    "a third of the learning rate": {"lr_factor": 1 / 3},
    "three times the learning rate": {"lr_factor": 3.0},
    "SGD": {"optimizer": "sgd"},
    "Muon": {"optimizer": "nmuon"},
    "mean and standard deviation of the weights": {"statistics": "weights"},
    "no augmentation": {"augment": "none"},
    "affine": {"augment": "affine"},
    "affine and color": {"augment": "affine_color"},
    "missing symmetries": {"augment": "flips"},
    "no label smoothing": {"label_smoothing": 0.0},
    "average of weights 0.98": {"ema_decay": 0.98},
    "batches of 16, half the learning rate": {"batch_size": 16, "lr_factor": 0.5},
    "batches of 64": {"batch_size": 64},
    "half the steps": {"steps_factor": 0.5},
    "early stopping after 5 epochs": {"patience": 5},
}

_INTRODUCTION = """# Rules of fine-tuning

`eqzoo finetune` chooses optimizer, learning rate, schedule, augmentation and number of steps by
[rules](fine_tuning.md). Here is what speaks for them and what does not: networks trained by the rules, and with one
factor changed at a time, on a few images of each class. The numbers are accuracies in percent on at most {valid}
validation images, from {seeds}: a difference of less than {noise:.0f} points between two of them is within chance.
The last column is the accuracy on at most {test} test images, of the rules alone. Runs have {steps} steps; the rules
ask for 700 from trained weights and 1,400 from random ones.

Made by `python training/study_finetune.py --data-dir data` on {machine}, with torch {torch}.
Here are the {count} runs that have been made; `--full` makes those of all {full} factors and cells, with three
seeds."""


class Cell(NamedTuple):
    """A network, how many images of each class of which data set, and the factors that are changed."""

    data: str
    network: str
    count: int
    factors: tuple[str, ...]


_ALL = tuple(FACTORS)
_RATES = _ALL[:3]
_MAIN = (*_RATES, "SGD", "Muon", "no augmentation", "affine", "affine and color")
REDUCED = (
    Cell("eurosat", "p4_resnet29", 100, _MAIN),
    Cell("rotmnist", "p4_cnn", 100, _ALL),
    Cell("chula_rbc12", "p4_resnet29", 100, _MAIN),
    Cell("rotmnist", "p4_cnn", 20, _MAIN),
    Cell("cifar10", "p4_cnn", 100, _MAIN),
    Cell("chula_rbc12", "p4_cnn", 100, _MAIN),
    Cell("eurosat", "p4_resnet29", 20, (*_RATES, "affine")),
    Cell("chula_rbc12", "p4_e4net", 20, (*_RATES, "affine")),
    Cell("chula_rbc12", "p4m_densenet", 20, (*_RATES, "affine")),
)
FULL = tuple(Cell(data, network, count, _ALL) for data in DATA for network in SIDES for count in (20, 100, 300))


def main() -> None:
    """Trains what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/finetuning_study"), help="the folder of runs")
    parser.add_argument("--full", action="store_true", help="all cells, with three seeds")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--only", help="only the cells of this data set, or timm")
    parser.add_argument("--render", action="store_true", help="make the page anew, and train nothing")
    add_data_arguments(parser)
    args = parser.parse_args()
    if not args.render:
        until = time.monotonic() + 60 * args.minutes
        for cell in FULL if args.full else REDUCED:
            if args.only in (None, cell.data):
                run_cell(cell, args, range(3) if args.full else range(1), until)
        if args.only in (None, "timm"):
            run_plain(args, until)
        runs = [json.loads(path.read_text()) for path in sorted(args.runs.glob("*.json"))]
        table = {"machine": machine(torch.device("cpu")), "torch": torch.__version__, "runs": runs}
        write(DOCS / "finetuning_study.json", json.dumps(table, indent=1) + "\n")
    write(DOCS / "finetuning_study.md", page(json.loads((DOCS / "finetuning_study.json").read_text())))


def run_cell(cell: Cell, args: argparse.Namespace, seeds: range, until: float) -> None:
    """Trains the network of a cell by the rules and with each of its factors."""
    splits = None
    for seed in seeds:
        for factor in cell.factors:
            if "statistics" in FACTORS[factor] and not starts_from_weights(cell):
                continue
            name = f"{cell.data}_{cell.network}_{cell.count}_{factor.replace(' ', '-').replace(',', '')}_{seed}"
            if (args.runs / f"{name}.json").is_file() or time.monotonic() > until:
                continue
            splits = splits or few(cell.data, SIDES[cell.network], cell.count, args)
            result = one_run(cell, splits, factor, seed, args.runs / name)
            write(args.runs / f"{name}.json", json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)


def few(data: str, side: int, count: int, args: argparse.Namespace) -> dict[str, Split]:
    """Few training images of each class, or as many as there are; some validation images and test images."""
    whole = hold_out(read_images(data, side, data_dir=args.data_dir, download=args.download))
    found: dict[str, Split] = {}
    for name, size in (("train", None), ("valid", VALID), ("test", TEST)):
        split = whole[name]
        assert isinstance(split, Split)
        found[name] = split[torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:size]]
    few_images = per_class(found["train"], min(count, int(found["train"].labels.bincount().min())))
    assert isinstance(few_images, Split)
    return found | {"train": few_images}


def one_run(cell: Cell, splits: dict[str, Split], factor: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains a network; its validation accuracy, and by the rules its test accuracy."""
    changes = dict(FACTORS[factor])
    start = starts_from_weights(cell)
    factor_of_steps = changes.pop("steps_factor", 1)
    own = changes.pop("statistics", "images") == "images"
    rate = changes.pop("lr_factor", 1.0)
    batch = min(changes.pop("batch_size", BATCH), len(splits["train"]))
    epochs = max(2, round(factor_of_steps * least_epochs(len(splits["train"]), batch, start)))
    values = with_rules({"epochs": epochs, **changes})
    values["lr"] *= rate
    if has_bfloat16(torch.device("cpu")):
        values["precision"] = "bfloat16"
    args = {"num_classes": int(splits["train"].labels.max()) + 1, "in_chans": splits["train"].shape[0]}
    recipe = Recipe(cell.network, cell.data, batch_size=batch, seed=seed, channels_last=True, model_args=args, **values)

    def build() -> nn.Module:
        model = eqzoo.create_model(cell.network, pretrained=start, **args)
        if start:
            model.reset_classifier(args["num_classes"])
        cfg = dict(model.pretrained_cfg)
        model.pretrained_cfg = cfg | (
            statistics_of(splits["train"]) if own or len(cfg["mean"]) != args["in_chans"] else {}
        )
        return model

    return trained(recipe, build, splits, folder) | {
        "data": cell.data, "network": cell.network, "per_class": cell.count, "factor": factor, "seed": seed,
        "start": "weights" if start else "random", "lr": recipe.lr,
    }  # fmt: skip


def trained(recipe: Recipe, build: Any, splits: dict[str, Split], folder: Path) -> dict[str, Any]:
    """Trains a network and removes its folder; the accuracies in percent, that on test images shown for few runs."""
    began = time.process_time()
    model = train(recipe, build, {name: splits[name] for name in ("train", "valid")}, folder, "cpu", 0).eval()
    seconds = time.process_time() - began
    rows = RunDirectory(folder).rows()
    best = best_row(rows)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return {
        "valid": round(best["valid_accuracy"], 2), "valid_loss": round(best["valid_loss"], 4),
        "test": round(accuracy(model, splits["test"]), 2), "images": len(splits["train"]),
        "valid_images": len(splits["valid"]),
        "epochs": recipe.epochs, "steps": recipe.epochs * (len(splits["train"]) // recipe.batch_size),
        "seconds": round(seconds, 1),
    }  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, split: AnySplit) -> float:
    """The accuracy on a split, in percent."""
    return top1(torch.cat([model(x).argmax(1) for x in inputs(model, split, 50)]), split.labels)


def starts_from_weights(cell: Cell) -> bool:
    """Whether there are trained weights of the network that have not seen the images of the cell."""
    return (cell.network, cell.data) not in SEEN and bool(timm.get_pretrained_cfg(cell.network).has_weights)


def run_plain(args: argparse.Namespace, until: float) -> None:
    """Trains networks of timm on EuroSAT from random weights, rotated, in the time of p4_resnet29 by the rules."""
    cell = next(cell for cell in REDUCED if (cell.data, cell.network) == ("eurosat", "p4_resnet29"))
    ours = args.runs / f"{cell.data}_{cell.network}_{cell.count}_the-rules_0.json"
    if not ours.is_file():
        return
    seconds = json.loads(ours.read_text())["seconds"]
    for network, side in PLAIN.items():
        for rate in (1e-3, 4e-3):
            name = f"timm_{network}_{rate:g}"
            if (args.runs / f"{name}.json").is_file() or time.monotonic() > until:
                continue
            splits = few(cell.data, side, cell.count, args)

            def build(network: str = network, splits: dict[str, Split] = splits) -> nn.Module:
                model = timm.create_model(network, num_classes=int(splits["train"].labels.max()) + 1)
                model.pretrained_cfg = dict(model.pretrained_cfg) | statistics_of(splits["train"])
                return model

            values = with_rules({"epochs": 1, "lr": rate, "augment": "affine"}) | {"warmup_epochs": 0}
            recipe = Recipe(f"timm:{network}", cell.data, batch_size=BATCH, channels_last=True, **values)
            if has_bfloat16(torch.device("cpu")):
                recipe = Recipe(**{**recipe.__dict__, "precision": "bfloat16"})
            trial = trained(recipe, build, splits, args.runs / f"{name}_trial")
            epochs = max(1, int(seconds / trial["seconds"]))
            recipe = Recipe(**{**recipe.__dict__, "epochs": epochs, "warmup_epochs": 0.15 * epochs})
            result = trained(recipe, build, splits, args.runs / name)
            result |= {"data": cell.data, "network": f"timm {network}", "per_class": cell.count, "lr": rate}
            result |= {"factor": "timm", "seed": 0, "start": "random"}
            write(args.runs / f"{name}.json", json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)


def write(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic(path, lambda temporary: temporary.write_text(text))


def page(table: dict[str, Any]) -> str:
    """The study as a page in Markdown."""
    runs = table["runs"]
    seeds = len({run["seed"] for run in runs})
    full = sum(len(cell.factors) for cell in FULL)
    valid = max(run.get("valid_images", VALID) for run in runs)
    noise = 2 * math.sqrt(2 * 0.15 * 0.85 / valid) * 100
    words = {"seeds": f"{seeds} seed{'s' * (seeds > 1)}", "full": full, "noise": noise, "valid": valid, "test": TEST}
    words |= {
        "count": len(runs),
        "steps": f"{min(run['steps'] for run in runs)} to {max(run['steps'] for run in runs)}",
    }
    parts = [_INTRODUCTION.format(**table, **words)]
    cells = list(
        dict.fromkeys((run["data"], run["network"], run["per_class"]) for run in runs if run["factor"] != "timm")
    )
    for data, network, count in cells:
        mine = [run for run in runs if (run["data"], run["network"], run["per_class"]) == (data, network, count)]
        parts += ["", *_section(data, network, count, mine)]
    plain = [run for run in runs if run["factor"] == "timm"]
    if plain:
        parts += ["", *_against(runs, plain)]
    return "\n".join(parts) + "\n"


def _section(data: str, network: str, count: int, runs: list[dict[str, Any]]) -> Iterator[str]:
    first = runs[0]
    start = "trained weights" if first["start"] == "weights" else "random weights"
    yield f"## {network} on {DATA[data]}, {count} images a class, from {start}"
    yield ""
    yield "| | validation | difference | steps | core-seconds | test |"
    yield "|---|---|---|---|---|---|"
    by_factor = {factor: [run for run in runs if run["factor"] == factor] for factor in FACTORS}
    rules = statistics.mean(run["valid"] for run in by_factor["the rules"]) if by_factor["the rules"] else math.nan
    for factor, mine in by_factor.items():
        if mine:
            valid = statistics.mean(run["valid"] for run in mine)
            test = f"{statistics.mean(run['test'] for run in mine):.1f}" if factor == "the rules" else ""
            seconds = statistics.mean(run["seconds"] for run in mine)
            yield f"| {factor} | {valid:.1f} | {valid - rules:+.1f} | {mine[0]['steps']} | {seconds:.0f} | {test} |"


def _against(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> Iterator[str]:
    count = plain[0]["per_class"]
    ours = [
        run
        for run in runs
        if (run["data"], run["network"], run["per_class"], run["factor"])
        == ("eurosat", "p4_resnet29", count, "the rules")
    ]
    best = {run["network"]: run for run in sorted(plain, key=lambda run: run["valid"])}
    yield f"## In the same time: networks of timm on EuroSAT, {count} images a class"
    yield ""
    yield "From random weights, on images of 64 x 64 pixels, augmented by `affine` (rotations by any angle), the better"
    yield "of two learning rates by validation accuracy. `p4_resnet29` starts from its weights of CIFAR-10."
    yield ""
    yield "| network | learning rate | epochs | core-seconds | validation | test |"
    yield "|---|---|---|---|---|---|"
    for run in [*ours, *best.values()]:
        yield (
            f"| {run['network']} | {run['lr']:g} | {run['epochs']} | {run['seconds']:.0f} | {run['valid']:.1f} "
            f"| {run['test']:.1f} |"
        )


if __name__ == "__main__":
    main()
