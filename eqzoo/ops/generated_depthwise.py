"""A depthwise correlation with filters generated at every pixel, which are never stored."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backend import cpu_function, launch, plain
from .dynamic_depthwise import (
    alike,
    check_window,
    dynamic_depthwise,
    parts,
    sizes,
    traced,
    weigh,
    weigh_kernel,
    weigh_value,
    wide,
)

__all__ = ["generated_depthwise"]


def generated_depthwise(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    """`dynamic_depthwise` with filters that are a linear map of a hidden field at the same pixel and element.

    ``out(c, h, x) = Σ_d K(slice(c), h, d, x) value(c, h, x + d)`` with ``K(s, h, d, x) = Σ_j weight(h, s, d, j)
    hidden(j, h, x) + bias(h, s, d)``, d over the k x k offsets row by row, zeros outside; the C channels fall into s
    slices of neighbours, ``slice(c) = ⌊c s / C⌋``, that share a filter.

    The filters, s·k·k numbers a pixel and element, are the largest thing here by far. They are made for a few pictures
    at a time, used, and forgotten; the backward pass makes them again.

    Args:
        hidden: What filters are generated from, ``(B, J, |H|, height, width)``.
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
        >>> generated_depthwise(hidden, weight, bias, value)[0, 0, 0]  # all filters are sums over 3 x 3 neighbourhoods
        tensor([[ 8., 15., 12.],
                [21., 36., 27.],
                [20., 33., 24.]])
    """
    hidden, weight, bias, value = alike(hidden, weight, bias, value)
    _check(hidden, weight, bias, value)
    if plain() and traced():
        return _composed(hidden, weight, bias, value)
    out: Tensor = _generated_depthwise(*(wide(x).contiguous() for x in (hidden, weight, bias, value)))
    return out.to(value.dtype)


def _composed(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    """The definition: a convolution that stores all filters, and the operation that reads them."""
    order, slices, taps, _ = weight.shape
    bank = weight.flatten(0, 2)[:, :, None, None]
    kernel = F.conv2d(hidden.transpose(1, 2).flatten(1, 2), bank, bias.flatten(), groups=order)
    return dynamic_depthwise(kernel.unflatten(1, (order, slices, taps)).transpose(1, 2), value)


@torch.library.custom_op("eqzoo::generated_depthwise", mutates_args=())
def _generated_depthwise(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    out = torch.empty_like(value)
    bank = _bank(weight, bias)
    function = cpu_function("dynamic_depthwise", "generated_depthwise", hidden, bank, value)
    if function is not None:
        launch(function, hidden, bank, value, out, *sizes(value, *weight.shape[1:3]), hidden.shape[1])
        return out
    generator = _Generator(hidden, bank, weight.shape[2])
    for part in generator.parts():
        weigh(generator.generate(part), value[part], out[part])
    return out


@torch.library.custom_op("eqzoo::generated_depthwise_backward", mutates_args=())
def _generated_depthwise_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor, needs_filters: bool, needs_value: bool
) -> list[Tensor]:
    grad_hidden, grad_value = torch.empty_like(hidden), torch.empty_like(value)
    bank = _bank(weight, bias)
    function = cpu_function("dynamic_depthwise", "generated_depthwise_backward", grad, hidden, bank, value)
    if function is not None:
        grad_banks = bank.new_zeros(torch.get_num_threads(), *bank.shape)
        found = (grad_hidden if needs_filters else None, grad_banks, grad_value if needs_value else None)
        shape = (*sizes(value, *weight.shape[1:3]), hidden.shape[1])
        launch(function, grad, hidden, bank, value, *found, *shape)
        grad_bank = grad_banks.sum(0)
    else:
        generator = _Generator(hidden, bank, weight.shape[2])
        for part in generator.parts():
            if needs_value:
                weigh_value(generator.generate(part), grad[part], grad_value[part])
            if needs_filters:
                weigh_kernel(grad[part], value[part], generator.filters(part))
                generator.carry_on(part, grad_hidden[part])
        grad_bank = generator.grad_bank
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    grad_weight.copy_(grad_bank[..., :-1].view_as(weight))
    grad_bias.copy_(grad_bank[..., -1].view_as(bias))
    return [grad_hidden, grad_weight, grad_bias, grad_value]


def _bank(weight: Tensor, bias: Tensor) -> Tensor:
    """The map of each element as one matrix, with the constants as its last column: ``(|H|, s·k·k, J + 1)``."""
    return torch.cat([weight.flatten(1, 2), bias.flatten(1, 2).unsqueeze(2)], 2)


class _Generator:
    """Makes the filters of some pictures, one memory for all of them, and collects the gradients of the generator.

    Filters are laid out as one product of matrices gives them, ``(|H|, s·k·k, pictures·pixels)``. Below the hidden
    field is a row of ones.
    """

    def __init__(self, hidden: Tensor, bank: Tensor, taps: int) -> None:
        self.hidden = hidden
        self.bank = bank
        # Sums over the batch need more digits than a half has.
        self.grad_bank = torch.zeros_like(bank, dtype=torch.promote_types(bank.dtype, torch.float32))
        self.windows = (bank.shape[0], bank.shape[1] // taps, taps)
        self.pixels = math.prod(hidden.shape[3:])
        pictures = next(self.parts(), slice(0, 0)).stop
        self.memory = hidden.new_empty(pictures * self.pixels * math.prod(self.windows))

    def parts(self) -> Iterator[slice]:
        """The batch in parts."""
        return parts(self.hidden, math.prod(self.windows) * self.pixels)

    def filters(self, part: slice) -> Tensor:
        """The memory of the filters of these pictures, as ``(pictures, s, |H|, k·k, height, width)``."""
        columns = self._columns(part).unflatten(1, self.windows[1:])
        return columns.unflatten(3, (-1, *self.hidden.shape[3:])).permute(3, 1, 0, 2, 4, 5)

    def generate(self, part: slice) -> Tensor:
        """The filters of these pictures, in their memory."""
        torch.bmm(self.bank, self._rows(part), out=self._columns(part))
        return self.filters(part)

    def carry_on(self, part: slice, grad_hidden: Tensor) -> None:
        """From the gradient of the filters, which is in their memory, to those of the map and the hidden field."""
        columns = self._columns(part)
        self.grad_bank += torch.bmm(columns, self._rows(part).mT)
        grad = torch.bmm(self.bank[:, :, :-1].mT, columns)
        grad_hidden.copy_(grad.unflatten(2, (-1, *grad_hidden.shape[3:])).permute(2, 1, 0, 3, 4))

    def _columns(self, part: slice) -> Tensor:
        shape = (*self.bank.shape[:2], (part.stop - part.start) * self.pixels)
        return self.memory[: math.prod(shape)].view(shape)

    def _rows(self, part: slice) -> Tensor:
        hidden = self.hidden[part]
        rows = torch.cat([hidden, hidden.new_ones(()).expand_as(hidden[:, :1])], 1)
        return rows.permute(2, 1, 0, 3, 4).flatten(2)


@_generated_depthwise.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


@_generated_depthwise_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor, needs_filters: bool, needs_value: bool
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (hidden, weight, bias, value)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    grads = _generated_depthwise_backward(grad.contiguous(), *ctx.saved_tensors, any(needs[:3]), needs[3])
    return tuple(x if need else None for x, need in zip(grads, needs, strict=True))


def _backward_twice(ctx: Any, cotangents: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The derivative of the gradients, through the definition: rare, and so not worth a kernel."""
    with torch.enable_grad():
        grad, *inputs = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        first = torch.autograd.grad(_composed(*inputs), inputs, grad, create_graph=True)
    second = torch.autograd.grad(first, (grad, *inputs), cotangents, allow_unused=True)
    return (*second, None, None)


_generated_depthwise.register_autograd(_backward, setup_context=_setup)
_generated_depthwise_backward.register_autograd(_backward_twice, setup_context=_setup)


def _check(hidden: Tensor, weight: Tensor, bias: Tensor, value: Tensor) -> None:
    if hidden.ndim != 5 or value.ndim != 5 or hidden.shape[:1] + hidden.shape[2:] != value.shape[:1] + value.shape[2:]:
        raise ValueError(
            "hidden and value are (B, J, |H|, height, width) and (B, C, |H|, height, width), got "
            f"{tuple(hidden.shape)} and {tuple(value.shape)}"
        )
    if not math.prod(value.shape[3:]):
        raise ValueError(f"a picture has at least one pixel, got {tuple(value.shape)}")
    fields, order = hidden.shape[1:3]
    if weight.ndim != 4 or weight.shape[0] != order or weight.shape[3] != fields or bias.shape != weight.shape[:3]:
        raise ValueError(
            f"weight is ({order}, s, k·k, {fields}) and bias ({order}, s, k·k), got {tuple(weight.shape)} and "
            f"{tuple(bias.shape)}"
        )
    check_window(value, weight.shape[1], weight.shape[2])
