"""Compares networks on real images without a canonical orientation: `python training/real_images.py --weights FILE`.

A row is a network on a data set: fine-tuned from its best start for some minutes of one core, and evaluated once on
test images, also under all 8 rotations and reflections, and with the mean over these. The side of the images is the
one that is best on validation images after the fewest minutes with the fewest images; other rows keep it. Further
seeds have as many epochs as the first, on any machine. Rows that `docs/benchmarks/real_sets.json` has are kept, so that
a run goes on where another ended; `--only TEXT ...` makes those whose name has one of the texts. FILE holds the
ImageNet weights of EfficientNet-Lite0 in timm's names.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tables import DATA_TITLES, RATE, mean_of, real_sets
from torch import nn

from eqzoo import multiply_adds
from eqzoo._common import write_json
from eqzoo.cards import training_results
from eqzoo.data import Split, load_splits
from eqzoo.data.splits import part_of
from eqzoo.engine.speed import AUTOMATIC
from eqzoo.evaluation import Predictor, sample
from eqzoo.evaluation.metrics import scores
from eqzoo.finetuning.plan import Request, make_plan, with_speed
from eqzoo.finetuning.rules import fine_tuning_recipe
from eqzoo.finetuning.run import train_plan
from eqzoo.groups import P4M

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "real_sets.json"
FIGURE = PAGE.with_suffix(".png")
MOST_IMAGES = {"valid": 500, "test": 1_000}  # drawn with a fixed seed
INVARIANT_IMAGES = 100  # whose copies an invariant network predicts
LAND, CELLS = {"eurosat", "ucmerced"}, {"pbc", "lc25000", "chula_rbc12"}
LITE0 = "tf_efficientnet_lite0"
AFFINE = {"recipe": {"augment": "affine"}}
# Data sets whose weights a network starts from: the first that is not the one it is trained on, else random weights.
Starts = dict[str, tuple[str, ...]]
OF_29: Starts = {"land": ("eurosat", "cifar10"), "cells": ("chula_rbc12", "cifar10"), "other": ("cifar10",)}
MIT: Starts = {"land": ("eurosat",), "cells": ("chula_rbc12", "eurosat"), "other": ("eurosat",)}
# Of each network: its start, the options of the fine-tuning, and the sides that are tried.
NETWORKS: dict[str, tuple[Starts | str, dict[str, Any], tuple[int, ...]]] = {
    "p4m_resnet_s": ("p4m_resnet_s.tiny_imagenet", {}, (64, 96)),
    "p4m_resnet_s, MIT": (MIT, {}, (64, 96)),
    "p4m_resnet_m": ("p4m_resnet_m.tiny_imagenet", {}, (64, 96)),
    "p4m_resnet_m, random weights": ("p4m_resnet_m", {}, (64, 96)),
    "p4_resnet_m": ("p4_resnet_m.tiny_imagenet", {}, (64, 96)),
    "z2_resnet_m": ("z2_resnet_m.tiny_imagenet", AFFINE, (64, 96)),
    "z2_resnet_m, random weights": ("z2_resnet_m", AFFINE, (64, 96)),
    "p4_resnet29": (OF_29, {}, (32, 64)),
    "p4m_resnet29": (OF_29, {}, (32, 64)),
    "z2_resnet29": (OF_29, AFFINE, (32, 64)),
    "EfficientNet-Lite0": (LITE0, AFFINE, (96, 128)),
    "EfficientNet-Lite0, random weights": (LITE0, AFFINE | {"weights": None, "pretrained": False}, (96, 128)),
    "EfficientNet-Lite0, OrbitNet": (LITE0, {"invariant": "p4m"}, (96, 128)),
    "EfficientNet-Lite0, canonical copy": (LITE0, {"invariant": "p4m", "copies": 1}, (96, 128)),
    "EfficientNet-Lite0, frozen": (LITE0, {"invariant": "p4m", "freeze": True, "minutes": None}, (128,)),
}


def main() -> None:
    """Parses, and makes rows or, in a process of its own, a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="of EfficientNet-Lite0")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="the folder of data sets (data)")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1.0], help="of training (1)")
    parser.add_argument("--images", type=int, nargs="+", default=[100], help="training images a class (100)")
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds (1)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="rows whose name has one of these texts"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(row(*json.loads(args.row), args.data_dir, args.weights, args.cache)))  # type: ignore[call-arg]
        return
    with tempfile.TemporaryDirectory() as cache:
        make_rows(args, Path(cache))


def make_rows(args: argparse.Namespace, cache: Path) -> None:
    """Makes the rows that are missing, each in a process of its own."""
    found = _rows()
    keys = [
        (data, network, minutes, images, seed)
        for minutes in args.minutes
        for images in args.images
        for seed in range(args.seeds)
        for data in DATA_TITLES
        for network in NETWORKS
    ]
    for key in keys:
        name = "{}/{}/{:g} minutes/{} a class/seed {}".format(*key)
        if name in found or not any(text in name for text in args.only):
            continue
        first, shortest = (
            found.get("{}/{}/{:g} minutes/{} a class/seed 0".format(*key[:2], *budget))
            for budget in (key[2:4], (min(args.minutes), min(args.images)))
        )
        same = first or shortest
        sides = (same["side"],) if same else NETWORKS[key[1]][2]
        epochs = first["epochs"] if first else None
        command = [sys.executable, __file__, "--data-dir", args.data_dir, "--weights", args.weights, "--cache", cache]
        command += ["--row", json.dumps([*key, sides, epochs])]
        ran = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
        # Other rows may have been made meanwhile by another process.
        found = _rows() | {name: json.loads(ran.stdout.splitlines()[-1])}
        write_json(PAGE, {"rows": found})
        print(name, f"{found[name]['accuracy']:.1f}", flush=True)
    draw(min(args.minutes))


def _rows() -> dict[str, Any]:
    return json.loads(PAGE.read_text(encoding="utf-8"))["rows"] if PAGE.is_file() else {}


def draw(minutes: float) -> None:
    """Draws accuracy over the cost of a prediction, a panel for each data set."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    found = real_sets(PAGE.parents[2], minutes)
    drawn = [network for network in found if any(RATE in rows[0] for rows in found[network].values())]
    plain = dict.fromkeys(network.removesuffix(", TTA") for network in drawn)
    colors = {network: colormaps["tab20"](index) for index, network in enumerate(plain)}
    ticks = (1, 2, 5, 10, 20, 50)  # milliseconds
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for axes, (data, title) in zip(figure.subplots(2, 3).flat, DATA_TITLES.items(), strict=True):
        for network, sets in found.items():
            if data in sets and RATE in sets[data][0]:
                cost = 1000 / sets[data][0][RATE]
                color = colors[network.removesuffix(", TTA")]
                fill = "none" if network.endswith("TTA") else "full"
                marker = "o" if "_" in network else "^"
                axes.plot(cost, mean_of(sets[data], "accuracy"), marker, color=color, fillstyle=fill, label=network)
        axes.set(title=title, xscale="log", xlabel="ms a prediction, one core")
        axes.set_xticks(ticks, labels=list(map(str, ticks)))
        axes.minorticks_off()
    figure.supylabel(f"accuracy in percent after {minutes:g} min of training")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(FIGURE, dpi=110)


def row(
    data: str,
    network: str,
    minutes: float,
    images: int,
    seed: int,
    sides: Sequence[int],
    epochs: int | None,
    folder: Path,
    weights: Path,
    cache: Path,
) -> dict[str, Any]:
    """The results of a network on a data set, at the side that is best on validation images.

    Without a number of epochs these are as many as fit into the minutes.
    """
    torch.set_num_threads(1)
    name, options = start_of(network, data), NETWORKS[network][1]
    settings: dict[str, Any] = {"minutes": minutes, "device": "cpu", "workers": 0}
    settings |= {"weights": weights} if name == LITE0 else {"pretrained": "." in name}
    settings |= options | {"recipe": {"seed": seed} | options.get("recipe", {})}
    trained = []
    for side in sides:
        splits = read(data, folder, side, images, cache)
        test = splits.pop("test")
        with tempfile.TemporaryDirectory() as output:
            trained.append((*tuned(Request(name, splits, Path(output) / "run", size=side, **settings), epochs), test))
    model, found, test = max(trained, key=lambda each: each[1]["valid_accuracy"])
    return found | evaluated(model, test)


def start_of(network: str, data: str) -> str:
    """The weights that a network starts from on a data set, which are of other images; without any, its own name."""
    start = NETWORKS[network][0]
    if isinstance(start, str):
        return start
    kind = "land" if data in LAND else "cells" if data in CELLS else "other"
    return ".".join([network.partition(",")[0], *[tag for tag in start[kind] if tag != data][:1]])


def tuned(request: Request, epochs: int | None) -> tuple[nn.Module, dict[str, Any]]:
    """A fine-tuned network and its facts. Minutes are of processor time, which other work does not change."""
    began = time.process_time()
    plan = make_plan(request)
    with plan.directory.locked():
        plan = with_speed(plan, {}, time.process_time)
        if epochs:
            measured = {key: getattr(plan.recipe, key) for key in AUTOMATIC} | {"epochs": epochs}
            plan = replace(plan, recipe=fine_tuning_recipe(plan, measured))
        model = train_plan(plan)
    found = training_results(plan.directory.rows(), model)
    return model, {
        "start": plan.settings["start"],
        "epochs": found["epochs"],
        "valid_accuracy": found["valid_accuracy"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "multiply_adds": multiply_adds(model, Predictor.of(model).input_size),
        "side": plan.side,
        "cpu_minutes": round((time.process_time() - began) / 60, 2),
    }


def read(data: str, folder: Path, side: int, images: int, cache: Path) -> dict[str, Split]:
    """The splits with at most so many training images a class and fewer others, gray ones in three channels.

    They are kept in ``cache`` for the next row.
    """
    path = cache / f"{data}_{side}_{images}.pt"
    if not path.is_file():
        splits = load_splits(data, folder, input_size=(3, side, side))
        kept = {name: sample(splits[name], most) for name, most in MOST_IMAGES.items()}
        order = torch.randperm(len(splits["train"]), generator=torch.Generator().manual_seed(0))
        labels = splits["train"].labels[order]
        first = [order[labels == label][:images] for label in labels.unique()]
        kept["train"] = part_of(splits["train"], torch.cat(first))
        torch.save({name: vars(split) for name, split in kept.items()}, path)
    found = {name: Split(**fields) for name, fields in torch.load(path, weights_only=True).items()}
    return {name: replace(split, images=split.images.expand(-1, 3, -1, -1)) for name, split in found.items()}


def evaluated(model: nn.Module, test: Split) -> dict[str, Any]:
    """Metrics of single predictions, and of means over the 8 rotated and reflected copies of each image.

    A network that is invariant under all 8 predicts them for some images only.
    """
    predictor = Predictor.of(model)
    began = time.process_time()
    single = predictor.logits(test)
    rate = len(test) / (time.process_time() - began)
    invariant = predictor.group.order == P4M.order
    copies = predictor.copies_logits(sample(test, INVARIANT_IMAGES) if invariant else test, P4M)
    classes = copies.argmax(2)
    averaged = single if invariant else copies.double().softmax(2).mean(0)
    found = [scores(test.labels, each.argmax(1), test.classes) for each in (single, averaged)]
    return {
        "accuracy": found[0]["accuracy"],
        "accuracy_interval": found[0]["accuracy_interval"],
        "macro_f1": found[0]["macro_f1"],
        "accuracy_averaged": found[1]["accuracy"],
        "macro_f1_averaged": found[1]["macro_f1"],
        "same_class": round(100 * (classes == classes[0]).all(0).double().mean().item(), 2),
        RATE: round(rate, 1),
        "test_images": len(test),
    }


if __name__ == "__main__":
    main()
