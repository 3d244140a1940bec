"""Reads the ``.pth`` files that other projects release, without running any of their code."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def read_pth(path: Path) -> dict[str, Any]:
    """What a file holds, on the CPU.

    Training scripts save their command line along; its class, `argparse.Namespace`, is let through besides tensors.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If torch cannot read it, or it holds more than tensors and plain values.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            held = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises pickle's, zip's and its own errors here, of several lines
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise ValueError(f"{path} is not a state dict that torch can read ({reason})") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path} holds a {type(held).__name__}, not weights by their names")
    return held


def some_of(names: Iterable[str]) -> str:
    """The first five of some names in their order, and how many there are besides."""
    named = sorted(names)
    return ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
