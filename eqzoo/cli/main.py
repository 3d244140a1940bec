"""The command line: argument parsing and dispatch.

A command is an entry of `eqzoo.cli.arguments.COMMANDS`, and a module ``eqzoo.cli.<name>`` with a function ``run(args)``
that returns an `eqzoo.cli.Answer`. The module, and with it torch and timm, is imported when the command runs, so that
``--help`` does not wait for them.
"""

import argparse
import importlib
import inspect
import io
import json
import os
import sys
import traceback
from typing import Any

from .._common import __version__
from .arguments import COMMANDS

EXIT_CODES = """exit codes:
  0    success
  1    success with a negative answer: not equivariant, or not exported
  2    an error in the input; the message says how to correct it
  3    an internal error; EQZOO_TRACEBACK=1 shows the traceback
  130  interrupted by Ctrl-C"""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code, see ``eqzoo --help``."""
    command = ""
    sys.stdout = sys.stdout or io.StringIO()  # it may be closed
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A terminal that is not UTF-8 has no ± or ‖; names of files may be bytes that are no text.
            bytes_are_kept = sys.stdout.encoding.lower().startswith("utf") and os.name == "posix"
            sys.stdout.reconfigure(errors="surrogateescape" if bytes_are_kept else "replace")
        whole = parser()
        if "" in (sys.argv[1:] if argv is None else argv):  # a path of it is the working directory
            whole.error("an argument is empty: set the variable that it comes from, or give . for this folder")
        args = whole.parse_args(argv, argparse.Namespace(parser=whole))
        command = args.command
        code = _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("eqzoo: interrupted" + "; run the same command again to go on" * (command == "finetune"), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does. Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # what was printed cannot be written, as to a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"eqzoo: the output cannot be written ({error})", file=sys.stderr)
        return 2
    return code


def _run(args: argparse.Namespace) -> int:
    try:
        answer = importlib.import_module(f"eqzoo.cli.{args.command}").run(args)
        print(_json(answer.data) if args.json else answer.text)
        if answer.error:
            sys.stdout.flush()
            _complain(args.command, answer.error)
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("EQZOO_TRACEBACK"):
            traceback.print_exc()
        expected = isinstance(error, OSError | ValueError | ImportError | IndexError | FloatingPointError)
        unexpected = f"{type(error).__name__}: {error} (EQZOO_TRACEBACK=1 shows the traceback)"
        _complain(args.command, str(error) if expected else unexpected)
        return 2 if expected else 3
    return int(answer.code)


def _complain(command: str, error: str) -> None:
    """Prints an error as one line."""
    print(f"eqzoo {command}: {' '.join(error.split())}", file=sys.stderr)


def _json(data: Any) -> str:
    """Strict JSON, without NaN; in ASCII if the output has not all letters, or a file's name is no text."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(data, indent=2, allow_nan=False)
    return text


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="eqzoo",
        description="Image networks that are equivariant by construction.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"eqzoo {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_arguments in COMMANDS.items():
        description = inspect.getdoc(add_arguments) or ""
        sub = commands.add_parser(name, help=description.partition("\n")[0], description=description)
        add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print the answer as JSON")
    return whole
