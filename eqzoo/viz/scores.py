"""Confusion matrices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._draw import SEQUENTIAL, literal, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBERED = 15  # the largest number of classes for which counts are written into the cells
_NAMED = 40  # the largest number of classes for which all ticks are labeled
_LONGEST = 16  # the longest class name that is not abbreviated, in characters


def plot_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> "Figure":
    """Draws a confusion matrix, with one row per true class, colored by the fraction of the row.

    Args:
        matrix: The counts, ``[true class][predicted class]``.
        names: The names of the classes. Long names are abbreviated in the middle; if two would then be equal, class
            numbers are shown instead.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    count = len(names)
    side = min(12.0, 3 + 0.38 * count)
    figure = new_figure(side + 0.9, side)
    axes = figure.subplots()
    shares = [[value / max(sum(row), 1) for value in row] for row in matrix]
    image = axes.imshow(shares, cmap=SEQUENTIAL, vmin=0, vmax=1, interpolation="nearest")
    if count <= _NUMBERED:
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                color = "black" if shares[i][j] > 0.55 else "white"
                axes.text(j, i, str(value), ha="center", va="center", fontsize=8, color=color)
    step = 1 if count <= _NAMED else -(-count // _NAMED)
    shown = _shown(names)[::step]
    longest = max(map(len, shown))
    axes.set_xticks(range(0, count, step), shown, rotation=0 if longest <= 2 else 90, fontsize=8)
    axes.set_yticks(range(0, count, step), shown, fontsize=8)
    axes.set(xlabel="predicted class", ylabel="true class")
    bar = figure.colorbar(image, ax=axes, fraction=0.046)
    bar.set_label("fraction of the true class", fontsize=9)
    bar.outline.set_visible(False)
    return figure


def _shown(names: Sequence[str]) -> list[str]:
    """The names, abbreviated if long, or class numbers if abbreviations would be equal."""
    short = [name if len(name) <= _LONGEST else f"{name[:8]}…{name[-7:]}" for name in names]
    return literal(short) if len(set(short)) == len(set(names)) else [str(i) for i in range(len(names))]
