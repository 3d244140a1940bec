"""Triton kernels of affine local attention: scores, softmax and sum in one forward pass, three kernels backward.

Tensors of a program are (channel of the head, element, pixel): pixels are distributed over threads, the rest is in
registers, so that sums over channels and elements need no exchange. Loads are contiguous along the width. No atomic
additions: gradients of fields are gathered, and those of psi and beta are sums over programs in a fixed order.
"""

# Arguments of kernels have no types before compilation, and constexpr arguments are capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import on_own_device

__all__ = ["backward", "forward"]

_BLOCK = 256  # pixels a program, at most
_PROGRAMS = 8192  # for the gradients of psi: several waves on a large GPU


@triton.jit
def _neighbor(i, d, height, width, K: tl.constexpr, SIGN: tl.constexpr):
    """The pixel at offset d from pixels i, or from which they are at offset d (SIGN -1), and whether there is one."""
    row = i // width + SIGN * (d // K - K // 2)
    column = i % width + SIGN * (d % K - K // 2)
    inside = (i < height * width) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return row * width + column, inside


@triton.jit
def _map(field, psi, beta, at, inside, d, plane, c, p, SIZE: tl.constexpr, ORDER: tl.constexpr, OFFSETS: tl.constexpr):
    """m(c, P, pixel) = beta(c, P, d) + sum over R of f(c, R, at) psi(c, P, R, d); pointers are those of the head."""
    own = c < SIZE
    m = tl.load(beta + (c * ORDER + p) * OFFSETS + d, mask=own, other=0.0).to(tl.float32)
    for r in tl.static_range(ORDER):
        x = tl.load(field + (c * ORDER + r) * plane + at, mask=own & inside, other=0.0).to(tl.float32)
        m = m + x * tl.load(psi + ((c * ORDER + p) * ORDER + r) * OFFSETS + d, mask=own, other=0.0).to(tl.float32)
    return m


@triton.jit
def _forward(
    query, key, value, query_psi, query_beta, key_psi, key_beta, value_psi, value_beta, out, height, width, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, ORDER: tl.constexpr, K: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = height * width
    head = tl.program_id(0) % HEADS
    field = tl.program_id(0).to(tl.int64) * (SIZE * ORDER) * plane
    psi = head * (SIZE * ORDER * ORDER)
    beta = head * (SIZE * ORDER)
    c = tl.arange(0, CHANNELS)[:, None, None]
    p = tl.arange(0, ORDER)[None, :, None]
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, None, :]
    q = _map(query + field, query_psi + psi, query_beta + beta, i, i < plane, 0, plane, c, p, SIZE, ORDER, 1) * scale
    running_max = tl.full((1, ORDER, BLOCK), -float("inf"), tl.float32)
    total = tl.zeros((1, ORDER, BLOCK), tl.float32)
    y = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    psi *= K * K
    beta *= K * K
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, 1)
        k = _map(key + field, key_psi + psi, key_beta + beta, at, inside, d, plane, c, p, SIZE, ORDER, K * K)
        v = k
        if VALUES:
            v = _map(value + field, value_psi + psi, value_beta + beta, at, inside, d, plane, c, p, SIZE, ORDER, K * K)
        s = tl.sum(q * k, 0, keep_dims=True)
        maximum = tl.maximum(running_max, s)
        rescale = tl.exp(running_max - maximum)
        e = tl.exp(s - maximum)
        total = total * rescale + e
        y = y * rescale + e * v
        running_max = maximum
    tl.store(out + field + (c * ORDER + p) * plane + i, y / total, mask=(c < SIZE) & (i < plane))


@triton.jit
def _backward_queries(
    grad, query, key, value, query_psi, query_beta, key_psi, key_beta, value_psi, value_beta,
    mapped, level, mean, grad_query, query_parts, height, width, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, ORDER: tl.constexpr, K: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """By query: the gradients of the queries and of their map, and the inputs of the other two kernels.

    These are the mapped queries, the logarithm of the sum of exponentials (level) and the mean gradient of weights.
    """
    plane = height * width
    head = tl.program_id(0) % HEADS
    field = tl.program_id(0).to(tl.int64) * (SIZE * ORDER) * plane
    psi = head * (SIZE * ORDER * ORDER)
    beta = head * (SIZE * ORDER)
    c = tl.arange(0, CHANNELS)[:, None, None]
    p = tl.arange(0, ORDER)[None, :, None]
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, None, :]
    own = (c < SIZE) & (i < plane)
    q = _map(query + field, query_psi + psi, query_beta + beta, i, i < plane, 0, plane, c, p, SIZE, ORDER, 1) * scale
    g = tl.load(grad + field + (c * ORDER + p) * plane + i, mask=own, other=0.0).to(tl.float32)
    running_max = tl.full((1, ORDER, BLOCK), -float("inf"), tl.float32)
    total = tl.zeros((1, ORDER, BLOCK), tl.float32)
    sum_da = tl.zeros((1, ORDER, BLOCK), tl.float32)
    key_psi_at = psi * (K * K)
    key_beta_at = beta * (K * K)
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, 1)
        k = _map(
            key + field, key_psi + key_psi_at, key_beta + key_beta_at, at, inside, d, plane, c, p, SIZE, ORDER, K * K
        )
        v = k
        if VALUES:
            v = _map(
                value + field,
                value_psi + key_psi_at,
                value_beta + key_beta_at,
                at,
                inside,
                d,
                plane,
                c,
                p,
                SIZE,
                ORDER,
                K * K,
            )
        s = tl.sum(q * k, 0, keep_dims=True)
        maximum = tl.maximum(running_max, s)
        rescale = tl.exp(running_max - maximum)
        e = tl.exp(s - maximum)
        total = total * rescale + e
        sum_da = sum_da * rescale + e * tl.sum(g * v, 0, keep_dims=True)
        running_max = maximum
    log = running_max + tl.log(total)
    mean_da = sum_da / total
    dq = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, 1)
        k = _map(
            key + field, key_psi + key_psi_at, key_beta + key_beta_at, at, inside, d, plane, c, p, SIZE, ORDER, K * K
        )
        v = k
        if VALUES:
            v = _map(
                value + field,
                value_psi + key_psi_at,
                value_beta + key_beta_at,
                at,
                inside,
                d,
                plane,
                c,
                p,
                SIZE,
                ORDER,
                K * K,
            )
        a = tl.exp(tl.sum(q * k, 0, keep_dims=True) - log)
        dq += a * (tl.sum(g * v, 0, keep_dims=True) - mean_da) * k
    dq = tl.where(own, dq * scale, 0.0)
    tl.store(mapped + field + (c * ORDER + p) * plane + i, q, mask=own)
    at_head = tl.program_id(0).to(tl.int64) * ORDER * plane + p * plane + i
    tl.store(level + at_head, log, mask=i < plane)
    tl.store(mean + at_head, mean_da, mask=i < plane)
    # One part a program, (image and head, tile, channel, P, R), the constant behind the elements R.
    parts = query_parts + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (
        SIZE * ORDER * (ORDER + 1)
    )
    to = parts + (c * ORDER + p) * (ORDER + 1)
    tl.store(to + ORDER, tl.sum(dq, 2, keep_dims=True), mask=c < SIZE)
    for r in tl.static_range(ORDER):
        x = tl.load(query + field + (c * ORDER + r) * plane + i, mask=own, other=0.0).to(tl.float32)
        tl.store(to + r, tl.sum(dq * x, 2, keep_dims=True), mask=c < SIZE)
        filters = tl.load(query_psi + psi + (c * ORDER + p) * ORDER + r, mask=c < SIZE, other=0.0).to(tl.float32)
        dx = tl.sum(dq * filters, 1, keep_dims=True)
        tl.store(grad_query + field + (c * ORDER + r) * plane + i, dx, mask=own)


@triton.jit
def _backward_fields(
    grad, key, value, key_psi, key_beta, value_psi, value_beta, mapped, level, mean, grad_key, grad_value,
    height, width,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, ORDER: tl.constexpr, K: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """By neighbor: the gradients of keys and values, gathered from the queries that see the pixel."""
    plane = height * width
    head = tl.program_id(0) % HEADS
    field = tl.program_id(0).to(tl.int64) * (SIZE * ORDER) * plane
    key_psi_at = head * (SIZE * ORDER * ORDER * K * K)
    key_beta_at = head * (SIZE * ORDER * K * K)
    c = tl.arange(0, CHANNELS)[:, None, None]
    p = tl.arange(0, ORDER)[None, :, None]
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, None, :]
    dx = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    dy = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    # psi(c, P, R, d) with all four axes, of which the first two belong to the mapped gradient.
    elements = ((c * ORDER + p) * ORDER)[:, :, None, :] + tl.arange(0, ORDER)[None, None, :, None]
    own = (c < SIZE)[:, :, None, :]
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, -1)
        k = _map(
            key + field, key_psi + key_psi_at, key_beta + key_beta_at, i, i < plane, d, plane, c, p, SIZE, ORDER, K * K
        )
        v = k
        if VALUES:
            v = _map(
                value + field,
                value_psi + key_psi_at,
                value_beta + key_beta_at,
                i,
                i < plane,
                d,
                plane,
                c,
                p,
                SIZE,
                ORDER,
                K * K,
            )
        seen = (c < SIZE) & inside
        q = tl.load(mapped + field + (c * ORDER + p) * plane + at, mask=seen, other=0.0)
        g = tl.load(grad + field + (c * ORDER + p) * plane + at, mask=seen, other=0.0).to(tl.float32)
        at_head = tl.program_id(0).to(tl.int64) * ORDER * plane + p * plane + at
        log = tl.load(level + at_head, mask=inside, other=float("inf"))
        a = tl.exp(tl.sum(q * k, 0, keep_dims=True) - log)
        ds = a * (tl.sum(g * v, 0, keep_dims=True) - tl.load(mean + at_head, mask=inside, other=0.0))
        dk = ds * q
        dv = a * g
        filters = tl.load(key_psi + key_psi_at + elements * (K * K) + d, mask=own, other=0.0).to(tl.float32)
        if VALUES:
            dx += tl.sum(dk[:, :, None, :] * filters, 1)
            filters = tl.load(value_psi + key_psi_at + elements * (K * K) + d, mask=own, other=0.0).to(tl.float32)
            dy += tl.sum(dv[:, :, None, :] * filters, 1)
        else:
            dx += tl.sum((dk + dv)[:, :, None, :] * filters, 1)
    to = field + (c * ORDER + p) * plane + i
    tl.store(grad_key + to, dx, mask=(c < SIZE) & (i < plane))
    if VALUES:
        tl.store(grad_value + to, dy, mask=(c < SIZE) & (i < plane))


@triton.jit
def _backward_maps(
    grad, key, value, key_psi, key_beta, value_psi, value_beta, mapped, level, mean, parts, tiles, items, height, width,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, ORDER: tl.constexpr, K: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """By head, output element and offset: the gradients of psi and beta over a share of the tiles of all images."""
    plane = height * width
    d = tl.program_id(0) % (K * K)
    p = tl.program_id(0) // (K * K) % ORDER
    head = tl.program_id(0) // (K * K * ORDER)
    c = tl.arange(0, CHANNELS)[:, None, None]
    r = tl.arange(0, ORDER)[None, :, None]
    own = c < SIZE
    channel = head * SIZE + c
    to_psi = ((channel * ORDER + p) * ORDER + r) * (K * K) + d
    to_beta = (channel * ORDER + p) * (K * K) + d
    psi = tl.load(key_psi + to_psi, mask=own, other=0.0).to(tl.float32)
    beta = tl.load(key_beta + to_beta, mask=own, other=0.0).to(tl.float32)
    if VALUES:
        psi_v = tl.load(value_psi + to_psi, mask=own, other=0.0).to(tl.float32)
        beta_v = tl.load(value_beta + to_beta, mask=own, other=0.0).to(tl.float32)
    dpsi = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    dbeta = tl.zeros((CHANNELS, 1, BLOCK), tl.float32)
    dpsi_v = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    dbeta_v = tl.zeros((CHANNELS, 1, BLOCK), tl.float32)
    for item in range(tl.program_id(1), items, tl.num_programs(1)):
        i = (item % tiles * BLOCK + tl.arange(0, BLOCK))[None, None, :]
        pair = (item // tiles).to(tl.int64) * HEADS + head
        field = pair * (SIZE * ORDER) * plane
        at, inside = _neighbor(i, d, height, width, K, 1)
        x = tl.load(key + field + (c * ORDER + r) * plane + at, mask=own & inside, other=0.0).to(tl.float32)
        k = beta + tl.sum(x * psi, 1, keep_dims=True)
        v = k
        if VALUES:
            y = tl.load(value + field + (c * ORDER + r) * plane + at, mask=own & inside, other=0.0).to(tl.float32)
            v = beta_v + tl.sum(y * psi_v, 1, keep_dims=True)
        from_query = field + (c * ORDER + p) * plane + i
        q = tl.load(mapped + from_query, mask=own & (i < plane), other=0.0)
        g = tl.load(grad + from_query, mask=own & (i < plane), other=0.0).to(tl.float32)
        at_head = (pair * ORDER + p) * plane + i
        log = tl.load(level + at_head, mask=i < plane, other=float("inf"))
        a = tl.exp(tl.sum(q * k, 0, keep_dims=True) - log)
        ds = a * (tl.sum(g * v, 0, keep_dims=True) - tl.load(mean + at_head, mask=i < plane, other=0.0))
        if VALUES:
            dpsi += ds * q * x
            dbeta += ds * q
            dpsi_v += a * g * y
            dbeta_v += a * g
        else:
            dm = ds * q + a * g
            dpsi += dm * x
            dbeta += dm
    # One part a share: psi of the keys, beta of the keys, and those of the values.
    numbers: tl.constexpr = HEADS * SIZE * ORDER * K * K
    to = parts + tl.program_id(1).to(tl.int64) * (numbers * (ORDER + 1) * (2 if VALUES else 1))
    tl.store(to + to_psi, tl.sum(dpsi, 2, keep_dims=True), mask=own)
    tl.store(to + numbers * ORDER + to_beta, tl.sum(dbeta, 2, keep_dims=True), mask=own)
    if VALUES:
        to += numbers * (ORDER + 1)
        tl.store(to + to_psi, tl.sum(dpsi_v, 2, keep_dims=True), mask=own)
        tl.store(to + numbers * ORDER + to_beta, tl.sum(dbeta_v, 2, keep_dims=True), mask=own)


def _constants(tensors: Sequence[Tensor], kernel_size: int, num_heads: int) -> dict[str, int | bool]:
    _, channels, order, height, width = tensors[0].shape
    size = channels // num_heads
    padded = triton.next_power_of_2(size)
    # Several pixels a thread share its loads of psi; eight numbers of a field a thread stay in registers.
    block = max(16, min(_BLOCK, triton.next_power_of_2(height * width), 1024 // (padded * order)))
    return {
        "HEADS": num_heads,
        "SIZE": size,
        "CHANNELS": padded,
        "ORDER": order,
        "K": kernel_size,
        "VALUES": len(tensors) == 9,
        "BLOCK": block,
        "num_warps": max(1, min(4, padded * order * block // 256)),
    }


def _nine(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Keys and their map once more where there are no values: kernels do not read them."""
    if len(tensors) == 9:
        return [*tensors]
    query, key, *maps = tensors
    return [query, key, key, *maps, *maps[2:]]


@on_own_device
def forward(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    """`eqzoo.ops.affine_attention` of contiguous tensors: queries, keys (and values), then psi and beta of each.

    Args:
        tensors: The six or nine tensors, in float32, float16 or bfloat16.
        kernel_size: The side k of the neighborhood, in pixels, odd.
        num_heads: The number of heads.
        scale: The factor of the scores.

    Returns:
        ``(B, C, |H|, height, width)``.
    """
    query = tensors[0]
    constants = _constants(tensors, kernel_size, num_heads)
    batch, _, _, height, width = query.shape
    out = torch.empty_like(query)
    if out.numel():
        grid = (batch * num_heads, triton.cdiv(height * width, constants["BLOCK"]))
        _forward[grid](*_nine(tensors), out, height, width, scale, **constants)
    return out


@on_own_device
def backward(grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> list[Tensor]:
    """The gradients of all tensors of `forward`, in their order.

    Args:
        grad: The gradient of the output, contiguous.
        tensors: As `forward`.
        kernel_size: As `forward`.
        num_heads: As `forward`.
        scale: As `forward`.

    Returns:
        Six or nine gradients.
    """
    query, key, value, query_psi, query_beta, *maps = _nine(tensors)
    batch, channels, order, height, width = query.shape
    grads = [torch.zeros_like(t) if not query.numel() else torch.empty_like(t) for t in tensors]
    if not query.numel():
        return grads
    constants = _constants(tensors, kernel_size, num_heads)
    fields = len(tensors) // 3
    tiles = triton.cdiv(height * width, constants["BLOCK"])
    mapped = torch.empty_like(query, dtype=torch.float32)
    level, mean = mapped.new_empty(2, batch, num_heads, order, height, width)
    query_parts = mapped.new_empty(batch, num_heads, tiles, channels // num_heads, order, order + 1)
    grid = (batch * num_heads, tiles)
    _backward_queries[grid](
        grad, query, key, value, query_psi, query_beta, *maps, mapped, level, mean, grads[0], query_parts,
        height, width, scale, **constants,
    )  # fmt: skip
    of_fields = constants
    if constants["CHANNELS"] * order**2 * constants["BLOCK"] > 4096:  # the products with psi spill with 4 warps
        of_fields = constants | {"num_warps": 8}
    _backward_fields[grid](
        grad, key, value, *maps, mapped, level, mean, grads[1], grads[fields - 1], height, width, **of_fields
    )
    offsets = kernel_size**2
    programs = num_heads * order * offsets
    shares = max(1, min(batch * tiles, _PROGRAMS // programs))
    parts = mapped.new_empty(shares, fields - 1, channels * order * offsets * (order + 1))
    _backward_maps[(programs, shares)](
        grad, key, value, *maps, mapped, level, mean, parts, tiles, batch * tiles, height, width, **constants
    )
    of_query = query_parts.sum((0, 2)).reshape(channels, order, order + 1)
    grads[fields].copy_(of_query[..., :order].reshape(query_psi.shape))
    grads[fields + 1].copy_(of_query[..., order:].reshape(query_beta.shape))
    for own, place in zip(parts.sum(0), range(fields + 2, len(grads), 2), strict=True):
        grads[place].copy_(own[: grads[place].numel()].reshape(grads[place].shape))
        grads[place + 1].copy_(own[grads[place].numel() :].reshape(grads[place + 1].shape))
    return grads
