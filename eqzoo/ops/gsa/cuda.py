"""Triton kernels of local group self-attention: a program computes a block of pixels of one head of one image.

Keys are read with all their poses at once, so that the softmax over poses happens in registers; neighbors are visited
one by one, with a running maximum and sum. The backward pass takes three kernels, by query, by key and by tap of the
window. Each program writes results of its own, without atomics: they are deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import on_own_device
from .eager import dropped_below

# How many numbers of a block of all poses and channels a thread holds, for at most 64 of a pixel, and the least pixels
# of a block. With one or two warps most sums over channels and poses are within a thread.
_BLOCKS = {"forward": (32, 8), "queries": (32, 8), "keys": (16, 8), "positions": (16, 8)}
_LOWEST = tl.constexpr(-1e30)  # finite, so that pixels without neighbors give no NaN


@on_own_device
def forward(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    seed: Tensor | None,
    window: tuple[int, int],
    scale: float,
    dropout: float,
) -> Tensor:
    """See `local_group_attention`; all tensors are contiguous."""
    batch, _, heads, channels, _, height, width = qkv.shape
    out = qkv.new_empty(batch, heads, channels, position.shape[1], height, width)
    constants, options = _constants(qkv, position, pose, seed, window, dropout)
    options |= (block := _block("forward", options))
    grid = (batch * heads * triton.cdiv(height * width, block["P"]),)  # only the first axis goes beyond 65,535
    _forward[grid](qkv, *constants, out, scale, **options)
    return out


@on_own_device
def backward(
    grad: Tensor,
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    seed: Tensor | None,
    window: tuple[int, int],
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv, position and pose; that of no pose is empty."""
    batch, _, heads, _, order, height, width = qkv.shape
    coded, outputs, taps = position.shape
    grad_qkv = torch.empty_like(qkv)
    constants, options = _constants(qkv, position, pose, seed, window, dropout)
    total = batch * heads
    queries, keys, positions = (options | _block(name, options) for name in ("queries", "keys", "positions"))
    runs, key_runs = (triton.cdiv(height * width, each["P"]) for each in (queries, keys))
    places = (total, order, outputs, height * width)
    normalizer, delta = (torch.empty(places, dtype=torch.float32, device=qkv.device) for _ in range(2))
    grad_pose = torch.empty(total * runs, options["E"], order, order, dtype=torch.float32, device=qkv.device)
    grad_position = torch.empty(total, coded, outputs, taps, dtype=torch.float32, device=qkv.device)
    given = (grad, qkv, *constants, normalizer, delta)
    _backward_queries[(total * runs, order)](*given, grad_qkv, grad_pose, scale, **queries)
    _backward_keys[(total * key_runs,)](*given, grad_qkv, scale, **keys)
    _backward_positions[(total * taps,)](*given, grad_position, scale, **positions)
    return grad_qkv, grad_position.sum(0).to(position.dtype), grad_pose.sum(0).to(qkv.dtype)


def _constants(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    seed: Tensor | None,
    window: tuple[int, int],
    dropout: float,
) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of all kernels: tensors, with zeros for None, and constants."""
    _, _, heads, channels, order, height, width = qkv.shape
    if seed is None:
        seed = torch.zeros(1, dtype=torch.int64, device=qkv.device)
    options: dict[str, Any] = {"N": heads, "D": channels, "G": order, "V": position.shape[1], "C": position.shape[0]}
    options |= {"E": 0 if pose is None else pose.shape[0], "HEIGHT": height, "WIDTH": width}
    options |= {"ROWS": window[0], "COLUMNS": window[1]}
    options |= {"BOUND": dropped_below(dropout), "KEEP": 1 - dropout}
    d, m, v = (triton.next_power_of_2(size) for size in (channels, order, position.shape[1]))
    options |= {"DD": d, "MM": m, "VV": v}
    return [position, qkv.new_zeros(1) if pose is None else pose, seed], options


def _block(kernel: str, options: dict[str, Any]) -> dict[str, int]:
    """The pixels of a block and the warps of a program."""
    held, fewest = _BLOCKS[kernel]
    size = options["DD"] * max(options["MM"], options["VV"])
    if size > 64:  # registers would be spilled
        held = 16 if size <= 128 else 8
    pixels = max(fewest, min(64, 32 * held // size))
    return {"P": pixels, "num_warps": max(1, min(16, pixels * size // (32 * held)))}


@triton.jit
def _hash(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _survivors(seed, head, g, j, i, m, G: tl.constexpr, TAPS: tl.constexpr, BOUND: tl.constexpr, KEEP: tl.constexpr):
    """`_survivors` of the eager form: 1/KEEP or 0 for each key pose and query pixel, ``(M, P)``."""
    number = tl.load(seed)
    row = ((head.to(tl.int64) * TAPS + j) * G + g) * G + m
    low = _hash((row ^ number).to(tl.uint32))
    high = _hash(low + (number >> 32).to(tl.uint32))
    x = i.to(tl.uint32)[None, :] * 0x9E3779B9 + low[:, None]
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ high[:, None]
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return tl.where(x >= BOUND, 1.0 / KEEP, 0.0)


@triton.jit
def _place(HEIGHT, WIDTH, P: tl.constexpr):
    """The head of an image, a block of its pixels, and how many there are; the blocks of a head follow one another."""
    pixels = HEIGHT * WIDTH
    runs = tl.cdiv(pixels, P)
    return tl.program_id(0) // runs, tl.program_id(0) % runs * P + tl.arange(0, P), pixels


@triton.jit
def _tap(j, i, sign, HEIGHT, WIDTH, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The pixel that tap j of a window shows, or with sign -1 the one whose tap j this is; whether it is there."""
    down, right = sign * (j // COLUMNS - ROWS // 2), sign * (j % COLUMNS - COLUMNS // 2)
    row, column = i // WIDTH + down, i % WIDTH + right
    near = (i < HEIGHT * WIDTH) & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    return i + (down * WIDTH + right), near  # contiguous as i, so that threads lie along pixels


@triton.jit
def _field(part, head, N: tl.constexpr, SIZE):
    """Where queries, keys or values of a head begin in qkv."""
    return ((head // N * 3 + part) * N + head % N).to(tl.int64) * SIZE


@triton.jit
def _query(base, g, c, i, near, scale, D: tl.constexpr, G: tl.constexpr, PIXELS):
    """One pose at some pixels, ``(D, P)``."""
    at = base + (c[:, None] * G + g) * PIXELS + i[None, :]
    return tl.load(at, mask=(c < D)[:, None] & near[None, :], other=0.0).to(tl.float32) * scale


@triton.jit
def _field_at(base, poses, c, i, near, D: tl.constexpr, ORDER: tl.constexpr, PIXELS):
    """All poses at some pixels, ``(poses, D, P)``."""
    at = base + (c[None, :, None] * ORDER + poses[:, None, None]) * PIXELS + i[None, None, :]
    mask = (poses < ORDER)[:, None, None] & (c < D)[None, :, None] & near[None, None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _codes(position, v, c, j, V: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr):
    """Codes of a tap, ``(V, D)``, with zeros for channels that are not compared with positions."""
    at = position + (c[None, :] * V + v[:, None]) * TAPS + j
    return tl.load(at, mask=(v < V)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _poses(pose, g, m, c, D: tl.constexpr, G: tl.constexpr, E: tl.constexpr):
    """Codes of the poses of keys, ``(M, D)``, with zeros for channels that are not compared with poses."""
    e = c - (D - E)
    at = pose + (e[None, :] * G + g) * G + m[:, None]
    return tl.load(at, mask=(m < G)[:, None] & ((e >= 0) & (e < E))[None, :], other=0.0).to(tl.float32)


@triton.jit
def _bias(query, pose, g, m, c, D: tl.constexpr, G: tl.constexpr, E: tl.constexpr):
    """What of the scores no place changes, ``(M, P)``; the poses that fill up a power of two get no weight."""
    padding = tl.where(m < G, 0.0, _LOWEST)[:, None]
    if E == 0:
        return tl.broadcast_to(padding, [m.shape[0], query.shape[1]])
    return padding + tl.sum(_poses(pose, g, m, c, D, G, E)[:, :, None] * query[None, :, :], axis=1)


@triton.jit
def _attend(query, key, codes, bias, near):
    """E, its sum over poses, and placed + top, from which the probabilities of a place follow."""
    shared = tl.sum(query[None, :, :] * key, axis=1) + bias
    top = tl.max(shared, axis=0)
    weights = tl.exp(shared - top[None, :])
    score = tl.sum(codes[:, :, None] * query[None, :, :], axis=1) + top[None, :]
    return weights, tl.sum(weights, axis=0), tl.where(near[None, :], score, _LOWEST)


@triton.jit
def _out(
    qkv, position, bias, seed, query, head, g, v, m, c, i,
    N: tl.constexpr, D: tl.constexpr, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr, HEIGHT, WIDTH,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BOUND: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """What query pose g adds to the output, ``(V, D, P)``, and the logarithm of its normalizer, ``(V, P)``."""
    pixels = HEIGHT * WIDTH
    keys = qkv + _field(1, head, N, D * G * pixels)
    values = qkv + _field(2, head, N, D * G * pixels)
    highest = tl.full([v.shape[0], i.shape[0]], _LOWEST, tl.float32)
    total = tl.zeros_like(highest)
    out = tl.zeros([v.shape[0], c.shape[0], i.shape[0]], tl.float32)
    for j in range(ROWS * COLUMNS):
        there, near = _tap(j, i, 1, HEIGHT, WIDTH, ROWS, COLUMNS)
        key = _field_at(keys, m, c, there, near, D, G, pixels)
        codes = _codes(position, v, c, j, V, C, ROWS * COLUMNS)
        weights, mass, score = _attend(query, key, codes, bias, near)
        if BOUND > 0:
            weights *= _survivors(seed, head, g, j, i, m, G, ROWS * COLUMNS, BOUND, KEEP)
        value = _field_at(values, m, c, there, near, D, G, pixels)
        mixed = tl.sum(weights[:, None, :] * value, axis=0)
        higher = tl.maximum(highest, score)
        shrink, a = tl.exp(highest - higher), tl.exp(score - higher)
        total = total * shrink + a * mass[None, :]
        out = out * shrink[:, None, :] + a[:, None, :] * mixed[None, :, :]
        highest = higher
    return out / total[:, None, :], highest + tl.log(total)


@triton.jit
def _forward(
    qkv, position, pose, seed, result, scale,
    N: tl.constexpr, D: tl.constexpr, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    HEIGHT, WIDTH, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BOUND: tl.constexpr,
    KEEP: tl.constexpr, DD: tl.constexpr, MM: tl.constexpr, VV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    head, i, pixels = _place(HEIGHT, WIDTH, P)
    c, m, v = tl.arange(0, DD), tl.arange(0, MM), tl.arange(0, VV)
    queries = qkv + _field(0, head, N, D * G * pixels)
    out = tl.zeros([VV, DD, P], tl.float32)
    for g in range(G):
        query = _query(queries, g, c, i, i < pixels, scale, D, G, pixels)
        bias = _bias(query, pose, g, m, c, D, G, E)
        part, _ = _out(qkv, position, bias, seed, query, head, g, v, m, c, i, N, D, G, V, C, HEIGHT, WIDTH, ROWS,
                       COLUMNS, BOUND, KEEP)  # fmt: skip
        out += part
    at = head.to(tl.int64) * D * V * pixels + (c[None, :, None] * V + v[:, None, None]) * pixels + i[None, None, :]
    mask = (v < V)[:, None, None] & (c < D)[None, :, None] & (i < pixels)[None, None, :]
    tl.store(result + at, out, mask=mask)


@triton.jit
def _backward_queries(
    grad, qkv, position, pose, seed, normalizers, deltas, grad_qkv, grad_pose, scale,
    N: tl.constexpr, D: tl.constexpr, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    HEIGHT, WIDTH, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BOUND: tl.constexpr,
    KEEP: tl.constexpr, DD: tl.constexpr, MM: tl.constexpr, VV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(1)
    head, i, pixels = _place(HEIGHT, WIDTH, P)
    c, m, v = tl.arange(0, DD), tl.arange(0, MM), tl.arange(0, VV)
    own = i < pixels
    field = _field(0, head, N, D * G * pixels)
    query = _query(qkv + field, g, c, i, own, scale, D, G, pixels)
    bias = _bias(query, pose, g, m, c, D, G, E)
    out, normalizer = _out(qkv, position, bias, seed, query, head, g, v, m, c, i, N, D, G, V, C, HEIGHT, WIDTH, ROWS,
                           COLUMNS, BOUND, KEEP)  # fmt: skip
    grad_out = _field_at(grad + head.to(tl.int64) * D * V * pixels, v, c, i, own, D, V, pixels)
    delta = tl.sum(grad_out * out, axis=1)
    # The other kernels need these two; each program writes those of its own queries.
    at = ((head.to(tl.int64) * G + g) * V + v[:, None]) * pixels + i[None, :]
    mask = (v < V)[:, None] & own[None, :]
    tl.store(normalizers + at, normalizer, mask=mask)
    tl.store(deltas + at, delta, mask=mask)

    keys = qkv + _field(1, head, N, D * G * pixels)
    values = qkv + _field(2, head, N, D * G * pixels)
    grad_query = tl.zeros([DD, P], tl.float32)
    grad_bias = tl.zeros([MM, P], tl.float32)
    for j in range(ROWS * COLUMNS):
        there, near = _tap(j, i, 1, HEIGHT, WIDTH, ROWS, COLUMNS)
        key = _field_at(keys, m, c, there, near, D, G, pixels)
        value = _field_at(values, m, c, there, near, D, G, pixels)
        codes = _codes(position, v, c, j, V, C, ROWS * COLUMNS)
        weights, mass, score = _attend(query, key, codes, bias, near)
        a = tl.exp(score - normalizer)
        kept = weights
        if BOUND > 0:
            kept = weights * _survivors(seed, head, g, j, i, m, G, ROWS * COLUMNS, BOUND, KEEP)
        grad_mixed = tl.sum(a[:, None, :] * grad_out, axis=0)
        spread = tl.sum(a * delta, axis=0)
        grad_shared = kept * tl.sum(value * grad_mixed[None, :, :], axis=1) - weights * spread[None, :]
        mixed = tl.sum(kept[:, None, :] * value, axis=0)
        grad_placed = a * (tl.sum(grad_out * mixed[None, :, :], axis=1) - mass[None, :] * delta)
        grad_query += tl.sum(grad_shared[:, None, :] * key, axis=0)
        grad_query += tl.sum(grad_placed[:, None, :] * codes[:, :, None], axis=0)
        grad_bias += grad_shared
    if E > 0:
        codes = _poses(pose, g, m, c, D, G, E)
        grad_query += tl.sum(grad_bias[:, None, :] * codes[:, :, None], axis=0)
        grad_codes = tl.sum(grad_bias[:, None, :] * query[None, :, :], axis=2)
        part = tl.program_id(0).to(tl.int64)
        e = c - (D - E)
        at = ((part * E + e[None, :]) * G + g) * G + m[:, None]
        tl.store(grad_pose + at, grad_codes, mask=(m < G)[:, None] & ((e >= 0) & (e < E))[None, :])
    at = grad_qkv + field + (c[:, None] * G + g) * pixels + i[None, :]
    tl.store(at, grad_query * scale, mask=(c < D)[:, None] & own[None, :])


@triton.jit
def _backward_keys(
    grad, qkv, position, pose, seed, normalizers, deltas, grad_qkv, scale,
    N: tl.constexpr, D: tl.constexpr, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    HEIGHT, WIDTH, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BOUND: tl.constexpr,
    KEEP: tl.constexpr, DD: tl.constexpr, MM: tl.constexpr, VV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    head, i, pixels = _place(HEIGHT, WIDTH, P)
    c, m, v = tl.arange(0, DD), tl.arange(0, MM), tl.arange(0, VV)
    own = i < pixels
    queries = qkv + _field(0, head, N, D * G * pixels)
    grads = grad + head.to(tl.int64) * D * V * pixels
    key = _field_at(qkv + _field(1, head, N, D * G * pixels), m, c, i, own, D, G, pixels)
    value = _field_at(qkv + _field(2, head, N, D * G * pixels), m, c, i, own, D, G, pixels)
    grad_key = tl.zeros([MM, DD, P], tl.float32)
    grad_value = tl.zeros([MM, DD, P], tl.float32)
    for j in range(ROWS * COLUMNS):
        there, near = _tap(j, i, -1, HEIGHT, WIDTH, ROWS, COLUMNS)
        codes = _codes(position, v, c, j, V, C, ROWS * COLUMNS)
        grad_out = _field_at(grads, v, c, there, near, D, V, pixels)
        for g in range(G):
            query = _query(queries, g, c, there, near, scale, D, G, pixels)
            bias = _bias(query, pose, g, m, c, D, G, E)
            weights, _, score = _attend(query, key, codes, bias, near)
            at = ((head.to(tl.int64) * G + g) * V + v[:, None]) * pixels + there[None, :]
            mask = (v < V)[:, None] & near[None, :]
            a = tl.exp(score - tl.load(normalizers + at, mask=mask, other=0.0))
            kept = weights
            if BOUND > 0:
                kept = weights * _survivors(seed, head, g, j, there, m, G, ROWS * COLUMNS, BOUND, KEEP)
            grad_mixed = tl.sum(a[:, None, :] * grad_out, axis=0)
            spread = tl.sum(a * tl.load(deltas + at, mask=mask, other=0.0), axis=0)
            grad_shared = kept * tl.sum(value * grad_mixed[None, :, :], axis=1) - weights * spread[None, :]
            grad_key += grad_shared[:, None, :] * query[None, :, :]
            grad_value += kept[:, None, :] * grad_mixed[None, :, :]
    at = (c[None, :, None] * G + m[:, None, None]) * pixels + i[None, None, :]
    mask = (m < G)[:, None, None] & (c < D)[None, :, None] & own[None, None, :]
    tl.store(grad_qkv + _field(1, head, N, D * G * pixels) + at, grad_key, mask=mask)
    tl.store(grad_qkv + _field(2, head, N, D * G * pixels) + at, grad_value, mask=mask)


@triton.jit
def _backward_positions(
    grad, qkv, position, pose, seed, normalizers, deltas, grad_position, scale,
    N: tl.constexpr, D: tl.constexpr, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    HEIGHT, WIDTH, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BOUND: tl.constexpr,
    KEEP: tl.constexpr, DD: tl.constexpr, MM: tl.constexpr, VV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    pixels = HEIGHT * WIDTH
    head, j = tl.program_id(0) // (ROWS * COLUMNS), tl.program_id(0) % (ROWS * COLUMNS)
    c, m, v = tl.arange(0, DD), tl.arange(0, MM), tl.arange(0, VV)
    queries = qkv + _field(0, head, N, D * G * pixels)
    keys = qkv + _field(1, head, N, D * G * pixels)
    values = qkv + _field(2, head, N, D * G * pixels)
    grads = grad + head.to(tl.int64) * D * V * pixels
    codes = _codes(position, v, c, j, V, C, ROWS * COLUMNS)
    grad_codes = tl.zeros([VV, DD, P], tl.float32)
    for run in range(tl.cdiv(pixels, P)):
        i = run * P + tl.arange(0, P)
        there, near = _tap(j, i, 1, HEIGHT, WIDTH, ROWS, COLUMNS)
        key = _field_at(keys, m, c, there, near, D, G, pixels)
        value = _field_at(values, m, c, there, near, D, G, pixels)
        grad_out = _field_at(grads, v, c, i, near, D, V, pixels)
        for g in range(G):
            query = _query(queries, g, c, i, near, scale, D, G, pixels)
            bias = _bias(query, pose, g, m, c, D, G, E)
            weights, mass, score = _attend(query, key, codes, bias, near)
            at = ((head.to(tl.int64) * G + g) * V + v[:, None]) * pixels + i[None, :]
            mask = (v < V)[:, None] & near[None, :]
            a = tl.exp(score - tl.load(normalizers + at, mask=mask, other=0.0))
            delta = tl.load(deltas + at, mask=mask, other=0.0)
            kept = weights
            if BOUND > 0:
                kept = weights * _survivors(seed, head, g, j, i, m, G, ROWS * COLUMNS, BOUND, KEEP)
            mixed = tl.sum(kept[:, None, :] * value, axis=0)
            grad_placed = a * (tl.sum(grad_out * mixed[None, :, :], axis=1) - mass[None, :] * delta)
            grad_codes += grad_placed[:, None, :] * query[None, :, :]
    at = ((head.to(tl.int64) * C + c[None, :]) * V + v[:, None]) * (ROWS * COLUMNS) + j
    tl.store(grad_position + at, tl.sum(grad_codes, axis=2), mask=(v < V)[:, None] & (c < C)[None, :])
