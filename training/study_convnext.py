"""ConvNeXt for p4m against timm's in the same minutes: `python training/study_convnext.py --data-dir DATA`.

Trains p4m_convnext_atto, variants of it and its plain twin convnext_atto of timm from random weights on EuroSAT and
CIFAR-10, each for the same minutes of processor time on one core. Each run adds its row to convnext_study.json when it
is finished and is not repeated, so the same command resumes the study; `--render` only writes the page.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import timm
import torch
from common import (
    DOCS,
    add_data_arguments,
    add_run,
    filled,
    made_elsewhere,
    read_splits,
    read_table,
    statistics_of,
    step_seconds,
    write_page,
)
from timm.layers import trunc_normal_
from torch import nn

import eqzoo
from eqzoo.analysis import multiply_adds
from eqzoo.data import Split, num_classes
from eqzoo.engine import Recipe, top1, train
from eqzoo.engine.allocator import keep_freed_memory
from eqzoo.engine.defaults import with_rules
from eqzoo.engine.metrics import predict_split
from eqzoo.engine.speed import measure
from eqzoo.engine.state import TrainingState

NAME = "convnext_study"
TITLES = {"eurosat": "EuroSAT, 32 x 32", "cifar10": "CIFAR-10, 32 x 32"}
SIDE = 32
RATES = (3e-4, 1e-3, 3e-3)
BATCH, SEED = 32, 0
ROUNDS = 6  # timed steps of each network; the first is left out
MINUTES = 6.0
PLANES = (40, 80, 160, 320)  # of the networks named atto
BOTH = ("eurosat", "cifar10")

_INTRODUCTION = """# ConvNeXt for p4m, and timm's, in the same minutes

What is `p4m_convnext_atto` worth to someone who trains it on one core for a few minutes? It is trained from random
weights on EuroSAT (satellite tiles scaled to 32 x 32 pixels, which have no canonical orientation) and on CIFAR-10
(photographs, which have one), and so is its plain twin, timm's `convnext_atto`: the same planes, depths and sides of
all maps, with eight times the weights in its pointwise layers. Both have patches of 2 pixels instead of 4, for these
images are small. In timm's network the patches are exchanged by hand: with timm's own `patch_size=2`, its first stage
halves the sides again, which makes it cheaper and the maps of all stages coarser. That network is a row too.

- **same minutes**: every run has {minutes:g} minutes of processor time for its training steps. How many steps that
  makes follows from the time of one step: the median of steps that all networks took alternately, each in the fastest
  of its formats (float32 or bfloat16, channels last or not). Validation and test do not count.
- **rotated and reflected**: an image is rotated by a multiple of 90° and flipped with probability 1/2
  (`augment="quarter_rotations_flips"`). The p4m networks need no such images; no network has any other augmentation.
- **mean, maximum over the group**: `global_pool="avg"` and `global_pool="max"`, which is the default since this study.
- **2 and 2.8 times the planes**: `planes={twice}` and `planes={eightfold}`; the latter has
  about as many parameters as timm's network.
- **multiply-adds** are those of expanded group convolutions. Pointwise layers that are computed
  [through the irreps of the group](kernels.md#group-convolutions-through-irreps) have 12 of 64 of them.

All runs have AdamW with weight decay 0.01, one cosine cycle that ends with the last step after a warm-up of 15 % of the
steps, labels smoothed by 0.1, batches of {batch} images, and layer scale that starts at 1 on both sides: the 1e-6 of
the paper is for schedules of hundreds of epochs. The learning rate is {rates} for `p4m_convnext_atto` with the mean
over the group and for the rotated and reflected twin, each trained with all: the best on validation images is the
row. The other rows take the learning rate of the one of these two that they vary.

Splits are those of `eqzoo.data.load_splits`: {splits}. The weights of the last step are kept. All validation images are
used, for the choice of the learning rate and of the head; test images are read once for each row. There is one seed,
{seed}: by the number of images alone, a difference of less than about {noise:.1f} points is within chance, and other
seeds add to that. The budget is small: this does not compare final accuracies.

Made by `python training/study_convnext.py --data-dir data --minutes {minutes:g}` on one core of {machine}, which other
processes used too, with torch {torch} and timm {timm}.{elsewhere} Accuracies are in percent."""

_ORIENTATION = (
    "Photographs have a canonical orientation. A plain network that is trained without rotations can use it; a network "
    "that is invariant to rotations cannot, nor can a plain one that is trained on rotated images."
)


class Arm(NamedTuple):
    """A network and how it is trained.

    Args:
        title: Its name in the tables.
        network: The name of the network, in eqzoo or timm.
        args: Arguments of the network.
        augment: The augmentation of training images.
        rate_of: The arm whose learning rate it takes; None if it is trained with each of `RATES`.
        data: The data sets.
        patch_size: The side of the patches that replace those of timm's network, in pixels; None to leave them.
    """

    title: str
    network: str
    args: dict[str, Any]
    augment: str = "none"
    rate_of: str | None = None
    data: tuple[str, ...] = BOTH
    patch_size: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a network of timm."""
        return self.network == "convnext_atto"


def planes(factor: float) -> list[int]:
    """The planes of an atto network times a factor, in multiples of 8."""
    return [8 * round(factor * n / 8) for n in PLANES]


_OWN = {"patch_size": 2, "layer_scale_init_value": 1.0, "global_pool": "avg"}
_PLAIN: dict[str, Any] = {"ls_init_value": 1.0}
_COPIES = "quarter_rotations_flips"
_TWIN = Arm("timm's `convnext_atto`, rotated and reflected", "convnext_atto", _PLAIN, _COPIES, patch_size=2)
ARMS = {
    "p4m": Arm("`p4m_convnext_atto`, mean over the group", "p4m_convnext_atto", _OWN),
    "plain": _TWIN,
    "p4m_max": Arm(
        "`p4m_convnext_atto`, maximum over the group", "p4m_convnext_atto", _OWN | {"global_pool": "max"},
        rate_of="p4m",
    ),
    "plain_none": _TWIN._replace(
        title="timm's `convnext_atto`, not augmented", augment="none", rate_of="plain", data=("cifar10",)
    ),
    "plain_coarse": Arm(
        "timm's `convnext_atto` with its `patch_size=2`, rotated and reflected", "convnext_atto",
        _PLAIN | {"patch_size": 2}, _COPIES, rate_of="plain",
    ),
    "p4m_x2": Arm(
        "`p4m_convnext_atto`, mean, 2 times the planes", "p4m_convnext_atto", _OWN | {"planes": planes(2)},
        rate_of="p4m",
    ),
    "p4m_x2.8": Arm(
        "`p4m_convnext_atto`, mean, 2.8 times the planes", "p4m_convnext_atto",
        _OWN | {"planes": planes(math.sqrt(8))}, rate_of="p4m",
    ),
}  # fmt: skip
DIFFERENCES = {
    "p4m less plain, rotated and reflected": ("p4m", "plain"),
    "p4m with the maximum less plain, rotated and reflected": ("p4m_max", "plain"),
    "p4m less plain, not augmented": ("p4m", "plain_none"),
    "p4m with the maximum less plain, not augmented": ("p4m_max", "plain_none"),
    "p4m less plain with timm's `patch_size=2`": ("p4m", "plain_coarse"),
    "maximum over the group less mean": ("p4m_max", "p4m"),
    "2 times the planes less `p4m_convnext_atto`": ("p4m_x2", "p4m"),
    "2.8 times the planes less `p4m_convnext_atto`": ("p4m_x2.8", "p4m"),
}


class Cell(NamedTuple):
    """A run of the study; a rate of None is that of the arm that its arm varies."""

    data: str
    arm: str
    rate: float | None


def main() -> None:
    """Trains what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(TITLES), default=list(TITLES), help="default: both")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="default: all")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"of processor time for each run (default: {MINUTES:g})"
    )
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
    """Runs the cells that have no row yet."""

    @cache
    def splits(data: str) -> dict[str, Split]:
        return read(data, args)

    table = table_of(args.output, args.minutes)
    for cell in plan(args.data, args.arms):
        rate = cell.rate or chosen_rate(table, cell)
        if select(table, cell.data, cell.arm, rate):
            continue
        if cell.data not in table["networks"]:
            table["splits"][cell.data] = {name: len(split) for name, split in splits(cell.data).items()}
            table["networks"][cell.data] = networks_of(cell.data, splits(cell.data), args.minutes)
        row = one_run(cell, rate, splits(cell.data), table)
        add_run(args.output / f"{NAME}.json", table, row)
        write_page(args.output, NAME, page)


def plan(data: list[str], arms: list[str]) -> Iterator[Cell]:
    """All runs: first the arms that try learning rates, then the others, which take theirs, one arm after another."""
    for name in data:
        for rate in RATES:
            yield from (Cell(name, arm, rate) for arm in arms if ARMS[arm].rate_of is None)
    for arm in arms:
        if ARMS[arm].rate_of:
            yield from (Cell(name, arm, None) for name in data if name in ARMS[arm].data)


def table_of(folder: Path, minutes: float) -> dict[str, Any]:
    """The rows so far, and where they were made."""
    path = folder / f"{NAME}.json"
    table = read_table(path, minutes=minutes, splits={}, networks={})
    if table["minutes"] != minutes:
        raise SystemExit(f"{path} has runs of {table['minutes']:g} minutes, not of {minutes:g}; name another --output")
    return table


def read(data: str, args: argparse.Namespace) -> dict[str, Split]:
    """The splits of a data set."""
    found = {}
    for name, split in read_splits(data, args, input_size=(3, SIDE, SIDE)).items():
        assert isinstance(split, Split)
        found[name] = split
    return found


def chosen_rate(table: dict[str, Any], cell: Cell) -> float:
    """The learning rate of the arm that this one varies."""
    other = ARMS[cell.arm].rate_of
    best = best_of(table, cell.data, str(other))
    if best is None:
        raise SystemExit(
            f"{cell.arm} takes the learning rate of {other}, which has no run on {cell.data}; add it to --arms"
        )
    return float(best["lr"])


def build(arm: Arm, split: Split) -> nn.Module:
    """The network with random weights, for images with the mean and the deviation of the split."""
    create = timm.create_model if arm.is_plain else eqzoo.create_model
    model: nn.Module = create(arm.network, num_classes=num_classes({"train": split}), **arm.args)
    if arm.patch_size:
        stem: Any = model.stem
        stem[0] = nn.Conv2d(split.shape[0], stem[0].out_channels, arm.patch_size, stride=arm.patch_size)
        trunc_normal_(stem[0].weight, std=0.02)  # as timm initializes it
        nn.init.zeros_(stem[0].bias)
    model.pretrained_cfg = dict(model.pretrained_cfg) | statistics_of(split)  # type: ignore[arg-type,assignment]
    return model


def recipe_of(data: str, arm: Arm, rate: float) -> Recipe:
    """The recipe of a run, in plain float32."""
    values = with_rules({"epochs": 1, "lr": rate, "augment": arm.augment})
    model = f"timm:{arm.network}" if arm.is_plain else arm.network
    return Recipe(model, data, batch_size=BATCH, seed=SEED, valid_size=0, model_args=arm.args, **values)


def networks_of(data: str, splits: dict[str, Split], minutes: float) -> dict[str, Any]:
    """The size of each network, its fastest formats and the milliseconds of a training step for an image."""
    split = splits["train"][:BATCH]
    accelerator = accelerate.Accelerator(cpu=True)
    found: dict[str, Any] = {}
    states = {}
    for key, arm in ARMS.items():
        if data not in arm.data:
            continue
        recipe = recipe_of(data, arm, RATES[0])

        def made(arm: Arm = arm) -> nn.Module:
            return build(arm, splits["train"])

        speed = measure(recipe, made, {"train": split}, {}, "cpu", 60 * minutes, time.process_time)
        formats: dict[str, Any] = {"precision": speed.precision, "channels_last": speed.channels_last}
        states[key] = TrainingState(replace(recipe, **formats), made, {"train": split}, accelerator, 0)
        model = states[key].model
        sizes: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
        sizes["multiply_adds"] = multiply_adds(model, tuple(split.shape))
        found[key] = sizes | formats
    for key, seconds in step_seconds(states, ROUNDS).items():
        found[key]["ms"] = round(1000 * seconds / BATCH, 3)
    return found


def one_run(cell: Cell, rate: float, splits: dict[str, Split], table: dict[str, Any]) -> dict[str, Any]:
    """Trains a network; its accuracies, on the test images only if no other learning rate was better in validation."""
    arm, network = ARMS[cell.arm], table["networks"][cell.data][cell.arm]
    steps = max(1, int(60_000 * table["minutes"] / (network["ms"] * BATCH)))
    formats = {key: network[key] for key in ("precision", "channels_last")}
    recipe = replace(recipe_of(cell.data, arm, rate), **formats)
    # The only epoch of the recipe has the images of all steps, each image as often as any other or once more.
    images, count = splits["train"], steps * BATCH
    generator = torch.Generator().manual_seed(SEED)
    order = torch.cat([torch.randperm(len(images), generator=generator) for _ in range(-(-count // len(images)))])
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        part = {"train": images[order[:count]]}
        model = train(recipe, lambda: build(arm, images), part, Path(folder), "cpu", 0)
    seconds = time.process_time() - began
    valid = accuracy(model, splits["valid"])
    before = best_of(table, cell.data, cell.arm)
    test = accuracy(model, splits["test"]) if before is None or valid > before["valid"] else None
    return {
        "data": cell.data, "arm": cell.arm, "lr": rate, "seed": SEED, "steps": steps, "images": count,
        "epochs": round(count / len(images), 2), "minutes": round(seconds / 60, 2), "valid": valid,
        "test": test,
    }  # fmt: skip


def accuracy(model: nn.Module, split: Split) -> float:
    """The accuracy in percent."""
    return round(top1(predict_split(model, split), split.labels), 2)


def select(table: dict[str, Any], data: str, arm: str, rate: float | None = None) -> list[dict[str, Any]]:
    """The runs of an arm on a data set, with a learning rate or with any."""
    found = [run for run in table["runs"] if (run["data"], run["arm"]) == (data, arm)]
    return [run for run in found if rate in (None, run["lr"])]


def best_of(table: dict[str, Any], data: str, arm: str) -> dict[str, Any] | None:
    """The run of an arm with the best validation accuracy, the first of equal ones; None if there is none."""
    return max(select(table, data, arm), key=lambda run: run["valid"], default=None)


def page(table: dict[str, Any]) -> str:
    """The page in Markdown."""
    sizes = [
        f"{TITLES[data].partition(',')[0]} has {size['train']:,} training, {size['valid']:,} validation and "
        f"{size['test']:,} test images"
        for data, size in table["splits"].items()
    ]
    text = _INTRODUCTION.format(
        **{key: table[key] for key in ("machine", "torch", "timm", "minutes")},
        elsewhere=made_elsewhere(table),
        twice=tuple(planes(2)),
        eightfold=tuple(planes(math.sqrt(8))),
        batch=BATCH,
        rates=", ".join(f"{rate:g}" for rate in RATES[:-1]) + f" or {RATES[-1]:g}",
        splits="; ".join(sizes),
        seed=SEED,
        noise=2 * math.sqrt(2 * 0.2 * 0.8 / 5_000) * 100,
    )
    parts = [filled(text)]
    if found := " ".join(winner(table, data) for data in TITLES if any(run["data"] == data for run in table["runs"])):
        parts += ["", filled(f"{found} {_ORIENTATION}")]
    for data, title in TITLES.items():
        run = data in table["networks"]
        rows = [*network_table(table, data), "", filled(cost(table, data))] if run else ["Not run."]
        parts += ["", f"## {title}", "", *rows]
    parts += ["", "## Learning rates", "", "Accuracy on validation images.", "", *rate_table(table)]
    parts += ["", "## Differences", "", "Percentage points on validation images / on test images.", ""]
    return "\n".join([*parts, *difference_table(table)]) + "\n"


def winner(table: dict[str, Any], data: str) -> str:
    """The most accurate arm on validation images, in a sentence."""
    found = [(key, run) for key in ARMS if (run := best_of(table, data, key))]
    key, run = max(found, key=lambda pair: pair[1]["valid"])
    return (
        f"Most accurate on validation images of {TITLES[data].partition(',')[0]}: {ARMS[key].title}, with "
        f"{run['test']:.1f} % of the test images."
    )


def network_table(table: dict[str, Any], data: str) -> Iterator[str]:
    """A row for each arm: its size, and the run with the better learning rate."""
    yield (
        "| network | parameters | million multiply-adds | ms of a step per image | steps | images seen | epochs "
        "| minutes | learning rate | validation | test |"
    )
    yield "|---" * 11 + "|"
    for key, arm in ARMS.items():
        if data not in arm.data:
            continue
        network, run = table["networks"][data][key], best_of(table, data, key)
        cells = [f"{network['parameters']:,}", f"{network['multiply_adds'] / 1e6:.0f}"]
        cells.append(f"{network['ms']:.1f}, {formats_of(network)}")
        results = ["not run"] * 7
        if run:
            results = [f"{run['steps']:,}", f"{run['images']:,}", f"{run['epochs']:.1f}", f"{run['minutes']:.1f}"]
            results += [f"{run['lr']:g}", f"{run['valid']:.1f}", f"{run['test']:.1f}"]
        yield f"| {' | '.join([arm.title, *cells, *results])} |"


def formats_of(network: dict[str, Any]) -> str:
    """The number format and the memory format in words."""
    return network["precision"] + (", channels last" if network["channels_last"] else "")


def cost(table: dict[str, Any], data: str) -> str:
    """What the equivariant network costs, as multiples of what its twin does."""
    own, plain = (table["networks"][data][key] for key in ("p4m", "plain"))
    parameters, products, time = (own[key] / plain[key] for key in ("parameters", "multiply_adds", "ms"))
    return (
        f"`p4m_convnext_atto` has {parameters:.2f} times the parameters of its twin and {products:.2f} times its "
        f"multiply-adds, and a training step takes {time:.2f} times as long: in the same minutes it sees "
        f"{1 / time:.2f} times as many images."
    )


def rate_table(table: dict[str, Any]) -> Iterator[str]:
    """The validation accuracy for each learning rate, of the arms that try them."""
    yield f"| network | data | {' | '.join(f'{rate:g}' for rate in RATES)} |"
    yield "|---" * (2 + len(RATES)) + "|"
    for data, title in TITLES.items():
        for key, arm in ARMS.items():
            if arm.rate_of is None:
                runs = [select(table, data, key, rate) for rate in RATES]
                cells = [f"{found[0]['valid']:.1f}" if found else "not run" for found in runs]
                yield f"| {arm.title} | {title} | {' | '.join(cells)} |"


def difference_table(table: dict[str, Any]) -> Iterator[str]:
    """The differences of accuracy between two arms."""
    yield f"| | {' | '.join(TITLES.values())} |"
    yield "|---" * (1 + len(TITLES)) + "|"
    for title, (key, other) in DIFFERENCES.items():
        cells = []
        for data in TITLES:
            runs = [best_of(table, data, name) for name in (key, other)]
            first, second = (run or {} for run in runs)
            parts = [f"{first[kind] - second[kind]:+.1f}" for kind in ("valid", "test") if first and second]
            tried = all(data in ARMS[name].data for name in (key, other))
            cells.append(" / ".join(parts) or ("not run" if tried else "not part of the study"))
        yield f"| {title} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
