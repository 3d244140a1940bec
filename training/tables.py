"""Renders the tables of README.md and docs from JSON: `python training/tables.py`.

A page holds a table between `<!-- NAME: rendered by training/tables.py -->` and `<!-- end of NAME -->`. Its numbers are
those of `model_cards/*/results.json`, `docs/benchmarks/*.json` and the networks themselves.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm

import eqzoo
from eqzoo._common import write_text
from eqzoo.analysis.sizes import weightless
from eqzoo.cards.card import wrapped
from eqzoo.cards.checkpoint import counts_of, error_text
from eqzoo.data import CATALOG
from eqzoo.hub import CONFIG_NAME
from eqzoo.models.builder import default_checkpoint
from eqzoo.models.papers import PAPERS, Row, rows

ROOT = Path(__file__).resolve().parents[1]
CARDS = "https://github.com/eqzoo/eqzoo/tree/main/model_cards/"  # docs/ is a site too, which does not hold the cards
BLOCK = re.compile(r"(<!-- ([\w-]+): rendered by training/tables\.py -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
# The networks of docs/choosing.md and what they are for.
NETWORKS = {
    "p4_cnn": "shapes on a plain background, few images, a browser: where to start",
    "p4m_cnn": "the same, invariant to reflections",
    "p4_e4net": "few parameters",
    "p4_alpha_f_cnn": "attention on inputs; maps to look at: `p4_alpha_cnn`",
    "r4_gsanet_t": "attention without convolutions",
    "p4m_resnet_s": "color images from 32 x 32 pixels up: where to start",
    "p4m_resnet_m": "scenes, with more time; with much more, `p4m_resnet_l`",
    "p4_resnet_m": "color images that a reflection changes",
    "p4_resnet29": "small color images",
    "p4m_resnet29": "the same, invariant to reflections",
    "p4_asc_resnet29": "affine self convolution",
    "p4m_asc_resnet29": "the same, invariant to reflections",
    "p4_allcnn": "convolutions only",
    "p4_e4_resnet18": "thousands of color images and a GPU",
    "p4m_densenet": "cells; MIT weights",
    "p4m_convnext_atto": "larger images; no weights",
    "p4m_octic_vit_large_patch16_224": "[ImageNet weights](imagenet.md)",
}
RATE = "predictions_per_second"  # of rows that were made on one machine; the others have none
# Minutes of training and images a class, by their title.
OTHER_BUDGETS = {
    "1 min, 25 a class": (1.0, 25),
    "4 min, all images": (4.0, 100_000),
    "5 min, 100 a class": (5.0, 100),
    "20 min, 100 a class": (20.0, 100),
}
PAPERS_DATA = {"rotmnist": "rotated MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "pcam": "PatchCamelyon"}
DATA_TITLES = {
    "ucmerced": "aerial scenes (UC Merced)",
    "pbc": "blood cells (PBC)",
    "eurosat": "satellite tiles (EuroSAT)",
    "lc25000": "lung tissue (LC25000)",
    "radio": "radio galaxies (FIRST)",
    "chula_rbc12": "red blood cells (RBC-12)",
}


def main() -> None:
    """Writes the pages whose tables changed."""
    for path, text in rendered_pages(ROOT).items():
        if path.read_text(encoding="utf-8") != text:
            write_text(path, text)
            print(path.relative_to(ROOT))


def rendered_pages(root: Path) -> dict[Path, str]:
    """The text of each page with rendered tables, in a copy of the repository."""
    pages = {path: path.read_text(encoding="utf-8") for path in (root / "README.md", *(root / "docs").glob("*.md"))}
    return {
        path: BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]](root)}\n{block[3]}", text)
        for path, text in pages.items()
        if BLOCK.search(text)
    }


def results(root: Path) -> dict[str, dict[str, Any]]:
    """The results of the published checkpoints by name."""
    paths = sorted((root / "model_cards").glob("*/results.json"))
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def checkpoints(root: Path) -> str:
    """The tables of all checkpoints, one for each data set."""
    found = list(results(root).values())
    sets = [(name, [r for r in found if r["data"] == name]) for name in CATALOG]
    return "\n\n".join(_of_dataset(root, name, of_set) for name, of_set in sets if of_set)


def _of_dataset(root: Path, name: str, found: Sequence[dict[str, Any]]) -> str:
    data, counts = CATALOG[name], [counts_of(r) for r in found]
    usual = max(counts, key=counts.count)
    columns = ["checkpoint", "input", "parameters", "test error", "at the worst of 24 angles"]
    columns += ["same class at all 90° rotations", "license"]
    rows = []
    for r, count in zip(found, counts, strict=True):
        path = root / "model_cards" / r["checkpoint"] / CONFIG_NAME
        cfg = json.loads(path.read_text(encoding="utf-8"))["pretrained_cfg"]
        others = "".join(f", {count[split]} {split} images" for split in count if count[split] != usual[split])
        cells = [
            f"[{r['checkpoint']}]({CARDS}{r['checkpoint']})",
            " x ".join(map(str, cfg["input_size"])),
            f"{r['parameters']:,}",
            error_text(r, 2) + _published(r) + others,
            f"{100 - min(r['rotation_curve']['accuracy']):.2f} %",
            f"{r['same_class_at_all_quarter_rotations']:.2f} %",
            cfg["license"],
        ]
        rows.append(cells)
    text = wrapped(f"Trained and tested on {data.text.format(**usual)}.")
    return f"## {data.title}\n\n{text}\n\n{table(columns, rows)}"


def _published(r: Mapping[str, Any]) -> str:
    """Behind an error: of several seeds the published one's, and the mean of the classes' F1 if classes are unequal."""
    count, macro_f1 = len(r.get("accuracies", ())), r.get("macro_f1", r["accuracy"])
    seeds = f" ({count} seeds; {100 - r['accuracy']:.2f} % published)" if count > 1 else ""
    return seeds + (f", macro F1 {macro_f1:.1f} %" if abs(macro_f1 - r["accuracy"]) > 1 else "")


def benchmark(root: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a benchmark of docs/benchmarks."""
    rows: list[dict[str, Any]] = json.loads((root / f"docs/benchmarks/{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])


def real_sets(root: Path, minutes: float, images: int = 100) -> dict[str, dict[str, list[dict[str, float]]]]:
    """The rows of training/real_images.py of so many minutes and images a class: networks, data sets, seeds.

    A network that is not invariant has a second entry: the mean of its predictions over 8 rotated and reflected copies.
    """
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    data = json.loads((root / "docs/benchmarks/real_sets.json").read_text(encoding="utf-8"))
    for name, row in data["rows"].items():
        dataset, network, *budget, _ = name.split("/")
        if budget != [f"{minutes:g} minutes", f"{images} a class"]:
            continue
        found.setdefault(network, {}).setdefault(dataset, []).append(row)
        if row["same_class"] < 100:
            several = {key.removesuffix("_averaged"): value for key, value in row.items() if key.endswith("_averaged")}
            copies = 2 if network.startswith("p4_") else 8  # what is invariant to rotations is reflected alone
            several |= {"parameters": row["parameters"], "same_class": 100.0}
            several |= {RATE: row[RATE] / copies} if RATE in row else {}
            found.setdefault(f"{network}, TTA", {}).setdefault(dataset, []).append(several)
    return found


def by_set(root: Path, budgets: Mapping[str, tuple[float, int]]) -> str:
    """Accuracies of networks by data set, each the mean over seeds; their mean, also by seed; symmetry, cost, size.

    Args:
        root: The repository.
        budgets: Minutes and images a class by what a table of several says of them.
    """
    found = {title: real_sets(root, *budget) for title, budget in budgets.items()}
    every = [sets for networks in found.values() for sets in networks.values()]
    present = [name for name in DATA_TITLES if any(name in sets for sets in every)]
    several = any(len(seeds) > 1 for sets in every for seeds in sets.values())
    compared = len(budgets) > 1
    lines = []
    for title, network, sets in [(title, *item) for title, networks in found.items() for item in networks.items()]:
        cells = [_quoted(network), *[title] * compared]
        cells += [f"{mean_of(sets[name], 'accuracy'):.1f}" if name in sets else "" for name in present]
        if "chula_rbc12" in sets:  # of unequal classes
            column = present.index("chula_rbc12") - len(present)
            cells[column] += f" / {mean_of(sets['chula_rbc12'], 'macro_f1'):.1f}"
        means = {
            key: statistics.fmean(mean_of(rows, key) for rows in sets.values()) for key in ("accuracy", "same_class")
        }
        complete = len(sets) == len(present)
        cells.append(f"{means['accuracy']:.1f}" if complete else "")
        if several:
            by_seed = [mean_of(rows, "accuracy") for rows in zip(*sets.values(), strict=False)]
            cells.append(", ".join(f"{mean:.1f}" for mean in by_seed) if complete and len(by_seed) > 1 else "")
        cells.append(f"{means['same_class']:.1f}" if complete else "")
        if not compared:
            rates = [rows[0][RATE] for rows in sets.values() if RATE in rows[0]]
            cells.append(f"{statistics.median(rates):,.0f}" if rates else "")
            cells.append(f"{4e-6 * statistics.median(rows[0]['parameters'] for rows in sets.values()):.1f}")
        lines.append(cells)
    header = ["network", *["training"] * compared, *(DATA_TITLES[name] for name in present), "mean"]
    header += ["mean, by seed"] * several + ["same class", *["predictions a second", "MB"] * (not compared)]
    return table(header, lines)


def mean_of(rows: Iterable[Mapping[str, float]], key: str) -> float:
    """The mean of a figure over rows."""
    return statistics.fmean(row[key] for row in rows)


def _quoted(network: str) -> str:
    """The names of our networks as code."""
    name, comma, rest = network.partition(",")
    return f"`{name}`{comma}{rest}" if "_" in name else network


def _twin(root: Path, name: str, network: str) -> dict[str, dict[str, Any]]:
    return {row["task"]: row for row in benchmark(root, name) if row["subject"] == network}


def twins(root: Path) -> str:
    """Networks against plain ones with as many parameters, on processors with AVX-512 and with AVX2 alone."""
    header = ["network", "against", "step, float32", "bfloat16", "prediction, float32", "bfloat16"]
    header += ["step, AVX2 alone", "prediction, AVX2 alone"]
    rows = []
    for name in dict.fromkeys(row["subject"] for row in benchmark(root, "twins_cpu")):
        wide, half, narrow = (_twin(root, kind, name) for kind in ("twins_cpu", "twins_cpu_bfloat16", "avx2/twins_cpu"))
        cells = [kind[task]["ratio"] for task in ("training step", "inference") for kind in (wide, half)]
        cells += [narrow.get(task, {}).get("ratio") for task in ("training step", "inference")]
        against = wide["inference"]["against"]
        rows.append((f"`{name}`", f"`{against}`", *(f"{cell:.1f}" if cell else "" for cell in cells)))
    return table(header, rows)


def attention(root: Path) -> str:
    """Networks with attention, and others, against networks of convolutions: time and memory."""
    header = ["network", "against", "training step", "prediction", "peak memory of a step"]
    memory = {(row["subject"], row["against"]): row["ratio"] for row in benchmark(root, "memory_cpu")}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in benchmark(root, "models_cpu"):
        found.setdefault((row["subject"], row["against"]), {})[row["task"]] = row["ratio"]
    rows = []
    for pair in [pair for pair in {**found, **memory} if "planes" not in pair[1]]:
        times = (found.get(pair, {}).get(task, "") for task in ("training step", "inference"))
        cells = [f"{cell:.2f}" if cell else "" for cell in (*times, memory.get(pair, ""))]
        rows.append((*(f"`{name}`".replace(", all stored`", "`, all stored") for name in pair), *cells))
    return table(header, rows)


def files(root: Path) -> str:
    """ONNX files through irreps, and torch, against files of plain convolutions."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in benchmark(root, "files_cpu"):
        found.setdefault(row["subject"], []).append(row)
    batches = [f"batch {row['batch']}" for row in next(iter(found.values()))]
    header = ["network", *(f"file, {batch}" for batch in batches), *(f"torch, {batch}" for batch in batches)]
    kinds = ("ratio", "ratio in torch")
    rows = ((f"`{name}`", *(f"{row[kind]:.2f}" for kind in kinds for row in each)) for name, each in found.items())
    return table(header, rows)


def networks(root: Path) -> str:
    """The networks that are worth a first look, with their costs and test errors."""
    header = ["network", "images", "parameters", "multiply-adds", "ms an image", "time / plain", "test error", "for"]
    timed = {row["network"]: row for row in benchmark(root, "choosing_cpu") if row["form"] == "eager"}
    rows = []
    for name, purpose in NETWORKS.items():
        model, time = weightless(name), timed.get(name, {})
        found = next((r for key, r in results(root).items() if key in (f"{name}.rotmnist", f"{name}.cifar10")), None)
        found = found or results(root).get(default_checkpoint(name))
        rows.append(
            (
                f"`{name}`",
                " x ".join(map(str, model.input_size)),
                f"{sum(parameter.numel() for parameter in model.parameters()):,}",
                f"{eqzoo.multiply_adds(model) / 1e6:,.0f} M",
                f"{1e3 * time['seconds'] / time['batch']:.3g}" if time else "",
                f"{time['ratio']:.1f}" if time.get("ratio") else "",
                error_text(found, 2) if found else "",
                purpose,
            )
        )
    return table(header, rows)


def papers(root: Path) -> str:
    """For each paper that we train again a section: its test errors beside ours."""
    ours, parts = results(root), []
    for key, paper in PAPERS.items():
        listed = {name: row for name, row in rows().items() if row.paper == key}
        if not listed:
            continue  # a paper whose networks are not trained again here
        notes: dict[str, str] = {}
        for name, row in listed.items():
            notes.setdefault(_data_of(name).removesuffix(", augmented"), row.note)
        parts.append(f"## [{paper.title}]({paper.url}) ({paper.short})")
        parts.append(_paper_table(listed, ours))
        parts.append("\n".join(f"- {name}: {note}." for name, note in notes.items()))
    return "\n\n".join(parts)


def _paper_table(listed: Mapping[str, Row], ours: Mapping[str, dict[str, Any]]) -> str:
    lines = []
    for name, row in listed.items():
        model, result = name.partition(".")[0], ours.get(name)
        count = _parameters(model, name) if result is None else result["parameters"]
        error = "" if result is None else error_text(result, 2).replace(" %", "")
        seeds = "" if result is None else len(result.get("accuracies") or [0])
        lines.append((model, _data_of(name), row.parameters, f"{count:,}", row.error_text, error, seeds))
    return table(["network", "data", "parameters, paper", "parameters", "error, paper", "error", "seeds"], lines)


def _data_of(checkpoint: str) -> str:
    tag = checkpoint.partition(".")[2]
    return PAPERS_DATA[tag.removesuffix("_aug")] + (", augmented" if tag.endswith("_aug") else "")


def _parameters(model: str, checkpoint: str) -> int:
    cfg = timm.get_pretrained_cfg(checkpoint.removesuffix("_aug"))
    network = weightless(model, num_classes=cfg.num_classes, in_chans=cfg.input_size[0])
    return sum(parameter.numel() for parameter in network.parameters())


TABLES: dict[str, Callable[[Path], str]] = {
    "attention": attention,
    "checkpoints": checkpoints,
    "files": files,
    "networks": networks,
    "papers": papers,
    "pays": partial(by_set, budgets={"": (5.0, 100)}),
    "real-sets": partial(by_set, budgets={"": (1.0, 100)}),
    "real-sets-others": partial(by_set, budgets=OTHER_BUDGETS),
    "twins": twins,
}

if __name__ == "__main__":
    main()
