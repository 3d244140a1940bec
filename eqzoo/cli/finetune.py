"""`eqzoo finetune`: fine-tunes a network on the user's images."""

import argparse
from pathlib import Path
from typing import Any

from .._common import parse_settings
from ..data.hashes import SPLIT_NAMES, USES
from ..finetuning.run import finetune
from ..hub import CONFIG_NAME
from ..models import list_models
from ._answer import Answer, table
from ._metrics import FEW_CLASSES, metric_rows


def run(args: argparse.Namespace) -> Answer:
    """Trains a network on the user's images and prints its metrics."""
    options = {
        key: value
        for key, value in vars(args).items()
        if value is not None and key not in ("command", "parser", "json", "set")
    }
    settings = parse_settings(args.set)
    if twice := sorted(options.keys() & settings.keys()):
        raise ValueError(f"{', '.join(twice)} is given by an option of its own and by --set; give it once")
    if args.freeze == []:
        options["freeze"] = True
    if _swapped(args.name, str(args.data)):
        raise ValueError(f"the network comes before the images: eqzoo finetune {args.data} {args.name}")
    results = finetune(**options, **settings).results
    return Answer(_text(results, args.output), results | {"output": args.output})


def _swapped(name: str, data: str) -> bool:
    folder = Path(name)
    return folder.is_dir() and not (folder / CONFIG_NAME).is_file() and data.partition(".")[0] in list_models()


def _text(results: dict[str, Any], folder: str) -> str:
    rows = [
        ["started from", results["start"] or "random weights"],
        ["images", ", ".join(f"{count:,} to {USES[name]}" for name, count in results["images"].items())],
        ["penalty of the fitted classifier", f"{results['penalty']:g}"]
        if "penalty" in results
        else ["epoch kept", f"{results['selected_epoch']} of {results['epochs']}"],
    ]
    if (valid := results["valid_accuracy"]) is not None:
        rows.append(["validation accuracy of it", f"{valid:.2f} %"])
    rows += [["evaluated on", f"{SPLIT_NAMES[results['evaluated_on']]} images"], *metric_rows(results)]
    if len(classes := results["classes"]) <= FEW_CLASSES:
        recalls = (f"{row['name']} {row['recall']:.2f} %" for row in classes if row["images"])
        rows.append(["recall of each class", ", ".join(recalls)])
    rows.append(["wrote", f"{folder}; README.md has all metrics of each class, predictions.csv each image"])
    return "\n".join([table(rows, flexible=1), *results["notes"], *(f"advice: {x}" for x in results["advice"])])
