"""Triton kernels of depthwise correlation with a filter at every pixel, and of its gradients.

A program computes a block of flattened pixels, so that reads are contiguous whatever the width. Each result is gathered
by the program that writes it: no atomics, and results are deterministic.
"""

import contextlib
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum(
    kernel,
    value,
    out,
    order,
    slices,
    shared,
    height,
    width,
    stride_b,
    stride_s,
    stride_h,
    stride_d,
    SIDE: tl.constexpr,
    ADJOINT: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """``out(c, p) = Σ_d kernel(d, p) value(c, p + d)``, or its adjoint, ``Σ_d kernel(d, p − d) value(c, p − d)``."""
    pixels = height * width
    program = tl.program_id(0)
    blocks = tl.cdiv(pixels, PIXELS)
    parts = tl.cdiv(shared, CHANNELS)
    p = program % blocks * PIXELS + tl.arange(0, PIXELS)
    c = program // blocks % parts * CHANNELS + tl.arange(0, CHANNELS)
    unit = (program // (blocks * parts)).to(tl.int64)
    h = unit % order
    s = unit // order % slices
    b = unit // (order * slices)
    y, x = p // width, p % width
    place = ((b * slices + s) * shared + c[:, None]) * order * pixels + h * pixels
    kernel += b * stride_b + s * stride_s + h * stride_h
    total = tl.zeros((CHANNELS, PIXELS), tl.float32)
    for i in range(SIDE):
        for j in range(SIDE):
            down, right = i - SIDE // 2, j - SIDE // 2
            if ADJOINT:
                down, right = -down, -right
            inside = (p < pixels) & (y + down >= 0) & (y + down < height) & (x + right >= 0) & (x + right < width)
            there = p + down * width + right
            at = there if ADJOINT else p
            tap = tl.load(kernel + (i * SIDE + j) * stride_d + at, mask=inside, other=0.0).to(tl.float32)
            mask = inside[None, :] & (c[:, None] < shared)
            total += tap[None, :] * tl.load(value + place + there[None, :], mask=mask, other=0.0).to(tl.float32)
    mask = (p < pixels)[None, :] & (c[:, None] < shared)
    tl.store(out + place + p[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _kernel_gradient(
    grad,
    value,
    out,
    order,
    slices,
    shared,
    height,
    width,
    stride_b,
    stride_s,
    stride_h,
    stride_d,
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """``out(d, p) = Σ_c grad(c, p) value(c, p + d)``, one row of the window a program."""
    pixels = height * width
    program = tl.program_id(0)
    blocks = tl.cdiv(pixels, PIXELS)
    p = program % blocks * PIXELS + tl.arange(0, PIXELS)
    i = program // blocks % SIDE
    unit = (program // (blocks * SIDE)).to(tl.int64)
    h = unit % order
    s = unit // order % slices
    b = unit // (order * slices)
    y, x = p // width, p % width
    down = i - SIDE // 2
    rows = (p < pixels) & (y + down >= 0) & (y + down < height)
    out += b * stride_b + s * stride_s + h * stride_h + i * SIDE * stride_d
    for j in range(SIDE):
        right = j - SIDE // 2
        inside = rows & (x + right >= 0) & (x + right < width)
        total = tl.zeros((PIXELS,), tl.float32)
        for first in range(0, shared, CHANNELS):
            c = first + tl.arange(0, CHANNELS)
            place = ((b * slices + s) * shared + c[:, None]) * order * pixels + h * pixels + p[None, :]
            mask = inside[None, :] & (c[:, None] < shared)
            here = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
            there = tl.load(value + place + down * width + right, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(here * there, 0)
        tl.store(out + j * stride_d + p, total.to(out.dtype.element_ty), mask=p < pixels)


def filtered_sum(kernel: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """``out(c, h, x) = Σ_d kernel(slice(c), h, d, x) value(c, h, x + d)``."""
    return _launch(_sum, kernel, (kernel, value, out), ADJOINT=False)


def field_gradient(kernel: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """``out(c, h, x) = Σ_d kernel(slice(c), h, d, x − d) grad(c, h, x − d)``."""
    return _launch(_sum, kernel, (kernel, grad, out), ADJOINT=True)


def filter_gradient(grad: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """``out(s, h, d, x) = Σ_c grad(c, h, x) value(c, h, x + d)`` over the channels c of the slice s."""
    return _launch(_kernel_gradient, out, (grad, value, out))


def _launch(function: Any, kernel: Tensor, tensors: tuple[Tensor, Tensor, Tensor], **flags: bool) -> Tensor:
    batch, slices, order, taps, height, width = kernel.shape
    shared, side = tensors[1].shape[1] // slices, math.isqrt(taps)
    options = configuration(shared, side, height * width)
    split = triton.cdiv(shared, options["CHANNELS"]) if function is _sum else side
    # One axis, which may have 2^31 programs; the others only 2^16.
    grid = (batch * slices * order * split * triton.cdiv(height * width, options["PIXELS"]),)
    device = torch.cuda.device_of(kernel) if kernel.is_cuda else contextlib.nullcontext()
    with device:
        function[grid](*tensors, order, slices, shared, height, width, *kernel.stride()[:4], **options, **flags)
    return tensors[2]


def configuration(shared: int, side: int, pixels: int) -> dict[str, int]:
    """The constants of a launch: channels that share a filter, side of the window, and pixels of an image."""
    block = min(128, triton.next_power_of_2(pixels))
    channels = min(8, triton.next_power_of_2(shared))
    warps = max(1, min(4, block * channels // 128))
    return {"SIDE": side, "CHANNELS": channels, "PIXELS": block, "num_warps": warps}
