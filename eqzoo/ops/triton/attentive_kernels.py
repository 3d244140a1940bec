"""Triton kernels that reduce the responses of a group convolution as they are computed, and their gradients.

A program computes a tile of pixels and output planes. Filters, attention and sums over channels have the output planes
last, ``(..., O)``, so that loads are contiguous. Gradients are gathered, without atomics: results are deterministic.
"""

# Arguments of kernels have no types before compilation, and constexpr arguments are capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

__all__ = [
    "filter_kernel",
    "input_kernel",
    "peak_filter_kernel",
    "peak_input_kernel",
    "peak_kernel",
    "reduce_kernel",
    "spatial_input_kernel",
    "spatial_filter_kernel",
    "spatial_kernel",
]


@triton.jit
def _response(
    x, w, p, o, i, j, height, width, out, inside, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr,
):  # fmt: skip
    """The responses of one plane at a tile of pixels and output planes."""
    total = tl.zeros((p.shape[0], o.shape[0]), tl.float32)
    for u in range(K):
        for v in tl.static_range(K):
            row, column = i * STRIDE + u * DILATION - PADDING, j * STRIDE + v * DILATION - PADDING
            seen = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            value = tl.load(x + row * width + column, mask=seen, other=0.0).to(tl.float32)
            tap = tl.load(w + (u * K + v) * out + o, mask=o < out, other=0.0).to(tl.float32)
            total += value[:, None] * tap[None, :]
    return total


@triton.jit
def peak_kernel(
    x, w, peaks, places, channels, poses, out, height, width, columns, pixels, K: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, DILATION: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The maximum over pixels of a plane's responses, and the pixel where it is first reached."""
    plane = tl.program_id(0).to(tl.int64)  # (b, s, c)
    c, s, b = plane % channels, plane // channels % poses, plane // (channels * poses)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    x += ((b * channels + c) * poses + s) * height * width
    w += (s * channels + c) * K * K * out
    best = tl.full((BO,), -float("inf"), tl.float32)
    where = tl.zeros((BO,), tl.int32)
    for first in range(0, pixels, BP):
        p = first + tl.arange(0, BP)
        i, j = p // columns, p % columns
        r = _response(x, w, p, o, i, j, height, width, out, p < pixels, K, STRIDE, PADDING, DILATION)
        r = tl.where((p < pixels)[:, None], r, -float("inf"))
        value, place = tl.max(r, axis=0, return_indices=True)
        where = tl.where(value > best, first + place, where)
        best = tl.where(value > best, value, best)
    tl.store(peaks + plane * out + o, best, mask=o < out)
    tl.store(places + plane * out + o, where, mask=o < out)


@triton.jit
def peak_input_kernel(
    w, places, g, grad_x, channels, poses, out, height, width, columns, K: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, DILATION: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradient of the input from that of the maxima, each of which comes from one window."""
    plane = tl.program_id(0).to(tl.int64)
    c, s, b = plane % channels, plane // channels % poses, plane // (channels * poses)
    q = tl.program_id(1) * BP + tl.arange(0, BP)
    w += (s * channels + c) * K * K * out
    total = tl.zeros((BP, BO), tl.float32)
    for first in range(0, out, BO):
        o = first + tl.arange(0, BO)
        place = tl.load(places + plane * out + o, mask=o < out, other=0)
        grad_peak = tl.load(g + plane * out + o, mask=o < out, other=0.0).to(tl.float32)
        row = (q // width + PADDING)[:, None] - (place // columns * STRIDE)[None, :]
        column = (q % width + PADDING)[:, None] - (place % columns * STRIDE)[None, :]
        hit = (row >= 0) & (row % DILATION == 0) & (row < K * DILATION) & (o < out)[None, :]
        hit = hit & (column >= 0) & (column % DILATION == 0) & (column < K * DILATION)
        tap = row // DILATION * K + column // DILATION
        value = tl.load(w + tap * out + o[None, :], mask=hit, other=0.0).to(tl.float32)
        total += value * grad_peak[None, :]
    at = ((b * channels + c) * poses + s) * height * width + q
    tl.store(grad_x + at, tl.sum(total, axis=1), mask=q < height * width)


@triton.jit
def peak_filter_kernel(
    x, places, g, grad_w, batch, channels, poses, out, height, width, columns, K: tl.constexpr, T: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradient of the filters from that of the maxima: a sum of the windows they come from."""
    plane = tl.program_id(0).to(tl.int64)  # (s, c)
    c, s = plane % channels, plane // channels
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    t = tl.arange(0, T)
    total = tl.zeros((T, BO), tl.float32)
    for b in range(0, batch):
        own = (b * poses * channels + plane) * out + o
        place = tl.load(places + own, mask=o < out, other=0)
        grad_peak = tl.load(g + own, mask=o < out, other=0.0).to(tl.float32)
        row = (place // columns * STRIDE - PADDING)[None, :] + (t // K * DILATION)[:, None]
        column = (place % columns * STRIDE - PADDING)[None, :] + (t % K * DILATION)[:, None]
        seen = (t < K * K)[:, None] & (o < out)[None, :]
        seen = seen & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        at = ((b * channels + c) * poses + s) * height * width
        value = tl.load(x + at + row * width + column, mask=seen, other=0.0).to(tl.float32)
        total += value * grad_peak[None, :]
    to = grad_w + (plane * K * K + t[:, None]) * out + o[None, :]
    tl.store(to, total, mask=(t < K * K)[:, None] & (o < out)[None, :])


@triton.jit
def reduce_kernel(
    x, w, alpha, sums, peaks, which, channels, poses, out, height, width, columns, pixels, K: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, PEAK: tl.constexpr, BP: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """Sum and maximum over channels of the attended responses, and the channel of the maximum."""
    task = tl.program_id(0).to(tl.int64)  # (b, s)
    b, s = task // poses, task % poses
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    i, j = p // columns, p % columns
    total = tl.zeros((BP, BO), tl.float32)
    best = tl.full((BP, BO), -float("inf"), tl.float32)
    where = tl.zeros((BP, BO), tl.int32)
    for c in range(0, channels):
        own = x + ((b * channels + c) * poses + s) * height * width
        taps = w + (s * channels + c) * K * K * out
        r = _response(own, taps, p, o, i, j, height, width, out, p < pixels, K, STRIDE, PADDING, DILATION)
        r *= tl.load(alpha + (task * channels + c) * out + o, mask=o < out, other=0.0).to(tl.float32)[None, :]
        total += r
        if PEAK:
            where = tl.where(r > best, c, where)
            best = tl.maximum(best, r)
    at = (task * pixels + p[:, None]) * out + o[None, :]
    inside = (p < pixels)[:, None] & (o < out)[None, :]
    tl.store(sums + at, total, mask=inside)
    if PEAK:
        tl.store(peaks + at, best, mask=inside)
        tl.store(which + at, where.to(tl.int16), mask=inside)


@triton.jit
def spatial_kernel(
    sums, peaks, psi, y, grad_y, grad_sums, grad_z, poses, out, rows, columns, channels, NS: tl.constexpr,
    STEP: tl.constexpr, BACKWARD: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The sum over poses times spatial attention; backward, the gradients of the sums and of the logits."""
    b = tl.program_id(0).to(tl.int64)
    pixels = rows * columns
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    i, j = p // columns, p % columns
    inside = (p < pixels)[:, None] & (o < out)[None, :]
    across = (b * out + o[None, :]) * pixels + p[:, None]
    total = tl.zeros((BP, BO), tl.float32)
    if BACKWARD:
        grad = tl.load(grad_y + across, mask=inside, other=0.0).to(tl.float32)
    for s in range(0, poses):
        first = (b * poses + s) * pixels
        z = tl.zeros((BP, BO), tl.float32)
        for tap in range(0, NS * NS):
            row, column = i + (tap // NS - NS // 2) * STEP, j + (tap % NS - NS // 2) * STEP
            seen = (p < pixels) & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
            at = (first + row * columns + column)[:, None] * out + o[None, :]
            both = seen[:, None] & (o < out)[None, :]
            from_ = psi + (s * NS * NS + tap) * 2 * out + o
            z += tl.load(sums + at, mask=both, other=0.0) * tl.load(from_, mask=o < out, other=0.0)[None, :] / channels
            z += tl.load(peaks + at, mask=both, other=0.0) * tl.load(from_ + out, mask=o < out, other=0.0)[None, :]
        alpha = tl.sigmoid(z)
        at = (first + p)[:, None] * out + o[None, :]
        own = tl.load(sums + at, mask=inside, other=0.0)
        if BACKWARD:
            tl.store(grad_sums + at, grad * alpha, mask=inside)
            tl.store(grad_z + at, grad * own * alpha * (1 - alpha), mask=inside)
        else:
            total += alpha * own
    if not BACKWARD:
        tl.store(y + across, total, mask=inside)


@triton.jit
def spatial_input_kernel(
    grad_z, psi, grad_sums, grad_peaks, poses, out, rows, columns, channels, NS: tl.constexpr, STEP: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradients of sums and maxima from that of the logits: a correlation with the flipped filters."""
    task = tl.program_id(0).to(tl.int64)  # (b, s)
    pixels = rows * columns
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    i, j = p // columns, p % columns
    mean, peak = tl.zeros((BP, BO), tl.float32), tl.zeros((BP, BO), tl.float32)
    for tap in range(0, NS * NS):
        row, column = i - (tap // NS - NS // 2) * STEP, j - (tap % NS - NS // 2) * STEP
        seen = (p < pixels) & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        at = (task * pixels + row * columns + column)[:, None] * out + o[None, :]
        grad = tl.load(grad_z + at, mask=seen[:, None] & (o < out)[None, :], other=0.0)
        from_ = psi + (task % poses * NS * NS + tap) * 2 * out + o
        mean += grad * tl.load(from_, mask=o < out, other=0.0)[None, :] / channels
        peak += grad * tl.load(from_ + out, mask=o < out, other=0.0)[None, :]
    at = (task * pixels + p[:, None]) * out + o[None, :]
    inside = (p < pixels)[:, None] & (o < out)[None, :]
    tl.store(grad_sums + at, tl.load(grad_sums + at, mask=inside, other=0.0) + mean, mask=inside)
    tl.store(grad_peaks + at, peak, mask=inside)


@triton.jit
def spatial_filter_kernel(
    grad_z, sums, peaks, grad_psi, poses, out, rows, columns, channels, NS: tl.constexpr, NV: tl.constexpr,
    STEP: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """An image's part of the gradient of one row of the spatial filters."""
    task = tl.program_id(0).to(tl.int64)  # (b, s)
    u = tl.program_id(1)
    pixels = rows * columns
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    v = tl.arange(0, NV)
    mean, peak = tl.zeros((BP, NV, BO), tl.float32), tl.zeros((BP, NV, BO), tl.float32)
    for first in range(0, pixels, BP):
        p = first + tl.arange(0, BP)
        row = p // columns + (u - NS // 2) * STEP
        column = (p % columns)[:, None] + ((v - NS // 2) * STEP)[None, :]
        inside = (p < pixels)[:, None] & (o < out)[None, :]
        grad = tl.load(grad_z + (task * pixels + p)[:, None] * out + o[None, :], mask=inside, other=0.0)
        seen = ((p < pixels) & (row >= 0) & (row < rows))[:, None] & (column >= 0) & (column < columns)
        seen = seen & (v < NS)[None, :]
        at = (task * pixels + row[:, None] * columns + column)[:, :, None] * out + o[None, None, :]
        both = seen[:, :, None] & (o < out)[None, None, :]
        mean += grad[:, None, :] * tl.load(sums + at, mask=both, other=0.0)
        peak += grad[:, None, :] * tl.load(peaks + at, mask=both, other=0.0)
    to = grad_psi + ((task * NS + u) * NS + v[:, None]) * 2 * out + o[None, :]
    inside = (v < NS)[:, None] & (o < out)[None, :]
    tl.store(to, tl.sum(mean, axis=0) / channels, mask=inside)
    tl.store(to + out, tl.sum(peak, axis=0), mask=inside)


@triton.jit
def filter_kernel(
    x, w, alpha, grad_sums, grad_peaks, which, grad_w, grad_alpha, batch, at_once, channels, poses, out, height, width,
    columns, pixels, K: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, PEAK: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradient of alpha, and of the filters over a few images."""
    plane = tl.program_id(0).to(tl.int64)  # (s, c)
    c, s = plane % channels, plane // channels
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    split = tl.program_id(2)
    t = tl.arange(0, T)
    taps = (plane * K * K + t[:, None]) * out + o[None, :]
    valid = (t < K * K)[:, None] & (o < out)[None, :]
    own = tl.load(w + taps, mask=valid, other=0.0).to(tl.float32)
    total = tl.zeros((T, BO), tl.float32)
    for b in range(split * at_once, tl.minimum(batch, (split + 1) * at_once)):
        task = (b * poses + s).to(tl.int64)
        at = ((b * channels + c) * poses + s) * height * width
        grad_filters = tl.zeros((T, BO), tl.float32)
        for first in range(0, pixels, BP):
            p = first + tl.arange(0, BP)
            inside = (p < pixels)[:, None] & (o < out)[None, :]
            place = (task * pixels + p)[:, None] * out + o[None, :]
            g = tl.load(grad_sums + place, mask=inside, other=0.0)
            if PEAK:
                mine = tl.load(which + place, mask=inside, other=-1) == c
                g += tl.load(grad_peaks + place, mask=mine, other=0.0)
            row = (p // columns * STRIDE - PADDING)[None, :] + (t // K * DILATION)[:, None]
            column = (p % columns * STRIDE - PADDING)[None, :] + (t % K * DILATION)[:, None]
            seen = (t < K * K)[:, None] & (p < pixels)[None, :]
            seen = seen & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            value = tl.load(x + at + row * width + column, mask=seen, other=0.0).to(tl.float32)
            grad_filters += tl.dot(value, g, input_precision="ieee")
        to = (task * channels + c) * out + o
        tl.store(grad_alpha + to, tl.sum(grad_filters * own, axis=0), mask=o < out)
        total += grad_filters * tl.load(alpha + to, mask=o < out, other=0.0).to(tl.float32)[None, :]
    tl.store(grad_w + split * poses * channels * K * K * out + taps, total, mask=valid)


@triton.jit
def input_kernel(
    w, alpha, grad_sums, grad_peaks, which, grad_x, channels, poses, out, height, width, rows, columns, K: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, PEAK: tl.constexpr, BP: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """The gradient of the input: the gradients of the responses, correlated with the flipped filters."""
    plane = tl.program_id(0).to(tl.int64)  # (b, s, c)
    task, c = plane // channels, plane % channels
    b, s = task // poses, task % poses
    q = tl.program_id(1) * BP + tl.arange(0, BP)
    total = tl.zeros((BP, BO), tl.float32)
    for first in range(0, out, BO):
        o = first + tl.arange(0, BO)
        weight = tl.load(alpha + plane * out + o, mask=o < out, other=0.0).to(tl.float32)
        for u in range(K):
            for v in tl.static_range(K):
                row, column = q // width + PADDING - u * DILATION, q % width + PADDING - v * DILATION
                seen = (q < height * width) & (row >= 0) & (row % STRIDE == 0) & (row // STRIDE < rows)
                seen = seen & (column >= 0) & (column % STRIDE == 0) & (column // STRIDE < columns)
                both = seen[:, None] & (o < out)[None, :]
                pixel = task * rows * columns + row // STRIDE * columns + column // STRIDE
                place = pixel[:, None] * out + o[None, :]
                g = tl.load(grad_sums + place, mask=both, other=0.0)
                if PEAK:
                    mine = tl.load(which + place, mask=both, other=-1) == c
                    g += tl.load(grad_peaks + place, mask=mine, other=0.0)
                taps = w + ((s * channels + c) * K * K + u * K + v) * out + o
                total += g * (tl.load(taps, mask=o < out, other=0.0).to(tl.float32) * weight)[None, :]
    at = ((b * channels + c) * poses + s) * height * width + q
    tl.store(grad_x + at, tl.sum(total, axis=1), mask=q < height * width)
