"""Accuracy from few training images, equivariant and plain: `python training/study_few_samples.py --data-dir DATA`.

Trains networks on 100 and 300 images of each class of rotated MNIST and CIFAR-10, with the same images, steps and
augmentation, and tests them on images rotated by multiples of 45°. Each run adds its row to few_samples.json when it is
finished and is not repeated, so the same command resumes the study; `--render` only writes the page from the JSON.

The plain network that trains on rotated images for the same number of steps has the better of two learning rates on
1,000 validation images.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    DOCS,
    add_data_arguments,
    add_run,
    find_run,
    made_elsewhere,
    read_splits,
    read_table,
    shuffled,
    spread,
    write_page,
)
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

import eqzoo
from eqzoo.data import AnySplit, Split, normalize, per_class
from eqzoo.engine import Recipe, predictions, top1, train

NAME = "few_samples"
ANGLES = range(0, 360, 45)
BATCH = 64
EPOCHS = {100: 16, 300: 5}  # about 240 steps each
TEST_SIZE, CHOICE_SIZE = 2_000, 1_000


_INTRODUCTION = """# Few training images

How much less training data and time does an equivariant network need? Networks with about the same number of parameters
are trained from random weights on the same images, 100 or 300 of each class. They are tested on 2,000 test images,
rotated by 0°, 45° ... 315°.

- On rotated digits p4_cnn is far more accurate after the same number of steps. A ResNet with four times as many steps
  comes close and stays below.
- On CIFAR-10, whose images have a fixed orientation, nothing is gained: trained on rotated images, the two networks are
  equal within the spread, and the spread of p4_cnn is larger. Without rotations in training, the ResNet is the most
  accurate on images in their fixed orientation, and the least accurate on rotated ones. If your images have a fixed
  orientation, try a plain network as well.
- All networks are far from convergence: this compares small budgets, not final accuracies.

Training uses Adam, batches of 64, a cosine schedule, and three seeds, each of which draws other training images. Unless
the table says otherwise, all networks take the same number of steps, and every training image is rotated by a random
angle. `timm ResNet` is `timm.models.resnet.ResNet` with one basic block for each stage, 8 to 28 channels, and a stem of
one 3 x 3 convolution. Where the table names a learning rate, it is the better of 0.005 and 0.02 on 1,000 validation
images. With four times the steps only 0.02 was tried, and without rotations only 0.005, the rate of p4_cnn's own
recipe. On a CPU a step of p4_cnn takes two to three times as long as one of the ResNet, so with four times the steps
the ResNet has at least as much time. All networks have the same normalization: on CIFAR-10 the mean 0.47 and the
standard deviation 0.25 for all three channels, which are those of its training split as a whole.

Made by `python training/study_few_samples.py --data-dir data` on {machine}, with torch {torch}.{elsewhere}

Accuracy: mean ± standard deviation over the seeds."""


class Arm(NamedTuple):
    """A network and how it is trained: on rotated images or not, from which rates the best, for how many steps."""

    title: str
    model: str
    augment: str
    rates: tuple[float, ...]
    sizes: tuple[int, ...]
    times: int = 1


P4 = Arm("p4_cnn", "p4_cnn", "rotations", (5e-3,), (100, 300))
P4_UNROTATED = Arm("p4_cnn, no rotations in training", "p4_cnn", "none", (5e-3,), (100,))
RESNET = Arm("timm ResNet", "resnet", "rotations", (5e-3, 2e-2), (100, 300))
RESNET_LONG = Arm("timm ResNet, 4 times the steps", "resnet", "rotations", (2e-2,), (100,), 4)
RESNET_UNROTATED = Arm("timm ResNet, no rotations in training", "resnet", "none", (5e-3,), (100,))

# The digits of rotated MNIST are rotated already; the images of CIFAR-10 have a fixed orientation.
TASKS: dict[str, tuple[str, tuple[Arm, ...]]] = {
    "rotmnist": ("Rotated MNIST", (P4, RESNET, RESNET_LONG, RESNET_UNROTATED)),
    "cifar10": (
        "CIFAR-10",
        (P4._replace(sizes=(100,)), RESNET._replace(sizes=(100,)), RESNET_UNROTATED, P4_UNROTATED),
    ),
}


def main() -> None:
    """Trains what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--output", type=Path, default=DOCS, help="the folder of JSON and page (default: docs)")
    parser.add_argument("--render", action="store_true", help="make the table anew, and train nothing")
    add_data_arguments(parser)
    args = parser.parse_args()
    if not args.render:
        study(args)
    write_page(args.output, NAME, page)


def study(args: argparse.Namespace) -> None:
    """Makes the runs that have no row yet."""

    @cache
    def splits(task: str) -> dict[str, Split]:
        return split_up(read_splits(task, args))

    path = args.output / f"{NAME}.json"
    table = read_table(path)
    for seed, size, task, arm, rate in plan(args.seeds):
        key = {"task": task, "per_class": size, "arm": arm.title, "lr": rate, "seed": seed}
        if find_run(table, **key) is None:
            add_run(path, table, key | one_run(splits(task), seed, size, task, arm, rate))
            write_page(args.output, NAME, page)


def plan(seeds: list[int]) -> Iterator[tuple[int, int, str, Arm, float]]:
    """All runs, one seed after the other."""
    for seed in seeds:
        for size in EPOCHS:
            for task, (_, arms) in TASKS.items():
                for arm in arms:
                    for rate in arm.rates if size in arm.sizes else ():
                        yield seed, size, task, arm, rate


def split_up(splits: dict[str, AnySplit]) -> dict[str, Split]:
    """Training images, some test images, and validation images to choose the learning rate by."""
    found = {}
    for name, size in (("train", None), ("test", TEST_SIZE), ("valid", CHOICE_SIZE)):
        split = splits[name]
        assert isinstance(split, Split)
        found[name] = shuffled(split, 0, size)
    return found


def build(arm: Arm, task: str) -> nn.Module:
    """The network, with the mean and the standard deviation of the data set: one of each for all channels."""
    channels, mean, std = (1, (0.1314,), (0.3025,)) if task == "rotmnist" else (3, (0.47,) * 3, (0.25,) * 3)
    if arm.model != "resnet":
        return eqzoo.create_model(arm.model, in_chans=channels, pretrained_cfg_overlay={"mean": mean, "std": std})
    width = 8
    model = ResNet(
        BasicBlock, (1, 1, 1, 1), 10, channels, stem_type="deep", stem_width=width // 2, channels=(width, 14, 20, 28)
    )
    # The stem of small images, one layer at full size: behind timm's own 1 x 1 pixel would be left at the end.
    model.conv1, model.maxpool = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.Identity()
    model.pretrained_cfg = {"mean": mean, "std": std}
    return model


def one_run(splits: dict[str, Split], seed: int, size: int, task: str, arm: Arm, rate: float) -> dict[str, Any]:
    """Trains and tests a network."""
    recipe = Recipe(
        arm.model, task, arm.times * EPOCHS[size], BATCH, lr=rate, seed=seed, augment=arm.augment, valid_size=0,
        warmup_epochs=1, samples_per_class=size,
    )  # fmt: skip
    # Each seed draws images of its own, the same for all networks.
    chosen = per_class(shuffled(splits["train"], seed), size)
    with tempfile.TemporaryDirectory() as folder:
        model = train(recipe, lambda: build(arm, task), {"train": chosen}, Path(folder), "cpu", 0).eval()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": len(chosen) // BATCH * recipe.epochs,
        "choice": accuracy(model, splits["valid"], 0),
        "accuracy": [accuracy(model, splits["test"], angle) for angle in ANGLES],
    }


def accuracy(model: nn.Module, split: Split, angle: float) -> float:
    """The share of right answers on rotated images, in percent."""
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    hits = [
        predictions(model, eqzoo.rotate(normalize(part, cfg["mean"], cfg["std"], torch.float32), angle))
        for part in split.images.split(250)
    ]
    return top1(torch.cat(hits), split.labels)


def page(table: dict[str, Any]) -> str:
    """The tables in Markdown: means and standard deviations over the seeds."""
    parts = [_INTRODUCTION.format(**table, elsewhere=made_elsewhere(table))]
    for task, (title, arms) in TASKS.items():
        parts += ["", f"## {title}", ""]
        parts += [
            "| images of each class | network | parameters | steps | at 0° | mean over the rotations | worst rotation |"
        ]
        parts += ["|---|---|---|---|---|---|---|"]
        for size in EPOCHS:
            for arm in arms:
                if found := best_rate(table["runs"], task, size, arm):
                    parts.append(row(size, arm, found))
    return "\n".join(parts) + "\n"


def best_rate(runs: list[dict[str, Any]], task: str, size: int, arm: Arm) -> list[dict[str, Any]]:
    """The runs of an arm at the rate that is best on the images to choose by, a run a seed."""
    mine = [r for r in runs if (r["task"], r["per_class"], r["arm"]) == (task, size, arm.title)]
    by_rate = [[r for r in mine if r["lr"] == rate] for rate in arm.rates]
    return max(by_rate, key=lambda found: statistics.mean([r["choice"] for r in found]) if found else -1)


def row(size: int, arm: Arm, runs: list[dict[str, Any]]) -> str:
    """A row of a table."""
    first = runs[0]
    columns = [
        [r["accuracy"][0] for r in runs],
        [statistics.mean(r["accuracy"]) for r in runs],
        [min(r["accuracy"]) for r in runs],
    ]
    rate = f", lr {first['lr']:g}" if len(arm.rates) > 1 else ""
    cells = " | ".join(map(spread, columns))
    return f"| {size} | {arm.title}{rate} | {first['parameters']:,} | {first['steps']} | {cells} |"


if __name__ == "__main__":
    main()
