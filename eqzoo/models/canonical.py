"""Canonical copies of images: one rotated or reflected copy that stands for all, chosen by exact integers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..groups import Group, transform
from ..layers._layout import is_channels_last
from ..ops._dispatch import is_observed, is_transformed

_LARGEST_LEVEL = 2**15  # of a pixel; levels of 8-bit images are 0 to 255


def group_of_sides(group: Group, height: int, width: int) -> Group:
    """The largest subgroup that preserves the shape of the images: no 90° rotations unless they are square."""
    return group if height == width or group.rotations % 2 else Group(2, group.reflections)


def canonical_elements(
    x: Tensor, group: Group, copies: int = 1, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Tensor:
    """The elements g whose copies ``g x`` come first in an order of images, so that all copies of x give the same ones.

    A copy comes first whose moment ``Σ_p |L(p) − mean L| p`` points down most, then right: L is the sum over the
    channels of the pixels in whole levels, 0 to 255, and p the position from the center of the image. Copies of one
    moment are compared by their first different pixel. The moments are integers, and elements permute them and change
    their signs, so that nothing is rounded: ``take_copies(g x, canonical_elements(g x))`` has the same bits for all g.

    Args:
        x: The images, ``(B, C, height, width)``: 8-bit levels of an integer type, or floating-point ones that are
            normalized, ``(levels / 255 − mean) / std``.
        group: A group H of the pixel grid; of images that are not square its elements that keep their shape.
        copies: How many of the copies, from 1 to ``|H|``.
        mean: The mean of the normalization, for all channels or each.
        std: The standard deviation, likewise.

    Returns:
        The elements of `group_of_sides`, the first ones in this order, ``(B, copies)`` int64.

    References:
        Equivariance with Learned Canonicalization Functions (Kaba et al., 2023), section 3
        https://arxiv.org/abs/2211.06489

    Example:
        >>> from eqzoo.groups import P4
        >>> x = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
        >>> x[..., 0, 1] = 9  # a point above the center, which a rotation by 180° brings down
        >>> canonical_elements(x, P4)
        tensor([[2]])
    """
    group = group_of_sides(group, x.shape[2], x.shape[3])
    moments = _moments(_levels(x, mean, std), group)
    found = [_first(x, group, moments)]
    while len(found) < copies:
        found.append(_first(x, group, moments, torch.stack(found, 1)))
    return torch.stack(found, 1)


def take_copies(x: Tensor, group: Group, elements: Tensor | None = None) -> Tensor:
    """The copies ``g x`` of images by elements that differ from image to image, ``(B · copies, C, height, width)``.

    Args:
        x: The images, ``(B, C, height, width)``; the copies have their memory format.
        group: The group, all of whose elements preserve the shape of the images.
        elements: The elements, ``(B, copies)``; None for all of the group.
    """
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    count = group.order if elements is None else elements.shape[1]
    if elements is None or needs_graph(x):
        found = torch.stack([transform(x, group, g, "trivial") for g in group.elements], 1)
        if elements is not None:
            found = found.gather(1, elements[:, :, None, None, None].expand(-1, -1, *x.shape[1:]))
        found = found.flatten(0, 1)
        # Written anew, because torch takes any strides of images of one channel for either layout.
        return found if needs_graph(x) else torch.empty_like(found, memory_format=layout).copy_(found)
    found = torch.empty((len(x) * count, *x.shape[1:]), dtype=x.dtype, device=x.device, memory_format=layout)
    for g in elements.unique().tolist():
        image, copy = (elements == g).nonzero(as_tuple=True)
        found[image * count + copy] = transform(x[image], group, g, "trivial")
    return found


def needs_graph(x: Tensor) -> bool:
    """Whether operations are recorded, or have no numbers, so that none may depend on the numbers of images."""
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_observed()  # type: ignore[attr-defined]
    return recorded or is_transformed() or x.is_meta or type(x) is not Tensor


def _levels(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The sum over the channels of the pixels in whole levels, ``(B, height, width)`` int64."""
    if x.is_floating_point():
        x = x if x.dtype == torch.float64 else x.float()
        scale, shift = (
            255 * torch.tensor(values, dtype=x.dtype, device=x.device)[:, None, None] for values in (std, mean)
        )
        x = (x * scale + shift).round().clamp(-_LARGEST_LEVEL, _LARGEST_LEVEL)
    return x.long().sum(1)


def _moments(levels: Tensor, group: Group) -> list[Tensor]:
    """Twice the moments of the absolute contrast of all copies of images, down and to the right, each ``(B, |H|)``."""
    height, width = levels.shape[1:]
    contrast = (levels * (height * width) - levels.sum((1, 2), keepdim=True)).abs()
    rows, columns = (torch.arange(1 - side, side, 2, device=levels.device) for side in (height, width))
    down, right = (contrast.sum(2) * rows).sum(1), (contrast.sum(1) * columns).sum(1)
    matrices = [group.matrix_rows(g) for g in group.elements]
    return [
        torch.stack([int(matrix[axis][0]) * down + int(matrix[axis][1]) * right for matrix in matrices], 1)
        for axis in (0, 1)
    ]


def _first(x: Tensor, group: Group, moments: list[Tensor], others: Tensor | None = None) -> Tensor:
    """The element of the first copy of each image, ``(B,)``, that is none of the ``others``, ``(B, copies)``."""
    is_graph = needs_graph(x)
    best = torch.zeros_like(moments[0][:, 0])
    best_copy = x
    for g in group.elements[1:]:
        (down, best_down), (right, best_right) = ((m[:, g], m.gather(1, best[:, None])[:, 0]) for m in moments)
        is_before = (down > best_down) | ((down == best_down) & (right > best_right))
        is_same = (down == best_down) & (right == best_right)
        if is_graph or is_same.any():  # in a graph the pixels are always compared
            copy = transform(x, group, g, "trivial")
            best_copy = best_copy if is_graph else take_copies(x, group, best[:, None])
            is_before = is_before | (is_same & _is_larger(copy, best_copy))
        if others is not None:
            is_before = (others != g).all(1) & (is_before | (others == best[:, None]).any(1))
        best = torch.where(is_before, g, best)
        if is_graph:
            best_copy = torch.where(is_before[:, None, None, None], copy, best_copy)
    return best


def _is_larger(x: Tensor, y: Tensor) -> Tensor:
    """Whether the first different pixel of two images is larger in the first one, ``(B,)``."""
    x, y = x.flatten(1), y.flatten(1)
    place = (x != y).to(torch.uint8).argmax(1, keepdim=True)
    return (x.gather(1, place) > y.gather(1, place))[:, 0]
