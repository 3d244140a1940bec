"""`eqzoo compare`: fine-tuned networks on the same test images."""

import argparse
from typing import Any

from ..data.hashes import SPLIT_NAMES
from ..finetuning.compare import compare
from ._answer import Answer, table


def run(args: argparse.Namespace) -> Answer:
    """Prints the metrics and costs of fine-tuned networks, and their differences to the first one."""
    rows = compare(*args.folders)
    lines = [
        ["", *(row["folder"] for row in rows)],
        ["network", *(row["checkpoint"] for row in rows)],
        ["evaluated on", *(f"{row['images']:,} {SPLIT_NAMES[row['evaluated_on']]} images" for row in rows)],
        ["accuracy", *(f"{row['accuracy']:.2f} %" for row in rows)],
        ["mean F1 of the classes that have images", *(f"{row['macro_f1']:.2f} %" for row in rows)],
        ["accuracy, difference to the first", "", *(_difference(row, "accuracy") for row in rows[1:])],
        ["mean F1, difference to the first", "", *(_difference(row, "macro_f1") for row in rows[1:])],
        ["p-value of McNemar's test", "", *(f"{row['p_value']:.2g}" for row in rows[1:])],
        ["same class at all 90° rotations", *(_of(row, "same_class_at_all_quarter_rotations") for row in rows)],
        ["lowest accuracy over the angles", *(_of(row, "lowest_over_angles", "images_over_angles") for row in rows)],
        ["predictions a second", *(f"{row['images_per_second']:,.0f}" for row in rows)],
        ["weights", *(f"{row['megabytes']:g} MB" for row in rows)],
        ["training", *(f"{row['training_minutes']:g} minutes" for row in rows)],
    ]
    notes = [
        f"{row['folder']} saw other pixels than {rows[0]['folder']} under the same names: are they the same images?"
        for row in rows[1:]
        if row["other_pixels"]
    ]
    return Answer("\n".join([table(lines), *notes]), {"networks": rows})


def _of(row: dict[str, Any], key: str, count: str = "rotated_images") -> str:
    return f"{row[key]:.2f} %, of {row[count]:,}"


def _difference(row: dict[str, Any], key: str) -> str:
    low, high = row[f"{key}_difference_interval"]
    return f"{row[f'{key}_difference']:+.2f} ({low:+.2f} to {high:+.2f})"
