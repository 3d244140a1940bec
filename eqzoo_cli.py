"""The command line: parses, and imports the package only when there is something to do.

It stands beside the package because importing anything inside it imports torch and timm, which takes seconds.

A command is an entry of `COMMANDS`, which says what it takes, and a module ``eqzoo.cli.<name>`` with a function
``run(args)`` that returns an `eqzoo.cli.Answer`: text, the same as data for ``--json``, and an exit code.
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["COMMANDS", "main", "parser"]

EXIT_CODES = """exit codes:
  0    done
  1    done, and the answer is no: something did not hold
  2    an error that you can mend; the message says how
  3    a fault of eqzoo's own; EQZOO_TRACEBACK=1 shows where
  130  stopped by Ctrl-C"""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code, as ``eqzoo --help`` lists them."""
    try:
        whole = parser()
        code = _run(whole.parse_args(argv, argparse.Namespace(parser=whole)))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("eqzoo: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has closed it, as `head` does. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _run(args: argparse.Namespace) -> int:
    try:
        answer = importlib.import_module(f"eqzoo.cli.{args.command}").run(args)
        print(json.dumps(answer.data, indent=2, ensure_ascii=False) if args.json else answer.text)
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("EQZOO_TRACEBACK"):
            raise
        expected = isinstance(error, OSError | ValueError | ImportError)
        said = " ".join(str(error).split())
        message = said if expected else f"{type(error).__name__}: {said} (EQZOO_TRACEBACK=1 shows where)"
        print(f"eqzoo {args.command}: {message}", file=sys.stderr)
        return 2 if expected else 3
    return int(answer.code)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="eqzoo",
        description="Image networks that are equivariant by construction.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.description)
        command.arguments(sub)
        sub.add_argument("--json", action="store_true", help="print the answer as JSON")
    return whole


class _Version(argparse.Action):
    """Reads the version where it is written: importing the package would take seconds."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        text = (Path(__file__).parent / "eqzoo" / "__init__.py").read_text(encoding="utf-8")
        found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
        assert found is not None
        print(f"eqzoo {found[1]}")
        parser.exit()


class Command(NamedTuple):
    """What a command takes.

    Completion goes by metavars: NAME is a network or checkpoint, FILE a file, DIR a folder.
    """

    help: str
    description: str
    arguments: Callable[[argparse.ArgumentParser], None]


def _list(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("pattern", nargs="?", default="*", help="a pattern such as 'p4*' (default: all)")
    sub.add_argument("--pretrained", action="store_true", help="checkpoints that exist, instead of networks")
    sub.add_argument("-l", "--long", action="store_true", help="a table, in a pipe too, where names alone are printed")
    sub.add_argument("--parameters", action="store_true", help="with the number of parameters, which takes a while")


def _info(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", metavar="NAME", help="a network or a checkpoint")
    sub.add_argument("--layers", action="store_true", help="every layer, instead of stem, blocks and head")


def _predict(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("picture", metavar="FILE", help="a picture file")
    sub.add_argument(
        "--model",
        nargs="+",
        default=["p4_cnn", "z2_cnn"],
        metavar="NAME",
        help="pretrained networks, side by side (default: p4_cnn and its plain baseline z2_cnn)",
    )
    sub.add_argument("--invert", action="store_true", help="for dark strokes on a light ground")


def _finetune(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", metavar="NAME", help="a network, a checkpoint or the folder of one")
    sub.add_argument(
        "data",
        metavar="DATA_DIR",
        help="a folder with train, val and test or with class folders alone, a .npz file, or a data set: cifar10, "
        "EuroSAT or another of torchvision's, hf:OWNER/NAME",
    )
    sub.add_argument("--output", required=True, metavar="DIR", help="the folder of the checkpoint and its report")
    sub.add_argument("--size", type=int, help="the side of the pictures in pixels (default: the network's own)")
    sub.add_argument("--channels", type=int, choices=[1, 3, 4], help="of picture files (default: 1 if all are grey)")
    sub.add_argument(
        "--pretrained",
        action=argparse.BooleanOptionalAction,
        help="start from trained weights (default: if there are any)",
    )
    sub.add_argument(
        "--freeze", nargs="*", metavar="MODULE", help="modules that stay as they are; alone, all but the classifier"
    )
    sub.add_argument("--epochs", type=int, help="how often the pictures are gone through, at most (default: 30)")
    sub.add_argument("--batch-size", type=int, help="pictures a step (default: 32, of few pictures less)")
    sub.add_argument("--lr", type=float, help="the highest learning rate (default: 0.001)")
    sub.add_argument("--layer-decay", type=float, metavar="F", help="the rate's factor for each layer further down")
    sub.add_argument("--patience", type=int, help="epochs without improvement before the end (default: 10)")
    sub.add_argument("--balance", action="store_true", help="classes weigh the same, however many pictures they have")
    sub.add_argument("--ema", type=float, metavar="DECAY", help="keep a moving average of the weights, such as 0.99")
    sub.add_argument(
        "--augment",
        help="none, shifts (default), flips, quarter_turns, quarter_turns_flips, turns, standard, standard_pad2; or "
        "missing: the quarter turns and mirrors that the network does not keep",
    )
    sub.add_argument("--valid", type=float, default=0.15, metavar="F", help="the fraction to choose the epoch by")
    sub.add_argument("--test", type=float, default=0.15, metavar="F", help="the fraction to test on")
    sub.add_argument("--seed", type=int, help="default: 0")
    sub.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more of a recipe: optimizer=adamw")
    sub.add_argument("--data-dir", default="data", metavar="DIR", help="where data sets with a name are (data)")
    sub.add_argument("--download", action="store_true", help="fetch them if they are not there")
    sub.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    sub.add_argument("--workers", type=int, default=4, help="processes that read what is not in memory (default: 4)")


def _attention(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", metavar="NAME", help="a network or a checkpoint")
    sub.add_argument("picture", metavar="FILE", help="a picture file")
    sub.add_argument("output", metavar="OUT", help="the figure to write: .png, .svg or .pdf")
    sub.add_argument("--layer", help="the layer (default: the first whose attention has poses; --json lists them)")
    sub.add_argument("--group", help="the group of the copies: z2m, r2, p4, p4m (default: the network's own)")
    sub.add_argument("--head", type=int, help="a head, an output field of an attentive convolution, or an E4 slice")
    sub.add_argument("--pose", type=int, help="the pose of the query, in group self-attention")
    sub.add_argument(
        "--place",
        type=int,
        nargs=2,
        metavar=("ROW", "COLUMN"),
        help="the place that attends, in pixels of the layer's input (default: what each place receives from all)",
    )
    sub.add_argument("--checkpoint", metavar="FILE", help="weights, a .safetensors file")
    sub.add_argument("--untrained", action="store_true", help="random weights, of a fixed seed")
    sub.add_argument("--invert", action="store_true", help="for dark strokes on a light ground")
    sub.add_argument("--dpi", type=int, default=150, help="pixels an inch (default: 150)")


def _convert(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", choices=["att_gconvs"], help="whose checkpoint it is")
    sub.add_argument("path", metavar="FILE", help="the checkpoint, a .pth file")
    sub.add_argument("--model", required=True, metavar="NAME", help="the network here that it is for")
    sub.add_argument("--output", required=True, metavar="FILE", help="the .safetensors file to write")
    sub.add_argument(
        "--upright", action="store_true", help="take upright pictures where the released network takes transposed ones"
    )


def _export(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", metavar="NAME", help="a name, a checkpoint's folder or a .safetensors file")
    sub.add_argument("output", metavar="FILE", help="the file to write, .onnx or .pt2")
    sub.add_argument("--model", metavar="NAME", help="the network that a file without config.json is of")
    sub.add_argument("--size", type=int, metavar="PIXELS", help="the side of the pictures (default: the network's)")
    sub.add_argument("--opset", type=int, default=18, metavar="N", help="the ONNX operators (default: 18)")
    sub.add_argument("--untrained", action="store_true", help="accept a network without weights")


def _check(sub: argparse.ArgumentParser) -> None:
    what = "a name here or of timm's, a checkpoint's folder, a .safetensors file or an .onnx file"
    sub.add_argument("source", metavar="NAME", help=what)
    sub.add_argument("--group", metavar="GROUP", help="p4, p4m, r2, r2m or z2m (default: the network's own, or p4)")
    sub.add_argument("--model", metavar="NAME", help="the network that a file without config.json is of")
    sub.add_argument("--size", type=int, metavar="PIXELS", help="the side of the pictures (default: the network's)")
    sub.add_argument("--tolerance", type=float, metavar="ERROR", help="the largest error (default: by number type)")
    sub.add_argument("--pretrained", action="store_true", help="with the weights of a network of timm's")


def _bench(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("names", nargs="+", metavar="NAME", help="networks, timed in turns")
    sub.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32], metavar="N", help="default: 1 32")
    sub.add_argument("--against", metavar="NAME", help="what to compare with (default: the z2 network of that name)")
    sub.add_argument("--rounds", type=int, default=20, help="timed runs of each, in turns (default: 20)")
    sub.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes a minute or more")
    sub.add_argument("--threads", type=int, help="torch's threads on a CPU (default: torch's own choice)")
    sub.add_argument("--device", help="such as cpu or cuda (default: cuda if there is one)")


def _completion(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell")


COMMANDS = {
    "list": Command("list the networks", "Lists the networks, or the checkpoints that exist.", _list),
    "info": Command(
        "describe a network",
        "Describes a network: group, parameters, multiply-adds, sizes, paper, checkpoints and their results, and its "
        "layers.",
        _info,
    ),
    "predict": Command(
        "classify a picture and its turned copies",
        "Classifies a picture and its turned copies, and prints the largest change between them.",
        _predict,
    ),
    "finetune": Command(
        "fine-tune a network on pictures of your own",
        "Trains a network on pictures of your own, measures it, and writes a folder that others can load, export and "
        "publish. The same command goes on with a run that was stopped.",
        _finetune,
    ),
    "attention": Command(
        "draw what a network attends to",
        "Draws what a layer attends to at every pose, for a picture and its turned copies: the maps turn with it.",
        _attention,
    ),
    "convert": Command(
        "convert another project's weights",
        "Writes another project's checkpoint as weights of a network here, with the same function.",
        _convert,
    ),
    "export": Command(
        "write a network as ONNX or as a torch program",
        "Writes a network as ONNX (.onnx) or as a program of torch's operators (.pt2), checked against it.",
        _export,
    ),
    "check": Command(
        "certify that a network keeps its group exactly",
        "Measures whether turned pictures get the same answer, and says why not. Exit code 0: yes, 1: no.",
        _check,
    ),
    "bench": Command(
        "time networks on this machine",
        "Times networks as they are, deployed (plain convolutions) and compiled: medians of runs in turns.",
        _bench,
    ),
    "completion": Command(
        "print a script that completes commands in a shell",
        "Prints a script that completes commands, options and the names of networks. "
        'bash: eval "$(eqzoo completion bash)" in ~/.bashrc. zsh: eqzoo completion zsh > a folder of $fpath/_eqzoo. '
        "fish: eqzoo completion fish > ~/.config/fish/completions/eqzoo.fish.",
        _completion,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
