"""Accuracy from few to all images of land and cells: `python training/study_real_images.py --data-dir DATA`.

Fine-tunes p4_resnet29 and its plain twin z2_resnet29 on 1 to 100 % of the training images of EuroSAT and Chula RBC-12,
and p4m_resnet29 and z2_resnet29 from their weights of EuroSAT on those of Chula RBC-12, for the same steps and for the
same minutes, and tests them. Each run adds its row to real_images.json when it is finished and is not repeated, so the
same command resumes the study; `--render` only writes the page and its figure.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
from common import DOCS, add_data_arguments, filled, read_splits, shuffled, spread, step_seconds, write_text
from torch import Tensor, nn

import eqzoo
from eqzoo._common import atomic
from eqzoo.analysis import machine
from eqzoo.analysis.rotation import inputs
from eqzoo.data import Split, stratified
from eqzoo.engine import Recipe, train
from eqzoo.engine.allocator import keep_freed_memory
from eqzoo.engine.metrics import BATCH_SIZE, scores
from eqzoo.engine.speed import measure
from eqzoo.engine.state import TrainingState
from eqzoo.groups import P4M, transform

NAME = "real_images"


class Comparison(NamedTuple):
    """An equivariant network and a plain one, and what they are fine-tuned on.

    Args:
        data: The data set.
        side: The side of its images, in pixels.
        title: What is compared, for the page.
        equivariant: The name of the equivariant network.
        plain: The name of the plain network.
        start: The data set whose weights both start from.
        scores: What is reported: the classes of cells are unequal.
    """

    data: str
    side: int
    title: str
    equivariant: str
    plain: str
    start: str
    scores: tuple[str, ...]

    @property
    def arms(self) -> "tuple[Arm, ...]":
        """The networks and how each is trained; they alternate, for a study that is interrupted."""
        kinds = ((self.equivariant, "steps"), (self.plain, "steps"), (self.plain, "minutes"))
        return tuple(Arm(network, augment, budget) for augment in AUGMENTATIONS for network, budget in kinds)


COMPARISONS = {
    "eurosat": Comparison(
        "eurosat", 32, "EuroSAT, 32 x 32", "p4_resnet29", "z2_resnet29", "cifar10", ("accuracy",)
    ),
    "chula_rbc12": Comparison(
        "chula_rbc12", 40, "Chula RBC-12, 40 x 40", "p4_resnet29", "z2_resnet29", "cifar10", ("accuracy", "macro_f1")
    ),
    "chula_rbc12_p4m": Comparison(
        "chula_rbc12", 40, "Chula RBC-12 from weights of EuroSAT, 40 x 40", "p4m_resnet29", "z2_resnet29", "eurosat",
        ("accuracy", "macro_f1"),
    ),
}  # fmt: skip
NOUNS = {"accuracy": "accuracy", "macro_f1": "macro F1"}
STEPS = {1: 80, 3: 96, 10: 120, 30: 160, 100: 240}  # by the percentage of the training images
SPREAD_BELOW = 10  # percent: smaller fractions are run with all seeds, the others with the first
BATCH, EPOCHS = 64, 4
CHOICE_SIZE = 500
ROUNDS = 8  # timed steps of each network; the first is left out
AUGMENTATIONS = {"affine": ", augmented", "none": ""}

_INTRODUCTION = """# Land and cells: accuracy over the number of training images

Does equivariance pay on images without a canonical orientation? `p4_resnet29` and its plain twin `z2_resnet29`, with
about as many parameters, are fine-tuned from their weights of CIFAR-10 on a part of the training images of EuroSAT
(16,200 satellite tiles, scaled to 32 x 32 pixels) and of Chula RBC-12 (10,184 red blood cells, scaled to 40 x 40), with
the splits of `eqzoo.data.load_splits`. The weights of `p4_resnet29` are its first ones, of the recipe
`p4_resnet29.cifar10_first`: 8.15 % test error; z2_resnet29 has 7.87 %. On the cells, `p4m_resnet29` and `z2_resnet29`
are also fine-tuned from their weights of EuroSAT. p4m_resnet29 has 346,288 parameters, z2_resnet29 313,114. The
weights of EuroSAT are not equally good: their cards have 1.02 and 1.78 % test error, the first after 3.7 hours from
random weights, the second after 0.8 hours from weights of CIFAR-10, which took 1.3 hours more.

- **augmented**: every training image is rotated by a random angle, reflected with probability 1/2 and shifted by up to
  a sixteenth of the side (`augment="affine"`).
- **same steps**: both networks take the steps of the first table, of 64 images each. **same minutes**: the plain
  network takes as many more steps as it is faster: {ratios}. The times of a step are medians, measured alternately
  on one core, each network in the faster of float32 and bfloat16{formats}, in which it predicts too.
- **8 copies averaged**: the prediction of the plain network is the mean of its probabilities for the 8 rotations by
  90° and reflections of an image, at 8 times the cost of a prediction. It is of the same weights as the row above. The
  mean over all 8 is the same for each of them, so it is as invariant as an equivariant network; a single prediction of
  the plain network is not.

All runs have the optimizer of the recipes for these data sets (Muon, learning rate 0.02, cosine schedule, weight decay
1e-2, label smoothing 0.1, a moving average of the weights) without a warm-up; it was not tuned for either network.
A fraction has the same share of each class, at least one image. Each seed draws its own images, the same for all
networks. {choice:,} validation images choose one of up to {epochs} epochs and nothing else. Each run is tested once, on
all test images. The budgets are small: this does not compare final accuracies.

Made by `python training/study_real_images.py --data-dir data` on one core of {machine}, with torch {torch}.{elsewhere}

![Accuracy over the share of the training images]({name}.png)

Accuracy and macro F1 are in percent, {seeds}.

In short, the equivariant network less the plain one, both augmented, the lowest and the highest over the shares of
training images, in percentage points:"""

SEEDS_WORDS = "mean ± standard deviation where {seeds} seeds were run, elsewhere of one seed"
ELSEWHERE = (
    " Made on one core of {machine}, with the same numbers of steps: {runs} of the {count} runs. Seconds below are "
    "those of the first machine, and so is the ratio of speeds behind the same minutes."
)
LONGER = " Elsewhere the equivariant network took {low:.0f} to {high:.0f} % longer in them than the plain one."
ONE_SEED = "of one seed, so that a difference of less than about a point may be chance"


class Arm(NamedTuple):
    """A network and how it is trained.

    Args:
        network: Its name.
        augment: The augmentation of training images.
        budget: ``"steps"`` for the steps of a fraction, ``"minutes"`` for the time that the equivariant network takes.
    """

    network: str
    augment: str
    budget: str

    @property
    def title(self) -> str:
        """The network and the augmentation."""
        return f"{self.network}{AUGMENTATIONS[self.augment]}"


class Cell(NamedTuple):
    """A run of the study: an arm of a comparison on a part of the data set, with a seed."""

    data: str  # the name of the comparison
    percent: int
    seed: int
    arm: Arm

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the row of the run."""
        return {"data": self.data, "percent": self.percent, "seed": self.seed, **self.arm._asdict()}


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


def render(folder: Path) -> None:
    """Writes the page and its figure."""
    table = read(folder)
    write_text(folder / f"{NAME}.md", page(table))
    atomic(folder / f"{NAME}.png", lambda path: draw_curves(table).savefig(path, dpi=90, format="png"))


def study(args: argparse.Namespace) -> None:
    """Runs the cells that have no row yet."""

    @cache
    def splits(data: str) -> dict[str, Split]:
        return split_up(data, args)

    for cell in plan(args.data, args.fractions, args.seeds):
        comparison = COMPARISONS[cell.data]
        table, steps = read(args.output), args.steps or STEPS[cell.percent]
        there = [run for run in table["runs"] if cell.key.items() <= run.items()]
        if there:
            if there[0]["equal_steps"] != steps:
                raise SystemExit(
                    f"{args.output / NAME}.json has runs of {there[0]['equal_steps']} steps on {cell.percent} % of "
                    f"{cell.data}, not of {steps}; name another --output"
                )
            continue
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
            **one_run(cell, splits(cell.data), steps_here, table["precision"][pair]),
        }
        if (here := machine(torch.device("cpu"))) != table["machine"]:
            row["machine"] = here
        table["runs"].append(row)
        write_text(args.output / f"{NAME}.json", json.dumps(table, indent=1) + "\n")
        render(args.output)
        print(json.dumps(row), flush=True)


def plan(data: list[str], fractions: list[int], seeds: list[int]) -> Iterator[Cell]:
    """All runs, small fractions first, then by seed, data set and arm."""
    for percent in sorted(fractions):
        for seed in seeds if percent < SPREAD_BELOW else seeds[:1]:
            for name in data:
                for arm in COMPARISONS[name].arms:
                    yield Cell(name, percent, seed, arm)


def read(folder: Path) -> dict[str, Any]:
    """The rows so far, and where they were made."""
    path = folder / f"{NAME}.json"
    if path.is_file():
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return table
    here = {"machine": machine(torch.device("cpu")), "torch": torch.__version__}
    return {**here, "precision": {}, "step_seconds": {}, "runs": []}


def split_up(data: str, args: argparse.Namespace) -> dict[str, Split]:
    """The splits of a comparison at its side, with a part of the validation images."""
    found, (name_of_set, side) = {}, COMPARISONS[data][:2]
    for name, split in read_splits(name_of_set, args, input_size=(3, side, side)).items():
        assert isinstance(split, Split)
        found[name] = split
    return found | {"valid": shuffled(found["valid"], 0, CHOICE_SIZE)}


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


def page(table: dict[str, Any]) -> str:
    """The page in Markdown: means and standard deviations over the seeds."""
    seeds = len({run["seed"] for run in table["runs"]})
    text = _INTRODUCTION.format(
        **table,
        ratios=ratios(table),
        formats=formats(table),
        elsewhere=elsewhere(table),
        choice=CHOICE_SIZE,
        epochs=EPOCHS,
        seeds=SEEDS_WORDS.format(seeds=seeds) if seeds > 1 else ONE_SEED,
        name=NAME,
    )
    parts = [
        filled(text),
        "",
        *(
            filled(line)
            for data, one in COMPARISONS.items()
            for key in one.scores
            if (line := in_short(table, data, key))
        ),
        "",
        *steps_table(table),
    ]
    for data, comparison in COMPARISONS.items():
        parts += ["", f"## {comparison.title}", ""]
        if not any(run["data"] == data for run in table["runs"]):
            parts.append("Not run.")
            continue
        for key in comparison.scores:
            if key == "macro_f1":
                parts += ["", "The classes are unequal, 33 to 1,279 of the test cells; macro F1 weights them equally:"]
                parts.append("")
            parts += score_table(table, data, key)
            parts += ["", f"Differences of {NOUNS[key]} on the same images and seeds, in percentage points:", ""]
            parts += difference_table(table, data, key)
    return "\n".join(parts) + "\n"


def in_short(table: dict[str, Any], data: str, key: str) -> str:
    """The range of the differences over the fractions, for both budgets and with 8 copies averaged."""
    comparison, parts = COMPARISONS[data], []
    own = Arm(comparison.equivariant, "affine", "steps")
    for budget, averaged in (("steps", False), ("minutes", False), ("minutes", True)):
        other = Arm(comparison.plain, "affine", budget)
        cells = [differences(table, data, key, percent, own, other, averaged) for percent in STEPS]
        if found := [statistics.mean(cell) for cell in cells if cell]:
            copies = ", against 8 copies averaged" if averaged else ""
            low, high = f"{min(found):+.1f}", f"{max(found):+.1f}"
            parts.append(f"same {budget}{copies} {low if low == high else f'{low} to {high}'}")
    networks = f"`{comparison.equivariant}` less `{comparison.plain}`"
    named = f"{comparison.title.partition(',')[0]}, {networks}, {NOUNS[key]}"
    return f"- {named}: {'; '.join(parts)}." if parts else ""


def ratios(table: dict[str, Any]) -> str:
    """How many times as many steps the plain network takes in the time of each equivariant one."""
    found: dict[str, list[float]] = {}
    for name, pair in table["step_seconds"].items():
        one = COMPARISONS[name.partition(",")[0]]
        found.setdefault(one.equivariant, []).append(pair[one.equivariant] / pair[one.plain])
    parts = []
    for network, values in found.items():
        low, high = f"{min(values):.1f}", f"{max(values):.1f}"
        parts.append(f"{low if low == high else f'{low} to {high}'} times for {network}")
    return ", ".join(parts) or "not measured yet"


def formats(table: dict[str, Any]) -> str:
    """The number format of each network."""
    found = [f"{network}: {value}" for pair in table["precision"].values() for network, value in pair.items()]
    return f" ({', '.join(dict.fromkeys(found))})" if found else ""


def elsewhere(table: dict[str, Any]) -> str:
    """Which runs were made on other machines than the first ones, and how equal the minutes are there."""
    found = [run for run in table["runs"] if "machine" in run]
    if not found:
        return ""
    longer = []
    for plain in (run for run in found if run["budget"] == "minutes"):
        own = Arm(COMPARISONS[plain["data"]].equivariant, plain["augment"], "steps")
        for run in select({"runs": found}, plain["data"], plain["percent"], own):
            if run["seed"] == plain["seed"]:
                longer.append(100 * (run["training_seconds"] / plain["training_seconds"] - 1))
    names = " or ".join(dict.fromkeys(run["machine"] for run in found))
    text = ELSEWHERE.format(runs=len(found), count=len(table["runs"]), machine=names)
    return text + (LONGER.format(low=min(longer), high=max(longer)) if longer else "")


def steps_table(table: dict[str, Any]) -> list[str]:
    """The steps of each fraction, and the processor time of a run."""
    lines = [header("training images"), rule()]
    first = [first_of(table, lambda run, p=p: run["percent"] == p) for p in STEPS]
    lines.append(line("steps", [f"{run['equal_steps']}" if run else "not run" for run in first]))
    for data, comparison in COMPARISONS.items():
        for arm in comparison.arms[:3]:
            runs = [select(table, data, percent, arm) for percent in STEPS]
            seconds = [[run["training_seconds"] for run in found if "machine" not in run] for found in runs]
            times = [statistics.mean(found) if found else math.nan for found in seconds]
            name = f"seconds on {comparison.title.partition(',')[0]}: {arm.title}, same {arm.budget}"
            lines.append(line(name, ["not run" if math.isnan(t) else f"{t:.0f}" for t in times]))
    return lines


def score_table(table: dict[str, Any], data: str, key: str) -> list[str]:
    """A score of every arm, and of the plain networks with 8 copies averaged, by fraction."""
    lines, comparison = [header(NOUNS[key]), rule()], COMPARISONS[data]
    for arm in sorted(comparison.arms, key=lambda arm: (arm.network, arm.budget == "minutes", arm.augment)):
        budget = f", same {arm.budget}" if arm.network == comparison.plain else ""
        runs = [select(table, data, percent, arm) for percent in STEPS]
        lines.append(line(arm.title + budget, [spread([run[key] for run in found]) for found in runs]))
        if arm.network == comparison.plain:
            cells = [spread([run["averaged"][key] for run in found]) for found in runs]
            lines.append(line(f"{arm.title}{budget}, 8 copies averaged", cells))
    return lines


def difference_table(table: dict[str, Any], data: str, key: str) -> list[str]:
    """The score of the equivariant network less that of the plain one, both augmented or both not."""
    comparison = COMPARISONS[data]
    lines = [header(f"{comparison.equivariant} less {comparison.plain}"), rule()]
    for arm in (arm for arm in comparison.arms if arm.network == comparison.plain):
        own = Arm(comparison.equivariant, arm.augment, "steps")
        for averaged in (False, True):
            found = [differences(table, data, key, percent, own, arm, averaged) for percent in STEPS]
            cells = [signed_spread(values) if values else "not run" for values in found]
            with_copies = ", 8 copies averaged" if averaged else ""
            name = "both augmented" if arm.augment == "affine" else "both not augmented"
            lines.append(line(f"{name}, same {arm.budget}{with_copies}", cells))
    return lines


def differences(
    table: dict[str, Any], data: str, key: str, percent: int, own: Arm, other: Arm, averaged: bool
) -> list[float]:
    """The differences for the seeds that both have."""
    ours = {run["seed"]: run[key] for run in select(table, data, percent, own)}
    theirs = {run["seed"]: (run["averaged"] if averaged else run)[key] for run in select(table, data, percent, other)}
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def signed_spread(values: list[float]) -> str:
    """The mean with its sign, and the standard deviation where there are several values."""
    mean = round(statistics.mean(values), 1) + 0.0  # not -0.0
    return f"{mean:+.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def select(table: dict[str, Any], data: str, percent: int, arm: Arm) -> list[dict[str, Any]]:
    """The rows of an arm on a fraction, one for each seed."""
    wanted = {"data": data, "percent": percent, **arm._asdict()}
    return [run for run in table["runs"] if wanted.items() <= run.items()]


def first_of(table: dict[str, Any], wanted: Any) -> dict[str, Any] | None:
    """The first row that is wanted."""
    return next(filter(wanted, table["runs"]), None)


def header(first: str) -> str:
    """The header of a table by fractions."""
    return line(first, [f"{percent} %" for percent in STEPS])


def rule() -> str:
    """The line below a header."""
    return "|---" * (1 + len(STEPS)) + "|"


def line(first: str, cells: list[str]) -> str:
    """A row of a table."""
    return f"| {first} | {' | '.join(cells)} |"


def draw_curves(table: dict[str, Any]) -> Any:
    """Accuracy over the share of the training images: a row of panels for each budget, a column for each data set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    panels = figure.subplots(2, len(COMPARISONS), sharey="col", squeeze=False)
    for row, budget in zip(panels, ("steps", "minutes"), strict=True):
        for axes, (data, one) in zip(row, COMPARISONS.items(), strict=True):
            for arm in one.arms:
                if arm.network == one.equivariant or arm.budget == budget:
                    draw_arm(axes, table, data, arm)
            axes.set(title=f"{one.title.replace(', ', chr(10))}, same {budget}", ylabel="accuracy, %")
            axes.set(xscale="log", xlabel="training images, %", xlim=(0.8, 125))
            axes.set_xticks(list(STEPS), map(str, STEPS))
            axes.minorticks_off()
            axes.grid(color="#eeeeee")
            axes.spines[["top", "right"]].set_visible(False)
    found = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if found:
        figure.legend(found.values(), found, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def draw_arm(axes: Any, table: dict[str, Any], data: str, arm: Arm) -> None:
    """The curve of an arm, and of its predictions with 8 copies averaged; dashed without augmentation."""
    groups = [runs for percent in STEPS if (runs := select(table, data, percent, arm))]
    if not groups:
        return
    shares = [runs[0]["percent"] for runs in groups]
    style = {"linestyle": "-" if arm.augment == "affine" else "--", "markersize": 4, "linewidth": 1.4, "capsize": 2}
    comparison = COMPARISONS[data]
    color = "#0072B2" if arm.network == comparison.equivariant else "#D55E00"
    curves = [(arm.title, [[run["accuracy"] for run in runs] for runs in groups], color, "o")]
    if arm.network == comparison.plain:
        values = [[run["averaged"]["accuracy"] for run in runs] for runs in groups]
        curves.append((f"{arm.title}, 8 copies averaged", values, "#009E73", "s"))
    for label, values, shade, marker in curves:
        means = [statistics.mean(v) for v in values]
        bars = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
        axes.errorbar(shares, means, bars, label=label, color=shade, marker=marker, **style)


if __name__ == "__main__":
    main()
