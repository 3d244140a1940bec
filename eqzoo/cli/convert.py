"""`eqzoo convert`: converts a checkpoint of another project."""

import argparse

from .._common import parse_settings
from ..models.conversion import convert
from ._answer import Answer


def run(args: argparse.Namespace) -> Answer:
    """Writes the weights of another project's checkpoint for a network of eqzoo."""
    settings = parse_settings(args.set or ())
    text = convert(args.source, args.path, args.model, args.output, untransposed=args.untransposed, settings=settings)
    return Answer(text, {"source": args.source, "model": args.model, "output": args.output})
