"""Launches the Triton kernels of attentive convolutions."""

import math
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from .._chunks import chunks
from . import on_own_device
from .attentive_kernels import (
    filter_kernel,
    input_kernel,
    peak_filter_kernel,
    peak_input_kernel,
    peak_kernel,
    reduce_kernel,
    spatial_filter_kernel,
    spatial_input_kernel,
    spatial_kernel,
)

__all__ = ["response_peak", "response_peak_backward", "response_sum", "response_sum_backward"]

_PIXELS, _OUT = 32, 32  # the tile of a program
_WARPS = 8  # of the kernels that compute responses or their gradients: with 4 they spill registers


@on_own_device
def response_peak(
    x: Tensor, filters: Tensor, peak: Tensor, where: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> None:
    """Fills in maxima and places of `eqzoo.ops._responses.response_peak`."""
    batch, channels, k, out, rows, columns = _sizes(x, filters, poses, stride, padding, dilation)
    grid = (batch * poses * channels, triton.cdiv(out, _OUT))
    sides = (*x.shape[2:], columns, rows * columns)
    steps = (k, stride, padding, dilation)
    taps = _taps_first(filters, poses)
    peak_kernel[grid](x, taps, peak, where, channels, poses, out, *sides, *steps, _PIXELS, _OUT, num_warps=_WARPS)


@on_own_device
def response_peak_backward(
    grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """The gradients of input and filters."""
    batch, channels, k, out, _, columns = _sizes(x, filters, poses, stride, padding, dilation)
    taps, grad_x = _taps_first(filters, poses), torch.empty_like(x)
    grad_filters = x.new_empty(taps.shape, dtype=torch.float32)
    height, width = x.shape[2:]
    sides, steps = (height, width, columns), (stride, padding, dilation)
    grid = (batch * poses * channels, triton.cdiv(height * width, _PIXELS))
    peak_input_kernel[grid](taps, where, grad, grad_x, channels, poses, out, *sides, k, *steps, _PIXELS, _OUT)
    grid = (poses * channels, triton.cdiv(out, _OUT))
    padded = triton.next_power_of_2(k * k)
    peak_filter_kernel[grid](x, where, grad, grad_filters, batch, channels, poses, out, *sides, k, padded, *steps, _OUT)
    return grad_x, _planes_first(grad_filters, filters)


@on_own_device
def response_sum(
    x: Tensor,
    filters: Tensor,
    alpha: Tensor | None,
    spatial: Tensor | None,
    y: Tensor,
    poses: int,
    stride: int,
    padding: int,
    dilation: int,
    attention_dilation: int,
) -> None:
    """Fills in the sum of `eqzoo.ops._responses.response_sum`."""
    sampling = (poses, stride, padding, dilation)
    taps, psi = _taps_first(filters, poses), _spatial_first(spatial)
    for some in _images(y, poses):
        sums, peaks, _ = _reduced(x[some], filters, taps, _weights(x, filters, alpha, poses)[some], psi, sampling)
        if psi is None:
            y[some] = sums.sum(1).permute(0, 3, 1, 2)
        else:
            _attend(sums, peaks, psi, attention_dilation, x.shape[1] // poses, y=y[some])


@on_own_device
def response_sum_backward(
    grad: Tensor,
    x: Tensor,
    filters: Tensor,
    alpha: Tensor | None,
    spatial: Tensor | None,
    poses: int,
    stride: int,
    padding: int,
    dilation: int,
    attention_dilation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of input, filters, alpha and spatial filters; sums and maxima are computed again."""
    sampling = (poses, stride, padding, dilation)
    _, channels, k, out, rows, columns = _sizes(x, filters, *sampling)
    taps, psi, weights = _taps_first(filters, poses), _spatial_first(spatial), _weights(x, filters, alpha, poses)
    grad_x, grad_alpha = torch.empty_like(x), torch.empty_like(weights)
    grad_filters = torch.zeros_like(taps, dtype=torch.float32)
    grad_spatial = None if psi is None else torch.zeros_like(psi)
    height, width = x.shape[2:]
    steps = (stride, padding, dilation)
    for some in _images(grad, poses):
        part, weight = x[some], weights[some]
        if psi is None:
            grad_sums = grad[some].permute(0, 2, 3, 1).float()[:, None].expand(-1, poses, -1, -1, -1).contiguous()
            grad_peaks, which = grad_sums, grad_sums
        else:
            sums, peaks, which = _reduced(part, filters, taps, weight, psi, sampling)
            grad_sums, grad_z = torch.empty_like(sums), torch.empty_like(sums)
            _attend(sums, peaks, psi, attention_dilation, channels, grad=grad[some], grad_sums=grad_sums, grad_z=grad_z)
            grad_peaks = torch.empty_like(sums)
            shape = (poses, out, rows, columns, channels)
            grid = (len(part) * poses, triton.cdiv(rows * columns, _PIXELS), triton.cdiv(out, _OUT))
            n = psi.shape[1]
            spatial_input_kernel[grid](grad_z, psi, grad_sums, grad_peaks, *shape, n, attention_dilation, _PIXELS, _OUT)
            each = psi.new_empty(len(part), *psi.shape)
            row = n, triton.next_power_of_2(n), attention_dilation
            spatial_filter_kernel[len(part) * poses, n, triton.cdiv(out, _OUT)](
                grad_z, sums, peaks, each, *shape, *row, 4, _OUT
            )
            assert grad_spatial is not None
            grad_spatial += each.sum(0)
        at_once = triton.cdiv(len(part), 8)
        each = grad_filters.new_empty(triton.cdiv(len(part), at_once), *grad_filters.shape)
        padded = max(16, triton.next_power_of_2(k * k))
        grid = (poses * channels, triton.cdiv(out, _OUT), len(each))
        sides = (channels, poses, out, height, width, columns, rows * columns)
        g = (grad_sums, grad_peaks, which)
        more = (k, padded, *steps, psi is not None, _PIXELS, _OUT)
        filter_kernel[grid](
            part, taps, weight, *g, each, grad_alpha[some], len(part), at_once, *sides, *more, num_warps=_WARPS
        )
        grad_filters += each.sum(0)
        planes = len(part) * poses * channels
        sides = (channels, poses, out, height, width, rows, columns)
        input_kernel[planes, triton.cdiv(height * width, _PIXELS)](
            taps, weight, *g, grad_x[some], *sides, k, *steps, psi is not None, _PIXELS, _OUT, num_warps=_WARPS
        )
    if grad_spatial is None or spatial is None:
        return grad_x, _planes_first(grad_filters, filters), grad_alpha, None
    return (
        grad_x,
        _planes_first(grad_filters, filters),
        grad_alpha,
        grad_spatial.permute(4, 3, 0, 1, 2).reshape(spatial.shape),
    )


def _reduced(
    x: Tensor, filters: Tensor, taps: Tensor, weights: Tensor, psi: Tensor | None, sampling: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, maxima and channels of the maxima, ``(B, S, height', width', O)``; without ψ the sums alone."""
    batch, channels, k, out, rows, columns = _sizes(x, filters, *sampling)
    poses, *steps = sampling
    sums = x.new_empty(batch, poses, rows, columns, out, dtype=torch.float32)
    peaks = sums if psi is None else torch.empty_like(sums)
    which = sums if psi is None else torch.empty_like(sums, dtype=torch.int16)
    grid = (batch * poses, triton.cdiv(rows * columns, _PIXELS), triton.cdiv(out, _OUT))
    sides = (channels, poses, out, *x.shape[2:], columns, rows * columns)
    reduce_kernel[grid](
        x, taps, weights, sums, peaks, which, *sides, k, *steps, psi is not None, _PIXELS, _OUT, num_warps=_WARPS
    )
    return sums, peaks, which


def _attend(
    sums: Tensor,
    peaks: Tensor,
    psi: Tensor,
    step: int,
    channels: int,
    y: Tensor | None = None,
    grad: Tensor | None = None,
    grad_sums: Tensor | None = None,
    grad_z: Tensor | None = None,
) -> None:
    """Fills in the attended sums y or, from the gradient of y, those of sums and logits."""
    batch, poses, rows, columns, out = sums.shape
    written = [sums if v is None else v for v in (y, grad, grad_sums, grad_z)]
    grid = (batch, triton.cdiv(rows * columns, _PIXELS), triton.cdiv(out, _OUT))
    sides = (poses, out, rows, columns, channels, psi.shape[1], step)
    spatial_kernel[grid](sums, peaks, psi, *written, *sides, y is None, _PIXELS, _OUT)


def _sizes(x: Tensor, filters: Tensor, poses: int, stride: int, padding: int, dilation: int) -> tuple[int, ...]:
    (batch, planes, *sides), (out, _, k, _) = x.shape, filters.shape
    rows, columns = ((side + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for side in sides)
    return batch, planes // poses, k, out, rows, columns


def _images(y: Tensor, poses: int) -> Iterator[slice]:
    return chunks(len(y), 2 * poses * math.prod(y.shape[1:]), y.device)  # sums and maxima


def _taps_first(filters: Tensor, poses: int) -> Tensor:
    """``(O, C·S, k, k)`` to ``(S, C, k, k, O)``."""
    return filters.unflatten(1, (-1, poses)).permute(2, 1, 3, 4, 0).contiguous()


def _planes_first(grad_filters: Tensor, filters: Tensor) -> Tensor:
    return grad_filters.permute(4, 1, 0, 2, 3).reshape(filters.shape).to(filters.dtype)


def _spatial_first(spatial: Tensor | None) -> Tensor | None:
    """``(O, 2·S, n, n)`` to ``(S, n, n, 2, O)``, of single precision."""
    return None if spatial is None else spatial.unflatten(1, (2, -1)).permute(2, 3, 4, 1, 0).contiguous().float()


def _weights(x: Tensor, filters: Tensor, alpha: Tensor | None, poses: int) -> Tensor:
    return x.new_ones(len(x), poses, x.shape[1] // poses, len(filters)) if alpha is None else alpha
