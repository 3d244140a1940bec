"""`eqzoo check`: whether a network keeps its group exactly."""

import argparse

from ..certificate import certify
from ._answer import Answer

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Gives the certificate of a network; the answer is no where it is not exact."""
    certificate = certify(args.source, args.group, args.model, args.size, args.tolerance, args.pretrained)
    return Answer(str(certificate), certificate.as_dict(), 0 if certificate.exact else 1)
