"""Triton kernels that reduce the responses of a group convolution as they are computed, and their gradients.

A program computes a tile of pixels and output planes. Filters, attention and sums over channels have the output planes
last, ``(..., O)``, so that loads are contiguous. Gradients are gathered, without atomics: results are deterministic.
"""

import triton
import triton.language as tl


@triton.jit
def _windows(
    p, t, pixels, height, width, columns, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr,
):  # fmt: skip
    """Where the windows of a tile of pixels are in a plane, ``(taps, pixels)``, and whether they are there."""
    row = (p // columns * STRIDE - PADDING)[None, :] + (t // K * DILATION)[:, None]
    column = (p % columns * STRIDE - PADDING)[None, :] + (t % K * DILATION)[:, None]
    seen = (t < K * K)[:, None] & (p < pixels)[None, :]
    seen = seen & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return row * width + column, seen


@triton.jit
def peak_kernel(
    x, w, peaks, places, channels, poses, height, width, columns, pixels, OUT: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, PRECISION: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The maximum over pixels of a plane's responses, and the pixel where it is first reached."""
    plane = tl.program_id(0).to(tl.int64)  # (b, s, c)
    c, s, b = plane % channels, plane // channels % poses, plane // (channels * poses)
    o, t = tl.program_id(1) * BO + tl.arange(0, BO), tl.arange(0, T)
    x += ((b * channels + c) * poses + s) * height * width
    valid = (t < K * K)[:, None] & (o < OUT)[None, :]
    taps = tl.load(w + (s * channels + c) * K * K * OUT + t[:, None] * OUT + o[None, :], mask=valid, other=0.0)
    taps = taps.to(tl.float32)
    best = tl.full((BP, BO), -float("inf"), tl.float32)
    where = tl.zeros((BP, BO), tl.int32)
    for first in range(0, pixels, BP):
        p = first + tl.arange(0, BP)
        window, seen = _windows(p, t, pixels, height, width, columns, K, STRIDE, PADDING, DILATION)
        value = tl.load(x + window, mask=seen, other=0.0).to(tl.float32)
        r = tl.dot(tl.trans(value), taps, input_precision=PRECISION)
        r = tl.where((p < pixels)[:, None], r, -float("inf"))
        where = tl.where(r > best, first, where)
        best = tl.maximum(best, r)
    peak = tl.max(best, axis=0)
    place = tl.where(best == peak[None, :], where + tl.arange(0, BP)[:, None], pixels)
    tl.store(peaks + plane * OUT + o, peak, mask=o < OUT)
    tl.store(places + plane * OUT + o, tl.min(place, axis=0), mask=o < OUT)


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
    x, w, alpha, sums, peaks, which, channels, poses, height, width, columns, pixels, OUT: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    PEAK: tl.constexpr, PRECISION: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Sum and maximum over channels of the attended responses, and the channel of the maximum."""
    task = tl.program_id(0).to(tl.int64)  # (b, s)
    b, s = task // poses, task % poses
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    o, t = tl.program_id(2) * BO + tl.arange(0, BO), tl.arange(0, T)
    window, seen = _windows(p, t, pixels, height, width, columns, K, STRIDE, PADDING, DILATION)
    tap, valid = t[:, None] * OUT + o[None, :], (t < K * K)[:, None] & (o < OUT)[None, :]
    total = tl.zeros((BP, BO), tl.float32)
    best = tl.full((BP, BO), -float("inf"), tl.float32)
    where = tl.zeros((BP, BO), tl.int32)
    for c in range(0, channels):
        value = tl.load(x + ((b * channels + c) * poses + s) * height * width + window, mask=seen, other=0.0)
        taps = tl.load(w + (s * channels + c) * K * K * OUT + tap, mask=valid, other=0.0).to(tl.float32)
        r = tl.dot(tl.trans(value.to(tl.float32)), taps, input_precision=PRECISION)
        r *= tl.load(alpha + (task * channels + c) * OUT + o, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
        total += r
        if PEAK:
            where = tl.where(r > best, c, where)
            best = tl.maximum(best, r)
    at = (task * pixels + p[:, None]) * OUT + o[None, :]
    inside = (p < pixels)[:, None] & (o < OUT)[None, :]
    tl.store(sums + at, total, mask=inside)
    if PEAK:
        tl.store(peaks + at, best, mask=inside)
        tl.store(which + at, where.to(tl.int16), mask=inside)


@triton.jit
def spatial_kernel(
    sums, peaks, psi, y, grad_y, grad_sums, grad_z, poses, rows, columns, OUT: tl.constexpr, NS: tl.constexpr,
    STEP: tl.constexpr, BACKWARD: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The sum over poses times spatial attention; backward, the gradients of the sums and of the logits."""
    b = tl.program_id(0).to(tl.int64)
    pixels = rows * columns
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    inside = (p < pixels)[:, None] & (o < OUT)[None, :]
    own = p[:, None] * OUT + o[None, :]
    across = b * OUT * pixels + o[None, :] * pixels + p[:, None]
    total = tl.zeros((BP, BO), tl.float32)
    if BACKWARD:
        grad = tl.load(grad_y + across, mask=inside, other=0.0).to(tl.float32)
    for s in range(0, poses):
        first = (b * poses + s) * pixels * OUT
        z = tl.zeros((BP, BO), tl.float32)
        for u in range(NS):
            row = p // columns + (u - NS // 2) * STEP
            high = (p < pixels) & (row >= 0) & (row < rows)
            for v in tl.static_range(NS):
                column = p % columns + (v - NS // 2) * STEP
                both = (high & (column >= 0) & (column < columns))[:, None] & (o < OUT)[None, :]
                at = first + ((u - NS // 2) * columns + v - NS // 2) * STEP * OUT
                from_ = psi + ((s * NS + u) * NS + v) * 2 * OUT + o
                z += tl.load(sums + at + own, mask=both, other=0.0) * tl.load(from_, mask=o < OUT, other=0.0)[None, :]
                psi_peak = tl.load(from_ + OUT, mask=o < OUT, other=0.0)
                z += tl.load(peaks + at + own, mask=both, other=0.0) * psi_peak[None, :]
        alpha = tl.sigmoid(z)
        value = tl.load(sums + first + own, mask=inside, other=0.0)
        if BACKWARD:
            tl.store(grad_sums + first + own, grad * alpha, mask=inside)
            tl.store(grad_z + first + own, grad * value * alpha * (1 - alpha), mask=inside)
        else:
            total += alpha * value
    if not BACKWARD:
        tl.store(y + across, total, mask=inside)


@triton.jit
def spatial_input_kernel(
    grad_z, psi, grad_sums, grad_peaks, poses, rows, columns, OUT: tl.constexpr, NS: tl.constexpr, STEP: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradients of sums and maxima from that of the logits: a correlation with the flipped filters."""
    task = tl.program_id(0).to(tl.int64)  # (b, s)
    pixels = rows * columns
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    own = p[:, None] * OUT + o[None, :]
    first = task * pixels * OUT
    mean, peak = tl.zeros((BP, BO), tl.float32), tl.zeros((BP, BO), tl.float32)
    for u in range(NS):
        row = p // columns - (u - NS // 2) * STEP
        high = (p < pixels) & (row >= 0) & (row < rows)
        for v in tl.static_range(NS):
            column = p % columns - (v - NS // 2) * STEP
            both = (high & (column >= 0) & (column < columns))[:, None] & (o < OUT)[None, :]
            at = first - ((u - NS // 2) * columns + v - NS // 2) * STEP * OUT
            grad = tl.load(grad_z + at + own, mask=both, other=0.0)
            from_ = psi + ((task % poses * NS + u) * NS + v) * 2 * OUT + o
            mean += grad * tl.load(from_, mask=o < OUT, other=0.0)[None, :]
            peak += grad * tl.load(from_ + OUT, mask=o < OUT, other=0.0)[None, :]
    inside = (p < pixels)[:, None] & (o < OUT)[None, :]
    tl.store(grad_sums + first + own, tl.load(grad_sums + first + own, mask=inside, other=0.0) + mean, mask=inside)
    tl.store(grad_peaks + first + own, peak, mask=inside)


@triton.jit
def spatial_filter_kernel(
    grad_z, sums, peaks, grad_psi, poses, rows, columns, channels, OUT: tl.constexpr, NS: tl.constexpr,
    NV: tl.constexpr, STEP: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """An image's part of the gradient of one row of the spatial filters."""
    task = tl.program_id(0).to(tl.int64)  # (b, s)
    u = tl.program_id(1)
    pixels = rows * columns
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    v = tl.arange(0, NV)
    first = task * pixels * OUT
    shift = (u - NS // 2) * STEP
    # The sum is over the pixels of the row that the filter's row shows: others add nothing.
    start, stop = tl.maximum(0, -shift) * columns, tl.minimum(rows, rows - shift) * columns
    mean, peak = tl.zeros((BP, NV, BO), tl.float32), tl.zeros((BP, NV, BO), tl.float32)
    for begin in range(start, stop, BP):
        p = begin + tl.arange(0, BP)
        column = (p % columns)[:, None] + ((v - NS // 2) * STEP)[None, :]
        inside = (p < stop)[:, None] & (o < OUT)[None, :]
        grad = tl.load(grad_z + first + p[:, None] * OUT + o[None, :], mask=inside, other=0.0)
        seen = (p < stop)[:, None] & (column >= 0) & (column < columns) & (v < NS)[None, :]
        at = (p[:, None] + ((v - NS // 2) * STEP)[None, :])[:, :, None] * OUT + o[None, None, :]
        both = seen[:, :, None] & (o < OUT)[None, None, :]
        mean += grad[:, None, :] * tl.load(sums + first + shift * columns * OUT + at, mask=both, other=0.0)
        peak += grad[:, None, :] * tl.load(peaks + first + shift * columns * OUT + at, mask=both, other=0.0)
    to = grad_psi + ((task * NS + u) * NS + v[:, None]) * 2 * OUT + o[None, :]
    inside = (v < NS)[:, None] & (o < OUT)[None, :]
    tl.store(to, tl.sum(mean, axis=0) / channels, mask=inside)
    tl.store(to + OUT, tl.sum(peak, axis=0), mask=inside)


@triton.jit
def _response_gradients(grad_sums, grad_peaks, which, c, first, at, inside, PEAK: tl.constexpr):
    """The gradients of the attended responses of channel c."""
    g = tl.load(grad_sums + first + at, mask=inside, other=0.0)
    if PEAK:
        mine = inside & (tl.load(which + first + at, mask=inside, other=-1) == c)
        g += tl.load(grad_peaks + first + at, mask=mine, other=0.0)
    return g


@triton.jit
def filter_kernel(
    x, w, alpha, grad_sums, grad_peaks, which, grad_w, grad_alpha, batch, at_once, channels, poses, height, width,
    columns, pixels, OUT: tl.constexpr, K: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, PEAK: tl.constexpr, PRECISION: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradient of alpha, and of the filters over a few images."""
    plane = tl.program_id(0).to(tl.int64)  # (s, c)
    c, s = plane % channels, plane // channels
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    split = tl.program_id(2)
    t = tl.arange(0, T)
    taps = (plane * K * K + t[:, None]) * OUT + o[None, :]
    valid = (t < K * K)[:, None] & (o < OUT)[None, :]
    own = tl.load(w + taps, mask=valid, other=0.0).to(tl.float32)
    total = tl.zeros((T, BO), tl.float32)
    for b in range(split * at_once, tl.minimum(batch, (split + 1) * at_once)):
        task = (b * poses + s).to(tl.int64)
        at = ((b * channels + c) * poses + s) * height * width
        grad_filters = tl.zeros((T, BO), tl.float32)
        for first in range(0, pixels, BP):
            p = first + tl.arange(0, BP)
            inside = (p < pixels)[:, None] & (o < OUT)[None, :]
            place = p[:, None] * OUT + o[None, :]
            g = _response_gradients(grad_sums, grad_peaks, which, c, task * pixels * OUT, place, inside, PEAK)
            window, seen = _windows(p, t, pixels, height, width, columns, K, STRIDE, PADDING, DILATION)
            value = tl.load(x + at + window, mask=seen, other=0.0).to(tl.float32)
            grad_filters += tl.dot(value, g, input_precision=PRECISION)
        to = (task * channels + c) * OUT + o
        tl.store(grad_alpha + to, tl.sum(grad_filters * own, axis=0), mask=o < OUT)
        total += grad_filters * tl.load(alpha + to, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
    tl.store(grad_w + split * poses * channels * K * K * OUT + taps, total, mask=valid)


@triton.jit
def window_kernel(
    w, alpha, grad_sums, grad_peaks, which, grad_windows, channels, poses, pixels, OUT: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr, PEAK: tl.constexpr, PRECISION: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """What each window of the input gets: the gradients of its responses times the filters, ``(B, S, C, k·k, P)``."""
    plane = tl.program_id(0).to(tl.int64)  # (b, s, c)
    task, c = plane // channels, plane % channels
    p, t = tl.program_id(1) * BP + tl.arange(0, BP), tl.arange(0, T)
    total = tl.zeros((T, BP), tl.float32)
    for first in range(0, OUT, BO):
        o = first + tl.arange(0, BO)
        valid = (t < K * K)[:, None] & (o < OUT)[None, :]
        weight = tl.load(alpha + plane * OUT + o, mask=o < OUT, other=0.0).to(tl.float32)
        from_ = w + (task % poses * channels + c) * K * K * OUT + t[:, None] * OUT + o[None, :]
        taps = tl.load(from_, mask=valid, other=0.0).to(tl.float32) * weight[None, :]
        inside = (p < pixels)[:, None] & (o < OUT)[None, :]
        place = p[:, None] * OUT + o[None, :]
        g = _response_gradients(grad_sums, grad_peaks, which, c, task * pixels * OUT, place, inside, PEAK)
        total += tl.dot(taps, tl.trans(g), input_precision=PRECISION)
    to = plane * K * K * pixels + t[:, None] * pixels + p[None, :]
    tl.store(grad_windows + to, total, mask=(t < K * K)[:, None] & (p < pixels)[None, :])


@triton.jit
def input_kernel(
    grad_windows, grad_x, channels, poses, height, width, rows, columns, K: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, DILATION: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradient of the input: a sum over the windows that show a pixel."""
    plane = tl.program_id(0).to(tl.int64)  # (b, s, c)
    task, c = plane // channels, plane % channels
    b, s = task // poses, task % poses
    q = tl.program_id(1) * BP + tl.arange(0, BP)
    grad_windows += plane * K * K * rows * columns
    total = tl.zeros((BP,), tl.float32)
    for u in range(K):
        for v in tl.static_range(K):
            row, column = q // width + PADDING - u * DILATION, q % width + PADDING - v * DILATION
            seen = (q < height * width) & (row >= 0) & (row % STRIDE == 0) & (row // STRIDE < rows)
            seen = seen & (column >= 0) & (column % STRIDE == 0) & (column // STRIDE < columns)
            place = (u * K + v) * rows * columns + row // STRIDE * columns + column // STRIDE
            total += tl.load(grad_windows + place, mask=seen, other=0.0)
    at = ((b * channels + c) * poses + s) * height * width + q
    tl.store(grad_x + at, total, mask=q < height * width)
