"""Group convolutions, expanded to plain ones or through the irreps of the group."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..groups import Group, orbit_array
from . import _group_convolution_eager as _eager
from ._backend import launch, operator, register
from ._group_convolution_choice import computed_in, kernel, through_irreps
from ._group_convolution_eager import expand_filters
from ._layout import empty, in_memory, is_last, laid_out, stored
from ._sizes import output_side

__all__ = ["expand_filters", "group_conv2d", "through_irreps"]


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
        ValueError: If the group is not one of the pixel grid, the shapes do not belong together, or stride, padding or
            dilation is out of range.

    References:
        Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 6, equation 11
        https://arxiv.org/abs/1602.07576

    Example:
        >>> from eqzoo.groups import P4
        >>> field, filters = torch.randn(2, 16, 4, 9, 9), torch.randn(8, 64, 3, 3)
        >>> group_conv2d(field, filters, None, P4, padding=1).shape
        torch.Size([2, 8, 4, 9, 9])
    """
    _check(field, filters, bias, group)
    if min(stride, dilation) < 1 or padding < 0:
        raise ValueError(
            f"stride and dilation are at least 1 pixel and padding at least 0, got {stride}, {dilation} and {padding}"
        )
    if min(field.shape[-2:]) < 1 or min(_sizes(field, filters.shape[-1], stride, padding, dilation)) < 1:
        raise ValueError(
            f"the image is smaller than the window, or empty: {tuple(field.shape)} with padding {padding}, and filters "
            f"of {filters.shape[-1]} pixels with dilation {dilation}"
        )
    if not through_irreps(field, filters, group):
        return _eager.expanded(field, filters, bias, group, stride, padding, dilation)
    dtype = computed_in(field)
    field, filters, bias = field.to(dtype), filters.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = _group_conv2d(field, filters, bias, group.rotations, group.reflections, stride, padding, dilation)
    return out


# Σ G out(f, ψ) is linear in the gradient G, the field f and the filters ψ. Its three derivatives are an operator each:
# the output and the two gradients; and the derivatives of these are the three again.


_group_conv2d = operator("group_conv2d", _eager.output)
_field_gradient = operator("group_conv2d_field", _eager.field_gradient)
_filters_gradient = operator("group_conv2d_filters", _eager.filters_gradient)


@_group_conv2d.register_fake
def _(
    field: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    rotations: int,
    reflections: bool,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    height, width = _sizes(field, filters.shape[-1], stride, padding, dilation)
    return empty(field, len(filters), height, width)


@_field_gradient.register_fake
def _(
    grad: Tensor,
    filters: Tensor,
    rotations: int,
    reflections: bool,
    height: int,
    width: int,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    return empty(grad, filters.shape[1] // grad.shape[2], height, width)


@_filters_gradient.register_fake
def _(
    grad: Tensor,
    field: Tensor,
    side: int,
    rotations: int,
    reflections: bool,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    return field.new_empty(grad.shape[1], field.shape[1] * field.shape[2], side, side)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    field, filters, _, *ctx.options = inputs
    ctx.save_for_backward(field, filters)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    field, filters = ctx.saved_tensors
    rotations, reflections, *steps = ctx.options
    needs_field, needs_filters, needs_bias = ctx.needs_input_grad[:3]
    grad = laid_out(grad, is_last(field))
    return (
        _field_gradient(grad, filters, rotations, reflections, *field.shape[-2:], *steps) if needs_field else None,
        _filters_gradient(grad, field, filters.shape[-1], rotations, reflections, *steps) if needs_filters else None,
        grad.sum((0, 2, 3, 4)) if needs_bias else None,
        *[None] * 5,
    )


def _field_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, filters, rotations, reflections, _, _, *steps = inputs
    ctx.options = [rotations, reflections, *steps]
    ctx.save_for_backward(grad, filters)


def _field_backward(ctx: Any, field: Tensor) -> tuple[Tensor | None, ...]:
    grad, filters = ctx.saved_tensors
    needs_grad, needs_filters = ctx.needs_input_grad[:2]
    field = laid_out(field, is_last(grad))
    return (
        _group_conv2d(field, filters, None, *ctx.options) if needs_grad else None,
        _filters_gradient(grad, field, filters.shape[-1], *ctx.options) if needs_filters else None,
        *[None] * 7,
    )


def _filters_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, field, _, *ctx.options = inputs
    ctx.save_for_backward(grad, field)


def _filters_backward(ctx: Any, filters: Tensor) -> tuple[Tensor | None, ...]:
    grad, field = ctx.saved_tensors
    rotations, reflections, *steps = ctx.options
    needs_grad, needs_field = ctx.needs_input_grad[:2]
    filters = filters.contiguous()
    return (
        _group_conv2d(field, filters, None, *ctx.options) if needs_grad else None,
        _field_gradient(grad, filters, rotations, reflections, *field.shape[-2:], *steps) if needs_field else None,
        *[None] * 6,
    )


_group_conv2d.register_autograd(_backward, setup_context=_setup)
_field_gradient.register_autograd(_field_backward, setup_context=_field_setup)
_filters_gradient.register_autograd(_filters_backward, setup_context=_filters_setup)


# On a CPU, in C++.


@register(_group_conv2d, "cpu", _eager.output)
def _native_output(
    field: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    rotations: int,
    reflections: bool,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    function = kernel("", field)
    if function is None:
        return NotImplemented
    out = empty(field, len(filters), *_sizes(field, filters.shape[-1], stride, padding, dilation))
    _correlate(function, field, filters, bias, out, Group(rotations, reflections), stride, padding, dilation, False)
    return out


@register(_field_gradient, "cpu", _eager.field_gradient)
def _native_field_gradient(
    grad: Tensor,
    filters: Tensor,
    rotations: int,
    reflections: bool,
    height: int,
    width: int,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    function = kernel("", grad)
    if function is None or stride > 1:
        return NotImplemented
    # The adjoint of an equivariant map is one: the same operation with transposed filters.
    group, reach = Group(rotations, reflections), dilation * (filters.shape[-1] - 1)
    out = empty(grad, filters.shape[1] // group.order, height, width)
    _correlate(function, grad, filters, None, out, group, 1, reach - padding, dilation, True)
    return out


@register(_filters_gradient, "cpu", _eager.filters_gradient)
def _native_filters_gradient(
    grad: Tensor,
    field: Tensor,
    side: int,
    rotations: int,
    reflections: bool,
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    function = kernel("_filters", grad, field)
    if function is None:
        return NotImplemented
    group, last = Group(rotations, reflections), is_last(field)
    out = field.new_empty(grad.shape[1], field.shape[1] * group.order, side, side)
    field, grad = in_memory(field, last), in_memory(grad, last)
    channels, outs = (field.shape[-1], grad.shape[-1]) if last else (field.shape[1], grad.shape[1])
    sizes = (group.order, len(field), channels, outs, *_pixels(field, last), *_pixels(grad, last))
    launch(function, field, grad, out, *_tables(group, side, False), *sizes, side, stride, padding, dilation, last)
    return out


def _correlate(
    function: Any,
    field: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    out: Tensor,
    group: Group,
    stride: int,
    padding: int,
    dilation: int,
    swapped: bool,
) -> None:
    side, last = filters.shape[-1], is_last(field)
    sizes = (group.order, len(field), field.shape[1], out.shape[1], *field.shape[-2:], *out.shape[-2:])
    launch(
        function,
        in_memory(field, last),
        filters.contiguous(),
        None if bias is None else bias.contiguous(),
        stored(out, last),
        *_tables(group, side, swapped),
        *sizes,
        side,
        stride,
        padding,
        dilation,
        last,
        swapped,
    )


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


def _pixels(field: Tensor, last: bool) -> torch.Size:
    """The sides of a field as it lies in memory."""
    return field.shape[1:3] if last else field.shape[-2:]


def _sizes(field: Tensor, side: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    height, width = (output_side(n, side, stride, padding, dilation) for n in field.shape[-2:])
    return height, width


def _check(field: Tensor, filters: Tensor, bias: Tensor | None, group: Group) -> None:
    if field.ndim != 5 or field.shape[2] != group.order:
        raise ValueError(f"field is (B, C, {group.order}, height, width), got {tuple(field.shape)}")
    planes = field.shape[1] * group.order
    if filters.ndim != 4 or filters.shape[1] != planes or filters.shape[2] != filters.shape[3]:
        raise ValueError(f"filters are (C', {planes}, k, k) for this field, got {tuple(filters.shape)}")
    if bias is not None and bias.shape != filters.shape[:1]:
        raise ValueError(f"bias is ({len(filters)},) for these filters, got {tuple(bias.shape)}")
