"""A depthwise correlation whose filter is another one at every pixel."""

import math
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["dynamic_depthwise"]


def dynamic_depthwise(kernel: Tensor, value: Tensor) -> Tensor:
    """Sums a field over the neighbourhood of every pixel, weighted by the filter of that pixel.

    ``out(c, h, x) = Σ_d kernel(slice(c), h, d, x) value(c, h, x + d)``, d over the k x k offsets row by row, zeros
    outside; the C channels fall into s slices of neighbours, ``slice(c) = ⌊c s / C⌋``, that share a filter. The group
    axis is carried along: filters come already transformed.

    No copy of the neighbourhoods is made, and the backward pass keeps nothing but the two arguments.

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
    out: Tensor = _DynamicDepthwise.apply(kernel, value)
    return out


class _DynamicDepthwise(torch.autograd.Function):
    """Goes over the offsets in both passes, instead of keeping a product and two gradients for each of them."""

    @staticmethod
    def forward(kernel: Tensor, value: Tensor) -> Tensor:
        slices, taps = kernel.shape[1], kernel.shape[3]
        padded = _pad(value, taps).unflatten(1, (slices, -1))
        out = torch.zeros_like(value).unflatten(1, (slices, -1))
        for tap, window in zip(kernel.unsqueeze(2).unbind(4), _windows(value, taps), strict=True):
            out.addcmul_(tap, padded[window])
        return out.flatten(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        kernel, value = ctx.saved_tensors
        slices, taps = kernel.shape[1], kernel.shape[3]
        grad = grads[0].unflatten(1, (slices, -1))
        padded = _pad(value, taps).unflatten(1, (slices, -1))
        padded_grad = _pad(grads[0], taps).unflatten(1, (slices, -1))
        grad_kernel = torch.empty_like(kernel)
        grad_value = torch.zeros_like(grad)
        windows = _windows(value, taps)
        # What came from x + d goes back by reading at −d: sums into windows of one tensor would not fuse when compiled.
        for place, (window, back) in enumerate(zip(windows, reversed(windows), strict=True)):
            grad_kernel[:, :, :, place] = (grad * padded[window]).sum(2)
            tap = _pad(kernel[:, :, :, place], taps)[back]
            grad_value.addcmul_(tap.unsqueeze(2), padded_grad[back])
        return grad_kernel, grad_value.flatten(1, 2)


def _pad(value: Tensor, taps: int) -> Tensor:
    margin = math.isqrt(taps) // 2
    return F.pad(value, (margin, margin, margin, margin))


def _windows(value: Tensor, taps: int) -> list[tuple[Any, ...]]:
    """Where the padded field is read for each offset, row by row."""
    height, width = value.shape[-2:]
    return [(..., slice(i, i + height), slice(j, j + width)) for i, j in product(range(math.isqrt(taps)), repeat=2)]


def _check(kernel: Tensor, value: Tensor) -> None:
    if value.ndim != 5:
        raise ValueError(f"value is (B, C, |H|, height, width), got {tuple(value.shape)}")
    batch, channels, order, height, width = value.shape
    shared = (batch, order, height, width)
    if kernel.ndim != 6 or kernel.shape[::2] + kernel.shape[5:] != shared or channels % kernel.shape[1]:
        raise ValueError(
            f"kernel is ({batch}, s, {order}, k·k, {height}, {width}) with s a divisor of the {channels} channels of "
            f"value, got {tuple(kernel.shape)}"
        )
    side = math.isqrt(kernel.shape[3])
    if side**2 != kernel.shape[3] or side % 2 == 0:
        raise ValueError(f"kernel has k·k = {kernel.shape[3]} offsets; k must be odd: 1, 9, 25, 49 ... offsets")
