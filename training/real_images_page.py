"""The page of the study of satellite tiles and blood cells: its tables and its curves."""

import statistics
from pathlib import Path
from typing import Any

from common import filled, is_first, made_elsewhere, spread, write_text
from real_images import CHOICE_SIZE, COMPARISONS, EPOCHS, FIRST_STARTS, NAME, STEPS, Arm, read, start_of

from eqzoo._common import atomic

NOUNS = {"accuracy": "accuracy", "macro_f1": "macro F1"}

_INTRODUCTION = """# Satellite tiles and blood cells: accuracy over the number of training images

Does equivariance pay on images without a canonical orientation? `p4_resnet29` and its plain twin `z2_resnet29`, with
about as many parameters, are fine-tuned from their weights of CIFAR-10 on a part of the training images of EuroSAT
(16,200 satellite tiles, scaled to 32 x 32 pixels) and of Chula RBC-12 (10,184 red blood cells, scaled to 40 x 40), with
the splits of `eqzoo.data.load_splits`. `p4m_resnet29` and `z2_resnet29` are compared too: on the tiles from weights of
CIFAR-10 by one recipe, with 5.70 and 6.07 % test error, on the cells from their weights of EuroSAT. p4m_resnet29 has
346,288 parameters, z2_resnet29 313,114. The weights of EuroSAT are not equally good: these have 1.02 and 1.78 % test
error, the first after 3.7 hours from random weights, the second after 0.8 hours from weights of CIFAR-10, which took
1.3 hours more.

- **augmented**: half of the training images are rotated by any angle, the others by a multiple of 90°; all are
  reflected with probability 1/2 and shifted by up to a sixteenth of the side (`augment="affine"`).
- **same steps**: both networks take the steps of the first table, of 64 images each. **same minutes**: the plain
  network takes as many more steps as it is faster: {ratios}. The times of a step are medians, measured alternately
  on one core, each network in the faster of float32 and bfloat16{formats}, in which it predicts too.
- **8 copies averaged**: the prediction of the plain network is the mean of its probabilities for the 8 rotations by
  90° and reflections of an image, at 8 times the cost of a prediction. It is of the same weights as the row above. The
  mean over all 8 is the same for each of them, so it is as invariant as an equivariant network; a single prediction of
  the plain network is not.

All runs have one recipe, that of the checkpoints for tiles without a warm-up (Muon, learning rate 0.02, cosine
schedule, weight decay 1e-2, label smoothing 0.1, a moving average of the weights); it was not tuned for either network.
Two checkpoints for cells have another. A fraction has the same share of each class, at least one image. Each seed draws
its own images, the same for all networks. {choice:,} validation images choose one of up to {epochs} epochs and nothing
else. Each run is tested once, on all test images. The budgets are small: this does not compare final accuracies.

![Accuracy over the share of the training images]({name}.png)

Accuracy and macro F1 are in percent, {seeds}.

In short, the equivariant network minus the plain one, both augmented, the lowest and the highest over the shares of
training images, in percentage points:"""

_MADE = """## How it was made

`python training/study_real_images.py --data-dir data` on one core of {machine}, with torch {torch}.{elsewhere}

{starts}"""

FIRST_WEIGHTS = (
    "In the comparisons of `p4_resnet29` both networks started from their first weights of CIFAR-10, of the recipes "
    "`p4_resnet29.cifar10_first` and `z2_resnet29.cifar10_first`: 8.15 and 7.87 % test error. To repeat these runs, "
    "put what `git show "
    "b3d3c8f:model_cards/p4_resnet29.cifar10/model.safetensors` and `git show "
    "09cc2c0:model_cards/z2_resnet29.cifar10/model.safetensors` write into "
    "`first/p4_resnet29.cifar10/model.safetensors` and `first/z2_resnet29.cifar10/model.safetensors`, and run the "
    "command with `EQZOO_WEIGHTS=first`, `--data eurosat chula_rbc12` and `--output repeated`: runs that are in the "
    "folder already are not made again."
)
OTHER_WEIGHTS = (
    "The others started from checkpoints, and are repeated without `EQZOO_WEIGHTS` and with `--data eurosat_p4m "
    f"chula_rbc12_p4m`. The SHA-256 of all weights that runs started from are in {NAME}.json (`start_sha256`) or, for "
    "runs without it, in `training/real_images.py`."
)
SEEDS_WORDS = "mean ± standard deviation where {seeds} seeds were run, elsewhere of one seed"
ELSEWHERE = (
    " Made on one core of {machine}, with the same numbers of steps: {runs} of the {count} runs{torch}. Seconds above "
    "are those of the first machine, and so is the ratio of speeds behind the same minutes."
)
OF_THEIR_OWN = " For {titles}, all of whose runs were made there, both are of that machine."
LONGER = (
    " In the other runs there the equivariant network took {low:.0f} to {high:.0f} % longer than the plain one in the "
    "same minutes, which favors it."
)
ONE_SEED = "of one seed, so that a difference of less than about a point may be chance"


def render(folder: Path) -> None:
    """Writes the page and its figure."""
    table = read(folder)
    write_text(folder / f"{NAME}.md", page(table))
    atomic(folder / f"{NAME}.png", lambda path: draw_curves(table).savefig(path, dpi=90, format="png"))


def page(table: dict[str, Any]) -> str:
    """The page in Markdown: means and standard deviations over the seeds."""
    seeds = len({run["seed"] for run in table["runs"]})
    text = _INTRODUCTION.format(
        **table,
        ratios=ratios(table),
        formats=formats(table),
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
        if not of(table, data):
            parts.append("Not run.")
            continue
        for key in comparison.scores:
            if key == "macro_f1":
                parts += ["", "The classes are unequal, 33 to 1,279 of the test cells; macro F1 weights them equally:"]
                parts.append("")
            parts += score_table(table, data, key)
            parts += ["", f"Differences of {NOUNS[key]} on the same images and seeds, in percentage points:", ""]
            parts += difference_table(table, data, key)
    first = list(map(has_first_start, table["runs"]))
    starts = " ".join([FIRST_WEIGHTS] * any(first) + [OTHER_WEIGHTS] * (not all(first)))
    parts += ["", *map(filled, _MADE.format(**table, elsewhere=elsewhere(table), starts=starts).splitlines())]
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
    networks = f"`{comparison.equivariant}` minus `{comparison.plain}`"
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


def has_first_start(run: dict[str, Any]) -> bool:
    """Whether a run started from the weights that the first runs started from."""
    return start_of(run) in FIRST_STARTS.items()


def elsewhere(table: dict[str, Any]) -> str:
    """Which runs were made on other machines or with another torch, and how equal the minutes are there."""
    found, alone = [run for run in table["runs"] if not is_first(run)], made_alone(table)
    longer = []
    for plain in (run for run in found if run["budget"] == "minutes" and run["data"] not in alone):
        own = Arm(COMPARISONS[plain["data"]].equivariant, plain["augment"], "steps")
        for run in select({"runs": found}, plain["data"], plain["percent"], own):
            if run["seed"] == plain["seed"]:
                longer.append(100 * (run["training_seconds"] / plain["training_seconds"] - 1))
    titles = " and ".join(COMPARISONS[data].title.partition(",")[0] for data in alone)
    more = OF_THEIR_OWN.format(titles=titles) if alone else ""
    more += LONGER.format(low=min(longer), high=max(longer)) if longer else ""
    return made_elsewhere(table, ELSEWHERE) + more


def made_alone(table: dict[str, Any]) -> list[str]:
    """The comparisons none of whose runs was made where the table was begun."""
    return [data for data in COMPARISONS if (runs := of(table, data)) and not any(map(is_first, runs))]


def of(table: dict[str, Any], data: str) -> list[dict[str, Any]]:
    """The rows of a comparison."""
    return [run for run in table["runs"] if run["data"] == data]


def steps_table(table: dict[str, Any]) -> list[str]:
    """The steps of each fraction, and the processor time of a run."""
    lines = [header("training images"), rule()]
    first = [first_of(table, lambda run, p=p: run["percent"] == p) for p in STEPS]
    lines.append(line("steps", [f"{run['equal_steps']}" if run else "not run" for run in first]))
    alone = made_alone(table)
    for data, comparison in COMPARISONS.items():
        for arm in comparison.arms[:3]:
            runs = [select(table, data, percent, arm) for percent in STEPS]
            kept = [[run for run in found if data in alone or is_first(run)] for found in runs]
            seconds = [[run["training_seconds"] for run in found] for found in kept]
            times = [
                f"{statistics.mean(here):.0f}" if here else "other machine" if found else "not run"
                for here, found in zip(seconds, runs, strict=True)
            ]
            name = f"seconds on {comparison.title.partition(',')[0]}: {arm.title}, same {arm.budget}"
            lines.append(line(name, times))
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
    """The score of the equivariant network minus that of the plain one, both augmented or both not."""
    comparison = COMPARISONS[data]
    lines = [header(f"{comparison.equivariant} minus {comparison.plain}"), rule()]
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

    figure = Figure(figsize=(4.3 * len(COMPARISONS), 7.5), layout="constrained")
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
