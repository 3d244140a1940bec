"""`eqzoo completion`: a script that completes commands, options and names in a shell."""

import argparse
import contextlib
import io

import shtab

from ..models import list_models, list_pretrained
from ._answer import Answer


def run(args: argparse.Namespace) -> Answer:
    """Prints the script, which contains the names of networks: completing them starts no process."""
    names = [*list_models(), *list_pretrained()]
    (commands,) = args.parser._subparsers._group_actions
    for action in (action for sub in commands.choices.values() for action in sub._actions):
        if action.metavar == "NAME":
            action.choices = names
        elif action.metavar in ("FILE", "OUT", "DIR", "DATA_DIR", "IMAGES"):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    with contextlib.redirect_stderr(io.StringIO()):
        script = shtab.complete(args.parser, args.shell)
    return Answer(script, {"shell": args.shell, "script": script})
