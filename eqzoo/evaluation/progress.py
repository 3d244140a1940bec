"""Progress bars that count images."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from tqdm import tqdm


def progress_bar(title: str, total: int, start: int = 0, shown: bool = True) -> "tqdm[Any]":
    """A progress bar on stderr that counts images.

    Args:
        title: What is under way.
        total: The number of images.
        start: Those that are done.
        shown: Whether there is a bar at all.
    """
    return tqdm(
        total=total,
        initial=start,
        desc=title,
        unit=" images",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 60,  # a log file keeps every line
        disable=not shown,
    )


@contextmanager
def counting(network: nn.Module, title: str, total: int) -> Iterator["tqdm[Any]"]:
    """A progress bar that advances by the images that a network is given."""
    with progress_bar(title, total) as bar:
        hook = network.register_forward_hook(lambda _, args, __: bar.update(len(args[0])) and None)
        try:
            yield bar
        finally:
            hook.remove()
