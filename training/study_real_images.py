"""Accuracy from few to all images of land and cells: `python training/study_real_images.py --data-dir DATA`.

Fine-tunes p4_resnet29 and its plain twin z2_resnet29 on 1 to 100 % of the training images of EuroSAT and Chula RBC-12,
and p4m_resnet29 and z2_resnet29 too, on Chula RBC-12 from their weights of EuroSAT, for the same steps and for the same
minutes, and tests them. Each run adds its row to real_images.json when it is finished and is not repeated, so the same
command resumes the study; `--render` only writes the page and its figure.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import torch
from common import DOCS, add_data_arguments, add_run, find_run, read_splits, shuffled, step_seconds, weights_sha256
from real_images import (
    BATCH,
    CHOICE_SIZE,
    COMPARISONS,
    EPOCHS,
    NAME,
    SPREAD_BELOW,
    STEPS,
    Arm,
    Cell,
    Comparison,
    read,
    start_of,
)
from real_images_page import render
from torch import Tensor, nn

import eqzoo
from eqzoo.analysis.rotation import inputs
from eqzoo.data import Split, stratified
from eqzoo.engine import Recipe, train
from eqzoo.engine.allocator import keep_freed_memory
from eqzoo.engine.metrics import BATCH_SIZE, scores
from eqzoo.engine.speed import measure
from eqzoo.engine.state import TrainingState
from eqzoo.groups import P4M, transform

ROUNDS = 8  # timed steps of each network; the first is left out


def main() -> None:
    """Trains what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS), help="default: all")
    parser.add_argument(
        "--fractions", type=int, nargs="+", choices=list(STEPS), default=list(STEPS), metavar="PERCENT",
        help="percentages of the training images (default: 1 3 10 30 100)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2],
        help=f"below {SPREAD_BELOW} percent; the first of them from there on (default: 0 1 2)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help="another number of steps, for a trial with another --output")
    parser.add_argument("--output", type=Path, default=DOCS, help="the folder of JSON, page and figure (default: docs)")
    parser.add_argument("--render", action="store_true", help="write the page and the figure anew, and train nothing")
    add_data_arguments(parser)
    args = parser.parse_args()
    if not args.render:
        torch.set_num_threads(1)
        keep_freed_memory()
        study(args)
    render(args.output)


def study(args: argparse.Namespace) -> None:
    """Runs the cells that have no row yet."""

    @cache
    def splits(data: str) -> dict[str, Split]:
        return split_up(data, args)

    for cell in plan(args.data, args.fractions, args.seeds):
        comparison = COMPARISONS[cell.data]
        table, steps = read(args.output), args.steps or STEPS[cell.percent]
        if there := find_run(table, **cell.key):
            if there["equal_steps"] != steps:
                raise SystemExit(
                    f"{args.output / NAME}.json has runs of {there['equal_steps']} steps on {cell.percent} % of "
                    f"{cell.data}, not of {steps}; name another --output"
                )
            continue
        name, sha256 = start_here(cell)
        others = {start_of(run) for run in table["runs"] if run["data"] == cell.data} - {(name, sha256)}
        if other := dict(others).get(name):
            raise SystemExit(
                f"{args.output / NAME}.json has runs that started from other weights of {name} "
                f"(SHA-256 {other[:8]}..., here {sha256[:8]}...); name another --output"
            )
        pair = f"{cell.data}, {cell.arm.augment}"
        if pair not in table["step_seconds"]:
            table["precision"][pair], table["step_seconds"][pair] = measured(
                comparison, splits(cell.data), cell.arm.augment
            )
        if cell.arm.budget == "minutes":
            seconds = table["step_seconds"][pair]
            steps_here = round(steps * seconds[comparison.equivariant] / seconds[comparison.plain])
        else:
            steps_here = steps
        row = {
            **cell.key,
            "equal_steps": steps,
            "start_sha256": sha256,
            **one_run(cell, splits(cell.data), steps_here, table["precision"][pair]),
        }
        add_run(args.output / f"{NAME}.json", table, row)
        render(args.output)


def plan(data: list[str], fractions: list[int], seeds: list[int]) -> Iterator[Cell]:
    """All runs, small fractions first, then by seed, data set and arm."""
    for percent in sorted(fractions):
        for seed in seeds if percent < SPREAD_BELOW else seeds[:1]:
            for name in data:
                for arm in COMPARISONS[name].arms:
                    yield Cell(name, percent, seed, arm)


def split_up(data: str, args: argparse.Namespace) -> dict[str, Split]:
    """The splits of a comparison at its side, with a part of the validation images."""
    found, (name_of_set, side) = {}, COMPARISONS[data][:2]
    for name, split in read_splits(name_of_set, args, input_size=(3, side, side)).items():
        assert isinstance(split, Split)
        found[name] = split
    return found | {"valid": shuffled(found["valid"], 0, CHOICE_SIZE)}


def start_here(cell: Cell) -> tuple[str, str]:
    """The checkpoint that a run starts from, and the SHA-256 of its weights here."""
    name, _ = start_of(cell.key)
    return name, weights_sha256(name)


def build(network: str, start: str, classes: tuple[str, ...]) -> nn.Module:
    """The network with its weights of a data set and a new classifier."""
    model = eqzoo.create_model(f"{network}.{start}", pretrained=True, num_classes=len(classes))
    model.reset_classifier(len(classes))  # as many classes as the weights have would keep theirs
    return model


def recipe_of(data: str, arm: Arm, epochs: int, seed: int, precision: str = "float32") -> Recipe:
    """The recipe of the data set's checkpoints, but for its length and the warm-up."""
    return Recipe(
        arm.network, data, epochs, BATCH, "nmuon", 0.02, 1e-2, seed=seed, optimizer_args={"fallback_lr_scale": 0.3},
        label_smoothing=0.1, augment=arm.augment, ema_decay=0.99, channels_last=True, precision=precision,
    )  # fmt: skip


def measured(comparison: Comparison, splits: dict[str, Split], augment: str) -> tuple[dict[str, str], dict[str, float]]:
    """The faster number format of each network, and the seconds of processor time that a step takes in it."""
    split = splits["train"][:BATCH]
    accelerator = accelerate.Accelerator(cpu=True)
    precision, states = {}, {}
    for network in (comparison.equivariant, comparison.plain):
        recipe = recipe_of("timing", Arm(network, augment, "steps"), 1, 0)

        def made(network: str = network) -> nn.Module:
            return build(network, comparison.start, split.classes)

        # 100: the seconds of a run, enough for all formats to be timed.
        speed = measure(recipe, made, {"train": split}, {"channels_last": True}, "cpu", 100, time.process_time)
        precision[network] = speed.precision
        states[network] = TrainingState(
            replace(recipe, precision=speed.precision), made, {"train": split}, accelerator, 0
        )
    return precision, step_seconds(states, ROUNDS)


def one_run(cell: Cell, splits: dict[str, Split], steps: int, precision: dict[str, str]) -> dict[str, Any]:
    """Trains and tests a network; ``precision`` has the number format of each."""
    images = part_of(splits["train"], cell.percent, cell.seed)
    # An epoch is a part of the run after which the network is validated; it repeats the images if they are fewer.
    epochs = max(1, min(EPOCHS, steps * BATCH // len(images)))
    count = steps // epochs * BATCH
    index = torch.cat([shuffle(len(images), cell.seed, turn) for turn in range(-(-count // len(images)))])[:count]
    comparison = COMPARISONS[cell.data]
    recipe = recipe_of(comparison.data, cell.arm, epochs, cell.seed, precision[cell.arm.network])
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        model = train(
            recipe,
            lambda: build(cell.arm.network, comparison.start, images.classes),
            {"train": images[index], "valid": splits["valid"]},
            Path(folder),
            "cpu",
            0,
        )
    seconds = time.process_time() - began
    return {
        "images": len(images),
        "steps": steps // epochs * epochs,
        "epochs": epochs,
        "training_seconds": round(seconds, 1),
        **test(model.eval(), splits["test"], recipe.precision, averaged=cell.arm.network == comparison.plain),
    }


def part_of(split: Split, percent: int, seed: int) -> Split:
    """The same percentage of the images of each class, drawn by the seed."""
    if percent == 100:
        return split
    part = stratified(shuffled(split, seed), percent / 100)[1]
    assert isinstance(part, Split)
    return part


def shuffle(count: int, seed: int, turn: int) -> Tensor:
    """A permutation of the images, another one for each pass over them."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000 * seed + turn))


@torch.no_grad()
def test(model: nn.Module, split: Split, precision: str, averaged: bool) -> dict[str, Any]:
    """Scores on the test images, and those of the mean over their 8 copies, with the processor time of an image.

    In bfloat16 where the network was trained in it, the faster format for it.
    """
    alone, mean = [], []
    began = time.process_time()
    spent = 0.0
    for x in inputs(model, split, BATCH_SIZE):
        before = time.process_time()
        first = probabilities(model, x, precision)
        spent += time.process_time() - before
        alone.append(first.argmax(1))
        if averaged:
            copies = [probabilities(model, transform(x, P4M, g, "trivial"), precision) for g in P4M.elements if g]
            mean.append((first + sum(copies)).argmax(1))
    whole = time.process_time() - began
    result: dict[str, Any] = summary(split, torch.cat(alone), spent)
    return result | ({"averaged": summary(split, torch.cat(mean), whole)} if averaged else {})


def probabilities(model: nn.Module, x: Tensor, precision: str) -> Tensor:
    """The probabilities of the classes, ``(n, classes)``."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(x.contiguous(memory_format=torch.channels_last))
    return logits.float().softmax(1)


def summary(split: Split, predicted: Tensor, seconds: float) -> dict[str, float]:
    """Accuracy and macro F1 in percent, and milliseconds an image."""
    found = scores(split.labels, predicted, split.classes)
    ms = round(1000 * seconds / len(split), 2)
    return {"accuracy": found["accuracy"], "macro_f1": found["macro_f1"], "predict_ms": ms}


if __name__ == "__main__":
    main()
