"""Augmentation of batches on any device, driven by random numbers drawn beforehand.

Each image has a row of seven numbers in [0, 1), so the result does not depend on how a batch is divided among processes
or accumulation steps.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import P4, P4M, Z2M, Group, transform

_OVERSHOOT = 64  # by which interpolated values may lie beyond 0 to 255


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Random numbers for `augment`, uniform in [0, 1): ``(count, 7)`` float32, a row for each image."""
    # Two draws: the first four columns are those that runs had before there were changes of color.
    parts = [torch.rand(count, columns, generator=generator, dtype=torch.float32) for columns in (4, 3)]
    return torch.cat(parts, 1)


def augment(name: str, images: Tensor, numbers: Tensor) -> Tensor:
    """Augments a batch of images.

    Args:
        name: One of `AUGMENTATIONS`. Pixels from outside the image are black.

            * ``"none"``: no change.
            * ``"standard"``: a left-right flip with probability 1/2, and a shift by up to 4 pixels in each direction.
            * ``"standard_pad2"``: the same with shifts by up to 2 pixels.
            * ``"standard_cutout"``: ``"standard"``, then a square is replaced by the mean color of the image (Cutout,
              DeVries and Taylor, 2017, https://arxiv.org/abs/1708.04552). Its side is a quarter of the image's shorter
              side and its center any pixel, so it may be cut off at an edge.
            * ``"shifts"``: shifts alone, by whole pixels up to a sixteenth of the side in each direction, at least one.
              Pixels from outside are those of the image reflected at its edges.
            * ``"flips"``: left-right flips with probability 1/2 alone.
            * ``"quarter_rotations"``: a rotation by 0°, 90°, 180° or 270°.
            * ``"quarter_rotations_flips"``: one of these rotations, flipped with probability 1/2.
            * ``"rotations"``: a rotation by an angle uniform in [0, 2π), bilinearly interpolated.
            * ``"rotations_shifts"``: such a rotation, and a shift by up to a sixteenth of the side in each direction.
              Pixels from outside are those of the image reflected at its edges. For half of the images the angle is a
              multiple of 90° and the shift whole pixels, which keeps them sharp: a network that sees interpolated
              images alone is worse on the images themselves.
            * ``"affine"``: the same, and a left-right flip with probability 1/2.
            * ``"affine_color"``: the same, then values v of an image with mean m become ``b·(m + c·(v − m))``, clipped
              to [0, 255]; contrast c and brightness b are uniform in [0.8, 1.2], and b in addition differs by up to 5 %
              between the channels. All channels change, so a transparency (alpha) does too.

        images: ``(n, channels, height, width)`` uint8; or floating point, of any range but for ``"affine_color"``, and
            with 0 for what lies outside.
        numbers: ``(n, 7)`` in [0, 1), from `draw`.

    Returns:
        Images of the same shape and range of values; floating point if they were interpolated, else of the same type.

    Raises:
        ValueError: If the augmentation rotates and the images are not square, or it changes colors and values of images
            on the CPU are beyond 0 to 255.
    """
    numbers = numbers.to(images.device, non_blocking=True)
    return AUGMENTATIONS[name](images, numbers.double() if images.dtype == torch.float64 else numbers)


def _flip_and_shift(pad: int) -> Callable[[Tensor, Tensor], Tensor]:
    def change(images: Tensor, numbers: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        corner = (numbers[:, 1:3] * (2 * pad + 1)).long()  # top left corner of the crop of the padded image
        rows = corner[:, :1] + torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device).expand(count, width)
        columns = corner[:, 1:] + torch.where(numbers[:, :1] < 0.5, columns.flip(1), columns)
        padded = F.pad(images, (pad, pad, pad, pad))
        index = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]
        index = index.flatten(1)[:, None].expand(count, channels, height * width)
        return padded.flatten(2).gather(2, index).view_as(images)

    return change


def _shift(images: Tensor, numbers: Tensor) -> Tensor:
    count, channels, height, width = images.shape

    def places(length: int, column: int) -> Tensor:  # (n, length): the pixels that move to each place
        most = max(1, round(length / 16))
        first = (numbers[:, column : column + 1] * (2 * most + 1)).long() - most
        moved = first + torch.arange(length, device=images.device)
        moved = torch.where(moved < 0, -1 - moved, moved)
        return torch.where(moved < length, moved, 2 * length - 1 - moved)

    index = places(height, 1)[:, :, None] * width + places(width, 2)[:, None, :]
    index = index.flatten(1)[:, None].expand(count, channels, height * width)
    return images.flatten(2).gather(2, index).view_as(images)


def _cutout(images: Tensor, numbers: Tensor) -> Tensor:
    """Replaces a square by the mean color; its center is drawn by the columns 3 and 4 of the numbers."""
    height, width = images.shape[-2:]
    side = min(height, width) // 4

    def inside(length: int, column: int) -> Tensor:  # (n, length)
        first = (numbers[:, column : column + 1] * length).long() - side // 2
        place = torch.arange(length, device=images.device)
        return (first <= place) & (place < first + side)

    square = inside(height, 3)[:, None, :, None] & inside(width, 4)[:, None, None, :]
    mean = images.float().mean((2, 3), keepdim=True).to(images.dtype)
    return torch.where(square, mean, images)


_standard = _flip_and_shift(4)


def _standard_cutout(images: Tensor, numbers: Tensor) -> Tensor:
    return _cutout(_standard(images, numbers), numbers)


def _elements(group: Group) -> Callable[[Tensor, Tensor], Tensor]:
    def change(images: Tensor, numbers: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        if group.rotations > 1:
            _check_square(height, width)
        pixels = torch.arange(height * width, device=images.device).view(1, height, width)
        orbit = torch.stack([transform(pixels, group, g, "trivial").flatten() for g in group.elements])
        index = orbit[(numbers[:, 3] * group.order).long()]
        return images.flatten(2).gather(2, index[:, None].expand(count, channels, height * width)).view_as(images)

    return change


_quarter_rotations = _elements(P4)


def _rotate(images: Tensor, numbers: Tensor) -> Tensor:
    _check_square(*images.shape[-2:])
    angles = 2 * math.pi * numbers[:, 3]
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    maps = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images.to(grid.dtype), grid, align_corners=False)


def _rotate_and_shift(flips: float) -> Callable[[Tensor, Tensor], Tensor]:
    def change(images: Tensor, numbers: Tensor) -> Tensor:
        _check_square(*images.shape[-2:])
        sharp = (2 * numbers[:, 0]) % 1 < 0.5
        flip = 1 - 2 * (numbers[:, 0] < flips).to(numbers.dtype)
        rotations, side = numbers[:, 3], images.shape[-1]
        angles = 2 * math.pi * torch.where(sharp, (4 * rotations).floor() / 4, rotations)
        cos, sin = angles.cos(), angles.sin()
        pixels = (2 * numbers[:, 1:3] - 1) * side / 16
        # The side is 2 in the coordinates of the grid.
        shifts = torch.where(sharp[:, None], pixels.round(), pixels) * 2 / side
        maps = torch.stack(
            [torch.stack([flip * cos, -flip * sin, shifts[:, 0]], 1), torch.stack([sin, cos, shifts[:, 1]], 1)], 1
        )
        grid = F.affine_grid(maps, list(images.shape), align_corners=False)
        return F.grid_sample(images.to(grid.dtype), grid, padding_mode="reflection", align_corners=False)

    return change


_affine = _rotate_and_shift(flips=0.5)


def _affine_color(images: Tensor, numbers: Tensor) -> Tensor:
    looks = images.is_floating_point() and images.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks and images.numel():
        least, most = map(float, images.aminmax())
        if least < -_OVERSHOOT or most > 255 + _OVERSHOOT:
            raise ValueError(
                f"changes of color take values in 0 to 255, got {least:.4g} to {most:.4g}; scale them, or take affine"
            )
    images = _affine(images, numbers)
    spread = (2 * numbers - 1)[:, :, None, None, None]
    contrast, brightness = 1 + 0.2 * spread[:, 4], 1 + 0.2 * spread[:, 5]
    # One number places the channels' differences: at thirds of a cosine's period, they sum to zero for three channels.
    phases = 2 * math.pi * torch.arange(images.shape[1], dtype=numbers.dtype, device=images.device) / 3
    tint = 1 + 0.05 * torch.cos(2 * math.pi * numbers[:, 6:] + phases)[:, :, None, None]
    mean = images.mean((1, 2, 3), keepdim=True)
    return (brightness * tint * (mean + contrast * (images - mean))).clamp(0, 255)


def _check_square(height: int, width: int) -> None:
    if height != width:
        raise ValueError(
            f"only square images can be augmented by rotations, got {height} x {width}; crop them to a square"
        )


AUGMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda images, _: images,
    "standard": _standard,
    "standard_pad2": _flip_and_shift(2),
    "standard_cutout": _standard_cutout,
    "shifts": _shift,
    "flips": _elements(Z2M),
    "quarter_rotations": _quarter_rotations,
    "quarter_rotations_flips": _elements(P4M),
    "rotations": _rotate,
    "rotations_shifts": _rotate_and_shift(flips=0),
    "affine": _affine,
    "affine_color": _affine_color,
}
