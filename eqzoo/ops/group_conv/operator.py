"""Group convolutions, expanded to plain ones or through the irreps of the group."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...groups import Group, orbit_array
from .. import _compile
from .._dispatch import Operator, check_shape
from .._layout import empty, in_memory, is_last, laid_out, output_side, stored
from . import eager
from .choice import computed_in, kernel, through_irreps
from .eager import Geometry


def group_conv2d(
    field: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    group: Group,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
) -> Tensor:
    """Correlates a regular field with every transformed copy of its filters.

    ``out(c', h, x) = Σ_{c,g,d} ψ(c', c, h⁻¹g, R_h⁻¹ d) f(c, g, x + d) + b(c')`` over fields c, poses g and the k x k
    taps d, zeros outside.

    It is a plain convolution with the orbit of the filters (`expand_filters`), of ``|H|² C C' k²`` multiplications a
    pixel. With the taps renamed by the pose that reads them, ``d = R_g e``, ``v_{c,e}(g, x) = f(c, g, x + R_g e)`` and
    ``κ_{c',c,e}(j) = ψ(c', c, j, R_j e)``, it is ``out(c', h, x) = Σ_{c,e} Σ_g κ_{c',c,e}(h⁻¹g) v_{c,e}(g, x)``: k²C
    convolutions over the group alone, which its Fourier transform makes block diagonal (Schur). That leaves 6 C C' k²
    multiplications of 16 for four rotations (5 where the complex product takes three real ones), 12 of 64 with
    reflections, 2 of 4 for a group of two elements. Which of the two runs is chosen by shape from measurements; both
    give the same numbers up to round-off.

    Args:
        field: The regular field, ``(B, C, |H|, height, width)``, contiguous or with channels last (its memory in the
            order B, height, width, |H|, C). The output has the same layout.
        filters: ``(C', C·|H|, k, k)``, read as ``(C', C, |H|, k, k)``.
        bias: One value a field, ``(C',)``, or None.
        group: The point group H; it must map the pixel grid onto itself.
        stride: The step between outputs, in pixels.
        padding: The zeros added to each side, in pixels.
        dilation: The step between filter taps, in pixels.

    Returns:
        ``(B, C', |H|, height', width')``.

    Raises:
        ValueError: If the group is not one of the pixel grid, the shapes do not belong together, or the window does not
            fit into the image.

    References:
        Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 6, equation 11
        https://arxiv.org/abs/1602.07576

    Example:
        >>> from eqzoo.groups import P4
        >>> field, filters = torch.randn(2, 16, 4, 9, 9), torch.randn(8, 64, 3, 3)
        >>> group_conv2d(field, filters, None, P4, padding=1).shape
        torch.Size([2, 8, 4, 9, 9])
    """
    planes, side = field.shape[1] * group.order, filters.shape[-1]
    check_shape("field", field, None, None, group.order, None, None)
    check_shape("filters", filters, None, planes, side, side)
    check_shape("bias", bias, len(filters))
    geometry = Geometry(group.rotations, int(group.reflections), stride, padding, dilation)
    sizes = (*field.shape[-2:], *(_output_sides(field, side, geometry) if min(stride, dilation) > 0 else (0,)))
    if min(sizes) < 1 or padding < 0:
        raise ValueError(
            f"the window does not fit: {tuple(field.shape)}, filters of {side} pixels, stride {stride}, padding "
            f"{padding}, dilation {dilation}"
        )
    if not through_irreps(field, filters, group):
        return eager.expanded(field, filters, bias, geometry)
    dtype = computed_in(field)
    field, filters, bias = field.to(dtype), filters.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = _group_conv2d(field, filters, bias, geometry)
    return out


# Σ G out(f, ψ) is linear in the gradient G, the field f and the filters ψ. Its three derivatives are an operator each:
# the output and the two gradients; and the derivatives of these are the three again. The numbers are those of
# `Geometry`, followed by the sides of what the gradient is of.


def _empty_output(field: Tensor, filters: Tensor, bias: Tensor | None, numbers: list[int]) -> Tensor:
    return empty(field, len(filters), *_output_sides(field, filters.shape[-1], Geometry(*numbers)))


def _empty_field(grad: Tensor, filters: Tensor, numbers: list[int]) -> Tensor:
    return empty(grad, filters.shape[1] // grad.shape[2], *numbers[5:])


def _empty_filters(grad: Tensor, field: Tensor, numbers: list[int]) -> Tensor:
    return field.new_empty(grad.shape[1], field.shape[1] * field.shape[2], numbers[5], numbers[5])


_group_conv2d = Operator(
    "group_conv2d(Tensor field, Tensor filters, Tensor? bias, SymInt[] numbers) -> Tensor", eager.output, _empty_output
)
_field_gradient = Operator(
    "group_conv2d_field(Tensor grad, Tensor filters, SymInt[] numbers) -> Tensor", eager.field_gradient, _empty_field
)
_filters_gradient = Operator(
    "group_conv2d_filters(Tensor grad, Tensor field, SymInt[] numbers) -> Tensor",
    eager.filters_gradient,
    _empty_filters,
)


@_group_conv2d.gradient()
def _(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    field, filters, _ = ctx.saved_tensors
    (geometry,) = ctx.numbers
    needs_field, needs_filters, needs_bias, _ = ctx.needs_input_grad
    grad = laid_out(grad, is_last(field))
    return (
        _field_gradient(grad, filters, [*geometry, *field.shape[-2:]]) if needs_field else None,
        _filters_gradient(grad, field, [*geometry, filters.shape[-1]]) if needs_filters else None,
        grad.sum((0, 2, 3, 4)) if needs_bias else None,
    )


@_field_gradient.gradient()
def _(ctx: Any, field: Tensor) -> tuple[Tensor | None, ...]:
    grad, filters = ctx.saved_tensors
    geometry = ctx.numbers[0][:5]
    field = laid_out(field, is_last(grad))
    return (
        _group_conv2d(field, filters, None, geometry) if ctx.needs_input_grad[0] else None,
        _filters_gradient(grad, field, [*geometry, filters.shape[-1]]) if ctx.needs_input_grad[1] else None,
    )


@_filters_gradient.gradient()
def _(ctx: Any, filters: Tensor) -> tuple[Tensor | None, ...]:
    grad, field = ctx.saved_tensors
    geometry, filters = ctx.numbers[0][:5], filters.contiguous()
    return (
        _group_conv2d(field, filters, None, geometry) if ctx.needs_input_grad[0] else None,
        _field_gradient(grad, filters, [*geometry, *field.shape[-2:]]) if ctx.needs_input_grad[1] else None,
    )


@_group_conv2d.kernel("cpu")
def _(field: Tensor, filters: Tensor, bias: Tensor | None, numbers: list[int]) -> Tensor:
    function = kernel("", field)
    if function is None:
        return NotImplemented
    out = _empty_output(field, filters, bias, numbers)
    _correlate(function, field, filters, bias, out, Geometry(*numbers), False)
    return out


@_field_gradient.kernel("cpu")
def _(grad: Tensor, filters: Tensor, numbers: list[int]) -> Tensor:
    function, geometry = kernel("", grad), Geometry(*numbers[:5])
    if function is None or geometry.stride > 1:
        return NotImplemented
    # The adjoint of an equivariant map is one: the same operation with transposed filters.
    reach = geometry.dilation * (filters.shape[-1] - 1)
    out = _empty_field(grad, filters, numbers)
    _correlate(function, grad, filters, None, out, geometry._replace(padding=reach - geometry.padding), True)
    return out


@_filters_gradient.kernel("cpu")
def _(grad: Tensor, field: Tensor, numbers: list[int]) -> Tensor:
    function = kernel("_filters", grad, field)
    if function is None:
        return NotImplemented
    geometry, side, last = Geometry(*numbers[:5]), numbers[5], is_last(field)
    out = _empty_filters(grad, field, numbers)
    if not field.numel():
        return out.zero_()
    sizes = (geometry.group.order, len(field), field.shape[1], grad.shape[1], *field.shape[-2:], *grad.shape[-2:], side)
    tensors = (in_memory(field, last), in_memory(grad, last), out, *_tables(geometry.group, side, False))
    _compile.launch(function, *tensors, *sizes, *geometry[2:], last)
    return out


def _correlate(
    function: Any, field: Tensor, filters: Tensor, bias: Tensor | None, out: Tensor, geometry: Geometry, swapped: bool
) -> None:
    if not out.numel():
        return
    side, last, group = filters.shape[-1], is_last(field), geometry.group
    sizes = (group.order, len(field), field.shape[1], out.shape[1], *field.shape[-2:], *out.shape[-2:], side)
    filters, bias = filters.contiguous(), None if bias is None else bias.contiguous()
    tensors = (in_memory(field, last), filters, bias, stored(out, last), *_tables(group, side, swapped))
    _compile.launch(function, *tensors, *sizes, *geometry[2:], last, swapped)


@cache
def _tables(group: Group, side: int, swapped: bool) -> tuple[Tensor, Tensor]:
    """Which tap a pose reads for each renamed tap, ``(|H|, k²)``, and where κ is in a filter, ``(k², |H|)``.

    The gradient of the input has ``ψ'(c, c', j, u) = ψ(c', c, j⁻¹, −R_{j⁻¹} u)``, so its κ are ``ψ(c', c, j⁻¹, −e)``.
    """
    taps = side**2
    index = orbit_array(group, side, "regular")
    reads = np.stack([index[group.inverse(g), :taps] % taps for g in group.elements])
    if swapped:
        places = np.array([[group.inverse(j) * taps + taps - 1 - e for j in group.elements] for e in range(taps)])
    else:
        places = np.stack([reads[j] + j * taps for j in group.elements], 1)
    return torch.from_numpy(reads), torch.from_numpy(places)


def _output_sides(field: Tensor, side: int, geometry: Geometry) -> list[int]:
    return [output_side(n, side, *geometry[2:]) for n in field.shape[-2:]]
