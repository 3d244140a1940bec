"""A depthwise correlation with a filter of its own at every pixel."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _compile, _dispatch, reference
from .._chunks import chunks
from .._dispatch import Operator, check_shape, check_window
from .._dtypes import promote, upcast
from . import eager


def dynamic_depthwise(kernel: Tensor, value: Tensor) -> Tensor:
    """Sums a field over the neighborhood of every pixel, weighted by that pixel's filter.

    ``out(c, h, x) = Σ_d kernel(slice(c), h, d, x) value(c, h, x + d)``, d over the k x k offsets row by row, with zero
    padding. The C channels are divided into s slices of adjacent channels, ``slice(c) = ⌊c s / C⌋``, that share a
    filter. The group axis is a batch axis: filters come already transformed.

    Neighborhoods are not copied, and the backward pass keeps the two arguments alone. It can be differentiated any
    number of times.

    Args:
        kernel: The filters, ``(B, s, |H|, k·k, height, width)``, k odd.
        value: The field, ``(B, C, |H|, height, width)``.

    Returns:
        ``(B, C, |H|, height, width)``.

    Raises:
        ValueError: If the shapes do not belong together.

    References:
        Efficient Equivariant Network (He et al., 2021), section 4.1, equation 12
        https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf

    Example:
        >>> value = torch.arange(9.0).reshape(1, 1, 1, 3, 3)
        >>> dynamic_depthwise(torch.ones(1, 1, 1, 9, 3, 3), value)[0, 0, 0]  # sums over 3 x 3 neighborhoods
        tensor([[ 8., 15., 12.],
                [21., 36., 27.],
                [20., 33., 24.]])
    """
    batch, channels, *places = value.shape
    slices, taps = kernel.shape[1], kernel.shape[3]
    check_shape("value", value, batch, channels // slices * slices, *places)
    side = math.isqrt(taps)
    check_shape("kernel", kernel, batch, slices, places[0], side**2, *places[1:])
    check_window(side)
    kernel, value = (x.contiguous() for x in promote(kernel, value))
    if _dispatch.forced("reference"):
        return reference.dynamic_depthwise(kernel, value)
    if _dispatch.plain() and traced():
        return _sum(kernel, value)
    # The kernels on a CPU do not read half precision.
    out: Tensor = _dynamic_depthwise(*(upcast(kernel, value) if value.is_cpu else (kernel, value)))
    return out.to(value.dtype)


def _sum(kernel: Tensor, value: Tensor) -> Tensor:
    """The form that is exported: nothing is written in place, which runtimes would implement by copies.

    A row of the neighborhood at a time, its k neighbors at once: runtimes are faster with few and large operators.
    """
    slices, side = kernel.shape[1], math.isqrt(kernel.shape[3])
    height, width = value.shape[-2:]
    padded = eager.pad(value, kernel.shape[3]).unflatten(1, (slices, -1)).unsqueeze(4)
    columns = torch.cat([padded[..., j : j + width] for j in range(side)], 4)
    rows = kernel.unsqueeze(2).split(side, 4)
    products = [row * columns[..., i : i + height, :] for i, row in enumerate(rows)]
    return functools.reduce(torch.add, products).sum(4).flatten(1, 2)


# What the operators run. Filters may be a view with contiguous pixels, fields are contiguous.


def _in_chunks(function: Callable[..., Tensor], one: Tensor, other: Tensor, out: Tensor, filters: Tensor) -> Tensor:
    """A function of `eager` for a few images at a time, so that their windows stay in the cache."""
    for part in chunks(len(filters), math.prod(filters.shape[1:]), filters.device):
        function(one[part], other[part], out[part])
    return out


def _filtered_sum(kernel: Tensor, value: Tensor) -> Tensor:
    return _in_chunks(eager.filtered_sum, kernel, value, torch.empty_like(value), kernel)


def _eager_filter_gradient(grad: Tensor, value: Tensor, numbers: list[int]) -> Tensor:
    out = _empty_filters(grad, value, numbers)
    return _in_chunks(eager.filter_gradient, grad, value, out, out)


def _eager_field_gradient(kernel: Tensor, grad: Tensor) -> Tensor:
    return _in_chunks(eager.field_gradient, kernel, grad, torch.empty_like(grad), kernel)


def _empty_filters(grad: Tensor, value: Tensor, numbers: list[int]) -> Tensor:
    """Filters without their values; the numbers are those of slices and taps."""
    batch, _, order, *sides = value.shape
    slices, taps = numbers
    return value.new_empty(batch, slices, order, taps, *sides)


# The sum Σ g K V over pixels and offsets is linear in each of the three. Its three derivatives are one operator each:
# the output, the gradient of the filters and that of the field; and the derivatives of these are the three again.
_dynamic_depthwise = Operator(
    "dynamic_depthwise(Tensor kernel, Tensor value) -> Tensor",
    _filtered_sum,
    lambda kernel, value: torch.empty_like(value),
)
_filter_gradient = Operator(
    "dynamic_depthwise_kernel(Tensor grad, Tensor value, SymInt[] numbers) -> Tensor",
    _eager_filter_gradient,
    _empty_filters,
)
_field_gradient = Operator(
    "dynamic_depthwise_value(Tensor kernel, Tensor grad) -> Tensor",
    _eager_field_gradient,
    lambda kernel, grad: torch.empty_like(grad),
)


@_dynamic_depthwise.kernel("cpu")
def _(kernel: Tensor, value: Tensor) -> Tensor:
    function = _compile.cpu_function("e4/cpu", "dynamic_depthwise", kernel, value)
    if function is None:
        return NotImplemented
    out = torch.empty_like(value)
    _compile.launch(function, kernel, value, out, *sizes(value, kernel.shape[1], kernel.shape[3]))
    return out


@_filter_gradient.kernel("cpu")
def _(grad: Tensor, value: Tensor, numbers: list[int]) -> Tensor:
    function = _compile.cpu_function("e4/cpu", "dynamic_depthwise_kernel", grad, value)
    if function is None:
        return NotImplemented
    out = _empty_filters(grad, value, numbers)
    _compile.launch(function, grad, value, out, *sizes(value, *numbers))
    return out


@_field_gradient.kernel("cpu")
def _(kernel: Tensor, grad: Tensor) -> Tensor:
    function = _compile.cpu_function("e4/cpu", "dynamic_depthwise_value", kernel, grad)
    if function is None:
        return NotImplemented
    out = torch.empty_like(grad)
    _compile.launch(function, kernel, grad, out, *sizes(grad, kernel.shape[1], kernel.shape[3]))
    return out


@_dynamic_depthwise.kernel("cuda")
def _(kernel: Tensor, value: Tensor) -> Tensor:
    if not _dispatch.on_cuda(kernel, value):
        return NotImplemented
    from . import cuda

    return cuda.filtered_sum(kernel, value, torch.empty_like(value))


@_filter_gradient.kernel("cuda")
def _(grad: Tensor, value: Tensor, numbers: list[int]) -> Tensor:
    if not _dispatch.on_cuda(grad, value):
        return NotImplemented
    from . import cuda

    return cuda.filter_gradient(grad, value, _empty_filters(grad, value, numbers))


@_field_gradient.kernel("cuda")
def _(kernel: Tensor, grad: Tensor) -> Tensor:
    if not _dispatch.on_cuda(kernel, grad):
        return NotImplemented
    from . import cuda

    return cuda.field_gradient(kernel, grad, torch.empty_like(grad))


@_dynamic_depthwise.gradient()
def _(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    kernel, value = ctx.saved_tensors
    grad = grad.contiguous()
    return (
        _filter_gradient(grad, value, [kernel.shape[1], kernel.shape[3]]) if ctx.needs_input_grad[0] else None,
        _field_gradient(kernel, grad) if ctx.needs_input_grad[1] else None,
    )


@_filter_gradient.gradient()
def _(ctx: Any, kernel: Tensor) -> tuple[Tensor | None, ...]:
    grad, value = ctx.saved_tensors
    kernel = kernel.contiguous()
    return (
        _dynamic_depthwise(kernel, value) if ctx.needs_input_grad[0] else None,
        _field_gradient(kernel, grad) if ctx.needs_input_grad[1] else None,
    )


@_field_gradient.gradient()
def _(ctx: Any, value: Tensor) -> tuple[Tensor | None, ...]:
    kernel, grad = ctx.saved_tensors
    value = value.contiguous()
    return (
        _filter_gradient(grad, value, [kernel.shape[1], kernel.shape[3]]) if ctx.needs_input_grad[0] else None,
        _dynamic_depthwise(kernel, value) if ctx.needs_input_grad[1] else None,
    )


def sizes(field: Tensor, slices: int, taps: int) -> tuple[int, ...]:
    """The shape arguments of the C++ functions."""
    batch, channels, order, height, width = field.shape
    return batch, channels, order, slices, height, width, math.isqrt(taps)


def traced() -> bool:
    """Whether a graph is recorded, which must not depend on the batch size."""
    return torch.compiler.is_compiling() or _dispatch.exporting()
