"""Group convolutions through the irreps of the group, and the gradient of their filters, on a GPU.

A program gathers the patches of a tile of pixels part by part, for all poses, transforms them over the group in
registers, multiplies them by transformed filters, and transforms the sums back before it writes them. The gradient of
the filters is summed over parts of the pixels and then over the parts: the same numbers in every run.
"""

# Arguments of kernels have no types before compilation, constexpr arguments are capitals, and tuples grow.
# ruff: noqa: ANN001, ANN202, N803, RUF005
# mypy: disable-error-code="no-untyped-def, assignment"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import on_own_device

__all__ = ["correlate", "correlate_filters"]

# Blocks of pixels, of columns (fields out) and of rows (taps and fields in), for each order of a group.
# As large as the sums of all components stay in registers.
_BLOCKS = {2: (64, 64, 16), 4: (32, 32, 16), 8: (16, 32, 16)}
_FILTER_BLOCKS = {2: (32, 64, 32), 4: (16, 32, 32), 8: (16, 32, 16)}
_PROGRAMS = 512  # that keep a GPU busy


@triton.jit
def _transform4(v):
    """Trivial and alternating sum, cosine and sine over four rotations."""
    a, b = v[0] + v[2], v[1] + v[3]
    return a + b, a - b, v[0] - v[2], v[1] - v[3]


@triton.jit
def _back4(v):
    """The transposed of `_transform4`."""
    a, b = v[0] + v[1], v[0] - v[1]
    return a + v[2], b + v[3], a - v[2], b - v[3]


@triton.jit
def _transform(v, ORDER: tl.constexpr):
    """The real Fourier transform over the group, with coefficients 1, 0 and -1 (components as in `_coefficients`)."""
    if ORDER == 2:
        return v[0] + v[1], v[0] - v[1]
    elif ORDER == 4:
        return _transform4(v)
    else:
        p = _transform4((v[0], v[1], v[2], v[3]))
        q = _transform4((v[4], v[5], v[6], v[7]))
        ones = p[0] + q[0], p[0] - q[0], p[1] + q[1], p[1] - q[1]
        return ones[0], ones[1], ones[2], ones[3], p[2] + q[2], q[3] - p[3], p[3] + q[3], p[2] - q[2]


@triton.jit
def _back(v, ORDER: tl.constexpr):
    """The transposed of `_transform`."""
    if ORDER == 2:
        return v[0] + v[1], v[0] - v[1]
    elif ORDER == 4:
        return _back4(v)
    else:
        p = _back4((v[0] + v[1], v[2] + v[3], v[4] + v[7], v[6] - v[5]))
        q = _back4((v[0] - v[1], v[2] - v[3], v[4] - v[7], v[6] + v[5]))
        return p[0], p[1], p[2], p[3], q[0], q[1], q[2], q[3]


@triton.jit
def _gather(
    x, reads, e, c, channels, b, top, left, height, width, inside,
    x_b, x_c, x_g, x_y, x_x, ORDER: tl.constexpr, SIDE: tl.constexpr, DILATION: tl.constexpr,
):  # fmt: skip
    """The transforms of a renamed tap's values at a tile of pixels and fields: ORDER blocks (pixels, fields)."""
    values = ()
    for g in tl.static_range(ORDER):
        t = tl.load(reads + g * SIDE * SIDE + e)
        row, column = top + t // SIDE * DILATION, left + t % SIDE * DILATION
        seen = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        place = b * x_b + g * x_g + row * x_y + column * x_x
        value = tl.load(x + place[:, None] + c[None, :] * x_c, mask=seen[:, None] & (c < channels)[None, :], other=0.0)
        values = values + (value.to(tl.float32),)
    return _transform(values, ORDER)


@triton.jit
def correlate_kernel(
    x, w, bias, out, reads, total, channels, outs, height, width, out_height, out_width,
    x_b, x_c, x_g, x_y, x_x, o_b, o_c, o_g, o_y, o_x,
    ORDER: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, padding, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of pixels and of fields of the output; w is (|H|, k²·C, C')."""
    blocks = tl.cdiv(outs, BN)
    p = (tl.program_id(0) // blocks).to(tl.int64) * BP + tl.arange(0, BP)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    inside = p < total
    b, y, column = p // (out_height * out_width), p // out_width % out_height, p % out_width
    top, left = y * STRIDE - padding, column * STRIDE - padding
    step = SIDE * SIDE * channels * outs
    sums = ()
    for _ in tl.static_range(ORDER):
        sums = sums + (tl.zeros((BP, BN), tl.float32),)
    for e in range(SIDE * SIDE):
        for first in range(0, channels, BC):
            c = first + tl.arange(0, BC)
            v = _gather(
                x, reads, e, c, channels, b, top, left, height, width, inside, x_b, x_c, x_g, x_y, x_x,
                ORDER, SIDE, DILATION,
            )  # fmt: skip
            there = w + (e * channels + c)[:, None] * outs + n[None, :]
            known = (c < channels)[:, None] & (n < outs)[None, :]
            sums = _multiply(v, there, known, step, sums, ORDER, PRECISION)
    if BIAS:
        value = tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)
        sums = _add_first(sums, value[None, :], ORDER)
    made = _back(sums, ORDER)
    place = b * o_b + y * o_y + column * o_x
    for g in tl.static_range(ORDER):
        tl.store(
            out + place[:, None] + n[None, :] * o_c + g * o_g,
            made[g].to(out.dtype.element_ty),
            mask=inside[:, None] & (n < outs)[None, :],
        )


@triton.jit
def _add_first(v, value, ORDER: tl.constexpr):
    out = (v[0] + value,)
    for j in tl.static_range(1, ORDER):
        out = out + (v[j],)
    return out


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    return tl.dot(a.to(b.dtype), b, total, input_precision=PRECISION)


@triton.jit
def _multiply(v, w, known, step, sums, ORDER: tl.constexpr, PRECISION: tl.constexpr):
    """Adds the products of transforms and transformed filters, irrep by irrep."""
    if ORDER == 2:
        s0 = _dot(v[0], tl.load(w, mask=known, other=0.0), sums[0], PRECISION)
        s1 = _dot(v[1], tl.load(w + step, mask=known, other=0.0), sums[1], PRECISION)
        return s0, s1
    elif ORDER == 4:
        s0 = _dot(v[0], tl.load(w, mask=known, other=0.0), sums[0], PRECISION)
        s1 = _dot(v[1], tl.load(w + step, mask=known, other=0.0), sums[1], PRECISION)
        re = tl.load(w + 2 * step, mask=known, other=0.0)
        im = tl.load(w + 3 * step, mask=known, other=0.0)
        s2 = _dot(v[3], im, _dot(v[2], re, sums[2], PRECISION), PRECISION)
        s3 = _dot(-v[2], im, _dot(v[3], re, sums[3], PRECISION), PRECISION)
        return s0, s1, s2, s3
    else:
        s0 = _dot(v[0], tl.load(w, mask=known, other=0.0), sums[0], PRECISION)
        s1 = _dot(v[1], tl.load(w + step, mask=known, other=0.0), sums[1], PRECISION)
        s2 = _dot(v[2], tl.load(w + 2 * step, mask=known, other=0.0), sums[2], PRECISION)
        s3 = _dot(v[3], tl.load(w + 3 * step, mask=known, other=0.0), sums[3], PRECISION)
        f = tl.load(w + 4 * step, mask=known, other=0.0)
        s4, s6 = _dot(v[4], f, sums[4], PRECISION), _dot(v[6], f, sums[6], PRECISION)
        f = tl.load(w + 5 * step, mask=known, other=0.0)
        s4, s6 = _dot(v[5], f, s4, PRECISION), _dot(v[7], f, s6, PRECISION)
        f = tl.load(w + 6 * step, mask=known, other=0.0)
        s5, s7 = _dot(v[4], f, sums[5], PRECISION), _dot(v[6], f, sums[7], PRECISION)
        f = tl.load(w + 7 * step, mask=known, other=0.0)
        s5, s7 = _dot(v[5], f, s5, PRECISION), _dot(v[7], f, s7, PRECISION)
        return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def correlate_filters_kernel(
    x, grad, sums, reads, total, share, channels, outs, height, width, out_height, out_width,
    x_b, x_c, x_g, x_y, x_x, g_b, g_c, g_g, g_y, g_x,
    ORDER: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, padding,
    PRECISION: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tap, a block of fields in and of fields out, and a share of the pixels; sums is (shares, |H|, k²·C, C')."""
    columns, rows = tl.cdiv(outs, BN), tl.cdiv(channels, BC)
    program = tl.program_id(0)
    n = program % columns * BN + tl.arange(0, BN)
    c = program // columns % rows * BC + tl.arange(0, BC)
    e = program // (columns * rows) % (SIDE * SIDE)
    part = (program // (columns * rows * SIDE * SIDE)).to(tl.int64)
    own = ()
    for _ in tl.static_range(ORDER):
        own = own + (tl.zeros((BC, BN), tl.float32),)
    for first in range(0, share, BP):
        p = part * share + first + tl.arange(0, BP)
        inside = (p < total) & (first + tl.arange(0, BP) < share)
        b, y, column = p // (out_height * out_width), p // out_width % out_height, p % out_width
        v = _gather(
            x, reads, e, c, channels, b, y * STRIDE - padding, column * STRIDE - padding, height, width, inside,
            x_b, x_c, x_g, x_y, x_x, ORDER, SIDE, DILATION,
        )  # fmt: skip
        place = b * g_b + y * g_y + column * g_x
        values = ()
        for g in tl.static_range(ORDER):
            value = tl.load(
                grad + place[:, None] + n[None, :] * g_c + g * g_g,
                mask=inside[:, None] & (n < outs)[None, :],
                other=0.0,
            )
            values = values + (value.to(tl.float32),)
        own = _multiply_transposed(v, _transform(values, ORDER), own, grad.dtype.element_ty, ORDER, PRECISION)
    for j in tl.static_range(ORDER):
        row = ((part * ORDER + j) * SIDE * SIDE + e) * channels + c
        tl.store(sums + row[:, None] * outs + n[None, :], own[j], mask=(c < channels)[:, None] & (n < outs)[None, :])


@triton.jit
def _product(a, b, total, KIND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(tl.trans(a.to(KIND)), b.to(KIND), total, input_precision=PRECISION)


@triton.jit
def _multiply_transposed(v, g, sums, KIND: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr):
    """Adds to the gradients of the transformed filters what `_multiply` makes of a gradient."""
    s0 = _product(v[0], g[0], sums[0], KIND, PRECISION)
    s1 = _product(v[1], g[1], sums[1], KIND, PRECISION)
    if ORDER == 2:
        return s0, s1
    elif ORDER == 4:
        s2 = _product(v[3], g[3], _product(v[2], g[2], sums[2], KIND, PRECISION), KIND, PRECISION)
        s3 = _product(-v[2], g[3], _product(v[3], g[2], sums[3], KIND, PRECISION), KIND, PRECISION)
        return s0, s1, s2, s3
    else:
        s2 = _product(v[2], g[2], sums[2], KIND, PRECISION)
        s3 = _product(v[3], g[3], sums[3], KIND, PRECISION)
        s4 = _product(v[6], g[6], _product(v[4], g[4], sums[4], KIND, PRECISION), KIND, PRECISION)
        s5 = _product(v[7], g[6], _product(v[5], g[4], sums[5], KIND, PRECISION), KIND, PRECISION)
        s6 = _product(v[6], g[7], _product(v[4], g[5], sums[6], KIND, PRECISION), KIND, PRECISION)
        s7 = _product(v[7], g[7], _product(v[5], g[5], sums[7], KIND, PRECISION), KIND, PRECISION)
        return s0, s1, s2, s3, s4, s5, s6, s7


@cache
def _coefficients(order: int) -> Tensor:
    """The transform over the group, ``(components, |H|)``, rows as `_transform` gives them."""
    if order == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu", dtype=torch.float64)
    rotations = torch.tensor(
        [[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 0, -1, 0], [0, 1, 0, -1]], device="cpu", dtype=torch.float64
    )
    if order == 4:
        return rotations
    one, sign, cos, sin = rotations
    rows = [(one, one), (one, -one), (sign, sign), (sign, -sign), (cos, cos), (-sin, sin), (sin, sin), (cos, -cos)]
    return torch.stack([torch.cat(row) for row in rows])


def _scaled(order: int) -> Tensor:
    """The transform of filters: scaled so that the transposed transform undoes it."""
    degree = torch.tensor([1.0 if j < max(2, order // 2) else 2.0 for j in range(order)], device="cpu").double()
    return _coefficients(order) * degree[:, None] / order


@on_own_device
def correlate(
    field: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    out: Tensor,
    reads: Tensor,
    places: Tensor,
    stride: int,
    padding: int,
    dilation: int,
    swapped: bool,
) -> None:
    """Writes a group convolution, or with swapped filters the gradient of its input, which is one."""
    batch, channels, order, height, width = field.shape
    outs, (rows, columns) = out.shape[1], out.shape[-2:]
    side = filters.shape[-1]
    entries = filters.reshape(len(filters), -1, order * side**2).float()
    with torch.autocast(field.device.type, enabled=False):  # it would round them twice
        kappa = entries[:, :, places.to(filters.device)] @ _scaled(order).to(filters.device).float().mT
    # κ is (C', C, k², |H|).
    packed = kappa.permute(3, 2, 0, 1) if swapped else kappa.permute(3, 2, 1, 0)
    total = batch * rows * columns
    bp, bn, bc = _blocks(_BLOCKS[order], total, outs, channels)
    correlate_kernel[(triton.cdiv(total, bp) * triton.cdiv(outs, bn),)](
        field,
        packed.to(filters.dtype).contiguous(),
        bias,
        out,
        reads.to(field.device),
        total,
        channels,
        outs,
        height,
        width,
        rows,
        columns,
        *field.stride(),
        *out.stride(),
        order,
        side,
        stride,
        dilation,
        padding,
        bias is not None,
        _precision(),
        bp,
        bn,
        bc,
        num_warps=8,
        num_stages=1 if order == 8 else 2,
    )


@on_own_device
def correlate_filters(
    field: Tensor,
    grad: Tensor,
    filters: Tensor,
    reads: Tensor,
    places: Tensor,
    stride: int,
    padding: int,
    dilation: int,
) -> None:
    """Writes the gradient of the filters."""
    batch, channels, order, height, width = field.shape
    outs, (rows, columns) = grad.shape[1], grad.shape[-2:]
    side, total = filters.shape[-1], batch * rows * columns
    bp, bn, bc = _blocks(_FILTER_BLOCKS[order], total, outs, channels)
    programs = side**2 * triton.cdiv(channels, bc) * triton.cdiv(outs, bn)
    parts = max(1, min(triton.cdiv(_PROGRAMS, programs), triton.cdiv(total, bp)))
    share = triton.cdiv(triton.cdiv(total, parts), bp) * bp
    sums = torch.empty(parts, order, side**2, channels, outs, device=field.device, dtype=torch.float32)
    correlate_filters_kernel[(programs * parts,)](
        field,
        grad,
        sums,
        reads.to(field.device),
        total,
        share,
        channels,
        outs,
        height,
        width,
        rows,
        columns,
        *field.stride(),
        *grad.stride(),
        order,
        side,
        stride,
        dilation,
        padding,
        _precision(),
        bp,
        bn,
        bc,
        num_warps=4 if order == 8 else 8,
        num_stages=1 if order == 8 else 2,
    )
    with torch.autocast(field.device.type, enabled=False):  # it would round the sums to its type
        kappa = torch.einsum("jecn,jh->nceh", sums.sum(0), _scaled(order).to(field.device).float())
    entries = sums.new_empty(outs, channels, order * side**2)
    entries[:, :, places.to(field.device)] = kappa
    filters.copy_(entries.reshape(filters.shape))


def _blocks(most: tuple[int, int, int], pixels: int, outs: int, channels: int) -> tuple[int, ...]:
    """Blocks no larger than they need be; products of matrices on a GPU start at 16."""
    needed = (pixels, outs, channels)
    return tuple(min(a, max(16, triton.next_power_of_2(b))) for a, b in zip(most, needed, strict=True))


def _precision() -> str:
    """As torch's own convolutions round."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
