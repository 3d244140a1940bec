"""What to fine-tune with: `python training/study_finetune.py --data-dir DATA`.

Trains networks on 20, 100 or 300 images of each class of EuroSAT, Chula RBC-12, CIFAR-10 and rotated MNIST, by the
rules of `eqzoo finetune` and with one factor changed at a time, and on EuroSAT two networks of timm in the same time.
The rules are compared on validation images; accuracies on test images are shown of the rules and of timm's networks
alone. Each run adds its row to finetuning_study.json when it is finished and is not repeated, so the same command
resumes the study.

The grid is reduced to what takes about three hours on one core; `--full` runs all cells with three seeds, `--render`
only writes the page.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from common import (
    DOCS,
    add_data_arguments,
    add_run,
    find_run,
    made_elsewhere,
    made_here,
    read_splits,
    read_table,
    weights_sha256,
    write_page,
)
from torch import nn

from eqzoo.analysis.sizes import weightless
from eqzoo.data import Split, per_class
from eqzoo.engine import Recipe, best_row, top1, train
from eqzoo.engine.allocator import keep_freed_memory
from eqzoo.engine.comparison import baseline_network, baseline_recipe
from eqzoo.engine.defaults import fine_tuning_recipe
from eqzoo.engine.finetuning import initial_network
from eqzoo.engine.finetuning_images import image_statistics
from eqzoo.engine.metrics import predict_split
from eqzoo.engine.processor import has_bfloat16
from eqzoo.engine.run import RunDirectory
from eqzoo.engine.speed import measure
from eqzoo.models.resolve import ModelSource, resolve

NAME = "finetuning_study"
SIDES = {"p4_cnn": 28, "p4_resnet29": 32, "p4_e4net": 28, "p4m_densenet": 80}
DATA = {"eurosat": "EuroSAT", "chula_rbc12": "Chula RBC-12", "cifar10": "CIFAR-10", "rotmnist": "rotated MNIST"}
# Trained on the images of the task, so the network starts from random weights there.
SEEN = {("p4_cnn", "rotmnist"), ("p4_e4net", "rotmnist"), ("p4_resnet29", "cifar10")}
# Images: validation chooses the epoch, as for a user, the choice compares factors, the test is read for the rules.
SIZES = {"valid": 300, "choice": 2_000, "test": 2_000}
PLAIN = {"resnet18": 64, "convnext_atto": 64}  # of timm, and the side of its images
PLAIN_RATES = (1e-3, 4e-3)

FACTORS: dict[str, dict[str, Any]] = {
    "the rules": {},
    "a third of the learning rate": {"lr_factor": 1 / 3},
    "three times the learning rate": {"lr_factor": 3.0},
    "SGD": {"optimizer": "sgd"},
    "Muon": {"optimizer": "nmuon"},
    "no augmentation": {"augment": "none"},
    "missing symmetries": {"augment": "missing"},
    "shifts": {"augment": "shifts"},
    "affine": {"augment": "affine"},
    "affine and color": {"augment": "affine_color"},
    "random weights": {"pretrained": False},
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
factor changed at a time, on a few images of each class.

The epoch is chosen on at most {valid} validation images, as by a user. The factors are compared on other images of the
validation split, at most {choice:,}: *accuracy*, in percent, from {seeds}. By the number of these images alone,
differences of less than {noise:.1f} points at an accuracy of 95 %, and {width:.1f} at 85 %, are within chance. The last
column is the accuracy on at most {test:,} test images, of the rules alone; nothing was chosen by it. The augmentation
of the rules was chosen here: before, it was `shifts`, which then went up to 4 pixels and left black stripes.

Made by `python training/study_finetune.py --data-dir data` on {machine}, with torch {torch}.{elsewhere}{starts}
Here are the {count} runs that have been made; `--full` makes those of all {full} combinations, with three
seeds."""

# Rows without "start_sha256" are older than the present weights of these networks.
_FIRST_WEIGHTS = {
    "p4_resnet29": "`p4_resnet29` started from its first weights of CIFAR-10, of the recipe `p4_resnet29.cifar10_first`"
    "\n(8.15 % test error).",
    "p4_cnn": "`p4_cnn` started from earlier weights of digits, of 150 epochs without rotations\n(2.23 % test error).",
}
_ELSEWHERE = " Made on {machine}, where their core-seconds are measured: {runs} of the {count} runs{torch}."


class Cell(NamedTuple):
    """A network, how many images of each class of which data set, and the factors that are changed."""

    data: str
    network: str
    count: int
    factors: tuple[str, ...]

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the rows of its runs, together with the factor and the seed."""
        return {"data": self.data, "network": self.network, "per_class": self.count}


AGAINST = ("eurosat", "p4_resnet29", 100)  # the cell in whose time timm's networks are trained
_ALL = tuple(FACTORS)
_RATES = _ALL[:3]
_MAIN = (*_RATES, "SGD", "Muon", "no augmentation", "shifts", "affine", "affine and color")
REDUCED = (
    Cell("chula_rbc12", "p4_cnn", 100, _MAIN),
    Cell("rotmnist", "p4_cnn", 100, _MAIN),
    Cell("eurosat", "p4_resnet29", 100, _MAIN),
    Cell("cifar10", "p4_cnn", 100, _MAIN),
    Cell("chula_rbc12", "p4_cnn", 20, _MAIN),
    Cell("chula_rbc12", "p4_resnet29", 100, (*_RATES, "SGD", "Muon", "affine", "affine and color")),
    Cell("eurosat", "p4_resnet29", 20, (*_RATES, "affine")),
    Cell("chula_rbc12", "p4_e4net", 20, (*_RATES, "affine")),
    Cell("chula_rbc12", "p4_cnn", 100, _ALL),  # what the first cell left out
    Cell("chula_rbc12", "p4m_densenet", 20, (*_RATES, "no augmentation")),
)
FULL = tuple(Cell(data, network, count, _ALL) for data in DATA for network in SIDES for count in (20, 100, 300))


def main() -> None:
    """Trains what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all cells, with three seeds")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--only", choices=[*DATA, "timm"], help="only the cells of this data set, or timm's networks")
    parser.add_argument("--output", type=Path, default=DOCS, help="the folder of JSON and page (default: docs)")
    parser.add_argument("--render", action="store_true", help="write the page anew, and train nothing")
    add_data_arguments(parser)
    args = parser.parse_args()
    if not args.render:
        torch.set_num_threads(1)
        keep_freed_memory()
        study(args)
    write_page(args.output, NAME, page)


def study(args: argparse.Namespace) -> None:
    """Makes the runs that have no row yet."""
    until = time.monotonic() + 60 * args.minutes
    for cell in FULL if args.full else REDUCED:
        if args.only in (None, cell.data):
            run_cell(cell, args, range(3) if args.full else range(1), until)
        if args.only in (None, "timm") and (cell.data, cell.network, cell.count) == AGAINST:
            run_plain(cell, args, until)


def run_cell(cell: Cell, args: argparse.Namespace, seeds: range, until: float) -> None:
    """Trains the network of a cell by the rules and with each of its factors."""
    splits = None
    for seed in seeds:
        for factor in cell.factors:
            key = cell.key | {"factor": factor, "seed": seed}
            if not find_run(table_of(args), **key) and time.monotonic() < until:
                splits = splits or few(cell.data, SIDES[cell.network], cell.count, args)
                record(args, key | one_run(cell, splits, factor, seed))


def table_of(args: argparse.Namespace) -> dict[str, Any]:
    """The rows so far, and where they were made."""
    return read_table(args.output / f"{NAME}.json")


def record(args: argparse.Namespace, run: dict[str, Any]) -> None:
    """Adds the row of a run that is finished."""
    add_run(args.output / f"{NAME}.json", table_of(args), run)
    write_page(args.output, NAME, page)


def few(data: str, side: int, count: int, args: argparse.Namespace) -> dict[str, Split]:
    """The images of a cell: few of each class for training, or as many as there are, and those of `SIZES`."""
    whole = read_splits(data, args, input_size=(3, side, side))
    found: dict[str, Split] = {}
    for name in ("train", "valid", "test"):
        split = whole[name]
        assert isinstance(split, Split)
        found[name] = split[torch.randperm(len(split), generator=torch.Generator().manual_seed(0))]
    few_images = per_class(found["train"], min(count, int(found["train"].labels.bincount().min())))
    assert isinstance(few_images, Split)
    valid, size = found["valid"], SIZES["valid"]
    parts = {
        "valid": valid[:size],
        "choice": valid[size : size + SIZES["choice"]],
        "test": found["test"][: SIZES["test"]],
    }
    return {"train": few_images, **parts}


def one_run(cell: Cell, splits: dict[str, Split], factor: str, seed: int) -> dict[str, Any]:
    """Trains the network of a cell as `eqzoo finetune` does, but for the factor."""
    source, given = resolve(cell.network), dict(FACTORS[factor])
    start = given.pop("pretrained", True) and starts_from_weights(cell)
    settings = settings_of(source, splits["train"], start)
    fixed = {"precision": "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32", "channels_last": True}
    steps, rate = given.pop("steps_factor", None), given.pop("lr_factor", None)

    def planned(**more: Any) -> Recipe:
        return fine_tuning_recipe(
            weightless(source),
            cell.data,
            splits,
            fixed | given | {"seed": seed} | more,
            model_args=source.model_args,
            freeze=(),
            balance=False,
            settings=settings,
        )

    if rate is not None:
        given["lr"] = planned().lr * rate
    if steps is not None:
        given["epochs"] = max(2, round(steps * planned().epochs))
    recipe = planned()
    found = trained(recipe, lambda: initial_network(source, recipe.model_args, settings), splits)
    if factor != "the rules":
        del found["test"]
    return found | {"lr": recipe.lr} | (weights_of(cell.network) if start else {"start": "random"})


def weights_of(network: str) -> dict[str, str]:
    """The weights that a network's name without a tag stands for: their checkpoint and, as it may get others, hash."""
    cfg = timm.get_pretrained_cfg(network)
    checkpoint = f"{cfg.architecture}.{cfg.tag}"
    return {"start": "weights", "weights": checkpoint, "start_sha256": weights_sha256(checkpoint)}


def settings_of(source: ModelSource, train_split: Split, start: bool) -> dict[str, Any]:
    """What a fine-tuning knows of the weights and the images."""
    mean, std = image_statistics(weightless(source), train_split, started=start)
    return {
        "start": source.name if start else None, "input_size": list(train_split.shape), "mean": mean, "std": std,
        "label_names": list(train_split.classes or map(str, range(int(train_split.labels.max()) + 1))),
    }  # fmt: skip


def trained(recipe: Recipe, build: Callable[[], nn.Module], splits: dict[str, Split]) -> dict[str, Any]:
    """Trains a network and evaluates it: accuracies in percent."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.process_time()
        model = train(recipe, build, {part: splits[part] for part in ("train", "valid")}, folder, "cpu", 0).eval()
        seconds = time.process_time() - began
        best = best_row(RunDirectory(folder).rows())
    sizes = {f"{name}_images": len(splits[name]) for name in ("train", *SIZES)}
    return sizes | {
        "valid": round(best["valid_accuracy"], 2), "epoch": best["epoch"], "epochs": recipe.epochs,
        "steps": recipe.epochs * (len(splits["train"]) // recipe.batch_size), "seconds": round(seconds, 1),
        **{name: accuracy(model, splits[name]) for name in ("choice", "test")},
    }  # fmt: skip


def accuracy(model: nn.Module, split: Split) -> float:
    """The accuracy in percent."""
    return round(top1(predict_split(model, split), split.labels), 2)


def starts_from_weights(cell: Cell) -> bool:
    """Whether there are trained weights of the network that have not seen the images of the cell."""
    return (cell.network, cell.data) not in SEEN and bool(timm.get_pretrained_cfg(cell.network).has_weights)


def run_plain(cell: Cell, args: argparse.Namespace, until: float) -> None:
    """Trains networks of timm from random weights as `--against` does, in the time of a cell by the rules."""
    table = table_of(args)
    ours = find_run(table, **cell.key, factor="the rules", seed=0)
    if ours is None:
        return
    own, seconds, there = resolve(cell.network), ours["seconds"], ours.get("machine", table["machine"])
    for network, side in PLAIN.items():
        for rate in PLAIN_RATES:
            key = cell.key | {"network": f"timm {network}", "factor": "timm", "lr": rate, "seed": 0}
            if find_run(table, **key) or time.monotonic() > until:
                continue
            if there != made_here()["machine"]:
                raise SystemExit(
                    f"{args.output / NAME}.json has the time of {cell.network} on {there}, and networks of timm are "
                    "trained for that time on the same machine; name another --output"
                )
            splits = few(cell.data, side, cell.count, args)
            settings = settings_of(own, splits["train"], False)

            def build(network: str = network, settings: dict[str, Any] = settings) -> nn.Module:
                return baseline_network(network, settings)

            fine_tuning = Recipe(
                cell.network,
                cell.data,
                epochs=1,
                batch_size=min(32, len(splits["train"])),
                label_smoothing=0.1,
                valid_size=0,
            )
            whole = baseline_recipe(network, fine_tuning, epochs=1, lr=rate, augment="affine")
            speed = measure(whole, build, splits, {}, "cpu", seconds, time.process_time)
            formats = {"precision": speed.precision, "channels_last": speed.channels_last}
            epochs = speed.epochs_within(seconds, splits)
            recipe = baseline_recipe(network, fine_tuning, epochs=epochs, lr=rate, augment="affine", **formats)
            record(args, key | trained(recipe, build, splits) | {"start": "random"})


def page(table: dict[str, Any]) -> str:
    """The study as a page in Markdown."""
    runs = table["runs"]
    seeds = len({run["seed"] for run in runs})
    words: dict[str, Any] = {f"{name}": max(run[f"{name}_images"] for run in runs) for name in SIZES}
    words |= {
        "seeds": f"{seeds} seed{'s' * (seeds > 1)}",
        "full": sum(len(cell.factors) for cell in FULL),
        "noise": chance(words["choice"], 0.95),
        "width": chance(words["choice"], 0.85),
        "count": len(runs),
        "elsewhere": made_elsewhere(table, _ELSEWHERE),
        "starts": "".join(
            f"\n{said}"
            for network, said in _FIRST_WEIGHTS.items()
            if any(_has_first_start(network, run) for run in runs)
        ),
    }
    parts = [_INTRODUCTION.format(**table, **words)]
    rules = [run for run in runs if run["factor"] != "timm"]
    order = list(dict.fromkeys((cell.data, cell.network, cell.count) for cell in (*REDUCED, *FULL)))
    cells = sorted({(run["data"], run["network"], run["per_class"]) for run in rules}, key=order.index)
    parts += ["", "## Against the best", "", *_summary(rules, cells)]
    for data, network, count in cells:
        mine = [run for run in rules if (run["data"], run["network"], run["per_class"]) == (data, network, count)]
        parts += ["", *_section(data, network, count, mine)]
    plain = [run for run in runs if run["factor"] == "timm"]
    if plain:
        parts += ["", *_against(rules, plain)]
    return "\n".join(parts) + "\n"


def _has_first_start(network: str, run: dict[str, Any]) -> bool:
    return run["network"] == network and run["start"] == "weights" and "start_sha256" not in run


def chance(images: int, accuracy: float) -> float:
    """Two standard deviations of the difference of two accuracies, in percentage points, by the number of images."""
    return 200 * math.sqrt(2 * accuracy * (1 - accuracy) / images)


def accuracy_of(runs: list[dict[str, Any]], factor: str) -> float:
    """The mean accuracy of a factor over its seeds; NaN without runs."""
    values = [run["choice"] for run in runs if run["factor"] == factor]
    return statistics.mean(values) if values else math.nan


def _summary(runs: list[dict[str, Any]], cells: list[tuple[str, str, int]]) -> Iterator[str]:
    yield "The rules beside the best of the factors that were run:"
    yield ""
    yield "| network and images | factors | the rules | best | difference |"
    yield "|---|---|---|---|---|"
    for data, network, count in cells:
        mine = [run for run in runs if (run["data"], run["network"], run["per_class"]) == (data, network, count)]
        factors = [factor for factor in FACTORS if any(run["factor"] == factor for run in mine)]
        best = max(factors, key=lambda factor: accuracy_of(mine, factor))
        rules, most = accuracy_of(mine, "the rules"), accuracy_of(mine, best)
        if math.isnan(rules):  # the study was stopped before
            continue
        title = f"{network}, {DATA[data]}, {count} a class"
        yield f"| {title} | {len(factors)} | {rules:.1f} | {most:.1f}, {best} | {rules - most:+.1f} |"


def _section(data: str, network: str, count: int, runs: list[dict[str, Any]]) -> Iterator[str]:
    start = "trained weights" if any(run["start"] == "weights" for run in runs) else "random weights"
    yield f"## {network} on {DATA[data]}, {count} images a class, from {start}"
    yield ""
    yield "| | accuracy | difference | learning rate | steps | core-seconds | test |"
    yield "|---|---|---|---|---|---|---|"
    rules = accuracy_of(runs, "the rules")
    for factor in FACTORS:
        if mine := [run for run in runs if run["factor"] == factor]:
            found = accuracy_of(runs, factor)
            test = f"{statistics.mean(run['test'] for run in mine):.1f}" if factor == "the rules" else ""
            seconds = statistics.mean(run["seconds"] for run in mine)
            difference = "" if math.isnan(rules) else f"{found - rules:+.1f}"
            cells = [factor, f"{found:.1f}", difference, f"{mine[0]['lr']:.2g}", f"{mine[0]['steps']:,}"]
            yield f"| {' | '.join([*cells, f'{seconds:.0f}', test])} |"


def _against(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> Iterator[str]:
    data, network, count = AGAINST
    side = SIDES[network]
    ours = [
        run
        for run in runs
        if (run["data"], run["network"], run["per_class"]) == AGAINST
        and run["factor"] in ("the rules", "random weights")
    ]
    yield f"## In the same time: networks of timm on {DATA[data]}, {count} images a class"
    yield ""
    yield "Networks of timm start from random weights, on images of 64 x 64 pixels, augmented by `affine` (rotations by"
    yield f"any angle, reflections, shifts), with two learning rates. `{network}` has images of {side} x {side} pixels."
    yield "Where it starts from trained weights, these are part of the difference; those of timm were not tried."
    yield ""
    yield "| network | start | learning rate | epochs | core-seconds | accuracy | test |"
    yield "|---|---|---|---|---|---|---|"
    for run in [*ours, *plain]:
        start = "trained weights" if run["start"] == "weights" else "random weights"
        test = f"{run['test']:.1f}" if "test" in run else ""
        cells = [run["network"], start, f"{run['lr']:g}", str(run["epochs"]), f"{run['seconds']:.0f}"]
        yield f"| {' | '.join([*cells, format(run['choice'], '.1f'), test])} |"


if __name__ == "__main__":
    main()
