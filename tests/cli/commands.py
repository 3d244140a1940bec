"""Runs the commands, as a user does."""

from eqzoo.cli import main as command_line
from tests.conftest import ROOT

IMAGE = ROOT / "examples" / "seven.png"


def run(capsys, *args):
    """The exit code of a command, and what it printed on stdout and stderr."""
    try:
        code = command_line.main([str(arg) for arg in args])
    except SystemExit as done:  # wrong arguments
        code = done.code
    return code, *capsys.readouterr()
