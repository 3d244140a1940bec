"""A depthwise correlation whose filter is another one at every pixel."""

import functools
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backend import cpu_function, launch, on_cuda, plain

__all__ = ["dynamic_depthwise"]

# How much of the filters is worked on at a time: what a core keeps in its cache, and what keeps a GPU busy.
_CPU_BYTES = 2**20
_GPU_BYTES = 2**26


def dynamic_depthwise(kernel: Tensor, value: Tensor) -> Tensor:
    """Sums a field over the neighbourhood of every pixel, weighted by the filter of that pixel.

    ``out(c, h, x) = Σ_d kernel(slice(c), h, d, x) value(c, h, x + d)``, d over the k x k offsets row by row, zeros
    outside; the C channels fall into s slices of neighbours, ``slice(c) = ⌊c s / C⌋``, that share a filter. The group
    axis is carried along: filters come already transformed.

    No copy of the neighbourhoods is made, and the backward pass keeps nothing but the two arguments. It may be
    differentiated as often as is asked for.

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
        >>> dynamic_depthwise(torch.ones(1, 1, 1, 9, 3, 3), value)[0, 0, 0]  # sums over 3 x 3 neighbourhoods
        tensor([[ 8., 15., 12.],
                [21., 36., 27.],
                [20., 33., 24.]])
    """
    _check(kernel, value)
    kernel, value = (x.contiguous() for x in alike(kernel, value))
    if torch.compiler.is_exporting():
        return _sum(kernel, value)
    out: Tensor = _Eager.apply(kernel, value) if plain() else _dynamic_depthwise(wide(kernel), wide(value))
    return out.to(value.dtype)


def _sum(kernel: Tensor, value: Tensor) -> Tensor:
    """The definition, with nothing written in place: runtimes that a network is exported to copy for that.

    Row by row of the neighbourhood, the k neighbours in a row at once: of few and large operators a runtime makes more.
    """
    slices, side = kernel.shape[1], math.isqrt(kernel.shape[3])
    height, width = value.shape[-2:]
    padded = _pad(value, kernel.shape[3]).unflatten(1, (slices, -1)).unsqueeze(4)
    columns = torch.cat([padded[..., j : j + width] for j in range(side)], 4)
    rows = kernel.unsqueeze(2).split(side, 4)
    products = [row * columns[..., i : i + height, :] for i, row in enumerate(rows)]
    return functools.reduce(torch.add, products).sum(4).flatten(1, 2)


# The sum Σ g K V over pixels and offsets is linear in each of the three. Its three derivatives are one operator each:
# the output, the gradient of the filters and that of the field; and the derivatives of these are the three again.


@torch.library.custom_op("eqzoo::dynamic_depthwise", mutates_args=())
def _dynamic_depthwise(kernel: Tensor, value: Tensor) -> Tensor:
    out = torch.empty_like(value)
    weigh(kernel, value, out)
    return out


@torch.library.custom_op("eqzoo::dynamic_depthwise_kernel", mutates_args=())
def _kernel_gradient(grad: Tensor, value: Tensor, slices: int, taps: int) -> Tensor:
    out = torch.empty(_kernel_shape(value, slices, taps), dtype=value.dtype, device=value.device)
    weigh_kernel(grad, value, out)
    return out


@torch.library.custom_op("eqzoo::dynamic_depthwise_value", mutates_args=())
def _value_gradient(kernel: Tensor, grad: Tensor) -> Tensor:
    out = torch.empty_like(grad)
    weigh_value(kernel, grad, out)
    return out


@_dynamic_depthwise.register_fake
def _(kernel: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


@_kernel_gradient.register_fake
def _(grad: Tensor, value: Tensor, slices: int, taps: int) -> Tensor:
    return value.new_empty(_kernel_shape(value, slices, taps))


@_value_gradient.register_fake
def _(kernel: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    kernel, value = ctx.saved_tensors
    needs_kernel, needs_value = ctx.needs_input_grad
    grad = grad.contiguous()
    return (
        _kernel_gradient(grad, value, kernel.shape[1], kernel.shape[3]) if needs_kernel else None,
        _value_gradient(kernel, grad) if needs_value else None,
    )


def _kernel_backward(ctx: Any, kernel: Tensor) -> tuple[Tensor | None, ...]:
    grad, value = ctx.saved_tensors
    needs_grad, needs_value = ctx.needs_input_grad[:2]
    kernel = kernel.contiguous()
    return (
        _dynamic_depthwise(kernel, value) if needs_grad else None,
        _value_gradient(kernel, grad) if needs_value else None,
        None,
        None,
    )


def _value_backward(ctx: Any, value: Tensor) -> tuple[Tensor | None, Tensor | None]:
    kernel, grad = ctx.saved_tensors
    needs_kernel, needs_grad = ctx.needs_input_grad
    value = value.contiguous()
    return (
        _kernel_gradient(grad, value, kernel.shape[1], kernel.shape[3]) if needs_kernel else None,
        _dynamic_depthwise(kernel, value) if needs_grad else None,
    )


_dynamic_depthwise.register_autograd(_backward, setup_context=_setup)
_kernel_gradient.register_autograd(_kernel_backward, setup_context=_setup)
_value_gradient.register_autograd(_value_backward, setup_context=_setup)


# What the operators run. Filters may be a view with dense pixels, fields are contiguous, results are written in place.


def weigh(kernel: Tensor, value: Tensor, out: Tensor) -> None:
    """``out(c, h, x) = Σ_d kernel(slice(c), h, d, x) value(c, h, x + d)``."""
    _run("", kernel, value, out, kernel)


def weigh_kernel(grad: Tensor, value: Tensor, out: Tensor) -> None:
    """``out(s, h, d, x) = Σ_c grad(c, h, x) value(c, h, x + d)`` over the channels c of the slice s."""
    _run("_kernel", grad, value, out, out)


def weigh_value(kernel: Tensor, grad: Tensor, out: Tensor) -> None:
    """``out(c, h, x) = Σ_d kernel(slice(c), h, d, x − d) grad(c, h, x − d)``."""
    _run("_value", kernel, grad, out, kernel)


def _run(name: str, a: Tensor, b: Tensor, out: Tensor, kernel: Tensor) -> None:
    function = cpu_function("dynamic_depthwise", f"dynamic_depthwise{name}", a, b, out)
    if function is not None:
        launch(function, a, b, out, *sizes(b, kernel.shape[1], kernel.shape[3]))
    elif not plain() and on_cuda(a, b, out):
        from .triton import dynamic_depthwise as triton

        getattr(triton, f"weigh{name}")(a, b, out)
    else:
        for part in parts(kernel, math.prod(kernel.shape[1:])):
            _EAGER[name](a[part], b[part], out[part])


def sizes(field: Tensor, slices: int, taps: int) -> tuple[int, ...]:
    """What the C++ functions have to know of the shapes."""
    batch, channels, order, height, width = field.shape
    return batch, channels, order, slices, height, width, math.isqrt(taps)


def parts(field: Tensor, numbers: int) -> Iterator[slice]:
    """The batch of a field in parts of as many pictures as fit a cache, at so many numbers a picture."""
    batch = field.shape[0]
    budget = _CPU_BYTES * torch.get_num_threads() if field.is_cpu else _GPU_BYTES
    pictures = max(1, budget // max(1, numbers * field.element_size()))
    return (slice(first, min(first + pictures, batch)) for first in range(0, batch, pictures))


def alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one type: autocast's where it is on, else the one that holds them all."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    device = tensors[0].device.type
    # Tensors without values know no autocast.
    if dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)


def wide(x: Tensor) -> Tensor:
    """On a CPU, whose kernels know no halves, a single for a half."""
    return x.float() if x.is_cpu and x.dtype in (torch.float16, torch.bfloat16) else x


# Eager torch: one offset after another, and a few pictures at a time, so that what is gone over k·k times stays in the
# cache.


class _Eager(torch.autograd.Function):
    """Goes over the offsets in both passes, instead of keeping a product and two gradients for each of them."""

    @staticmethod
    def forward(kernel: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(value)
        for part in _traceable_parts(kernel):
            _eager(kernel[part], value[part], out[part])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        kernel, value = ctx.saved_tensors
        grad_kernel, grad_value = torch.empty_like(kernel), torch.empty_like(value)
        for part in _traceable_parts(kernel):
            _eager_kernel(grads[0][part], value[part], grad_kernel[part])
            _eager_value(kernel[part], grads[0][part], grad_value[part])
        return grad_kernel, grad_value


def traced() -> bool:
    """Whether a graph is being recorded, which must not depend on how many pictures there are."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def _traceable_parts(kernel: Tensor) -> Iterator[slice]:
    return iter([slice(None)]) if traced() else parts(kernel, math.prod(kernel.shape[1:]))


def _eager(kernel: Tensor, value: Tensor, out: Tensor) -> None:
    slices, taps = kernel.shape[1], kernel.shape[3]
    padded = _pad(value, taps).unflatten(1, (slices, -1))
    total = torch.zeros_like(value).unflatten(1, (slices, -1))
    for tap, window in zip(kernel.unsqueeze(2).unbind(4), _windows(value, taps), strict=True):
        total.addcmul_(tap, padded[window])
    out.copy_(total.flatten(1, 2))


def _eager_kernel(grad: Tensor, value: Tensor, out: Tensor) -> None:
    slices, taps = out.shape[1], out.shape[3]
    padded = _pad(value, taps).unflatten(1, (slices, -1))
    grad = grad.unflatten(1, (slices, -1))
    for place, window in enumerate(_windows(value, taps)):
        out[:, :, :, place] = (grad * padded[window]).sum(2)


def _eager_value(kernel: Tensor, grad: Tensor, out: Tensor) -> None:
    slices, taps = kernel.shape[1], kernel.shape[3]
    padded = _pad(grad, taps).unflatten(1, (slices, -1))
    total = torch.zeros_like(grad).unflatten(1, (slices, -1))
    # What came from x + d goes back by reading at −d: sums into windows of one tensor would not fuse when compiled.
    for place, back in enumerate(reversed(_windows(grad, taps))):
        total.addcmul_(_pad(kernel[:, :, :, place], taps)[back].unsqueeze(2), padded[back])
    out.copy_(total.flatten(1, 2))


_EAGER = {"": _eager, "_kernel": _eager_kernel, "_value": _eager_value}


def _margin(taps: int) -> int:
    return math.isqrt(taps) // 2


def _pad(value: Tensor, taps: int) -> Tensor:
    margin = _margin(taps)
    return F.pad(value, (margin, margin, margin, margin))


def _windows(value: Tensor, taps: int) -> list[tuple[Any, ...]]:
    """Where the padded field is read for each offset, row by row."""
    height, width = value.shape[-2:]
    return [(..., slice(i, i + height), slice(j, j + width)) for i, j in product(range(math.isqrt(taps)), repeat=2)]


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
    """Raises unless the slices divide the channels and the offsets are those of a window with a centre."""
    if slices < 1 or value.shape[1] % slices:
        raise ValueError(
            f"s filters a pixel need s a divisor of the {value.shape[1]} channels of value, got s = {slices}"
        )
    side = math.isqrt(taps)
    if side**2 != taps or side % 2 == 0:
        raise ValueError(f"filters have k·k = {taps} offsets; k must be odd: 1, 9, 25, 49 ... offsets")
