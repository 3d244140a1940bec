"""Augmentation of whole batches, on the device that they are on, by numbers that are drawn beforehand.

Every picture takes its changes from a row of four numbers in [0, 1), so that a batch that is shared out to several
processes, or split into passes, is changed as a whole one is.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import P4, P4M, Z2M, Group, transform

__all__ = ["AUGMENTATIONS", "augment", "draw"]


def draw(count: int, generator: torch.Generator) -> Tensor:
    """The numbers that change pictures, a row of four for each, uniform in [0, 1)."""
    return torch.rand(count, 4, generator=generator, dtype=torch.float32)


def augment(name: str, images: Tensor, numbers: Tensor) -> Tensor:
    """Changes pictures.

    Args:
        name: One of `AUGMENTATIONS`. ``"none"``; ``"standard"``, a mirror image half the time and a shift by up to 4
            pixels in each direction, with black coming in; ``"standard_pad2"``, the same by up to 2 pixels;
            ``"shifts"``, the shift alone, by up to 4 pixels; ``"flips"``, a mirror image half the time;
            ``"quarter_turns"``, one of the four at random; ``"quarter_turns_flips"``, and of their mirror images;
            ``"turns"``, any angle, bilinear, with black coming in.
        images: ``(n, channels, height, width)`` uint8.
        numbers: ``(n, 4)`` in [0, 1), from `draw`.

    Returns:
        Pictures of the same shape with values in 0 to 255; floating point where they were interpolated.

    Raises:
        ValueError: If pictures that are not square are to be turned.
    """
    return AUGMENTATIONS[name](images, numbers.to(images.device, non_blocking=True))


def _flip_and_shift(pad: int, flips: float = 0.5) -> Callable[[Tensor, Tensor], Tensor]:
    def change(images: Tensor, numbers: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        corner = (numbers[:, 1:3] * (2 * pad + 1)).long()  # of the part that is kept of the padded picture
        rows = corner[:, :1] + torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device).expand(count, width)
        columns = corner[:, 1:] + torch.where(numbers[:, :1] < flips, columns.flip(1), columns)
        padded = F.pad(images, (pad, pad, pad, pad))
        place = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]
        place = place.flatten(1)[:, None].expand(count, channels, height * width)
        return padded.flatten(2).gather(2, place).view_as(images)

    return change


def _elements(group: Group) -> Callable[[Tensor, Tensor], Tensor]:
    def change(images: Tensor, numbers: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        if group.rotations > 1:
            _check_square(height, width)
        places = torch.arange(height * width, device=images.device).view(1, height, width)
        orbit = torch.stack([transform(places, group, g, "trivial").flatten() for g in group.elements])
        place = orbit[(numbers[:, 3] * group.order).long()]
        return images.flatten(2).gather(2, place[:, None].expand(count, channels, height * width)).view_as(images)

    return change


def _turn(images: Tensor, numbers: Tensor) -> Tensor:
    _check_square(*images.shape[-2:])
    angles = 2 * math.pi * numbers[:, 3]
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    maps = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images.to(grid.dtype), grid, align_corners=False)


def _check_square(height: int, width: int) -> None:
    if height != width:
        raise ValueError(f"pictures that are to be turned are square, got {height} x {width}")


AUGMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda images, _: images,
    "standard": _flip_and_shift(4),
    "standard_pad2": _flip_and_shift(2),
    "shifts": _flip_and_shift(4, flips=0),
    "flips": _elements(Z2M),
    "quarter_turns": _elements(P4),
    "quarter_turns_flips": _elements(P4M),
    "turns": _turn,
}
