"""A depthwise correlation with a filter of its own at every pixel."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _backend, _depthwise_eager, reference
from ._chunks import chunks
from ._dtypes import promote, upcast

__all__ = ["dynamic_depthwise"]


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
    _check(kernel, value)
    kernel, value = (x.contiguous() for x in promote(kernel, value))
    if _backend.forced("reference"):
        return reference.dynamic_depthwise(kernel, value)
    if torch.compiler.is_exporting():
        return _sum(kernel, value)
    if _backend.plain():
        out: Tensor = _Eager.apply(kernel, value)
    else:
        # The kernels on a CPU do not read half precision.
        out = _dynamic_depthwise(*(upcast(kernel, value) if value.is_cpu else (kernel, value)))
    return out.to(value.dtype)


def _sum(kernel: Tensor, value: Tensor) -> Tensor:
    """The form that is exported: nothing is written in place, which runtimes would implement by copies.

    A row of the neighborhood at a time, its k neighbors at once: runtimes are faster with few and large operators.
    """
    slices, side = kernel.shape[1], math.isqrt(kernel.shape[3])
    height, width = value.shape[-2:]
    padded = _depthwise_eager.pad(value, kernel.shape[3]).unflatten(1, (slices, -1)).unsqueeze(4)
    columns = torch.cat([padded[..., j : j + width] for j in range(side)], 4)
    rows = kernel.unsqueeze(2).split(side, 4)
    products = [row * columns[..., i : i + height, :] for i, row in enumerate(rows)]
    return functools.reduce(torch.add, products).sum(4).flatten(1, 2)


# What the operators run. Filters may be a view with contiguous pixels, fields are contiguous.


def filtered_sum(kernel: Tensor, value: Tensor) -> Tensor:
    """``out(c, h, x) = Σ_d kernel(slice(c), h, d, x) value(c, h, x + d)`` in eager torch."""
    out = torch.empty_like(value)
    for part in _image_chunks(kernel):
        _depthwise_eager.filtered_sum(kernel[part], value[part], out[part])
    return out


def filter_gradient(grad: Tensor, value: Tensor, slices: int, taps: int) -> Tensor:
    """``out(s, h, d, x) = Σ_c grad(c, h, x) value(c, h, x + d)`` over the channels c of slice s in eager torch."""
    out = torch.empty(_kernel_shape(value, slices, taps), dtype=value.dtype, device=value.device)
    for part in _image_chunks(out):
        _depthwise_eager.filter_gradient(grad[part], value[part], out[part])
    return out


def field_gradient(kernel: Tensor, grad: Tensor) -> Tensor:
    """``out(c, h, x) = Σ_d kernel(slice(c), h, d, x − d) grad(c, h, x − d)`` in eager torch."""
    out = torch.empty_like(grad)
    for part in _image_chunks(kernel):
        _depthwise_eager.field_gradient(kernel[part], grad[part], out[part])
    return out


# The sum Σ g K V over pixels and offsets is linear in each of the three. Its three derivatives are one operator each:
# the output, the gradient of the filters and that of the field; and the derivatives of these are the three again.
_dynamic_depthwise = _backend.operator("dynamic_depthwise", filtered_sum)
_filter_gradient = _backend.operator("dynamic_depthwise_kernel", filter_gradient)
_field_gradient = _backend.operator("dynamic_depthwise_value", field_gradient)


@_backend.register(_dynamic_depthwise, "cpu", filtered_sum)
def _native_sum(kernel: Tensor, value: Tensor) -> Tensor:
    function = _backend.cpu_function("dynamic_depthwise", "dynamic_depthwise", kernel, value)
    if function is None:
        return NotImplemented
    out = torch.empty_like(value)
    _backend.launch(function, kernel, value, out, *sizes(value, kernel.shape[1], kernel.shape[3]))
    return out


@_backend.register(_filter_gradient, "cpu", filter_gradient)
def _native_filter_gradient(grad: Tensor, value: Tensor, slices: int, taps: int) -> Tensor:
    function = _backend.cpu_function("dynamic_depthwise", "dynamic_depthwise_kernel", grad, value)
    if function is None:
        return NotImplemented
    out = value.new_empty(_kernel_shape(value, slices, taps))
    _backend.launch(function, grad, value, out, *sizes(value, slices, taps))
    return out


@_backend.register(_field_gradient, "cpu", field_gradient)
def _native_field_gradient(kernel: Tensor, grad: Tensor) -> Tensor:
    function = _backend.cpu_function("dynamic_depthwise", "dynamic_depthwise_value", kernel, grad)
    if function is None:
        return NotImplemented
    out = torch.empty_like(grad)
    _backend.launch(function, kernel, grad, out, *sizes(grad, kernel.shape[1], kernel.shape[3]))
    return out


@_backend.register(_dynamic_depthwise, "cuda", filtered_sum)
def _triton_sum(kernel: Tensor, value: Tensor) -> Tensor:
    if not _backend.on_cuda(kernel, value):
        return NotImplemented
    from .triton import dynamic_depthwise as kernels

    return kernels.filtered_sum(kernel, value, torch.empty_like(value))


@_backend.register(_filter_gradient, "cuda", filter_gradient)
def _triton_filter_gradient(grad: Tensor, value: Tensor, slices: int, taps: int) -> Tensor:
    if not _backend.on_cuda(grad, value):
        return NotImplemented
    from .triton import dynamic_depthwise as kernels

    return kernels.filter_gradient(grad, value, value.new_empty(_kernel_shape(value, slices, taps)))


@_backend.register(_field_gradient, "cuda", field_gradient)
def _triton_field_gradient(kernel: Tensor, grad: Tensor) -> Tensor:
    if not _backend.on_cuda(kernel, grad):
        return NotImplemented
    from .triton import dynamic_depthwise as kernels

    return kernels.field_gradient(kernel, grad, torch.empty_like(grad))


@_dynamic_depthwise.register_fake
def _(kernel: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


@_filter_gradient.register_fake
def _(grad: Tensor, value: Tensor, slices: int, taps: int) -> Tensor:
    return value.new_empty(_kernel_shape(value, slices, taps))


@_field_gradient.register_fake
def _(kernel: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    kernel, value = ctx.saved_tensors
    needs_kernel, needs_value = ctx.needs_input_grad
    grad = grad.contiguous()
    return (
        _filter_gradient(grad, value, kernel.shape[1], kernel.shape[3]) if needs_kernel else None,
        _field_gradient(kernel, grad) if needs_value else None,
    )


def _filter_backward(ctx: Any, kernel: Tensor) -> tuple[Tensor | None, ...]:
    grad, value = ctx.saved_tensors
    needs_grad, needs_value = ctx.needs_input_grad[:2]
    kernel = kernel.contiguous()
    return (
        _dynamic_depthwise(kernel, value) if needs_grad else None,
        _field_gradient(kernel, grad) if needs_value else None,
        None,
        None,
    )


def _field_backward(ctx: Any, value: Tensor) -> tuple[Tensor | None, Tensor | None]:
    kernel, grad = ctx.saved_tensors
    needs_kernel, needs_grad = ctx.needs_input_grad
    value = value.contiguous()
    return (
        _filter_gradient(grad, value, kernel.shape[1], kernel.shape[3]) if needs_kernel else None,
        _dynamic_depthwise(kernel, value) if needs_grad else None,
    )


_dynamic_depthwise.register_autograd(_backward, setup_context=_setup)
_filter_gradient.register_autograd(_filter_backward, setup_context=_setup)
_field_gradient.register_autograd(_field_backward, setup_context=_setup)


def sizes(field: Tensor, slices: int, taps: int) -> tuple[int, ...]:
    """The shape arguments of the C++ functions."""
    batch, channels, order, height, width = field.shape
    return batch, channels, order, slices, height, width, math.isqrt(taps)


# Eager torch: one offset at a time for a few images, so that what is read k·k times stays in the cache.


class _Eager(torch.autograd.Function):
    """Loops over the offsets in both passes, instead of keeping a product and two gradients for each of them."""

    @staticmethod
    def forward(kernel: Tensor, value: Tensor) -> Tensor:
        return filtered_sum(kernel, value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        kernel, value = ctx.saved_tensors
        return filter_gradient(grads[0], value, kernel.shape[1], kernel.shape[3]), field_gradient(kernel, grads[0])


def traced() -> bool:
    """Whether a graph is recorded, which must not depend on the batch size."""
    return torch.compiler.is_compiling() or _backend.exporting()


def _image_chunks(kernel: Tensor) -> Iterator[slice]:
    if traced():
        return iter([slice(None)])
    return chunks(len(kernel), math.prod(kernel.shape[1:]), kernel.device)


def _kernel_shape(value: Tensor, slices: int, taps: int) -> tuple[int, ...]:
    batch, _, *rest = value.shape
    return (batch, slices, rest[0], taps, *rest[1:])


def _check(kernel: Tensor, value: Tensor) -> None:
    if value.ndim != 5:
        raise ValueError(f"value is (B, C, |H|, height, width), got {tuple(value.shape)}")
    batch, channels, order, height, width = value.shape
    shared = (batch, order, height, width)
    if kernel.ndim != 6 or kernel.shape[::2] + kernel.shape[5:] != shared:
        raise ValueError(
            f"kernel is ({batch}, s, {order}, k·k, {height}, {width}), with s a divisor of the {channels} channels of "
            f"value, got {tuple(kernel.shape)}"
        )
    check_window(value, kernel.shape[1], kernel.shape[3])


def check_window(value: Tensor, slices: int, taps: int) -> None:
    """Raises ValueError unless the slices divide the channels and the window has an odd side."""
    if slices < 1 or value.shape[1] % slices:
        raise ValueError(
            f"the number of filters a pixel is a divisor of the {value.shape[1]} channels of value, got s = {slices}"
        )
    side = math.isqrt(taps)
    if side**2 != taps or side % 2 == 0:
        raise ValueError(f"k must be odd, so that filters have 1, 9, 25, 49 ... taps, got {taps}")
