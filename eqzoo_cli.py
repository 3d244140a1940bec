"""The command line: parses, and imports the package only when there is something to do.

It stands beside the package because importing anything inside it imports torch and timm, which takes seconds.
"""

import argparse
import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0, or 2 after an error that the user can mend."""
    args = _parser().parse_args(argv)
    from eqzoo import cli

    try:
        getattr(cli, args.command)(args)
    except (OSError, ValueError) as error:
        print(f"eqzoo {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


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
    return parser


if __name__ == "__main__":
    sys.exit(main())
