"""Draws the accuracy over rotations as a small SVG, with the same bytes everywhere.

Not by matplotlib: the layout, fonts and numbers of its SVG change with its version, and a test compares the bytes of
published curves with those that results.json gives.
"""

import math
from collections.abc import Sequence

__all__ = ["draw_rotation_curve"]

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
    ticks = _ticks(min(accuracy), max(accuracy))
    low, high = ticks[0], ticks[-1]

    def x(angle: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * angle / 360

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    title = f"{name}: accuracy on rotated test {noun}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="title desc" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<title id="title">{_escape(title)}</title>',
        f'<desc id="desc">Between {min(accuracy):.2f} and {max(accuracy):.2f} percent at {len(angles)} angles.</desc>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" fill="{INK}" font-weight="bold">{_escape(title)}</text>',
    ]
    for tick in ticks:
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        label = f"{tick:.1f}".removesuffix(".0")
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" fill="{INK}" text-anchor="end">{label} %</text>')
    for angle in map(float, range(0, 361, 45)):
        parts.append(f'<path d="M{x(angle):.1f} {HEIGHT - BOTTOM}v5" stroke="{INK}"/>')
        parts.append(
            f'<text x="{x(angle):.1f}" y="{HEIGHT - BOTTOM + 20}" fill="{INK}" text-anchor="middle">{angle:.0f}°</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{HEIGHT - 8}" fill="{INK}" text-anchor="middle">angle of the rotation '
        f'(<tspan fill="{QUARTER}">squares: 90° rotations, not interpolated</tspan>; '
        f'<tspan fill="{LINE}">dots: interpolated</tspan>)</text>'
    )
    line = " ".join(f"{x(angle):.1f},{y(value):.1f}" for angle, value in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    for angle, value in points:
        if angle % 90 == 0:
            parts.append(
                f'<rect x="{x(angle) - 5:.1f}" y="{y(value) - 5:.1f}" width="10" height="10" fill="{QUARTER}"/>'
            )
        else:
            parts.append(f'<circle cx="{x(angle):.1f}" cy="{y(value):.1f}" r="3.5" fill="{LINE}"/>')
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
