"""Responses of a group convolution reduced as they are produced, on a GPU: what the operations launch."""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from . import on_own_device
from .attentive_kernels import (
    filter_kernel,
    input_kernel,
    peak_filter_kernel,
    peak_input_kernel,
    peak_kernel,
    reduce_kernel,
    spatial_back_kernel,
    spatial_filter_kernel,
    spatial_kernel,
)

__all__ = ["response_peak", "response_peak_backward", "response_sum", "response_sum_backward"]

_PIXELS, _OUT = 32, 32
# What a few pictures' sums, maxima and their gradients may take, in elements.
_ELEMENTS_AT_ONCE = 1 << 25


@on_own_device
def response_peak(
    x: Tensor, filters: Tensor, peak: Tensor, where: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> None:
    """Fills in maxima and places as `eqzoo.ops._responses.response_peak` gives them."""
    batch, channels, k, out, rows, columns = _sizes(x, filters, poses, stride, padding, dilation)
    grid = (batch * poses * channels, triton.cdiv(out, _OUT))
    sides = (*x.shape[2:], columns, rows * columns)
    steps = (k, stride, padding, dilation)
    peak_kernel[grid](x, _taps_first(filters, poses), peak, where, channels, poses, out, *sides, *steps, _PIXELS, _OUT)


@on_own_device
def response_peak_backward(
    grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """The gradients of input and filters."""
    batch, channels, k, out, _, columns = _sizes(x, filters, poses, stride, padding, dilation)
    taps, grad_x = _taps_first(filters, poses), torch.empty_like(x)
    slopes = x.new_empty(taps.shape, dtype=torch.float32)
    height, width = x.shape[2:]
    sides, steps = (height, width, columns), (stride, padding, dilation)
    grid = (batch * poses * channels, triton.cdiv(height * width, _PIXELS))
    peak_input_kernel[grid](taps, where, grad, grad_x, channels, poses, out, *sides, k, *steps, _PIXELS, _OUT)
    grid = (poses * channels, triton.cdiv(out, _OUT))
    padded = triton.next_power_of_2(k * k)
    peak_filter_kernel[grid](x, where, grad, slopes, batch, channels, poses, out, *sides, k, padded, *steps, _OUT)
    return grad_x, _planes_first(slopes, filters)


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
    """Fills in the sum as `eqzoo.ops._responses.response_sum` gives it."""
    sampling = (poses, stride, padding, dilation)
    taps, psi = _taps_first(filters, poses), _spatial_first(spatial)
    for some in _pictures(y, poses):
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
    """The gradients of input, filters, alpha and spatial filters; sums and maxima are made again."""
    sampling = (poses, stride, padding, dilation)
    _, channels, k, out, rows, columns = _sizes(x, filters, *sampling)
    taps, psi, weights = _taps_first(filters, poses), _spatial_first(spatial), _weights(x, filters, alpha, poses)
    grad_x, grad_alpha = torch.empty_like(x), torch.empty_like(weights)
    slopes = torch.zeros_like(taps, dtype=torch.float32)
    bends = None if psi is None else torch.zeros_like(psi)
    height, width = x.shape[2:]
    steps = (stride, padding, dilation)
    for some in _pictures(grad, poses):
        part, weight = x[some], weights[some]
        if psi is None:
            gsums = grad[some].permute(0, 2, 3, 1).float()[:, None].expand(-1, poses, -1, -1, -1).contiguous()
            gpeaks, which = gsums, gsums
        else:
            sums, peaks, which = _reduced(part, filters, taps, weight, psi, sampling)
            gsums, gz = torch.empty_like(sums), torch.empty_like(sums)
            _attend(sums, peaks, psi, attention_dilation, channels, grad=grad[some], gsums=gsums, gz=gz)
            gpeaks = torch.empty_like(sums)
            shape = (poses, out, rows, columns, channels)
            grid = (len(part) * poses, triton.cdiv(rows * columns, _PIXELS), triton.cdiv(out, _OUT))
            n = psi.shape[1]
            spatial_back_kernel[grid](gz, psi, gsums, gpeaks, *shape, n, attention_dilation, _PIXELS, _OUT)
            each = psi.new_empty(len(part), *psi.shape)
            row = n, triton.next_power_of_2(n), attention_dilation
            spatial_filter_kernel[len(part) * poses, n, triton.cdiv(out, _OUT)](
                gz, sums, peaks, each, *shape, *row, 4, _OUT
            )
            assert bends is not None
            bends += each.sum(0)
        at_once = triton.cdiv(len(part), 8)
        each = slopes.new_empty(triton.cdiv(len(part), at_once), *slopes.shape)
        padded = max(16, triton.next_power_of_2(k * k))
        grid = (poses * channels, triton.cdiv(out, _OUT), len(each))
        sides = (channels, poses, out, height, width, columns, rows * columns)
        g = (gsums, gpeaks, which)
        more = (k, padded, *steps, psi is not None, _PIXELS, _OUT)
        filter_kernel[grid](part, taps, weight, *g, each, grad_alpha[some], len(part), at_once, *sides, *more)
        slopes += each.sum(0)
        planes = len(part) * poses * channels
        sides = (channels, poses, out, height, width, rows, columns)
        input_kernel[planes, triton.cdiv(height * width, _PIXELS)](
            taps, weight, *g, grad_x[some], *sides, k, *steps, psi is not None, _PIXELS, _OUT
        )
    if bends is None or spatial is None:
        return grad_x, _planes_first(slopes, filters), grad_alpha, None
    return grad_x, _planes_first(slopes, filters), grad_alpha, bends.permute(4, 3, 0, 1, 2).reshape(spatial.shape)


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
    reduce_kernel[grid](x, taps, weights, sums, peaks, which, *sides, k, *steps, psi is not None, _PIXELS, _OUT)
    return sums, peaks, which


def _attend(
    sums: Tensor,
    peaks: Tensor,
    psi: Tensor,
    step: int,
    channels: int,
    y: Tensor | None = None,
    grad: Tensor | None = None,
    gsums: Tensor | None = None,
    gz: Tensor | None = None,
) -> None:
    """Fills in the attended sums y, or the gradients of sums and logits from y's. What is not asked for is not read."""
    batch, poses, rows, columns, out = sums.shape
    written = [sums if v is None else v for v in (y, grad, gsums, gz)]
    grid = (batch, triton.cdiv(rows * columns, _PIXELS), triton.cdiv(out, _OUT))
    sides = (poses, out, rows, columns, channels, psi.shape[1], step)
    spatial_kernel[grid](sums, peaks, psi, *written, *sides, y is None, _PIXELS, _OUT)


def _sizes(x: Tensor, filters: Tensor, poses: int, stride: int, padding: int, dilation: int) -> tuple[int, ...]:
    (batch, planes, *sides), (out, _, k, _) = x.shape, filters.shape
    rows, columns = ((side + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for side in sides)
    return batch, planes // poses, k, out, rows, columns


def _pictures(y: Tensor, poses: int) -> Iterator[slice]:
    step = max(1, _ELEMENTS_AT_ONCE // (poses * y[0].numel()))
    return (slice(i, i + step) for i in range(0, len(y), step))


def _taps_first(filters: Tensor, poses: int) -> Tensor:
    """``(O, C·S, k, k)`` to ``(S, C, k, k, O)``."""
    return filters.unflatten(1, (-1, poses)).permute(2, 1, 3, 4, 0).contiguous()


def _planes_first(slopes: Tensor, filters: Tensor) -> Tensor:
    return slopes.permute(4, 1, 0, 2, 3).reshape(filters.shape).to(filters.dtype)


def _spatial_first(spatial: Tensor | None) -> Tensor | None:
    """``(O, 2·S, n, n)`` to ``(S, n, n, 2, O)``, of single precision."""
    return None if spatial is None else spatial.unflatten(1, (2, -1)).permute(2, 3, 4, 1, 0).contiguous().float()


def _weights(x: Tensor, filters: Tensor, alpha: Tensor | None, poses: int) -> Tensor:
    return x.new_ones(len(x), poses, x.shape[1] // poses, len(filters)) if alpha is None else alpha
