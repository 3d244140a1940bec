"""The figures. Each is a matplotlib `Figure` of its own, for the caller to change, show or save."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..groups import Group, cyclic
from ..turns import turn
from ._draw import (
    COLOURS,
    SEQUENTIAL,
    SIGNED,
    colour_bar,
    draw_above,
    draw_map,
    draw_ring,
    new_figure,
    norm_of,
    panels,
)
from ._inside import moved
from .attention import Attention, attention
from .measures import error_maps, first_convolution, orbit_filters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["attention_maps", "equivariance_map", "feature_rings", "filter_orbit", "plot_turn_curve"]

ROUNDING = 1e-12  # relative errors below are those of rounding in float64
_LINES = ("-", "--", "-.", ":")


def attention_maps(
    model: nn.Module | Attention,
    image: Tensor | None = None,
    layer: str | None = None,
    place: tuple[int, int] | None = None,
    head: int | None = None,
    pose: int | None = None,
    group: Group | None = None,
) -> "Figure":
    """Draws what a layer attends to, at every pose, for a picture and its transformed copies.

    Each copy is a ring: the picture in the middle, the map of each pose around it. The ring of a turned picture is the
    ring, turned: the maps turn, and each takes the place of the next pose. Where there is channel attention, it is
    drawn below on a scale of 0 to 1, a row a channel and a column a pose.

    Args:
        model: The network, or numbers that `eqzoo.viz.attention` gave; then the rest is left out.
        image: What the network is fed, a normalised picture ``(C, height, width)``.
        layer: The name of the layer; by default the first whose attention has poses.
        place: The query place of self-attention, ``(row, column)`` in pixels of the layer's input; None for the
            attention that each pixel receives from all places.
        head: The head, the output field of an attentive convolution, or the slice of an E⁴ layer.
        pose: The pose of the query, in group self-attention.
        group: The group of the copies; by default the network's own, or p4 for one without.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: As `eqzoo.viz.attention`.
    """
    if isinstance(model, Attention):
        seen = model
    elif image is None:
        raise ValueError("attention_maps(model, image): image is missing, what the network is fed, (C, height, width)")
    else:
        seen = attention(model, image, layer, place, head, pose, group)
    count, one_pose = len(seen.pictures), seen.maps and len(seen.maps[0]) == 1
    heights = [2.6 if one_pose else 2.4] * bool(seen.maps) + [1.0] * bool(seen.channels)
    columns = min(4, count)
    width = (1.9 if one_pose else 2.5) * columns + 1.0
    title = _attention_title(seen, width)
    figure = new_figure(width, (sum(heights) + 0.3) * -(-count // columns) + 0.2 + 0.2 * len(title.splitlines()))
    figure.suptitle(title, fontsize=10)
    shown, bars = panels(figure, count, columns, heights)
    for axes, g in zip(shown[0], seen.elements, strict=True):
        axes.set_title(seen.group.describe(g), fontsize=9)
    if seen.maps:
        _draw_rings(shown[0], bars[0], seen)
    if seen.channels:
        _draw_channels(shown[-1], bars[-1], columns, seen)
    return figure


def _attention_title(seen: Attention, width: float) -> str:
    """The title, in lines that a figure of this width, in inches, has room for."""
    where = f" at row {seen.place[0]}, column {seen.place[1]} of {seen.size[0]} x {seen.size[1]}" if seen.place else ""
    law = (
        f"turns with the picture to rounding ({seen.error:.0e})"
        if seen.error < ROUNDING
        else f"does not turn with the picture: relative difference {seen.error:.2g}"
    )
    lines = (f"{seen.layer or 'the layer'}: {seen.quantity}{where}", law)
    return _typeset("\n".join(textwrap.fill(line, int(12 * width)) for line in lines))


def _typeset(text: str) -> str:
    return text.replace("α^X", "$α^X$").replace("α^C", "$α^C$")


def _draw_rings(shown: "list[Axes]", bar: "Axes", seen: Attention) -> None:
    norm, cmap = norm_of(seen.maps, seen.signed), SIGNED if seen.signed else SEQUENTIAL
    for i, (axes, picture, maps) in enumerate(zip(shown, seen.pictures, seen.maps, strict=True)):
        draw_ring(axes, maps, seen.own, picture, _mark(seen, i), norm=norm, cmap=cmap)
    label = seen.quantity.partition(",")[0].partition(" and ")[0].partition(" over ")[0].partition(" from ")[0]
    colour_bar(bar, norm, cmap, _typeset("weight" if seen.signed else label))


def _mark(seen: Attention, copy: int) -> tuple[float, float, float, float] | None:
    """The window in a copy, where the layer sees as many pixels as the picture has."""
    if seen.place is None or tuple(seen.pictures[0].shape[-2:]) != seen.size:
        return None
    height, width = seen.maps[copy].shape[-2:]
    row, column = moved(seen.place, *seen.size, seen.group, seen.elements[copy])
    return (row, column, height, width) if (height, width) != seen.size else (row, column, 1, 1)


def _draw_channels(shown: "list[Axes]", bar: "Axes", columns: int, seen: Attention) -> None:
    from matplotlib.colors import Normalize

    norm = Normalize(0, 1)  # of a sigmoid, which is 0.5 for all where training left it alone
    for place, (axes, values) in enumerate(zip(shown, seen.channels, strict=True)):
        axes.imshow(values.numpy(), norm=norm, cmap=SEQUENTIAL, interpolation="nearest", aspect="auto")
        axes.set(xticks=range(values.shape[1]), yticks=[0, len(values) - 1] if len(values) > 1 else [0])
        axes.set_xlabel("pose", fontsize=8)
        axes.tick_params(labelsize=7, length=2)
        if place % columns == 0:
            axes.set_ylabel("channel", fontsize=8)
    colour_bar(bar, norm, SEQUENTIAL, _typeset("attention α^C"))


def feature_rings(
    field: Tensor,
    group: Group | None = None,
    picture: Tensor | None = None,
    fields: Sequence[int] | None = None,
    columns: int = 5,
) -> "Figure":
    """Draws feature fields as rings: the maps of a field, one a pose, on a circle, counter-clockwise from the top.

    Args:
        field: A regular field ``(C, |H|, height, width)``, or with a batch of one before it.
        group: Its group; by default turns alone, as many as there are poses.
        picture: A picture ``(C, height, width)`` for the middle of every ring.
        fields: Which fields; by default the first 10.
        columns: The rings in a row.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If it is no regular field of the group, or has no such field.
    """
    maps = field[0] if field.ndim == 5 and len(field) == 1 else field
    group = group or (cyclic(maps.shape[1]) if maps.ndim == 4 else None)
    if maps.ndim != 4 or group is None or maps.shape[1] != group.order:
        wanted = group.order if group else "|H|"
        raise ValueError(f"a regular field of one picture is (C, {wanted}, height, width), got {tuple(field.shape)}")
    maps = maps.detach().to("cpu", torch.float64)
    chosen = list(range(min(10, len(maps)))) if fields is None else list(fields)
    if not chosen or not all(0 <= i < len(maps) for i in chosen):
        raise ValueError(f"fields are 0 to {len(maps) - 1} here, got {chosen}")
    signed = bool((maps[chosen] < 0).any())
    norm, cmap = norm_of([maps[chosen]], signed), SIGNED if signed else SEQUENTIAL
    columns = min(columns, len(chosen))
    figure = new_figure(2.2 * columns + 0.9, 2.4 * -(-len(chosen) // columns))
    (shown,), (bar,) = panels(figure, len(chosen), columns)
    for axes, i in zip(shown, chosen, strict=True):
        draw_ring(axes, maps[i], group, picture, norm=norm, cmap=cmap)
        axes.set_title(f"field {i}", fontsize=9)
    colour_bar(bar, norm, cmap, "activation")
    return figure


def filter_orbit(layer: nn.Module, fields: Sequence[int] | None = None, channel: int = 0) -> "Figure":
    """Draws filters under all elements of the group.

    A filter of a lifting convolution is one square, and its orbit a ring of them. A filter of a group convolution has a
    square for each input pose, itself a ring; its orbit is a row of rings, each the first one turned.

    Args:
        layer: The convolution, plain or attentive; of a network, the first one inside.
        fields: The fields that go out; by default the first 8 of a lifting convolution, 3 of a group convolution.
        channel: The channel or field that comes in.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is no such convolution, field or channel.
    """
    layer = first_convolution(layer)
    filters = orbit_filters(layer).to("cpu", torch.float64)
    lifting = filters.ndim == 5
    chosen = list(range(min(8 if lifting else 3, len(filters)))) if fields is None else list(fields)
    if not chosen or not all(0 <= i < len(filters) for i in chosen) or not 0 <= channel < filters.shape[2]:
        raise ValueError(
            f"the layer has fields 0 to {len(filters) - 1} going out and 0 to {filters.shape[2] - 1} coming in, got "
            f"fields {chosen} and channel {channel}"
        )
    filters = filters[:, :, channel]
    group: Group = layer.group  # type: ignore[assignment]
    columns = min(4, len(chosen) if lifting else group.order)
    count = len(chosen) if lifting else len(chosen) * group.order
    norm = norm_of([filters[chosen]], signed=True)
    figure = new_figure(2.3 * columns + 1.0, 2.35 * -(-count // columns))
    (shown,), (bar,) = panels(figure, count, columns)
    for place, axes in enumerate(shown):
        i, g = (place, 0) if lifting else divmod(place, group.order)
        draw_ring(axes, filters[chosen[i]] if lifting else filters[chosen[i], g], group, norm=norm, cmap=SIGNED)
        axes.set_title(f"filter {chosen[i]}" + ("" if lifting else f"\n{group.describe(g)}"), fontsize=8)
    colour_bar(bar, norm, SIGNED, "weight")
    return figure


def equivariance_map(model: nn.Module, x: Tensor, layer: str | None = None, group: Group | None = None) -> "Figure":
    """Draws where in the picture the equivariance error of a layer, or of a network's features, lies.

    One map an element, the error relative to the root mean square of the output, on one logarithmic scale for all
    networks, from rounding to 1.

    Args:
        model: The network, or a layer.
        x: What it is fed, with a batch axis.
        layer: The name of a layer of the network, to measure it on the input that it has there.
        group: The group; by default the network's own, or p4 for one without turns and mirrors.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: As `eqzoo.viz.error_maps`.
    """
    found = error_maps(model, x, layer, group)
    shown = {g: m for g, m in found.maps.items() if g}  # as it is, there is nothing to see
    if not shown:
        raise ValueError(f"{found.group.name} has no element but the identity on the pixel grid; ask for group=P4")
    from matplotlib.colors import LogNorm

    norm, errors = LogNorm(1e-17, 1), found.errors
    columns = min(4, len(shown))
    figure = new_figure(2.3 * columns + 1.0, 2.5 * -(-len(shown) // columns) + 0.5)
    name = getattr(model, "pretrained_cfg", {}).get("architecture") or type(model).__name__
    figure.suptitle(f"equivariance error of {layer + ' in ' if layer else ''}{name}", fontsize=10)
    (grid,), (bar,) = panels(figure, len(shown), columns)
    for axes, (g, values) in zip(grid, shown.items(), strict=True):
        draw_map(axes, values.clamp(min=1e-17), norm=norm, cmap=SEQUENTIAL)
        axes.set(xticks=[], yticks=[])
        size = f"0 to rounding ({errors[g]:.0e})" if errors[g] < ROUNDING else f"{errors[g]:.2g}"
        axes.set_title(f"{found.group.describe(g)}\n{size}", fontsize=8)
    colour_bar(bar, norm, SEQUENTIAL, "relative error")
    return figure


def plot_turn_curve(
    curves: Mapping[str, Sequence[float]],
    degrees: Sequence[float] = range(0, 360, 15),
    label: str = "accuracy in percent",
    picture: Tensor | None = None,
) -> "Figure":
    """Draws the accuracy of classifiers over the angle by which their pictures are turned.

    Args:
        curves: By name, what `eqzoo.turn_curve` gave for each classifier.
        degrees: The angles, in degrees, as they were given to `eqzoo.turn_curve`.
        label: What the values are.
        picture: A picture, ``(C, height, width)``, to be shown above the curves as it is at each angle that has a mark;
            or None.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is no curve, one has another length than there are angles, or the picture is none.
    """
    if picture is not None and picture.ndim != 3:
        raise ValueError(f"picture is (C, height, width), got {tuple(picture.shape)}")
    if not curves:
        raise ValueError("no curve to draw: curves is {name: [accuracy at each angle]}")
    for name, values in curves.items():
        if len(values) != len(degrees):
            raise ValueError(f"{name} has {len(values)} values for {len(degrees)} angles; pass degrees= as they were")
    figure = new_figure(7, 3.6 if picture is None else 4.2)
    axes = figure.subplots()
    for place, (name, values) in enumerate(curves.items()):
        angles, heights = _closed(list(degrees), list(values))
        style = _LINES[(place // len(COLOURS)) % len(_LINES)]
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(angles, heights, style, color=colour, marker="o", markersize=3, label=name, clip_on=False)
    axes.set(xlabel="turned by, in degrees", ylabel=label, xlim=(min(degrees), max([*degrees, 360])))
    axes.set_xticks([a for a in range(0, 361, 45) if min(degrees) <= a])
    for quarter in (90, 180, 270):
        axes.axvline(quarter, color="#cccccc", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    if picture is not None:
        low, high = picture.min(), picture.max()
        for angle in axes.get_xticks():  # interpolation goes beyond the picture's own range
            draw_above(axes, turn(picture[None], angle)[0].clamp(low, high), angle, 34)
    figure.legend(loc="outside upper left", ncols=min(3, len(curves)), frameon=False, fontsize=9)
    return figure


def _closed(degrees: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """A curve that starts at 0 goes on to 360, which is the same angle."""
    if degrees and degrees[0] == 0 and 300 < degrees[-1] < 360:
        return [*degrees, 360.0], [*values, values[0]]
    return degrees, values
