"""Draws the accuracy over rotations and over epochs as small SVGs, with the same bytes everywhere.

Not by matplotlib: the layout, fonts and numbers of its SVG change with its version, and a test compares the bytes of
published curves with those that results.json gives.
"""

import math
from collections.abc import Mapping, Sequence

__all__ = ["draw_rotation_curve", "draw_training_curve"]

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 48
INK, FAINT, LINE, QUARTER = "#1a1a1a", "#d0d0d0", "#0072b2", "#d55e00"  # blue and vermilion: safe for color blindness


def draw_rotation_curve(angles: Sequence[float], accuracy: Sequence[float], name: str, noun: str) -> str:
    """The curve of a network's accuracy over the angle by which test images are rotated.

    Multiples of 90 degrees, which the pixel grid allows exactly, are marked by squares and the rotations between them,
    which are interpolated, by dots; so the two differ in shape as well as in color.

    Args:
        angles: The angles, in degrees, rising from 0 to below 360.
        accuracy: The accuracy at each, in percent.
        name: The checkpoint.
        noun: What the images are called.

    Returns:
        The text of an SVG file.

    Raises:
        ValueError: If the lists differ in length or are empty, or a number is out of range.
    """
    if not angles or len(angles) != len(accuracy):
        raise ValueError(f"a rotation curve needs one accuracy for each angle, got {len(angles)} and {len(accuracy)}")
    if not all(0 <= a < 360 for a in angles) or not all(0 <= a <= 100 for a in accuracy):
        raise ValueError("a rotation curve takes angles in [0, 360) degrees and accuracies in [0, 100] percent")
    # The circle is closed: the value at 0° is that at 360°.
    points = sorted(zip(angles, accuracy, strict=True))
    points += [(360.0, points[0][1])] if points[0][0] == 0 else []
    title = f"{name}: accuracy on rotated test {noun}"
    desc = f"Between {min(accuracy):.2f} and {max(accuracy):.2f} percent at {len(angles)} angles."
    ticks = {float(angle): f"{angle}°" for angle in range(0, 361, 45)}
    caption = (
        f'angle of the rotation (<tspan fill="{QUARTER}">squares: 90° rotations, not interpolated</tspan>; '
        f'<tspan fill="{LINE}">dots: interpolated</tspan>)'
    )
    marked = [angle for angle, _ in points if angle % 90 == 0]
    return _curve(points, marked, (0.0, 360.0), ticks, title, desc, caption)


def draw_training_curve(accuracy: Sequence[float], kept: int, name: str, noun: str, first: int = 1) -> str:
    """The curve of the accuracy on validation images after each epoch; the epoch that is kept is marked by a square.

    Args:
        accuracy: The accuracy after each epoch, in percent, from the first one on that is drawn.
        kept: The epoch whose weights are kept.
        name: The checkpoint.
        noun: What the images are called.
        first: The first epoch that is drawn, counted from 1: the first one on images of full size.

    Returns:
        The text of an SVG file.

    Raises:
        ValueError: If there are less than two epochs, the kept one is none of them, or an accuracy is out of range.
    """
    count, last = len(accuracy), first + len(accuracy) - 1
    if count < 2 or not first <= kept <= last or not all(0 <= value <= 100 for value in accuracy):
        raise ValueError(
            "a training curve takes accuracies in [0, 100] percent of two epochs or more, and one of them that is "
            f"kept; got epochs {first} to {last} and {kept}"
        )
    points = [(float(epoch), value) for epoch, value in enumerate(accuracy, first)]
    step = next(step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if count / step <= 12)
    ticks = {float(epoch): f"{epoch}" for epoch in (first, *range(step * (first // step + 1), last + 1, step))}
    title = f"{name}: accuracy on validation {noun}"
    desc = f"{accuracy[kept - first]:.2f} percent after epoch {kept} of {last}, which is kept."
    full = " at full size" if first > 1 else ""
    caption = f'epoch{full} (<tspan fill="{QUARTER}">square: the one that is kept</tspan>)'
    return _curve(points, [float(kept)], (float(first), float(last)), ticks, title, desc, caption)


def _curve(
    points: Sequence[tuple[float, float]],
    marked: Sequence[float],
    limits: tuple[float, float],
    across: Mapping[float, str],
    title: str,
    desc: str,
    caption: str,
) -> str:
    """A line of percentages with a title, both axes and a caption: squares at the marked places, dots at the others."""
    values = [value for _, value in points]
    ticks = _ticks(min(values), max(values))
    low, high = ticks[0], ticks[-1]

    def x(place: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (place - limits[0]) / (limits[1] - limits[0])

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="title desc" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<title id="title">{_escape(title)}</title>',
        f'<desc id="desc">{desc}</desc>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" fill="{INK}" font-weight="bold">{_escape(title)}</text>',
    ]
    for tick in ticks:
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        label = f"{tick:.1f}".removesuffix(".0")
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" fill="{INK}" text-anchor="end">{label} %</text>')
    for place, label in across.items():
        parts.append(f'<path d="M{x(place):.1f} {HEIGHT - BOTTOM}v5" stroke="{INK}"/>')
        parts.append(
            f'<text x="{x(place):.1f}" y="{HEIGHT - BOTTOM + 20}" fill="{INK}" text-anchor="middle">{label}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" fill="{INK}" text-anchor="middle">{caption}</text>')
    line = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    for place, value in points:
        if place in marked:
            parts.append(
                f'<rect x="{x(place) - 5:.1f}" y="{y(value) - 5:.1f}" width="10" height="10" fill="{QUARTER}"/>'
            )
        else:
            parts.append(f'<circle cx="{x(place):.1f}" cy="{y(value):.1f}" r="3.5" fill="{LINE}"/>')
    return "\n".join([*parts, "</svg>\n"])


def _ticks(low: float, high: float) -> list[float]:
    """At most seven round numbers around all values, over at least 2 points, so that noise does not look large."""
    span = max(high - low, 2.0)
    step = next(s for s in (0.5, 1, 2, 5, 10, 20) if span / s <= 5)
    center = (low + high) / 2
    first = max(0, math.floor(min(low, center - span / 2) / step))
    last = min(math.floor(100 / step), math.ceil(max(high, center + span / 2) / step))
    return [step * i for i in range(first, last + 1)]


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
