"""Triton kernels of affine local attention: scores, softmax and sum in one forward pass, three kernels backward.

Tensors of a program are (channel of the head, element, pixel): pixels are distributed over threads, the rest is in
registers, so that sums over channels and elements need no exchange. Loads are contiguous along the width. No atomic
additions: gradients of fields are gathered, and those of psi and beta are sums over programs in a fixed order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import on_own_device

# For each kernel: about how many numbers of a tensor (channels, elements, pixels) a thread holds, and warps.
_FORWARD = (16, 4)
_FORWARD_CHANNELS = (8, 4)  # of heads of several channels, whose elements are distributed over warps, too
_QUERIES = (8, 4)
_FIELDS = (16, 4)
_MAPS = (32, 4)
_MAX_BLOCK = 1024  # pixels a program
_PROGRAMS = 8192  # for the gradients of psi: several waves on a large GPU


@triton.jit
def _place(plane, BLOCK: tl.constexpr):
    """Which image and heads, and which tile of pixels; only the first axis goes beyond 65,535."""
    tiles = tl.cdiv(plane, BLOCK)
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles


@triton.jit
def _neighbor(i, d, height, width, K: tl.constexpr, SIGN: tl.constexpr):
    """The pixel at offset d from pixels i, or from which they are at offset d (SIGN -1), and whether there is one."""
    down, right = SIGN * (d // K - K // 2), SIGN * (d % K - K // 2)
    row, column = i // width + down, i % width + right
    inside = (i < height * width) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return i + (down * width + right), inside  # contiguous as i, so that threads lie along pixels


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
def _rescale(running_max, s):
    """The factor of the sums so far, exp(s - maximum), and the maximum; one of the first two is 1."""
    above = s > running_max
    small = tl.exp(-tl.abs(s - running_max))
    return tl.where(above, small, 1.0), tl.where(above, 1.0, small), tl.maximum(running_max, s)


@triton.jit(do_not_specialize=["height", "width"])
def _forward(
    query, key, value, query_psi, query_beta, key_psi, key_beta, value_psi, value_beta, out, height, width, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, ORDER: tl.constexpr, K: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = height * width
    pair, tile = _place(plane, BLOCK)
    head = (pair % HEADS).to(tl.int32)
    field = pair * (SIZE * ORDER) * plane
    psi = head * (SIZE * ORDER * ORDER)
    beta = head * (SIZE * ORDER)
    c = tl.arange(0, CHANNELS)[:, None, None]
    p = tl.arange(0, ORDER)[None, :, None]
    i = (tile * BLOCK + tl.arange(0, BLOCK))[None, None, :]
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
        rescale, e, running_max = _rescale(running_max, s)
        total = total * rescale + e
        y = y * rescale + e * v
    tl.store(out + field + (c * ORDER + p) * plane + i, y / total, mask=(c < SIZE) & (i < plane))


@triton.jit(do_not_specialize=["height", "width"])
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
    pair, tile = _place(plane, BLOCK)
    head = (pair % HEADS).to(tl.int32)
    field = pair * (SIZE * ORDER) * plane
    psi = head * (SIZE * ORDER * ORDER)
    beta = head * (SIZE * ORDER)
    c = tl.arange(0, CHANNELS)[:, None, None]
    p = tl.arange(0, ORDER)[None, :, None]
    i = (tile * BLOCK + tl.arange(0, BLOCK))[None, None, :]
    own = (c < SIZE) & (i < plane)
    q = _map(query + field, query_psi + psi, query_beta + beta, i, i < plane, 0, plane, c, p, SIZE, ORDER, 1) * scale
    g = tl.load(grad + field + (c * ORDER + p) * plane + i, mask=own, other=0.0).to(tl.float32)
    running_max = tl.full((1, ORDER, BLOCK), -float("inf"), tl.float32)
    total = tl.zeros((1, ORDER, BLOCK), tl.float32)
    sum_da = tl.zeros((1, ORDER, BLOCK), tl.float32)
    sum_k = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    sum_dak = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    psi_at = psi * (K * K)
    beta_at = beta * (K * K)
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, 1)
        k = _map(key + field, key_psi + psi_at, key_beta + beta_at, at, inside, d, plane, c, p, SIZE, ORDER, K * K)
        v = k
        if VALUES:
            v = _map(
                value + field, value_psi + psi_at, value_beta + beta_at, at, inside, d, plane, c, p, SIZE, ORDER, K * K
            )
        s = tl.sum(q * k, 0, keep_dims=True)
        rescale, e, running_max = _rescale(running_max, s)
        da = e * tl.sum(g * v, 0, keep_dims=True)
        total = total * rescale + e
        sum_da = sum_da * rescale + da
        sum_k = sum_k * rescale + e * k
        sum_dak = sum_dak * rescale + da * k
    log = running_max + tl.log(total)
    mean_da = sum_da / total
    dq = (sum_dak - mean_da * sum_k) / total
    dq = tl.where(own, dq * scale, 0.0)
    tl.store(mapped + field + (c * ORDER + p) * plane + i, q, mask=own)
    at_head = pair * ORDER * plane + p * plane + i
    tl.store(level + at_head, log, mask=i < plane)
    tl.store(mean + at_head, mean_da, mask=i < plane)
    # One part a program, (image and head, tile, channel, P, R), the constant behind the elements R.
    parts = query_parts + tl.program_id(0).to(tl.int64) * (SIZE * ORDER * (ORDER + 1))
    to = parts + (c * ORDER + p) * (ORDER + 1)
    tl.store(to + ORDER, tl.sum(dq, 2, keep_dims=True), mask=c < SIZE)
    for r in tl.static_range(ORDER):
        x = tl.load(query + field + (c * ORDER + r) * plane + i, mask=own, other=0.0).to(tl.float32)
        tl.store(to + r, tl.sum(dq * x, 2, keep_dims=True), mask=c < SIZE)
        filters = tl.load(query_psi + psi + (c * ORDER + p) * ORDER + r, mask=c < SIZE, other=0.0).to(tl.float32)
        dx = tl.sum(dq * filters, 1, keep_dims=True)
        tl.store(grad_query + field + (c * ORDER + r) * plane + i, dx, mask=own)


@triton.jit(do_not_specialize=["height", "width"])
def _backward_fields(
    grad, key, value, key_psi, key_beta, value_psi, value_beta, mapped, level, mean, grad_key, grad_value,
    height, width,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, ORDER: tl.constexpr, K: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """By neighbor: the gradients of keys and values, gathered from the queries that see the pixel."""
    plane = height * width
    pair, tile = _place(plane, BLOCK)
    head = (pair % HEADS).to(tl.int32)
    field = pair * (SIZE * ORDER) * plane
    key_psi_at = head * (SIZE * ORDER * ORDER * K * K)
    key_beta_at = head * (SIZE * ORDER * K * K)
    c = tl.arange(0, CHANNELS)[:, None, None]
    r = tl.arange(0, ORDER)[None, :, None]
    i = (tile * BLOCK + tl.arange(0, BLOCK))[None, None, :]
    own = c < SIZE
    to = field + (c * ORDER + r) * plane + i
    x = tl.load(key + to, mask=own & (i < plane), other=0.0).to(tl.float32)
    dx = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    if VALUES:
        y = tl.load(value + to, mask=own & (i < plane), other=0.0).to(tl.float32)
        dy = tl.zeros((CHANNELS, ORDER, BLOCK), tl.float32)
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, -1)
        for p in range(ORDER):
            filters = ((c * ORDER + p) * ORDER + r) * (K * K) + d
            offset = (c * ORDER + p) * (K * K) + d
            psi = tl.load(key_psi + key_psi_at + filters, mask=own, other=0.0).to(tl.float32)
            k = tl.load(key_beta + key_beta_at + offset, mask=own, other=0.0).to(tl.float32)
            k += tl.sum(x * psi, 1, keep_dims=True)
            v = k
            if VALUES:
                psi_v = tl.load(value_psi + key_psi_at + filters, mask=own, other=0.0).to(tl.float32)
                v = tl.load(value_beta + key_beta_at + offset, mask=own, other=0.0).to(tl.float32)
                v += tl.sum(y * psi_v, 1, keep_dims=True)
            from_query = field + (c * ORDER + p) * plane + at
            q = tl.load(mapped + from_query, mask=own & inside, other=0.0)
            g = tl.load(grad + from_query, mask=own & inside, other=0.0).to(tl.float32)
            at_head = (pair * ORDER + p) * plane + at
            log = tl.load(level + at_head, mask=inside, other=float("inf"))
            a = tl.exp(tl.sum(q * k, 0, keep_dims=True) - log)
            ds = a * (tl.sum(g * v, 0, keep_dims=True) - tl.load(mean + at_head, mask=inside, other=0.0))
            if VALUES:
                dx += ds * q * psi
                dy += a * g * psi_v
            else:
                dx += (ds * q + a * g) * psi
    tl.store(grad_key + to, dx, mask=own & (i < plane))
    if VALUES:
        tl.store(grad_value + to, dy, mask=own & (i < plane))


@triton.jit(do_not_specialize=["height", "width"])
def _backward_maps(
    grad, key, value, key_psi, key_beta, value_psi, value_beta, mapped, level, mean, parts, tiles, items, height, width,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, ORDER: tl.constexpr, K: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """By head, some output elements and offset: the gradients of psi and beta over a share of the tiles of all images.

    Tensors are (channel of the head, output element, input element, pixel).
    """
    plane = height * width
    d = tl.program_id(0) % (K * K)
    part = tl.program_id(0) // (K * K) % (ORDER // OUTPUTS)
    head = tl.program_id(0) // (K * K * (ORDER // OUTPUTS))
    c = tl.arange(0, CHANNELS)[:, None, None, None]
    p = part * OUTPUTS + tl.arange(0, OUTPUTS)[None, :, None, None]
    r = tl.arange(0, ORDER)[None, None, :, None]
    own = c < SIZE
    channel = head * SIZE + c
    to_psi = ((channel * ORDER + p) * ORDER + r) * (K * K) + d
    to_beta = (channel * ORDER + p) * (K * K) + d
    psi = tl.load(key_psi + to_psi, mask=own, other=0.0).to(tl.float32)
    beta = tl.load(key_beta + to_beta, mask=own, other=0.0).to(tl.float32)
    dpsi = tl.zeros((CHANNELS, OUTPUTS, ORDER, BLOCK), tl.float32)
    dbeta = tl.zeros((CHANNELS, OUTPUTS, 1, BLOCK), tl.float32)
    if VALUES:
        psi_v = tl.load(value_psi + to_psi, mask=own, other=0.0).to(tl.float32)
        beta_v = tl.load(value_beta + to_beta, mask=own, other=0.0).to(tl.float32)
        dpsi_v = tl.zeros((CHANNELS, OUTPUTS, ORDER, BLOCK), tl.float32)
        dbeta_v = tl.zeros((CHANNELS, OUTPUTS, 1, BLOCK), tl.float32)
    for item in range(tl.program_id(1), items, tl.num_programs(1)):
        i = (item % tiles * BLOCK + tl.arange(0, BLOCK))[None, None, None, :]
        pair = (item // tiles).to(tl.int64) * HEADS + head
        field = pair * (SIZE * ORDER) * plane
        at, inside = _neighbor(i, d, height, width, K, 1)
        x = tl.load(key + field + (c * ORDER + r) * plane + at, mask=own & inside, other=0.0).to(tl.float32)
        k = beta + tl.sum(x * psi, 2, keep_dims=True)
        v = k
        if VALUES:
            y = tl.load(value + field + (c * ORDER + r) * plane + at, mask=own & inside, other=0.0).to(tl.float32)
            v = beta_v + tl.sum(y * psi_v, 2, keep_dims=True)
        from_query = field + (c * ORDER + p) * plane + i
        q = tl.load(mapped + from_query, mask=own & (i < plane), other=0.0)
        g = tl.load(grad + from_query, mask=own & (i < plane), other=0.0).to(tl.float32)
        at_head = (pair * ORDER + p) * plane + i
        log = tl.load(level + at_head, mask=i < plane, other=float("inf"))
        a = tl.exp(tl.sum(q * k, 0, keep_dims=True) - log)
        ds = a * (tl.sum(g * v, 0, keep_dims=True) - tl.load(mean + at_head, mask=i < plane, other=0.0))
        dm = ds * q
        if VALUES:
            dv = a * g
            dpsi_v += dv * y
            dbeta_v += dv
        else:
            dm += a * g
        dpsi += dm * x
        dbeta += dm
    # One part a share: psi of the keys, beta of the keys, and those of the values.
    numbers: tl.constexpr = HEADS * SIZE * ORDER * K * K
    to = parts + tl.program_id(1).to(tl.int64) * (numbers * (ORDER + 1) * (2 if VALUES else 1))
    tl.store(to + to_psi, tl.sum(dpsi, 3, keep_dims=True), mask=own)
    tl.store(to + numbers * ORDER + to_beta, tl.sum(dbeta, 3, keep_dims=True), mask=own)
    if VALUES:
        to += numbers * (ORDER + 1)
        tl.store(to + to_psi, tl.sum(dpsi_v, 3, keep_dims=True), mask=own)
        tl.store(to + numbers * ORDER + to_beta, tl.sum(dbeta_v, 3, keep_dims=True), mask=own)


def _constants(tensors: Sequence[Tensor], kernel_size: int, num_heads: int) -> dict[str, int | bool]:
    _, channels, order, _, _ = tensors[0].shape
    size = channels // num_heads
    return {
        "HEADS": num_heads,
        "SIZE": size,
        "CHANNELS": triton.next_power_of_2(size),
        "ORDER": order,
        "K": kernel_size,
        "VALUES": len(tensors) == 9,
    }


def _tile(query: Tensor, num_heads: int, numbers: int, warps: int, split: bool = False) -> dict[str, int]:
    """BLOCK and num_warps, so that a thread has about ``numbers`` of a field of a head.

    They are of whole pixels if it can hold them, or else those of a pixel lie in one warp; with ``split`` in any.
    """
    _, channels, order, height, width = query.shape
    held = triton.next_power_of_2(channels // num_heads) * order
    warps = 1 if held > numbers and not split else warps
    plane = max(16, triton.next_power_of_2(height * width))
    block = min(plane, _MAX_BLOCK, max(1, 32 * warps * numbers // held))
    most = held * block // (32 * numbers) if split else block // 32
    return {"BLOCK": block, "num_warps": max(1, min(warps, most))}


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
    tile = _FORWARD if constants["SIZE"] == 1 else _FORWARD_CHANNELS
    constants |= _tile(query, num_heads, *tile, split=constants["SIZE"] > 1)
    batch, _, _, height, width = query.shape
    out = torch.empty_like(query)
    if out.numel():
        grid = (batch * num_heads * triton.cdiv(height * width, constants["BLOCK"]),)
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
    fields, heads, plane = len(tensors) // 3, batch * num_heads, height * width
    mapped = torch.empty_like(query, dtype=torch.float32)
    level, mean = mapped.new_empty(2, batch, num_heads, order, height, width)
    tile = _tile(query, num_heads, *_QUERIES)
    tiles = triton.cdiv(plane, tile["BLOCK"])
    query_parts = mapped.new_empty(batch, num_heads, tiles, channels // num_heads, order, order + 1)
    _backward_queries[(heads * tiles,)](
        grad, query, key, value, query_psi, query_beta, *maps, mapped, level, mean, grads[0], query_parts,
        height, width, scale, **constants, **tile,
    )  # fmt: skip
    tile = _tile(query, num_heads, *_FIELDS)
    _backward_fields[(heads * triton.cdiv(plane, tile["BLOCK"]),)](
        grad, key, value, *maps, mapped, level, mean, grads[1], grads[fields - 1], height, width, **constants, **tile
    )
    held = constants["CHANNELS"] * order
    outputs = max(1, min(order, _MAPS[0] // held))
    tile = _tile(query, num_heads, min(held, 16), _MAPS[1])
    tiles = triton.cdiv(plane, tile["BLOCK"])
    offsets = kernel_size**2
    programs = num_heads * (order // outputs) * offsets
    shares = max(1, min(batch * tiles, _PROGRAMS // programs))
    parts = mapped.new_empty(shares, fields - 1, channels * order * offsets * (order + 1))
    _backward_maps[(programs, shares)](
        grad, key, value, *maps, mapped, level, mean, parts, tiles, batch * tiles, height, width,
        **constants, **tile, OUTPUTS=outputs,
    )  # fmt: skip
    of_query = query_parts.sum((0, 2)).reshape(channels, order, order + 1)
    grads[fields].copy_(of_query[..., :order].reshape(query_psi.shape))
    grads[fields + 1].copy_(of_query[..., order:].reshape(query_beta.shape))
    for own, place in zip(parts.sum(0), range(fields + 2, len(grads), 2), strict=True):
        grads[place].copy_(own[: grads[place].numel()].reshape(grads[place].shape))
        grads[place + 1].copy_(own[grads[place].numel() :].reshape(grads[place + 1].shape))
    return grads
