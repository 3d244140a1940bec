"""`eqzoo check`: whether a network is equivariant, up to round-off."""

import argparse

from ..analysis.check import check_equivariance
from ._answer import Answer


def run(args: argparse.Namespace) -> Answer:
    """Prints the equivariance check; the exit code is 1 where the network is not exact."""
    report = check_equivariance(args.source, args.group, args.model, args.size, args.tolerance, args.pretrained)
    return Answer(str(report), report.as_dict(), 0 if report.exact else 1)
