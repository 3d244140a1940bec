"""Drawing helpers: colors, grids of panels, and rings of maps."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..groups import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

SEQUENTIAL = "cividis"
SIGNED = "PuOr"
# The palette of Okabe and Ito, distinguishable with all kinds of color vision, without black and the pale yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def literal(names: Sequence[str]) -> list[str]:
    """Names as they are: matplotlib sets what is between two dollars as mathematics."""
    return [name.replace("$", r"\$") for name in names]


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, sizes in inches, that is not registered with pyplot.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("figures need matplotlib, which is not installed: pip install 'eqzoo[viz]'") from error
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.12))


def panels(figure: "Figure", count: int, columns: int, heights: Sequence[float] = (1,)) -> "list[list[Axes]]":
    """Rows of panels, for each kind of panel a list.

    Args:
        figure: The figure.
        count: The number of panels of each kind.
        columns: The number of panels per row.
        heights: The relative heights of the kinds of panels; kinds alternate from row to row.
    """
    rows, kinds = -(-count // columns), len(heights)
    grid = figure.subplots(rows * kinds, columns, squeeze=False, height_ratios=[*heights] * rows)
    shown = [[axes for row in grid[kind::kinds] for axes in row] for kind in range(kinds)]
    for axes in [axes for of_kind in shown for axes in of_kind[count:]]:
        axes.remove()
    return [of_kind[:count] for of_kind in shown]


def norm_of(maps: Sequence[Tensor], signed: bool = False) -> "Normalize":
    """One color scale for all maps; symmetric about 0 if they are signed."""
    from matplotlib.colors import Normalize

    values = torch.cat([m.flatten() for m in maps])
    if signed:
        largest = values.abs().max().item()
        return Normalize(-largest, largest)
    low, high = values.min().item(), values.max().item()
    if high - low > 1e-9 * abs(high):
        return Normalize(low, high)
    # Values that are equal up to round-off get the middle color, so that round-off does not show as a pattern.
    return Normalize(min(2 * low, 0), max(2 * high, 1e-9))


def color_bar(axes: "Sequence[Axes]", norm: "Normalize", cmap: str, label: str) -> None:
    """Draws the color bar of maps at the right of their axes."""
    from matplotlib.cm import ScalarMappable

    bar = axes[0].figure.colorbar(ScalarMappable(norm, cmap), ax=axes, pad=0.02, aspect=25)
    bar.set_label(label, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)


def draw_map(axes: "Axes", values: Tensor, extent: tuple[float, float, float, float] | None = None, **how: Any) -> None:
    """Draws a map with the keyword arguments of `imshow`, or an image if there are none."""
    shown = values.detach().cpu().numpy() if how else _image(values)
    axes.imshow(shown, extent=extent, interpolation="nearest", zorder=2, **how)


def draw_above(axes: "Axes", values: Tensor, x: float, side: float) -> None:
    """Draws a small image ``(C, height, width)`` above a plot at x; ``side`` is its longer side, in points."""
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    image = OffsetImage(_image(values), zoom=side / max(values.shape[-2:]), interpolation="nearest", resample=True)
    foot = ("data", "axes fraction")
    axes.add_artist(AnnotationBbox(image, (x, 1.03), xycoords=foot, box_alignment=(0.5, 0), frameon=False, pad=0))


def _image(values: Tensor) -> Any:
    """``(C, height, width)`` scaled to [0, 1], as RGB: in color if C is 3, else the gray mean over channels."""
    values = values.detach().to("cpu", torch.float64)
    shown = values if len(values) == 3 else values.mean(0, keepdim=True).expand(3, -1, -1)
    low, high = shown.min(), shown.max()
    return ((shown - low) / (high - low if high > low else 1)).permute(1, 2, 0).numpy()


def draw_ring(
    axes: "Axes",
    maps: Tensor,
    group: Group,
    center: Tensor | None = None,
    mark: tuple[float, float, float, float] | None = None,
    **how: Any,
) -> None:
    """Draws the maps of all poses on a circle around an image, counter-clockwise from the top.

    Rotating the image rotates the whole ring: each map is rotated and moves to the position of the next pose. Reflected
    poses are between the others.

    Args:
        axes: The axes; their frame is removed.
        maps: ``(poses, height, width)``.
        group: The group; if its order is not the number of poses, the poses are numbered.
        center: An image ``(C, height, width)`` for the center, or None.
        mark: A frame in the image: row and column of its center, height and width, in pixels.
        **how: Keyword arguments of `imshow`.
    """
    angles, labels = _poses(len(maps), group)
    spots = [(-math.sin(angle), math.cos(angle)) for angle in angles]
    # Squares do not overlap if they are apart along one axis; this gives half the sides of the maps and of the center.
    half = min([_apart(a, b) / 2 for a, b in itertools.combinations(spots, 2)] + [0.42]) * 0.92
    middle = min(min(_apart(spot, (0, 0)) for spot in spots) - half, 0.6) * 0.92 if center is not None else 0.0
    if center is not None:
        extent = _extent((0, 0), middle, center)
        draw_map(axes, center, extent)
        if mark:
            _frame(axes, extent, center, mark)
    for spot, values, label in zip(spots, maps, labels, strict=True):
        box = _extent(spot, half, values)
        draw_map(axes, values, box, **how)
        _outline(axes, box, "#bbbbbb", 0.4)
        if len(maps) > 1:
            _label(axes, spot, half, label)
    side = 1 + half + 0.42 if len(maps) > 1 else max(half, middle) + 0.05
    top, bottom = (1 + half + 0.25, 1 + half + 0.25) if len(maps) > 1 else (1 + half + 0.05, middle + 0.05)
    # Anchored at the top, so that the layout leaves room for the title.
    axes.set(xlim=(-side, side), ylim=(-bottom, top), aspect="equal", anchor="N")
    axes.set_axis_off()


def _label(axes: "Axes", spot: tuple[float, float], half: float, text: str) -> None:
    """Labels a pose at the outer side of its map."""
    x, y = spot
    across = "center" if abs(x) < 0.3 else "left" if x > 0 else "right"
    along = "center" if abs(y) < 0.3 else "bottom" if y > 0 else "top"
    beside = (x + math.copysign(half + 0.05, x)) if along == "center" else x
    above = (y + math.copysign(half + 0.04, y)) if along != "center" else y
    if along != "center" and across != "center":  # in a corner, above or below the map
        across = "center"
    axes.text(beside, above, text, ha=across, va=along, fontsize=7, color="#555555")


def _frame(
    axes: "Axes", extent: tuple[float, float, float, float], image: Tensor, mark: tuple[float, float, float, float]
) -> None:
    row, column, high, wide = mark
    unit = (extent[1] - extent[0]) / image.shape[-1]
    x, y = extent[0] + (column + 0.5) * unit, extent[3] - (row + 0.5) * unit
    _outline(axes, (x - wide / 2 * unit, x + wide / 2 * unit, y - high / 2 * unit, y + high / 2 * unit), COLORS[-1], 1)


def _outline(axes: "Axes", extent: tuple[float, float, float, float], color: str, width: float) -> None:
    from matplotlib.patches import Rectangle

    left, right, bottom, top = extent
    size = (right - left, top - bottom)
    axes.add_patch(Rectangle((left, bottom), *size, fill=False, edgecolor=color, linewidth=width, zorder=3))


def _poses(count: int, group: Group) -> tuple[list[float], list[str]]:
    if count != group.order:
        return [2 * math.pi * i / count for i in range(count)], [str(i) for i in range(count)]
    step, angles, labels = 2 * math.pi / group.rotations, [], []
    for g in group.elements:
        m, r = divmod(g, group.rotations)
        angles.append(step * (r + m / 2))
        labels.append(("m " if m else "") + f"{360 * r / group.rotations:g}°")
    return angles, labels


def _apart(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]))


def _extent(spot: tuple[float, float], half: float, values: Tensor) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of a map whose longer side is twice ``half``."""
    height, width = values.shape[-2:]
    high, wide = (half * side / max(height, width) for side in (height, width))
    return spot[0] - wide, spot[0] + wide, spot[1] - high, spot[1] + high
