"""Figures of attention, feature fields, filters, equivariance errors and rotation curves."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._common import network_name
from ..evaluation.rotation import rotate
from ..groups import Group, cyclic
from ._draw import (
    COLORS,
    SEQUENTIAL,
    SIGNED,
    color_bar,
    draw_above,
    draw_map,
    draw_ring,
    literal,
    new_figure,
    norm_of,
    panels,
)
from ._inside import moved
from .attention_weights import Attention, attention
from .measures import error_maps, first_convolution, orbit_filters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDOFF = 1e-12  # smaller relative errors are float64 round-off
_LINES = ("-", "--", "-.", ":")


def attention_maps(model: nn.Module | Attention, *args: Any, **kwargs: Any) -> "Figure":
    """Draws the attention of a layer, one map per pose, for an image and its transformed copies.

    Each copy is drawn as a ring, with the image in the center and the maps of the poses around it. The ring of a
    rotated image is the rotated ring: each map is rotated and moves to the position of the next pose. Channel
    attention, if any, is drawn below on a scale of 0 to 1, with one row per channel and one column per pose.

    Args:
        model: The network, or the result of `eqzoo.viz.attention`; then there are no other arguments.
        *args: The arguments of `eqzoo.viz.attention`: the image, the layer, the query position and others.
        **kwargs: Likewise.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: As `eqzoo.viz.attention`.
    """
    seen = model if isinstance(model, Attention) else attention(model, *args, **kwargs)
    count, one_pose = len(seen.images), seen.maps and len(seen.maps[0]) == 1
    heights = [2.6 if one_pose else 2.4] * bool(seen.maps) + [1.0] * bool(seen.channels)
    columns = min(4, count)
    width = (1.9 if one_pose else 2.5) * columns + 1.0
    title = _attention_title(seen, width)
    figure = new_figure(width, (sum(heights) + 0.3) * -(-count // columns) + 0.2 + 0.2 * len(title.splitlines()))
    figure.suptitle(title, fontsize=10)
    shown = panels(figure, count, columns, heights)
    for axes, g in zip(shown[0], seen.elements, strict=True):
        axes.set_title(seen.group.describe(g), fontsize=9)
    if seen.maps:
        _draw_rings(shown[0], columns, seen)
    if seen.channels:
        _draw_channels(shown[-1], columns, seen)
    return figure


def _attention_title(seen: Attention, width: float) -> str:
    """The title, wrapped to the width of the figure, in inches."""
    where = f" at row {seen.place[0]}, column {seen.place[1]} of {seen.size[0]} x {seen.size[1]}" if seen.place else ""
    law = (
        f"equivariant up to round-off ({seen.error:.0e})"
        if seen.error < ROUNDOFF
        else f"not equivariant: relative error {seen.error:.2g}"
    )
    lines = (f"{seen.layer or 'the layer'}: {seen.quantity}{where}", law)
    return _typeset("\n".join(textwrap.fill(line, int(12 * width)) for line in lines))


def _typeset(text: str) -> str:
    return text.replace("α^X", "$α^X$").replace("α^C", "$α^C$")


def _draw_rings(shown: "list[Axes]", columns: int, seen: Attention) -> None:
    norm, cmap = norm_of(seen.maps, seen.signed), SIGNED if seen.signed else SEQUENTIAL
    for i, (axes, image, maps) in enumerate(zip(shown, seen.images, seen.maps, strict=True)):
        draw_ring(axes, maps, seen.own, image, _mark(seen, i), norm=norm, cmap=cmap)
    label = seen.quantity.partition(",")[0].partition(" and ")[0].partition(" over ")[0].partition(" from ")[0]
    color_bar(shown[:columns], norm, cmap, _typeset("weight" if seen.signed else label))


def _mark(seen: Attention, copy: int) -> tuple[float, float, float, float] | None:
    """The frame of the neighborhood in a copy, if the layer's input has the size of the image."""
    if seen.place is None or tuple(seen.images[0].shape[-2:]) != seen.size:
        return None
    height, width = seen.maps[copy].shape[-2:]
    row, column = moved(seen.place, *seen.size, seen.group, seen.elements[copy])
    return (row, column, height, width) if (height, width) != seen.size else (row, column, 1, 1)


def _draw_channels(shown: "list[Axes]", columns: int, seen: Attention) -> None:
    from matplotlib.colors import Normalize

    norm = Normalize(0, 1)  # the range of the sigmoid
    for place, (axes, values) in enumerate(zip(shown, seen.channels, strict=True)):
        axes.imshow(values.cpu().numpy(), norm=norm, cmap=SEQUENTIAL, interpolation="nearest", aspect="auto")
        axes.set(xticks=range(values.shape[1]), yticks=[0, len(values) - 1] if len(values) > 1 else [0])
        axes.set_xlabel("pose", fontsize=8)
        axes.tick_params(labelsize=7, length=2)
        if place % columns == 0:
            axes.set_ylabel("channel", fontsize=8)
    color_bar(shown[:columns], norm, SEQUENTIAL, _typeset("attention α^C"))


def feature_rings(
    field: Tensor,
    group: Group | str | None = None,
    image: Tensor | None = None,
    fields: Sequence[int] | None = None,
    columns: int = 5,
) -> "Figure":
    """Draws feature fields as rings: the maps of the poses on a circle, counter-clockwise from the top.

    Args:
        field: A regular field ``(C, |H|, height, width)``, or ``(1, C, |H|, height, width)``.
        group: Its group, or the name of it; by default the cyclic group with as many rotations as poses.
        image: An image ``(C, height, width)`` for the center of each ring.
        fields: The indices of the fields; by default the first 10.
        columns: The number of rings per row.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If it is not a regular field of the group.
    """
    maps = (field[0] if field.ndim == 5 and len(field) == 1 else field).detach().to("cpu", torch.float64)
    group = Group.from_name(group) if isinstance(group, str) else group or cyclic(maps.shape[1])
    if maps.ndim != 4 or maps.shape[1] != group.order:
        raise ValueError(f"a regular field of one image is (C, {group.order}, height, width), got {tuple(field.shape)}")
    chosen = list(range(min(10, len(maps)))) if fields is None else list(fields)
    signed = bool((maps[chosen] < 0).any())
    norm, cmap = norm_of([maps[chosen]], signed), SIGNED if signed else SEQUENTIAL
    columns = min(columns, len(chosen))
    figure = new_figure(2.2 * columns + 0.9, 2.4 * -(-len(chosen) // columns))
    (shown,) = panels(figure, len(chosen), columns)
    for axes, i in zip(shown, chosen, strict=True):
        draw_ring(axes, maps[i], group, image, norm=norm, cmap=cmap)
        axes.set_title(f"field {i}", fontsize=9)
    color_bar(shown, norm, cmap, "activation")
    return figure


def filter_orbit(layer: nn.Module, fields: Sequence[int] | None = None, channel: int = 0) -> "Figure":
    """Draws the orbits of filters, their copies under all elements of the group.

    The orbit of a filter of a lifting convolution is a ring. A filter of a group convolution has one map per input pose
    and is itself a ring; its orbit is a row of rings, the transformed copies of the first.

    Args:
        layer: The convolution, plain or attentive, or a network, whose first convolution is drawn.
        fields: The output fields; by default the first 8 of a lifting convolution, 3 of a group convolution.
        channel: The input channel or field.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is no lifting or group convolution.
    """
    layer = first_convolution(layer)
    filters = orbit_filters(layer).to("cpu", torch.float64)
    lifting = filters.ndim == 5
    chosen = list(range(min(8 if lifting else 3, len(filters)))) if fields is None else list(fields)
    filters = filters[:, :, channel]
    group = layer.group
    columns = min(4, len(chosen) if lifting else group.order)
    count = len(chosen) if lifting else len(chosen) * group.order
    norm = norm_of([filters[chosen]], signed=True)
    figure = new_figure(2.3 * columns + 1.0, 2.35 * -(-count // columns))
    (shown,) = panels(figure, count, columns)
    for place, axes in enumerate(shown):
        i, g = (place, 0) if lifting else divmod(place, group.order)
        draw_ring(axes, filters[chosen[i]] if lifting else filters[chosen[i], g], group, norm=norm, cmap=SIGNED)
        axes.set_title(f"filter {chosen[i]}" + ("" if lifting else f"\n{group.describe(g)}"), fontsize=8)
    color_bar(shown, norm, SIGNED, "weight")
    return figure


def equivariance_map(
    model: nn.Module, x: Tensor, layer: str | None = None, group: Group | str | None = None
) -> "Figure":
    """Draws the equivariance error of a network's features, or of a layer, at each pixel.

    One map per element: the error relative to the root mean square of the output, on a logarithmic scale from round-off
    to 1, the same for all networks.

    Args:
        model: The network, or a layer.
        x: The input, with a batch axis.
        layer: The name of a layer of the network, which is measured on the input that it receives there.
        group: The group, or its name; by default the network's own, or p4 if it is trivial.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: As `eqzoo.viz.error_maps`.
    """
    found = error_maps(model, x, layer, group)
    shown = {g: m for g, m in found.maps.items() if g}  # the identity has no error
    if not shown:
        raise ValueError(f"{found.group.name} has only the identity on the pixel grid; pass group=P4")
    from matplotlib.colors import LogNorm

    norm, errors = LogNorm(1e-17, 1), found.errors
    columns = min(4, len(shown))
    figure = new_figure(2.3 * columns + 1.0, 2.5 * -(-len(shown) // columns) + 0.5)
    figure.suptitle(f"equivariance error of {layer + ' in ' if layer else ''}{network_name(model)}", fontsize=10)
    (grid,) = panels(figure, len(shown), columns)
    for axes, (g, values) in zip(grid, shown.items(), strict=True):
        draw_map(axes, values.clamp(min=1e-17), norm=norm, cmap=SEQUENTIAL)
        axes.set(xticks=[], yticks=[])
        size = f"0 up to round-off ({errors[g]:.0e})" if errors[g] < ROUNDOFF else f"{errors[g]:.2g}"
        axes.set_title(f"{found.group.describe(g)}\n{size}", fontsize=8)
    color_bar(grid, norm, SEQUENTIAL, "relative error")
    return figure


def plot_rotation_curve(
    curves: Mapping[str, Sequence[float]],
    degrees: Sequence[float] = range(0, 360, 15),
    label: str = "accuracy in percent",
    image: Tensor | None = None,
) -> "Figure":
    """Draws the accuracy of classifiers over the rotation angle of their images.

    Args:
        curves: The results of `eqzoo.rotation_curve`, by name of the classifier.
        degrees: The angles given to `eqzoo.rotation_curve`, in degrees.
        label: The label of the accuracy axis.
        image: An image ``(C, height, width)``, drawn above the curves, rotated by the angle of each tick; or None.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If a curve and the angles differ in length.
    """
    figure = new_figure(7, 3.6 if image is None else 4.2)
    axes = figure.subplots()
    for place, (name, values) in enumerate(curves.items()):
        angles, heights = list(degrees), list(values)
        if angles[0] == 0 and 300 < angles[-1] < 360:  # 360° is the same angle as 0°
            angles, heights = [*angles, 360.0], [*heights, heights[0]]
        style, color = _LINES[(place // len(COLORS)) % len(_LINES)], COLORS[place % len(COLORS)]
        axes.plot(
            angles, heights, style, color=color, marker="o", markersize=3, label=literal([name])[0], clip_on=False
        )
    axes.set(xlabel="rotation angle in degrees", ylabel=label, xlim=(min(degrees), max([*degrees, 360])))
    axes.set_xticks([a for a in range(0, 361, 45) if min(degrees) <= a])
    for quarter in (90, 180, 270):
        axes.axvline(quarter, color="#cccccc", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    if image is not None:
        image = image.detach().to("cpu", torch.float64)
        low, high = image.min(), image.max()
        for angle in axes.get_xticks():  # interpolation exceeds the range of the image
            draw_above(axes, rotate(image[None], angle)[0].clamp(low, high), angle, 34)
    figure.legend(loc="outside upper left", ncols=min(3, len(curves)), frameon=False, fontsize=9)
    return figure
