"""The command line: parses, and imports the package only when there is something to do.

It stands beside the package because importing anything inside it imports torch and timm, which takes seconds.
"""

import argparse
import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, 1 if the answer is no, or 2 after an error that the user can mend."""
    args = _parser().parse_args(argv)
    from eqzoo import cli

    try:
        code: int | None = getattr(cli, args.command)(args)
    except (ImportError, OSError, ValueError) as error:
        print(f"eqzoo {args.command}: {error}", file=sys.stderr)
        return 2
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eqzoo", description="Image networks that are equivariant by construction.")
    commands = parser.add_subparsers(dest="command", required=True)

    predict = commands.add_parser(
        "predict",
        help="classify a picture and its turned copies",
        description="Classifies a picture and its turned copies, and prints the largest change between them.",
    )
    predict.add_argument("picture", help="a picture file")
    predict.add_argument(
        "--model",
        nargs="+",
        default=["p4_cnn", "z2_cnn"],
        metavar="NAME",
        help="pretrained networks, side by side (default: p4_cnn and its plain baseline z2_cnn)",
    )
    predict.add_argument("--invert", action="store_true", help="for dark strokes on a light ground")

    models = commands.add_parser("list", help="list the networks", description="Lists the networks.")
    models.add_argument("pattern", nargs="?", default="*", help="a pattern such as 'p4*' (default: all)")
    models.add_argument("--pretrained", action="store_true", help="checkpoints only")

    convert = commands.add_parser(
        "convert",
        help="convert another project's weights",
        description="Writes another project's checkpoint as weights of a network here, with the same function.",
    )
    convert.add_argument("source", choices=["att_gconvs"], help="whose checkpoint it is")
    convert.add_argument("path", help="the checkpoint, a .pth file")
    convert.add_argument("--model", required=True, metavar="NAME", help="the network here that it is for")
    convert.add_argument("--output", required=True, metavar="FILE", help="the .safetensors file to write")
    convert.add_argument(
        "--upright", action="store_true", help="take upright pictures where the released network takes transposed ones"
    )

    export = commands.add_parser(
        "export",
        help="write a network as ONNX or as a torch program",
        description="Writes a network as ONNX (.onnx) or as a program of torch's operators (.pt2), checked against it.",
    )
    export.add_argument("source", help="a name, a checkpoint's folder or a .safetensors file")
    export.add_argument("output", help="the file to write, .onnx or .pt2")
    export.add_argument("--model", metavar="NAME", help="the network that a file without config.json is of")
    export.add_argument("--size", type=int, metavar="PIXELS", help="the side of the pictures (default: the network's)")
    export.add_argument("--opset", type=int, default=18, metavar="N", help="the ONNX operators (default: 18)")
    export.add_argument("--untrained", action="store_true", help="accept a network without weights")
    export.add_argument("--json", action="store_true", help="print the report as JSON")

    check = commands.add_parser(
        "check",
        help="certify that a network keeps its group exactly",
        description="Measures whether turned pictures get the same answer, and says why not. Exit code 0: yes, 1: no.",
    )
    check.add_argument(
        "source", help="a name here or of timm's, a checkpoint's folder, a .safetensors file or an .onnx file"
    )
    check.add_argument("--group", metavar="GROUP", help="p4, p4m, r2, r2m or z2m (default: the network's own, or p4)")
    check.add_argument("--model", metavar="NAME", help="the network that a file without config.json is of")
    check.add_argument("--size", type=int, metavar="PIXELS", help="the side of the pictures (default: the network's)")
    check.add_argument("--tolerance", type=float, metavar="ERROR", help="the largest error (default: by number type)")
    check.add_argument("--pretrained", action="store_true", help="with the weights of a network of timm's")
    check.add_argument("--json", action="store_true", help="print the certificate as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
