"""Renders the tables of README.md and docs from JSON: `python training/tables.py`.

A page holds a table between `<!-- NAME: rendered by training/tables.py -->` and `<!-- end of NAME -->`. Its numbers are
those of `model_cards/*/results.json`, `docs/benchmarks/*.json` and the networks themselves.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import eqzoo
from eqzoo._common import write_text
from eqzoo.analysis.sizes import weightless
from eqzoo.cards import render_summary, render_table
from eqzoo.cards.checkpoint import error_text, mean_error

__all__ = ["rendered_pages"]

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- ([\w-]+): rendered by training/tables\.py -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
# The networks of docs/choosing.md and what they are for.
NETWORKS = {
    "p4_cnn": "shapes on a plain background, few images, a browser: where to start",
    "p4m_cnn": "the same, invariant to reflections",
    "p4_cnn_w19": "the same, wider",
    "p4_e4net": "few parameters",
    "p4_alpha_f_cnn": "attention on inputs",
    "p4_alpha_cnn": "attention maps to look at",
    "r4_gsanet_t": "attention without convolutions",
    "p4_resnet29": "small color images",
    "p4m_resnet29": "the same, invariant to reflections",
    "p4_asc_resnet29": "affine self convolution",
    "p4m_asc_resnet29": "the same, invariant to reflections",
    "p4_allcnn": "convolutions only",
    "p4_e4_resnet18": "thousands of color images and a GPU",
    "p4_resnet18": "the same; no weights",
    "p4m_densenet": "cells, patches of tissue",
    "p4m_convnext_atto": "larger images; no weights",
    "p4m_octic_vit_large_patch16_224": "[weights of ImageNet](imagenet.md)",
}
BUDGETS = ("equivariant", "same_steps", "same_minutes", "copies_averaged")
EAGER = "torch's operators alone"  # a benchmark's column without kernels


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


def benchmark(root: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a benchmark of docs/benchmarks."""
    rows: list[dict[str, Any]] = json.loads((root / f"docs/benchmarks/{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])


def pays(root: Path, network: str) -> str:
    """A network against its plain one: accuracy and macro F1 by the number of training images and the budget."""
    header = ["trained on", "images", f"`{network}`", *_against("same steps", "same minutes", "same minutes, 8 copies")]
    rows: list[Sequence[object]] = []
    ratios = []
    for row in benchmark(root, "real_images"):
        if row["network"] != network:
            continue
        rotated = "" if row["augment"] == "affine" else ", not rotated in training"
        if row["images"] in ((10_184, 16_200) if rotated else (103, 162, 1_018, 1_620, 10_184, 16_200)):
            scores = ("accuracy",) if row["data"] == "EuroSAT" else ("accuracy", "macro_f1")
            cells = (" / ".join(f"{row[score][key]:.1f}" for score in scores) for key in BUDGETS)
            title = row["data"] + (", accuracy / macro F1" if len(scores) > 1 else "") + rotated
            rows.append((title, f"{row['images']:,}", *cells))
        ratios.append([row["predict_ms"][key] / row["predict_ms"]["same_steps"] for key in BUDGETS])
    errors = [mean_error(results(root)[f"{name}.cifar10"]) for name in (network, "z2_resnet29")]
    rows.append(("CIFAR-10, photographs", "45,000", *(f"{100 - error:.1f}" for error in errors), "", ""))
    spans = [sorted(column) for column in zip(*ratios, strict=True)]
    costs = [f"{span[len(span) // 2]:.1f}" for span in spans]
    return table(header, [*rows, ("**cost of a prediction**", "", costs[0], "1", "1", "8")])


def _against(*budgets: str) -> list[str]:
    return [f"plain, {budget}" for budget in budgets]


def costs(root: Path) -> str:
    """The time of three networks over that of plain ones with as many parameters."""
    header = ["against the plain network", "training step", "prediction"]
    header += ["step without a compiler", "step, AVX2 alone", "the same without a compiler"]
    rows = []
    for name in ("p4_resnet29", "p4m_resnet29", "p4_cnn"):
        wide, narrow = (_twin(root, f"{folder}twins_cpu", name) for folder in ("", "avx2/"))
        steps = [wide["training step"], narrow["training step"]]
        cells = [steps[0]["ratio"], wide["inference"]["ratio"], steps[0][EAGER], steps[1]["ratio"], steps[1][EAGER]]
        rows.append((f"`{name}`", *(f"{cell:.1f}" for cell in cells)))
    return table(header, rows)


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
        cells += [narrow[task]["ratio"] for task in ("training step", "inference")]
        against = wide["inference"]["against"]
        rows.append((f"`{name}`", f"`{against}`", *(f"{cell:.1f}" for cell in cells)))
    return table(header, rows)


def planes(root: Path) -> str:
    """Networks against plain ones with as many channels."""
    found: dict[str, dict[str, float]] = {}
    for row in benchmark(root, "models_cpu"):
        if row["against"].endswith("with its planes"):
            found.setdefault(row["subject"], {})[row["task"]] = row["ratio"]
    tasks = ("training step", "inference", "inference, deployed")
    rows = [(f"`{name}`", *(f"{times[task]:.2f}" for task in tasks)) for name, times in found.items()]
    return table(["network", "training step", "prediction", "prediction, deployed"], rows)


def tiles(root: Path) -> str:
    """Tiles that are predicted a second, by number format and layout."""
    rates: dict[str, list[float]] = {}
    for row in benchmark(root, "tiles_avx512_cpu"):
        if row["form"] == "eager":
            layout = "channels last" if row["channels_last"] else "contiguous"
            rates.setdefault(f"{row['precision']}, {layout}", []).append(row["images_per_second"])
    rows = [(key, f"{ours:.1f}", f"{plain:.1f}", f"{plain / ours:.1f}") for key, (ours, plain) in rates.items()]
    return table(["format", "`p4m_resnet29`", "plain `z2_resnet29`", "time / plain"], rows)


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


def networks(root: Path) -> str:
    """The networks that are worth a first look, with their costs and test errors."""
    header = ["network", "images", "parameters", "multiply-adds", "ms an image", "time / plain", "test error", "for"]
    timed = {row["network"]: row for row in benchmark(root, "avx2/choosing_cpu") if row["form"] == "eager"}
    rows = []
    for name, purpose in NETWORKS.items():
        model, time = weightless(name), timed.get(name, {})
        found = next((r for key, r in results(root).items() if key in (f"{name}.rotmnist", f"{name}.cifar10")), None)
        found = found or next((r for key, r in results(root).items() if key.startswith(f"{name}.")), None)
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


def starts(root: Path) -> str:
    """The checkpoints of tiles and cells."""
    header = ["checkpoint", "size", "test error", "macro F1", "multiply-adds", "epochs"]
    rows = []
    for name, r in results(root).items():
        if name.endswith((".eurosat", ".chula_rbc12")):
            side = weightless(name).input_size[-1]
            f1 = f"{r['macro_f1']:.1f} %" if r["data"] == "chula_rbc12" else ""  # classes are unequal
            cells = error_text(r, 2), f1, f"{r['multiply_adds'] / 1e6:,.0f} M"
            rows.append((f"`{name}`", f"{side} x {side}", *cells, r["epochs"]))
    return table(header, sorted(rows, key=lambda row: row[0].partition(".")[2], reverse=True))


TABLES: dict[str, Callable[[Path], str]] = {
    "attention": attention,
    "checkpoints": lambda root: render_table(list(results(root).values())),
    "costs": costs,
    "networks": networks,
    "pays": partial(pays, network="p4_resnet29"),
    "pays-p4m": partial(pays, network="p4m_resnet29"),
    "planes": planes,
    "results": lambda root: render_summary(list(results(root).values())),
    "starts": starts,
    "tiles": tiles,
    "twins": twins,
}

if __name__ == "__main__":
    main()
