"""A depthwise correlation with filters that are generated at every pixel and not stored."""

import math
from collections.abc import Iterator
from functools import partial, reduce
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compile, _dispatch, reference
from .._chunks import chunk_size, chunks
from .._derivatives import derivative_of_gradients
from .._dispatch import Operator, check_pixels, check_shape, check_window
from .._dtypes import accumulation_dtype, promote, upcast
from . import eager


def generated_depthwise(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    """Depthwise correlation with a filter at every pixel: a linear map of a hidden field there, at the same element.

    ``out(c, h, x) = Σ_d K(slice(c), h, d, x) value(c, h, x + d)`` with ``K(s, h, d, x) = Σ_j weight(h, s, d, j)
    hidden(j, h, x) + bias(h, s, d)``, d over the k x k offsets row by row, with zero padding. The C channels are
    divided into s slices of adjacent channels, ``slice(c) = ⌊c s / C⌋``, that share a filter.

    The filters, s·k·k numbers a pixel and element, are the largest intermediate result by far. They are generated for
    a few images at a time and not kept; the backward pass generates them again.

    Args:
        hidden: The hidden field, ``(B, J, |H|, height, width)``.
        weight: The map for each element, ``(|H|, s, k·k, J)``, k odd.
        bias: Its constants, ``(|H|, s, k·k)``.
        value: The field, ``(B, C, |H|, height, width)``.

    Returns:
        ``(B, C, |H|, height, width)``.

    Raises:
        ValueError: If the shapes do not belong together.

    References:
        Efficient Equivariant Network (He et al., 2021), section 4.1, equation 12
        https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf

    Example:
        >>> hidden, value = torch.ones(1, 2, 1, 3, 3), torch.arange(9.0).reshape(1, 1, 1, 3, 3)
        >>> weight, bias = torch.full((1, 1, 9, 2), 0.25), torch.full((1, 1, 9), 0.5)
        >>> generated_depthwise(hidden, weight, bias, value)[0, 0, 0]  # all filters are sums over 3 x 3 neighborhoods
        tensor([[ 8., 15., 12.],
                [21., 36., 27.],
                [20., 33., 24.]])
    """
    hidden, weight, bias, value = promote(hidden, weight, bias, value)
    (order, slices, taps, fields), side = weight.shape, math.isqrt(weight.shape[2])
    check_shape("value", value, None, value.shape[1] // slices * slices, order, None, None)
    check_shape("hidden", hidden, value.shape[0], fields, *value.shape[2:])
    check_shape("weight", weight, order, slices, side**2, fields)
    check_shape("bias", bias, order, slices, taps)
    check_window(side)
    check_pixels(value)
    if _dispatch.forced("reference"):
        return reference.generated_depthwise(hidden, weight, bias, value)
    if _dispatch.plain() and (torch.compiler.is_compiling() or _dispatch.exporting()):
        return _composed(hidden, weight, bias, value)
    given = [x.contiguous() for x in (hidden, weight, bias, value)]
    # The kernels on a CPU do not read half precision.
    out: Tensor = _generated_depthwise(*(upcast(*given) if value.is_cpu else given))
    return out.to(value.dtype)


def _composed(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    """The form that is exported: a convolution that stores all filters, and the operation that reads them."""
    order, slices, taps, _ = weight.shape
    bank = weight.flatten(0, 2)[:, :, None, None]
    kernel = F.conv2d(hidden.transpose(1, 2).flatten(1, 2), bank, bias.flatten(), groups=order)
    return _sum(kernel.unflatten(1, (order, slices, taps)).transpose(1, 2), value)


def _sum(kernel: Tensor, value: Tensor) -> Tensor:
    """The correlation; nothing is written in place, which runtimes would implement by copies.

    A row of the neighborhood at a time, its k neighbors at once: runtimes are faster with few and large operators.
    """
    slices, side = kernel.shape[1], math.isqrt(kernel.shape[3])
    height, width = value.shape[-2:]
    padded = eager.pad(value, kernel.shape[3]).unflatten(1, (slices, -1)).unsqueeze(4)
    columns = torch.cat([padded[..., j : j + width] for j in range(side)], 4)
    rows = kernel.unsqueeze(2).split(side, 4)
    products = [row * columns[..., i : i + height, :] for i, row in enumerate(rows)]
    return reduce(torch.add, products).sum(4).flatten(1, 2)


def _forward(depthwise: ModuleType, hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    """The output, with the functions of `eager` or of `cuda`."""
    out = torch.empty_like(value)
    generator = _Generator(hidden, _bank(weight, bias), weight.shape[2])
    for part in generator.parts():
        depthwise.filtered_sum(generator.generate(part), value[part], out[part])
    return out


def _backward_of(
    depthwise: ModuleType,
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    value: Tensor,
    needs_filters: bool,
    needs_value: bool,
) -> list[Tensor]:
    """The gradients of all four, with the functions of `eager` or of `cuda`."""
    grad_hidden, grad_value = torch.empty_like(hidden), torch.empty_like(value)
    generator = _Generator(hidden, _bank(weight, bias), weight.shape[2])
    for part in generator.parts():
        if needs_value:
            depthwise.field_gradient(generator.generate(part), grad[part], grad_value[part])
        if needs_filters:
            depthwise.filter_gradient(grad[part], value[part], generator.filters(part))
            generator.backward(part, grad_hidden[part])
    return [grad_hidden, *_split_bank(generator.grad_bank, weight, bias), grad_value]


_generated_depthwise = Operator(
    "generated_depthwise(Tensor hidden, Tensor weight, Tensor bias, Tensor value) -> Tensor",
    partial(_forward, eager),
    lambda hidden, weight, bias, value: torch.empty_like(value),
)
_generated_depthwise_backward = Operator(
    "generated_depthwise_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor bias, Tensor value, "
    "bool needs_filters, bool needs_value) -> Tensor[]",
    partial(_backward_of, eager),
    lambda grad, *inputs: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:4]],
)


@_generated_depthwise.kernel("cpu")
def _(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    bank = _bank(weight, bias)
    function = _compile.cpu_function("e4/cpu", "generated_depthwise", hidden, bank, value)
    if function is None:
        return NotImplemented
    out = torch.empty_like(value)
    _compile.launch(function, hidden, bank, value, out, *_sizes(value, *weight.shape[1:3]), hidden.shape[1])
    return out


@_generated_depthwise_backward.kernel("cpu")
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor, needs_filters: bool, needs_value: bool
) -> list[Tensor]:
    bank = _bank(weight, bias)
    function = _compile.cpu_function("e4/cpu", "generated_depthwise_backward", grad, hidden, bank, value)
    if function is None:
        return NotImplemented
    grad_hidden, grad_value = torch.empty_like(hidden), torch.empty_like(value)
    grad_banks = bank.new_zeros(torch.get_num_threads(), *bank.shape)
    grads = (grad_hidden if needs_filters else None, grad_banks, grad_value if needs_value else None)
    _compile.launch(function, grad, hidden, bank, value, *grads, *_sizes(value, *weight.shape[1:3]), hidden.shape[1])
    return [grad_hidden, *_split_bank(grad_banks.sum(0), weight, bias), grad_value]


@_generated_depthwise.kernel("cuda")
def _(*tensors: Tensor) -> Tensor:
    if not _dispatch.on_cuda(*tensors):
        return NotImplemented
    from . import cuda

    return _forward(cuda, *tensors)


@_generated_depthwise_backward.kernel("cuda")
def _(*tensors_and_needs: Any) -> list[Tensor]:
    if not _dispatch.on_cuda(*tensors_and_needs[:5]):
        return NotImplemented
    from . import cuda

    return _backward_of(cuda, *tensors_and_needs)


@_generated_depthwise.gradient()
def _(ctx: Any, grad: Tensor) -> list[Tensor]:
    needs = ctx.needs_input_grad
    grads: list[Tensor] = _generated_depthwise_backward(grad.contiguous(), *ctx.saved_tensors, any(needs[:3]), needs[3])
    return grads


@_generated_depthwise_backward.gradient()
def _(ctx: Any, cotangents: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Second derivatives, through the composed form: too rare for a kernel."""
    grad, *inputs = ctx.saved_tensors
    return derivative_of_gradients(_composed, [grad], inputs, cotangents)


def _bank(weight: Tensor, bias: Tensor) -> Tensor:
    """The map of each element as one matrix, with the constants as its last column: ``(|H|, s·k·k, J + 1)``."""
    return torch.cat([weight.flatten(1, 2), bias.flatten(1, 2).unsqueeze(2)], 2)


def _split_bank(grad_bank: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias from that of their matrix."""
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    grad_weight.copy_(grad_bank[..., :-1].view_as(weight))
    grad_bias.copy_(grad_bank[..., -1].view_as(bias))
    return grad_weight, grad_bias


def _sizes(value: Tensor, slices: int, taps: int) -> tuple[int, ...]:
    """The shape arguments of the C++ functions."""
    batch, channels, order, height, width = value.shape
    return batch, channels, order, slices, height, width, math.isqrt(taps)


class _Generator:
    """Generates the filters of a chunk of images into one buffer, and accumulates the gradients of the generator.

    Filters have the layout of one matrix product, ``(|H|, s·k·k, images·pixels)``. The hidden field gets a row of ones
    for the constants.
    """

    def __init__(self, hidden: Tensor, bank: Tensor, taps: int) -> None:
        self.hidden = hidden
        self.bank = bank
        # Sums over the batch need more digits than a half has.
        self.grad_bank = torch.zeros_like(bank, dtype=accumulation_dtype(bank.dtype))
        self.windows = (bank.shape[0], bank.shape[1] // taps, taps)
        self.pixels = math.prod(hidden.shape[3:])
        images = min(len(hidden), chunk_size(self._elements(), hidden.device))
        self.buffer = hidden.new_empty(images * self.pixels * math.prod(self.windows))

    def parts(self) -> Iterator[slice]:
        """The chunks of the batch."""
        return chunks(len(self.hidden), self._elements(), self.hidden.device)

    def _elements(self) -> int:
        return math.prod(self.windows) * self.pixels

    def filters(self, part: slice) -> Tensor:
        """The buffer of the filters of these images, as ``(images, s, |H|, k·k, height, width)``."""
        columns = self._columns(part).unflatten(1, self.windows[1:])
        return columns.unflatten(3, (-1, *self.hidden.shape[3:])).permute(3, 1, 0, 2, 4, 5)

    def generate(self, part: slice) -> Tensor:
        """Generates the filters of these images into the buffer."""
        torch.bmm(self.bank, self._rows(part), out=self._columns(part))
        return self.filters(part)

    def backward(self, part: slice, grad_hidden: Tensor) -> None:
        """From the gradient of the filters, which is in the buffer, to those of the map and the hidden field."""
        columns = self._columns(part)
        self.grad_bank += torch.bmm(columns, self._rows(part).mT)
        grad = torch.bmm(self.bank[:, :, :-1].mT, columns)
        grad_hidden.copy_(grad.unflatten(2, (-1, *grad_hidden.shape[3:])).permute(2, 1, 0, 3, 4))

    def _columns(self, part: slice) -> Tensor:
        shape = (*self.bank.shape[:2], (part.stop - part.start) * self.pixels)
        return self.buffer[: math.prod(shape)].view(shape)

    def _rows(self, part: slice) -> Tensor:
        hidden = self.hidden[part]
        rows = torch.cat([hidden, hidden.new_ones(()).expand_as(hidden[:, :1])], 1)
        return rows.permute(2, 1, 0, 3, 4).flatten(2)
