"""Digits drawn as strokes, in the format of rotated MNIST: test images that need no download; and a part of MNIST's."""

import itertools
import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from eqzoo.data import Split, rotated_mnist

SIDE = 28  # pixels


def _arc(row: float, column: float, height: float, width: float, start: float, end: float) -> list[tuple[float, float]]:
    """Points of an ellipse, by its center, half axes and angles in degrees: 0 is right, 90 is up."""
    angles = [math.radians(start + (end - start) * i / 16) for i in range(17)]
    return [(row - height * math.sin(a), column + width * math.cos(a)) for a in angles]


# Strokes as polylines of (row, column), in a box of 20 pixels with its center at (0, 0).
STROKES = {
    0: [_arc(0, 0, 10, 6, 90, 450)],
    1: [[(-10, 1), (10, -1)]],
    2: [[*_arc(-4.5, 0, 5.5, 6, 160, -40), (9, -6), (9, 7)]],
    3: [[*_arc(-5, 0, 5, 5.5, 150, -90), *_arc(5, 0, 5, 6, 90, -150)]],
    4: [[(-9, -3), (2, -7), (2, 7)], [(-8, 4), (10, 2)]],
    5: [[(-9, 6), (-9, -4), (-1, -5), *_arc(4, -1, 5.5, 6.5, 100, -140)]],
    6: [[(-10, 3), (-4, -3), (3, -5), *_arc(4.5, 0, 5, 5, 180, 540)]],
    7: [[(-9, -6), (-9, 6), (10, -2)]],
    8: [_arc(-5, 0, 5, 4.5, 90, 450), _arc(5, 0, 5, 5.5, 90, 450)],
    9: [[*_arc(-4.5, 0, 5, 5, 0, 360), (-4, 5), (10, 3)]],
}


def drawn_digits(count: int = 200, seed: int = 0) -> Split:
    """Digits of every class in turn, each with its own angle, slant, size and stroke width.

    Args:
        count: The number of images.
        seed: The seed of the variations; angles are uniform in [0, 2π).

    Returns:
        Images ``(count, 1, 28, 28)`` uint8, white on black, and labels.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, 4, generator=generator, dtype=torch.float64)
    images = [_draw(i % 10, *row) for i, row in enumerate(numbers.tolist())]
    return Split(torch.stack(images)[:, None], torch.arange(count) % 10)


def _draw(digit: int, angle: float, slant: float, size: float, width: float) -> Tensor:
    cos, sin = math.cos(2 * math.pi * angle), math.sin(2 * math.pi * angle)
    shear, scale = 0.4 * slant - 0.1, 0.85 + 0.15 * size
    linear = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64) @ torch.tensor(
        [[scale, 0.0], [-shear * scale, scale]], dtype=torch.float64
    )
    lines = [torch.tensor(stroke, dtype=torch.float64) @ linear.T for stroke in STROKES[digit]]
    starts, ends = torch.cat([line[:-1] for line in lines]), torch.cat([line[1:] for line in lines])
    axis = torch.arange(SIDE, dtype=torch.float64) - (SIDE - 1) / 2
    pixels = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)[:, :, None]
    along = ends - starts
    share = ((pixels - starts) * along).sum(-1) / along.square().sum(-1).clamp(min=1e-12)
    distance = (pixels - starts - share.clamp(0, 1)[..., None] * along).norm(dim=-1).amin(-1)
    # A pixel is as white as the part of it that the stroke covers, to first order.
    return (255 * (0.8 + 0.8 * width + 0.5 - distance).clamp(0, 1)).round().to(torch.uint8)


@contextmanager
def rotating(places: Container[int]) -> Iterator[None]:
    """`eqzoo.data.rotmnist` rotates the images at these places alone, of 62,000, which takes 20 seconds in all."""
    rotate, count = rotated_mnist._rotate, itertools.count()
    few = mock.patch.object(
        rotated_mnist, "_rotate", lambda image, angle: rotate(image, angle) if next(count) in places else image
    )
    with few:
        yield
