"""Launches the Triton kernels of attentive convolutions."""

import math
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from .._chunks import chunks
from .._dispatch import on_own_device
from .._layout import output_side
from .cuda_kernels import (
    filter_kernel,
    input_kernel,
    peak_filter_kernel,
    peak_input_kernel,
    peak_kernel,
    reduce_kernel,
    spatial_filter_kernel,
    spatial_input_kernel,
    spatial_kernel,
    window_kernel,
)

# Pixels and output planes of a program's tile, and warps: of the kernels with dots, and of those without.
_PIXELS, _OUT, _WARPS = 64, 64, 8
_FILTER_PIXELS, _FILTER_OUT, _FILTER_WARPS, _FILTER_STAGES = 32, 64, 8, 2
_SPATIAL_PIXELS, _SPATIAL_OUT, _SPATIAL_WARPS = 32, 32, 4
_ROW_PIXELS = 4  # of the gradient of the spatial filters, a row of taps at once
_PEAK_PIXELS, _PEAK_OUT = 32, 32  # of the gradients of maxima over pixels
_INPUT_PIXELS = 256
_PARTS = 32  # of a batch, with sums of their own for the gradient of the filters


@on_own_device
def response_peak(
    x: Tensor, filters: Tensor, peak: Tensor, where: Tensor, poses: int, stride: int, padding: int, dilation: int
) -> None:
    """Fills in maxima and places of `eqzoo.ops.attentive.responses.response_peak`."""
    batch, channels, k, out, rows, columns = _sizes(x, filters, poses, stride, padding, dilation)
    grid = (batch * poses * channels, triton.cdiv(out, _OUT))
    sides = (*x.shape[2:], columns, rows * columns)
    steps = (k, _padded(k), stride, padding, dilation)
    taps = _taps_first(filters, poses)
    options = (_precision(x), _pixels(k), _OUT)
    peak_kernel[grid](x, taps, peak, where, channels, poses, *sides, out, *steps, *options, num_warps=_WARPS)


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
    tile = _PEAK_PIXELS, _PEAK_OUT
    grid = (batch * poses * channels, triton.cdiv(height * width, _PEAK_PIXELS))
    peak_input_kernel[grid](taps, where, grad, grad_x, channels, poses, out, *sides, k, *steps, *tile)
    grid = (poses * channels, triton.cdiv(out, _PEAK_OUT))
    more = (k, triton.next_power_of_2(k * k), *steps, _PEAK_OUT)
    peak_filter_kernel[grid](x, where, grad, grad_filters, batch, channels, poses, out, *sides, *more)
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
    """Fills in the sum of `eqzoo.ops.attentive.responses.response_sum`."""
    sampling = (poses, stride, padding, dilation)
    taps, psi = _taps_first(filters, poses), _spatial_first(spatial, x.shape[1] // poses)
    for some in _images(y, poses):
        sums, peaks, _ = _reduced(x[some], filters, taps, _weights(x, filters, alpha, poses)[some], psi, sampling)
        if psi is None:
            y[some] = sums.sum(1).permute(0, 3, 1, 2)
        else:
            _attend(sums, peaks, psi, attention_dilation, y=y[some])


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
    taps, psi = _taps_first(filters, poses), _spatial_first(spatial, channels)
    weights = _weights(x, filters, alpha, poses)
    grad_x, grad_alpha = torch.empty_like(x), torch.empty_like(weights)
    grad_filters = torch.zeros_like(taps, dtype=torch.float32)
    grad_spatial = None if psi is None else torch.zeros_like(psi)
    height, width = x.shape[2:]
    steps = (stride, padding, dilation)
    windows = x[0].numel() * k * k * rows * columns // math.prod(x.shape[2:])
    for some in _images(grad, poses, windows):
        part, weight = x[some], weights[some]
        if psi is None:
            grad_sums = grad[some].permute(0, 2, 3, 1).float()[:, None].expand(-1, poses, -1, -1, -1).contiguous()
            grad_peaks, which = grad_sums, grad_sums
        else:
            sums, peaks, which = _reduced(part, filters, taps, weight, psi, sampling)
            grad_sums, grad_z = torch.empty_like(sums), torch.empty_like(sums)
            _attend(sums, peaks, psi, attention_dilation, grad=grad[some], grad_sums=grad_sums, grad_z=grad_z)
            grad_peaks = torch.empty_like(sums)
            blocks, n = triton.cdiv(out, _SPATIAL_OUT), psi.shape[1]
            grid = (len(part) * poses, triton.cdiv(rows * columns, _SPATIAL_PIXELS), blocks)
            fields = (grad_z, psi, grad_sums, grad_peaks, poses, rows, columns, out, n, attention_dilation)
            spatial_input_kernel[grid](*fields, _SPATIAL_PIXELS, _SPATIAL_OUT, num_warps=_SPATIAL_WARPS)
            each = psi.new_empty(len(part), *psi.shape)
            row = n, triton.next_power_of_2(n), attention_dilation
            spatial_filter_kernel[len(part) * poses, n, blocks](
                grad_z, sums, peaks, each, poses, rows, columns, channels, out, *row, _ROW_PIXELS, _SPATIAL_OUT
            )
            assert grad_spatial is not None
            grad_spatial += each.sum(0)
        at_once = triton.cdiv(len(part), _PARTS)
        each = grad_filters.new_empty(triton.cdiv(len(part), at_once), *grad_filters.shape)
        g, padded = (grad_sums, grad_peaks, which), _padded(k)
        sides = (channels, poses, height, width, columns, rows * columns, out)
        more = (psi is not None, _precision(x))
        filter_kernel[poses * channels, triton.cdiv(out, _FILTER_OUT), len(each)](
            part, taps, weight, *g, each, grad_alpha[some], len(part), at_once, *sides, k, padded, *steps, *more,
            _FILTER_PIXELS, _FILTER_OUT, num_warps=_FILTER_WARPS, num_stages=_FILTER_STAGES,
        )  # fmt: skip
        grad_filters += each.sum(0)
        planes = len(part) * poses * channels
        grad_windows = grad_filters.new_empty(planes, k * k, rows * columns)
        window_kernel[planes, triton.cdiv(rows * columns, _pixels(k))](
            taps, weight, *g, grad_windows, channels, poses, rows * columns, out, k, padded, *more, _pixels(k), _OUT,
            num_warps=_WARPS,
        )  # fmt: skip
        image = (channels, poses, height, width, rows, columns)
        input_kernel[planes, triton.cdiv(height * width, _INPUT_PIXELS)](
            grad_windows, grad_x[some], *image, k, *steps, _INPUT_PIXELS
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
    grid = (batch * poses, triton.cdiv(rows * columns, _pixels(k)), triton.cdiv(out, _OUT))
    sides = (channels, poses, *x.shape[2:], columns, rows * columns, out)
    more = (k, _padded(k), *steps, psi is not None, _precision(x), _pixels(k), _OUT)
    reduce_kernel[grid](x, taps, weights, sums, peaks, which, *sides, *more, num_warps=_WARPS)
    return sums, peaks, which


def _attend(
    sums: Tensor,
    peaks: Tensor,
    psi: Tensor,
    step: int,
    y: Tensor | None = None,
    grad: Tensor | None = None,
    grad_sums: Tensor | None = None,
    grad_z: Tensor | None = None,
) -> None:
    """Fills in the attended sums y or, from the gradient of y, those of sums and logits."""
    batch, poses, rows, columns, out = sums.shape
    written = [sums if v is None else v for v in (y, grad, grad_sums, grad_z)]
    grid = (batch, triton.cdiv(rows * columns, _SPATIAL_PIXELS), triton.cdiv(out, _SPATIAL_OUT))
    more = (poses, rows, columns, out, psi.shape[1], step, y is None, _SPATIAL_PIXELS, _SPATIAL_OUT)
    spatial_kernel[grid](sums, peaks, psi, *written, *more, num_warps=_SPATIAL_WARPS)


def _sizes(x: Tensor, filters: Tensor, poses: int, stride: int, padding: int, dilation: int) -> tuple[int, ...]:
    (batch, planes, *sides), (out, _, k, _) = x.shape, filters.shape
    rows, columns = (output_side(side, k, stride, padding, dilation) for side in sides)
    return batch, planes // poses, k, out, rows, columns


def _padded(k: int) -> int:
    """The taps of a filter, filled up to a size that dots take."""
    return max(16, triton.next_power_of_2(k * k))


def _pixels(k: int) -> int:
    """The pixels of a tile: fewer of larger windows."""
    return max(16, 16 * _PIXELS // _padded(k))


def _precision(x: Tensor) -> str:
    """That of dots on tensor cores. TF32 holds half precision exactly, and rounds the float32 gradients beside it."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def _images(y: Tensor, poses: int, more: int = 0) -> Iterator[slice]:
    """As many at once as fit the memory of sums and maxima, and of ``more`` numbers for each image."""
    return chunks(len(y), 2 * poses * math.prod(y.shape[1:]) + more, y.device)


def _taps_first(filters: Tensor, poses: int) -> Tensor:
    """``(O, C·S, k, k)`` to ``(S, C, k, k, O)``."""
    return filters.unflatten(1, (-1, poses)).permute(2, 1, 3, 4, 0).contiguous()


def _planes_first(grad_filters: Tensor, filters: Tensor) -> Tensor:
    return grad_filters.permute(4, 1, 0, 2, 3).reshape(filters.shape).to(filters.dtype)


def _spatial_first(spatial: Tensor | None, channels: int) -> Tensor | None:
    """``(O, 2·S, n, n)`` to ``(S, n, n, 2, O)``, of single precision; those of the mean are applied to a sum."""
    if spatial is None:
        return None
    psi = spatial.unflatten(1, (2, -1)).permute(2, 3, 4, 1, 0).contiguous().float()
    return psi / psi.new_tensor([channels, 1])[:, None]


def _weights(x: Tensor, filters: Tensor, alpha: Tensor | None, poses: int) -> Tensor:
    return x.new_ones(len(x), poses, x.shape[1] // poses, len(filters)) if alpha is None else alpha
