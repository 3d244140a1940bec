"""`eqzoo export`: writes a network as ONNX or as a torch program."""

import argparse

from ..export.programs import ExportError, export_onnx, export_pt2
from ..models.loading import load_network
from ..models.resolve import resolve
from ._answer import Answer

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Writes and checks a file; the exit code is 1 where the network cannot be exported correctly."""
    if args.untrained and (args.model or resolve(args.source).config):
        raise ValueError(
            f"{args.source} is a checkpoint with weights of its own; leave --untrained out, or name a network"
        )
    source = load_network(args.source, args.model, pretrained=False if args.untrained else None)
    if not source.trained and not args.untrained:
        raise ValueError(
            f"{source.name} has no published weights; give a checkpoint's folder or file, or add --untrained to export "
            "random weights"
        )
    try:
        if args.output.endswith(".pt2"):
            if args.opset is not None:
                raise ValueError(f"--opset is of ONNX files, and {args.output} is a torch program; leave it out")
            report = export_pt2(source.network, args.output, args.size)
        elif args.output.endswith(".onnx"):
            report = export_onnx(source.network, args.output, 18 if args.opset is None else args.opset, args.size)
        else:
            raise ValueError(f"the file to write ends in .onnx or .pt2, got {args.output}")
    except ExportError as error:
        return Answer(f"not written: {error}", {"written": False, "reason": str(error)}, 1)
    return Answer(str(report), report.as_dict())
