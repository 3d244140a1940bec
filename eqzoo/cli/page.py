"""`eqzoo page`: writes a web page that classifies images with a network."""

import argparse
from pathlib import Path

from ..page import write_page
from ._answer import Answer
from ._metrics import thresholds_of


def run(args: argparse.Namespace) -> Answer:
    """Writes the page."""
    names = write_page(args.source, args.output, args.against, thresholds_of(args.threshold), args.title)
    size = Path(args.output).stat().st_size
    text = f"wrote {args.output}, {size / 1e6:.1f} MB: open it in a browser or send it; it runs {' and '.join(names)}"
    return Answer(text, {"path": args.output, "bytes": size, "networks": names})
