"""Images that are copies of others: recompressed, resized, rotated by 90°, reflected or of another brightness."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups import P4M, transform
from .hashes import SPLIT_NAMES, image_codes
from .splits import AnySplit, Split

_COARSE, _FINE = 8, 16  # the sides of the grids of mean values that are compared
_DISTANCE = 0.3  # between two coarse grids of norm 1: a correlation of 0.955
_CORRELATION = 0.85  # of what the fine grid adds to the coarse one
_SYMMETRIC = 0.5  # the same correlation of an image with its own rotations and reflections: discs, straight edges
_CELLS = 40  # of 256, in which an image has its details: strokes and single edges, which look alike, have fewer
_CELLS_GRAY = 70  # the same without colors: above all rotated digits
_COLOR = 0.99  # the cosine between the mean colors
_FLAT = 2.0  # of 255, the deviation of a coarse grid: noise decides what flatter images look like
_FLAT_ADDED = 0.5  # the same of what the fine grid adds
_BLOCK = 4096  # images that are compared with as many at once


class Copies(NamedTuple):
    """Copies in the splits of a data set.

    Args:
        leaked: The split and the index of each validation image that is a copy of a training image, and of each test
            image that is a copy of one of both.
        contradictory: The split and the index of both images of each pair of copies in two classes.
    """

    leaked: list[tuple[str, int]]
    contradictory: list[tuple[tuple[str, int], tuple[str, int]]]


def copies(splits: Mapping[str, AnySplit]) -> Copies:
    """The images that are copies of images in another split, and copies in two classes.

    Args:
        splits: The images; those that are not in memory are not compared.
    """
    kept = {name: split for name, split in splits.items() if isinstance(split, Split)}
    places = [(name, i) for name, split in kept.items() for i in range(len(split))]
    labels = [label for split in kept.values() for label in split.labels.tolist()]
    leaked, contradictory = set(), []
    images = torch.cat([split.images.cpu() for split in kept.values()]) if kept else torch.empty(0)
    codes = np.concatenate([image_codes(split) for split in kept.values()] or [np.empty(0)])
    _, first, code = np.unique(codes, return_index=True, return_inverse=True)  # equal images, also flat ones
    equal = ((int(first[code[i]]), i) for i in range(len(codes)) if first[code[i]] != i)
    order = [*SPLIT_NAMES]
    for pair in sorted({*map(tuple, near_copies(images).tolist()), *equal}):
        one, other = (places[i] for i in pair)
        if one[0] != other[0]:
            leaked.add(max(one, other, key=lambda place: order.index(place[0])))
        if labels[pair[0]] != labels[pair[1]]:
            contradictory.append((one, other))
    return Copies(sorted(leaked), contradictory)


def near_copies(images: Tensor) -> Tensor:
    """Pairs of images that are copies of each other, up to compression, size, brightness and the symmetries of p4m.

    Images are reduced to 8 x 8 mean values a channel, without their mean and divided by their norm. Of these grids the
    mean and the deviation over each orbit of cells under p4m are invariant, and no farther apart than the grids are, so
    they find all candidates in one matrix product. A pair is a copy if in one of the eight orientations the distance of
    the grids is below 0.3, and what a grid of 16 x 16 adds to them correlates by more than 0.85. Images that are nearly
    flat, symmetric such as round cells, or simple such as a stroke look alike without being copies: of these all pixels
    have to be equal. Crops and changed hues are not found.

    Args:
        images: ``(n, channels, height, width)`` uint8, square.

    Returns:
        ``(pairs, 2)`` int64, the lower number first.
    """
    if not len(images):
        return torch.empty(0, 2, dtype=torch.long)
    grids = _grids(images)
    codes, details = _invariants(grids.coarse), _invariants(grids.added)
    found = []
    for first in range(0, len(codes), _BLOCK):
        for second in range(first, len(codes), _BLOCK):
            similar = codes[first : first + _BLOCK] @ codes[second : second + _BLOCK].T > 1 - _DISTANCE**2 / 2
            pairs = (similar.triu(1) if first == second else similar).nonzero() + torch.tensor([first, second])
            for part in pairs.split(_BLOCK):
                part = part[_possible(grids, *part.T)]
                one, other = part.T
                part = part[(details[one] * details[other]).sum(1) > _CORRELATION]
                found.append(part[_same(images, grids, *part.T)])
    return torch.cat(found)


class _Grids(NamedTuple):
    """The grids of images that are compared, ``(n, channels, side, side)`` of norm 1, and what else tells them apart.

    Args:
        coarse: The means of 8 x 8 cells, without the mean of each channel.
        added: What 16 x 16 cells add to them.
        color: The mean of each channel, ``(n, channels)`` of norm 1.
        plain: Which images are nearly flat, symmetric or simple.
        sums: The sum of the pixels of each, which all orientations share.
    """

    coarse: Tensor
    added: Tensor
    color: Tensor
    plain: Tensor
    sums: Tensor


def _possible(grids: _Grids, one: Tensor, other: Tensor) -> Tensor:
    """Which pairs have the same mean color or, where one of them is plain, the same sum of pixels."""
    plain = grids.plain[one] | grids.plain[other]
    color = (grids.color[one] * grids.color[other]).sum(1) > _COLOR
    return torch.where(plain, grids.sums[one] == grids.sums[other], color)


def _same(images: Tensor, grids: _Grids, one: Tensor, other: Tensor) -> Tensor:
    """Which pairs are copies in one of the eight orientations, ``(pairs,)`` bool."""
    plain = grids.plain[one] | grids.plain[other]
    same = torch.zeros(len(one), dtype=torch.bool)
    for g in P4M.elements:
        place = (~same).nonzero()[:, 0]
        a, b = one[place], other[place]
        turned = [transform(grid[b], P4M, g, "trivial") for grid in (grids.coarse, grids.added)]
        near = (grids.coarse[a] - turned[0]).flatten(1).norm(dim=1) < _DISTANCE
        near &= (grids.added[a] * turned[1]).flatten(1).sum(1) > _CORRELATION
        for k in plain[place].nonzero()[:, 0].tolist():
            near[k] = torch.equal(images[a[k]], transform(images[b[k]][None], P4M, g, "trivial")[0])
        same[place] = near
    return same


def _grids(images: Tensor) -> _Grids:
    fine = torch.cat([F.adaptive_avg_pool2d(part.cpu().float(), _FINE) for part in images.split(_BLOCK)])
    coarse = F.avg_pool2d(fine, _FINE // _COARSE)
    added = fine - F.interpolate(coarse, scale_factor=_FINE / _COARSE)
    color = F.normalize(coarse.mean((2, 3)), dim=1)
    coarse = coarse - coarse.mean((2, 3), keepdim=True)
    plain = (_deviation(coarse) < _FLAT) | (_deviation(added) < _FLAT_ADDED)
    coarse, added = (F.normalize(grid.flatten(1), dim=1).view_as(grid) for grid in (coarse, added))
    for g in P4M.elements[1:]:
        plain |= (added * transform(added, P4M, g, "trivial")).flatten(1).sum(1) > _SYMMETRIC
    gray = F.normalize(added.mean(1).flatten(1), dim=1)
    plain |= (gray**4).sum(1) > 1 / (_CELLS if added.shape[1] > 1 else _CELLS_GRAY)  # the participation ratio
    sums = torch.cat([part.cpu().long().flatten(1).sum(1) for part in images.split(_BLOCK)])
    return _Grids(coarse, added, color, plain, sums)


def _deviation(grid: Tensor) -> Tensor:
    return grid.flatten(1).square().mean(1).sqrt()


def _invariants(grids: Tensor) -> Tensor:
    """The mean of each orbit of cells and the norm of what is left, ``(n, 2 · orbits · channels)`` of norm 1 or 0."""
    side = grids.shape[-1]
    cells = torch.arange(side**2).view(1, 1, side, side)
    orbit = torch.stack([transform(cells, P4M, g, "trivial").flatten() for g in P4M.elements]).min(0).values
    parts = []
    for first in orbit.unique():
        values = grids.flatten(2)[..., orbit == first]
        mean = values.mean(2, keepdim=True)
        parts += [mean[..., 0] * values.shape[2] ** 0.5, (values - mean).norm(dim=2)]
    return torch.cat(parts, 1)
