"""`eqzoo evaluate`: the metrics of a network on labeled images."""

import argparse

from ..engine.digests import SPLIT_NAMES
from ..engine.evaluation import evaluate
from ._answer import Answer, table
from ._metrics import class_rows, confusion_rows, metric_rows

__all__ = ["run"]

_NAMES = SPLIT_NAMES | {"val": SPLIT_NAMES["valid"]}


def run(args: argparse.Namespace) -> Answer:
    """Prints accuracy, scores of each class and the confusion matrix."""
    data = evaluate(
        args.name,
        args.data,
        split=args.split,
        rotated=args.rotated,
        data_dir=args.data_dir,
        download=args.download,
        device=args.device,
        workers=args.workers,
    )
    part = f" {_NAMES[data['split']]} images" if data["split"] else ""
    rows = [["network", data["network"]], ["images", f"{data['images']:,}{part} of {data['data']}"]]
    parts = [
        table([*rows, *metric_rows(data)], flexible={1}),
        table(class_rows(data["classes"]), right=range(1, 5)),
    ]
    if confusion := confusion_rows(data):
        parts.append(table(confusion, right=range(1, len(confusion[0]))))
    return Answer("\n\n".join([*parts, *data["notes"]]), data)
