"""What a classifier takes for what, drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._draw import SEQUENTIAL, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_confusion"]

_NUMBERED = 15  # classes, at most, whose cells have room for a number
_NAMED = 40  # classes, at most, whose names have room
_LONGEST = 16  # characters of a name that are shown


def plot_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> "Figure":
    """Draws a confusion matrix: a row a true class, a column an answer, coloured by the share of the row.

    Args:
        matrix: The counts, ``[true class][answer]``.
        names: The names of the classes. Long ones are cut in the middle, and numbers stand for all where two would then
            look alike.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the matrix is not as wide and as high as there are names.
    """
    count = len(names)
    if not count or len(matrix) != count or any(len(row) != count for row in matrix):
        raise ValueError(f"a matrix of {count} names has {count} rows and columns, got {[len(row) for row in matrix]}")
    side = min(12.0, 3 + 0.38 * count)
    figure = new_figure(side + 0.9, side)
    axes = figure.subplots()
    shares = [[value / max(sum(row), 1) for value in row] for row in matrix]
    image = axes.imshow(shares, cmap=SEQUENTIAL, vmin=0, vmax=1, interpolation="nearest")
    if count <= _NUMBERED:
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                colour = "black" if shares[i][j] > 0.55 else "white"
                axes.text(j, i, str(value), ha="center", va="center", fontsize=8, color=colour)
    step = 1 if count <= _NAMED else -(-count // _NAMED)
    shown = _shown(names)[::step]
    longest = max(map(len, shown))
    axes.set_xticks(range(0, count, step), shown, rotation=0 if longest <= 2 else 90, fontsize=8)
    axes.set_yticks(range(0, count, step), shown, fontsize=8)
    axes.set(xlabel="answer", ylabel="true class")
    bar = figure.colorbar(image, ax=axes, fraction=0.046)
    bar.set_label("share of the true class", fontsize=9)
    bar.outline.set_visible(False)
    return figure


def _shown(names: Sequence[str]) -> list[str]:
    """The names, or what there is room for: their beginnings and ends, or numbers where these are not enough."""
    short = [name if len(name) <= _LONGEST else f"{name[:8]}…{name[-7:]}" for name in names]
    return short if len(set(short)) == len(set(names)) else [str(i) for i in range(len(names))]
