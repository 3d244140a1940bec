"""`eqzoo convert`: another project's weights as weights of a network here."""

import argparse

from ..convert import convert
from ._answer import Answer

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Writes another project's checkpoint as weights of a network here."""
    convert(args.source, args.path, args.model, args.output, args.upright)
    text = f"wrote {args.output}; eqzoo.create_model({args.model!r}, checkpoint_path={args.output!r}) reads it"
    return Answer(text, {"source": args.source, "model": args.model, "output": args.output})
