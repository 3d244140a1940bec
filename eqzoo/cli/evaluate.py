"""`eqzoo evaluate`: the metrics of a network on labeled images."""

import argparse
import io
import sys
from typing import Any

from ..data.hashes import SPLIT_NAMES
from ..evaluation.predictions_file import write_predictions
from ..evaluation.results import evaluate
from ._answer import Answer, table
from ._metrics import class_rows, confusion_rows, metric_rows, threshold_rows, thresholds_of

_NAMES = SPLIT_NAMES | {"val": SPLIT_NAMES["valid"]}


def run(args: argparse.Namespace) -> Answer:
    """Prints accuracy, scores of each class and the confusion matrix, or with --csv the prediction for each image."""
    if args.csv and (args.json or args.rotated or args.threshold):
        raise ValueError(
            "--csv prints all probabilities and the most probable class; leave --json, --rotated and --threshold out"
        )
    data = evaluate(
        args.name,
        args.data,
        split=args.split,
        rotated=0 if args.csv else args.rotated,
        predictions=args.csv,
        thresholds=thresholds_of(args.threshold),
        tta=args.tta,
        data_dir=args.data_dir,
        download=args.download,
        device=args.device,
        workers=args.workers,
    )
    if args.csv:
        for note in data["notes"]:
            print(f"eqzoo: {note}", file=sys.stderr)
        names = [row["name"] for row in data["classes"]]
        write_predictions(text := io.StringIO(), names, {None: data["predictions"]})
        return Answer(text.getvalue().removesuffix("\n"), data)
    part = f" {_NAMES[data['split']]} images" if data["split"] else ""
    rows = [["network", data["network"]], ["images", f"{data['images']:,}{part} of {data['data']}"]]
    parts = [table([*rows, *metric_rows(data)], flexible=1), table(class_rows(data["classes"]), right=range(1, 6))]
    if thresholds := data.get("thresholds"):
        parts.append(table(threshold_rows(thresholds), right=range(1, 6)))
    parts += _confusion(data)
    if chosen := data.get("by_thresholds"):
        parts.append(
            "The accuracy and the confusion above are of the most probable class; with the thresholds they are:"
        )
        parts += [table(metric_rows(chosen), flexible=1), *_confusion(chosen)]
    return Answer("\n\n".join([*parts, *data["notes"]]), data)


def _confusion(data: dict[str, Any]) -> list[str]:
    rows = confusion_rows(data)
    return [table(rows, right=range(1, len(rows[0])))] if rows else []
