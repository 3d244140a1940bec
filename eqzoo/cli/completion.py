"""`eqzoo completion`: a script that completes commands, options and names in a shell."""

import argparse
import contextlib
import io
from typing import Any

from ._answer import Answer
from ._names import network_names

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Prints the script, which contains the names of networks: completing them starts no process."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError(
            "completion scripts are written by shtab, which is not installed: pip install shtab"
        ) from error
    names = network_names()
    for action in _actions(args.parser):
        if action.metavar == "NAME":
            action.choices = names
        elif action.metavar in ("FILE", "OUT", "DIR", "DATA_DIR", "IMAGES"):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    with contextlib.redirect_stderr(io.StringIO()):
        script = shtab.complete(args.parser, args.shell)
    return Answer(script, {"shell": args.shell, "script": script})


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subs: Any = action.choices.values()
            found += [inner for sub in subs for inner in _actions(sub)]
        else:
            found.append(action)
    return found
