"""The `eqzoo` command, a module for each subcommand: ``run(args)`` returns an `Answer`."""

from ._answer import Answer

__all__ = ["Answer"]
