"""`eqzoo convert`: converts a checkpoint of another project."""

import argparse
import json
from typing import Any

from ..models.conversion import convert
from ._answer import Answer

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Writes the weights of another project's checkpoint for a network of eqzoo."""
    settings = dict(map(_setting, args.set or ()))
    text = convert(args.source, args.path, args.model, args.output, args.untransposed, settings)
    return Answer(text, {"source": args.source, "model": args.model, "output": args.output})


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set takes NAME=VALUE such as num_heads=3, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a word
