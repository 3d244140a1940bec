"""Group convolutions as plain convolutions with the orbits of the filters, in eager torch, and their gradients."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...groups import Group, orbit
from .._layout import is_last, laid_out


class Geometry(NamedTuple):
    """The group and the window of a group convolution, as integers that an operator takes."""

    rotations: int
    reflections: int
    stride: int
    padding: int
    dilation: int

    @property
    def group(self) -> Group:
        """The group."""
        return Group(self.rotations, bool(self.reflections))


def expand_filters(filters: Tensor, index: Tensor, order: int) -> Tensor:
    """The copies of filters under all elements, ``(C', |H|, C, n)``, by one gather.

    Args:
        filters: ``(C', C, n)``, n = k² for lifting filters and k²·|H| for those of fields.
        index: Where the entries of a transformed filter come from, ``(|H|, n)`` as `eqzoo.groups.orbit` has it, or
            ``(1, |H|, 1, n)``.
        order: The order of the group.
    """
    copies = filters.unsqueeze(1).expand(-1, order, -1, -1)
    return copies.gather(3, index.reshape(1, order, 1, -1).expand_as(copies))


def expanded(field: Tensor, filters: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The definition: one plain convolution of planes with the orbit of the filters."""
    group, last = geometry.group, is_last(field)
    bank = _bank(filters, group, last)
    if bias is not None:
        bias = bias.repeat(group.order) if last else bias.repeat_interleave(group.order)
    return _field(F.conv2d(_planes(field, last), bank, bias, *geometry[2:]), group.order, last)


def output(field: Tensor, filters: Tensor, bias: Tensor | None, numbers: list[int]) -> Tensor:
    """`expanded`, in the layout of the field."""
    return laid_out(expanded(field, filters, bias, Geometry(*numbers)), is_last(field))


def field_gradient(grad: Tensor, filters: Tensor, numbers: list[int]) -> Tensor:
    """The gradient of the field, whose height and width follow the geometry."""
    geometry, last = Geometry(*numbers[:5]), is_last(grad)
    bank = _bank(filters, geometry.group, last)
    planes = _planes(grad, last)
    # Its numbers are not read, but torch takes the layout from it.
    layout = torch.channels_last if last else torch.contiguous_format
    size = (len(grad), bank.shape[1], *numbers[5:])
    field = torch.empty(size, dtype=planes.dtype, device=planes.device, memory_format=layout)
    found = _gradients(planes, field, bank, geometry, [True, False, False])[0]
    return laid_out(_field(found, geometry.group.order, last), last)


def filters_gradient(grad: Tensor, field: Tensor, numbers: list[int]) -> Tensor:
    """The gradient of the filters, whose side follows the geometry."""
    geometry, side, last = Geometry(*numbers[:5]), numbers[5], is_last(field) and is_last(grad)
    order, channels, outs = geometry.group.order, field.shape[1], grad.shape[1]
    empty = field.new_empty(outs * order, channels * order, side, side)
    bank = _gradients(_planes(grad, last), _planes(field, last), empty, geometry, [False, True, False])[1]
    if last:
        bank = bank.reshape(order, outs, order, channels, side**2).permute(1, 0, 3, 2, 4)
    copies = bank.reshape(outs, order, channels, -1)
    index = orbit(geometry.group, side, "regular").to(field.device).view(1, order, 1, -1).expand_as(copies)
    # Each copy's entries go back to where they came from.
    sums = torch.zeros_like(copies).scatter_(3, index, copies).sum(1)
    return sums.reshape(outs, channels * order, side, side)


def _gradients(
    grad: Tensor, field: Tensor, bank: Tensor, geometry: Geometry, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a plain convolution's input and filters, as automatic differentiation computes them."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        grad, field, bank, None, *([n] * 2 for n in geometry[2:]), False, [0, 0], 1, mask
    )
    return found


def _bank(filters: Tensor, group: Group, last: bool) -> Tensor:
    """The filter bank of planes, with channels last of those whose group axis is slow."""
    order, side, outs = group.order, filters.shape[-1], len(filters)
    index = orbit(group, side, "regular").to(filters.device)
    copies = expand_filters(filters.reshape(outs, -1, order * side**2), index, order)
    if last:
        copies = copies.unflatten(3, (order, -1)).permute(1, 0, 3, 2, 4)
    return copies.reshape(outs * order, -1, side, side)


def _planes(field: Tensor, last: bool) -> Tensor:
    return field.transpose(1, 2).flatten(1, 2) if last else field.flatten(1, 2)


def _field(planes: Tensor, order: int, last: bool) -> Tensor:
    return planes.unflatten(1, (order, -1)).transpose(1, 2) if last else planes.unflatten(1, (-1, order))
