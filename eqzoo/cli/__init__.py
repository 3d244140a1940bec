"""The commands behind `eqzoo`, a module each: ``run(args)`` takes the parsed arguments and returns an answer."""

from ._answer import Answer

__all__ = ["Answer"]
