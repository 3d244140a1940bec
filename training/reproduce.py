"""Renders the papers' tables with our numbers beside theirs: `python training/reproduce.py`.

A row for every network and data set of the papers; ours are read from model_cards/*/results.json and are empty where
nothing was run. `--output docs/reproduction.md` writes the page that the docs show.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import timm
from tables import table

import eqzoo
from eqzoo._common import write_text
from eqzoo.cards.checkpoint import error_text
from eqzoo.models.papers import PAPERS, Row, rows

CARDS = Path(__file__).resolve().parents[1] / "model_cards"
DATASETS = {"rotmnist": "rotated MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "pcam": "PatchCamelyon"}


def main() -> None:
    """Parses, and prints or writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a Markdown file to write (default: print)")
    args = parser.parse_args()
    text = page()
    if args.output:
        write_text(args.output, text)
    else:
        print(text)


def page() -> str:
    """All tables, a section a paper."""
    ours = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in CARDS.glob("*/results.json")}
    parts = [
        "# The papers' tables",
        "Test errors in percent, the papers' beside ours, which are rendered from `model_cards/*/results.json` by "
        "`python training/reproduce.py --output docs/reproduction.md`. A blank is a network that was not trained "
        "here, or for which the paper prints no number. Ours are chosen on validation data; what is known of the "
        "papers' choice stands under each table. The command of each of our numbers is on its card, and where it "
        "does not make the same weights, the card says so. Rotated MNIST is regenerated here, so its numbers are "
        "close to the papers', not the same. Ours are of the recipes on the cards, most of them shorter than the "
        "papers' and with another optimizer or augmentation, and of one seed where the last column says 1: they "
        "neither confirm nor refute the papers' numbers, and rows of different recipes do not rank their networks. "
        'A network marked "distilled" also learned from the predictions of other networks here, which its card '
        "names; no network of the papers did.",
    ]
    for key, paper in PAPERS.items():
        listed = {name: row for name, row in rows().items() if row.paper == key}
        if not listed:
            continue  # a paper whose networks are not trained again here
        notes: dict[str, str] = {}
        for name, row in listed.items():
            notes.setdefault(dataset(name).removesuffix(", augmented"), row.note)
        parts.append(f"## [{paper.title}]({paper.url}) ({paper.short})")
        parts.append(paper_table(listed, ours))
        parts.append("\n".join(f"- {name}: {note}." for name, note in notes.items()))
    return "\n\n".join(parts) + "\n"


def paper_table(listed: dict[str, Row], ours: dict[str, dict[str, Any]]) -> str:
    """A paper's table."""
    lines = []
    for name, row in listed.items():
        model, result = name.partition(".")[0], ours.get(name)
        count = parameters(model, name) if result is None else result["parameters"]
        seeds = "" if result is None else len(result.get("accuracies") or [0])
        lines.append((model, dataset(name), row.parameters, f"{count:,}", row.error_text, error(result), seeds))
    return table(["network", "data", "parameters, paper", "parameters", "error, paper", "error", "seeds"], lines)


def error(result: dict[str, Any] | None) -> str:
    """Our test error: of one seed, or the mean of several with their standard deviation; with a mark if distilled."""
    return "" if result is None else error_text(result, 2).replace(" %", "")


def dataset(checkpoint: str) -> str:
    """The data set of a checkpoint, as people call it."""
    tag = checkpoint.partition(".")[2]
    return DATASETS[tag.removesuffix("_aug")] + (", augmented" if tag.endswith("_aug") else "")


def parameters(model: str, checkpoint: str) -> int:
    """The number of parameters of a network for a data set."""
    cfg = timm.get_pretrained_cfg(checkpoint.removesuffix("_aug"))
    network = eqzoo.create_model(model, num_classes=cfg.num_classes, in_chans=cfg.input_size[0])
    return sum(parameter.numel() for parameter in network.parameters())


if __name__ == "__main__":
    main()
