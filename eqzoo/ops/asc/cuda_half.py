"""Triton kernels of affine attention in half precision, whose affine maps are products of matrices on tensor cores.

A program has the rows (channel of a head, head, element) of some heads, at least 16 together, and a tile of pixels. The
maps of its heads are one block-diagonal matrix of rows x rows for each offset. Products are of float16 or bfloat16
numbers, their sums, scores and weights of float32. No atomic additions, as in `affine_attention`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import on_own_device
from .cuda import _neighbor, _place, _rescale

_ROWS = 16  # of the smallest product of matrices
_MOST_ROWS = 32
# Numbers of a tensor that a thread holds, warps, and stages of the loads, by kernel.
_FORWARD = (16, 1, 3)
_QUERIES = (16, 1, 3)
_FIELDS = (16, 4, 1)
_MAPS = (16, 1, 3)
_PROGRAMS = 8192  # of the gradients of maps: several waves on a large GPU


@triton.jit
def _rows(field, at, mask, ROWS: tl.constexpr):
    """The rows of some pixels, (pixel, row)."""
    return tl.load(field + at[:, None] * ROWS + tl.arange(0, ROWS)[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def _matrix(maps, at, ROWS: tl.constexpr):
    m = tl.arange(0, ROWS)
    return tl.load(maps + at * (ROWS * ROWS) + m[:, None] * ROWS + m[None, :])


@triton.jit
def _constant(beta, at, ROWS: tl.constexpr):
    return tl.load(beta + at * ROWS + tl.arange(0, ROWS))[:, None]


@triton.jit
def _by_channel(x, SIZE: tl.constexpr):
    """Rows as (channel of the head, head and element)."""
    return tl.reshape(x, (SIZE, x.shape[0] // SIZE, x.shape[1]))


@triton.jit
def _map(field, maps, beta, pixels, mask, at, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """m(row, pixel) = beta(row) + sum over r of psi(row, r) f(pixel, r), by channel; ``at`` is offset and group."""
    x = _rows(field, pixels, mask, ROWS)
    return _by_channel(tl.dot(_matrix(maps, at, ROWS), tl.trans(x)) + _constant(beta, at, ROWS), SIZE)


@triton.jit
def _map_gradients(
    grad, mapped, level, mean, k, v, at, mask, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradients of mapped keys and values, (row, pixel), from the queries of some pixels; 0 outside the mask."""
    q = _by_channel(tl.trans(_rows(mapped, at, mask, ROWS)).to(tl.float32), SIZE)
    g = _by_channel(tl.trans(_rows(grad, at, mask, ROWS)).to(tl.float32), SIZE)
    log = _by_channel(tl.trans(_rows(level, at, mask, ROWS // SIZE)), 1)
    mean_da = _by_channel(tl.trans(_rows(mean, at, mask, ROWS // SIZE)), 1)
    a = tl.exp(tl.sum(q * _by_channel(k, SIZE), 0, keep_dims=True) - log)
    ds = a * (tl.sum(g * _by_channel(v, SIZE), 0, keep_dims=True) - mean_da)
    return tl.reshape(ds * q, (ROWS, BLOCK)), tl.reshape(a * g, (ROWS, BLOCK))


@triton.jit
def _forward(
    query, key, value, query_maps, query_beta, key_maps, key_beta, value_maps, value_beta, out, groups, height, width,
    scale, SIZE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = height * width
    pair, tile = _place(plane, BLOCK)
    group = (pair % groups).to(tl.int32)
    field = pair * plane * ROWS
    i = tile * BLOCK + tl.arange(0, BLOCK)
    q = _map(query + field, query_maps, query_beta, i, i < plane, group, ROWS, SIZE) * scale
    q = q.to(out.dtype.element_ty).to(tl.float32)
    running_max = tl.full((1, ROWS // SIZE, BLOCK), -float("inf"), tl.float32)
    total = tl.zeros((1, ROWS // SIZE, BLOCK), tl.float32)
    y = tl.zeros((SIZE, ROWS // SIZE, BLOCK), tl.float32)
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, 1)
        k = _map(key + field, key_maps, key_beta, at, inside, d * groups + group, ROWS, SIZE)
        v = k
        if VALUES:
            v = _map(value + field, value_maps, value_beta, at, inside, d * groups + group, ROWS, SIZE)
        rescale, e, running_max = _rescale(running_max, tl.sum(q * k, 0, keep_dims=True))
        total = total * rescale + e
        y = y * rescale + e * v
    y = tl.trans(tl.reshape(y / total, (ROWS, BLOCK)).to(out.dtype.element_ty))
    tl.store(out + field + i[:, None] * ROWS + tl.arange(0, ROWS)[None, :], y, mask=(i < plane)[:, None])


@triton.jit
def _backward_queries(
    grad, query, key, value, query_maps, query_beta, key_maps, key_beta, value_maps, value_beta,
    mapped, level, mean, grad_query, parts, groups, height, width, scale,
    SIZE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """By query: the gradients of the queries and of their map, and the inputs of the other two kernels."""
    plane = height * width
    pair, tile = _place(plane, BLOCK)
    group = (pair % groups).to(tl.int32)
    field = pair * plane * ROWS
    i = tile * BLOCK + tl.arange(0, BLOCK)
    own = (i < plane)[:, None]
    m = tl.arange(0, ROWS)
    to = field + i[:, None] * ROWS + m[None, :]
    x_query = _rows(query + field, i, i < plane, ROWS)
    map_query = _matrix(query_maps, group, ROWS)
    q = (tl.dot(map_query, tl.trans(x_query)) + _constant(query_beta, group, ROWS)) * scale
    half_q = q.to(mapped.dtype.element_ty)
    tl.store(mapped + to, tl.trans(half_q), mask=own)
    q = _by_channel(half_q.to(tl.float32), SIZE)
    g = _by_channel(tl.trans(_rows(grad + field, i, i < plane, ROWS)).to(tl.float32), SIZE)
    running_max = tl.full((1, ROWS // SIZE, BLOCK), -float("inf"), tl.float32)
    total = tl.zeros((1, ROWS // SIZE, BLOCK), tl.float32)
    sum_da = tl.zeros((1, ROWS // SIZE, BLOCK), tl.float32)
    sum_k = tl.zeros((SIZE, ROWS // SIZE, BLOCK), tl.float32)
    sum_dak = tl.zeros((SIZE, ROWS // SIZE, BLOCK), tl.float32)
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, 1)
        k = _map(key + field, key_maps, key_beta, at, inside, d * groups + group, ROWS, SIZE)
        v = k
        if VALUES:
            v = _map(value + field, value_maps, value_beta, at, inside, d * groups + group, ROWS, SIZE)
        rescale, e, running_max = _rescale(running_max, tl.sum(q * k, 0, keep_dims=True))
        da = e * tl.sum(g * v, 0, keep_dims=True)
        total = total * rescale + e
        sum_da = sum_da * rescale + da
        sum_k = sum_k * rescale + e * k
        sum_dak = sum_dak * rescale + da * k
    mean_da = sum_da / total
    of_heads: tl.constexpr = ROWS // SIZE
    to_heads = pair * plane * of_heads
    to_heads += i[:, None] * of_heads + tl.arange(0, of_heads)[None, :]
    log = tl.reshape(running_max + tl.log(total), (of_heads, BLOCK))
    tl.store(level + to_heads, tl.trans(log), mask=own)
    tl.store(mean + to_heads, tl.trans(tl.reshape(mean_da, (of_heads, BLOCK))), mask=own)
    dq = tl.reshape((sum_dak - mean_da * sum_k) / total * scale, (ROWS, BLOCK))
    dq = tl.where((i < plane)[None, :], dq, 0.0)
    part = parts + tl.program_id(0).to(tl.int64) * (ROWS * (ROWS + 1))
    tl.store(part + ROWS * ROWS + m, tl.sum(dq, 1))
    half = dq.to(grad_query.dtype.element_ty)
    tl.store(part + m[:, None] * ROWS + m[None, :], tl.dot(half, x_query))
    dx = tl.dot(tl.trans(map_query), half).to(grad_query.dtype.element_ty)
    tl.store(grad_query + to, tl.trans(dx), mask=own)


@triton.jit
def _backward_fields(
    grad, key, value, key_maps, key_beta, value_maps, value_beta, mapped, level, mean, grad_key, grad_value,
    groups, height, width,
    SIZE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """By neighbor: the gradients of keys and values, gathered from the queries that see the pixel."""
    plane = height * width
    pair, tile = _place(plane, BLOCK)
    group = (pair % groups).to(tl.int32)
    field = pair * plane * ROWS
    of_heads: tl.constexpr = ROWS // SIZE
    heads = pair * plane * of_heads
    i = tile * BLOCK + tl.arange(0, BLOCK)
    half = grad_key.dtype.element_ty
    x = tl.trans(_rows(key + field, i, i < plane, ROWS))
    dx = tl.zeros((ROWS, BLOCK), tl.float32)
    if VALUES:
        y = tl.trans(_rows(value + field, i, i < plane, ROWS))
        dy = tl.zeros((ROWS, BLOCK), tl.float32)
    for d in range(K * K):
        at, inside = _neighbor(i, d, height, width, K, -1)
        map_key = _matrix(key_maps, d * groups + group, ROWS)
        k = tl.dot(map_key, x) + _constant(key_beta, d * groups + group, ROWS)
        v = k
        if VALUES:
            map_value = _matrix(value_maps, d * groups + group, ROWS)
            v = tl.dot(map_value, y) + _constant(value_beta, d * groups + group, ROWS)
        dk, dv = _map_gradients(
            grad + field, mapped + field, level + heads, mean + heads, k, v, at, inside, ROWS, SIZE, BLOCK
        )
        if VALUES:
            dy = tl.dot(tl.trans(map_value), dv.to(half), dy)
        else:
            dk += dv
        dx = tl.dot(tl.trans(map_key), dk.to(half), dx)
    to = field + i[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(grad_key + to, tl.trans(dx.to(half)), mask=(i < plane)[:, None])
    if VALUES:
        tl.store(grad_value + to, tl.trans(dy.to(half)), mask=(i < plane)[:, None])


@triton.jit
def _backward_maps(
    grad, key, value, key_maps, key_beta, value_maps, value_beta, mapped, level, mean, parts, groups, tiles, items,
    height, width,
    SIZE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """By heads and offset: the gradients of psi and beta over a share of the tiles of all images."""
    plane = height * width
    d = tl.program_id(0) % (K * K)
    group = tl.program_id(0) // (K * K)
    of_heads: tl.constexpr = ROWS // SIZE
    half = key.dtype.element_ty
    map_key = _matrix(key_maps, d * groups + group, ROWS)
    beta = _constant(key_beta, d * groups + group, ROWS)
    dmap = tl.zeros((ROWS, ROWS), tl.float32)
    dbeta = tl.zeros((ROWS, BLOCK), tl.float32)
    if VALUES:
        map_value = _matrix(value_maps, d * groups + group, ROWS)
        beta_value = _constant(value_beta, d * groups + group, ROWS)
        dmap_value = tl.zeros((ROWS, ROWS), tl.float32)
        dbeta_value = tl.zeros((ROWS, BLOCK), tl.float32)
    for item in range(tl.program_id(1), items, tl.num_programs(1)):
        pair = (item // tiles).to(tl.int64) * groups + group
        field, heads = pair * plane * ROWS, pair * plane * of_heads
        i = item % tiles * BLOCK + tl.arange(0, BLOCK)
        at, inside = _neighbor(i, d, height, width, K, 1)
        x = _rows(key + field, at, inside, ROWS)
        k = tl.dot(map_key, tl.trans(x)) + beta
        v = k
        if VALUES:
            y = _rows(value + field, at, inside, ROWS)
            v = tl.dot(map_value, tl.trans(y)) + beta_value
        dk, dv = _map_gradients(
            grad + field, mapped + field, level + heads, mean + heads, k, v, i, i < plane, ROWS, SIZE, BLOCK
        )
        if VALUES:
            dmap_value = tl.dot(dv.to(half), y, dmap_value)
            dbeta_value += dv
        else:
            dk += dv
        dmap = tl.dot(dk.to(half), x, dmap)
        dbeta += dk
    # One part a share: (keys, values), offset, group of heads, and the matrix with the constants behind it.
    m = tl.arange(0, ROWS)
    sets: tl.constexpr = 2 if VALUES else 1
    part = parts + ((tl.program_id(1) * sets * (K * K) + d) * groups + group).to(tl.int64) * (ROWS * (ROWS + 1))
    tl.store(part + m[:, None] * ROWS + m[None, :], dmap)
    tl.store(part + ROWS * ROWS + m, tl.sum(dbeta, 1))
    if VALUES:
        part += K * K * groups * (ROWS * (ROWS + 1))
        tl.store(part + m[:, None] * ROWS + m[None, :], dmap_value)
        tl.store(part + ROWS * ROWS + m, tl.sum(dbeta_value, 1))


def fits(query: Tensor, num_heads: int) -> bool:
    """Whether the kernels take such a field: half precision, and heads that fill products of matrices."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    _, channels, order, _, _ = query.shape
    size = channels // num_heads
    rows = size * order
    together = max(1, _ROWS // rows)
    powers = size & (size - 1) == 0 and order & (order - 1) == 0
    return powers and order > 1 and rows <= _MOST_ROWS and num_heads % together == 0


def _constants(tensors: Sequence[Tensor], kernel_size: int, num_heads: int) -> dict[str, int | bool]:
    _, channels, order, _, _ = tensors[0].shape
    size = channels // num_heads
    together = max(1, _ROWS // (size * order))
    return {"SIZE": size, "ROWS": together * size * order, "K": kernel_size, "VALUES": len(tensors) == 9}


def _tile(query: Tensor, rows: int, numbers: int, warps: int, num_stages: int) -> dict[str, int]:
    """The pixels of a program, so that a thread has so many numbers of a tensor of rows and pixels."""
    pixels = max(8, 32 * numbers // rows)  # of a warp
    plane = max(16, pixels, triton.next_power_of_2(query.shape[3] * query.shape[4]))
    block = min(plane, warps * pixels)
    return {"BLOCK": block, "num_warps": max(1, block // pixels), "num_stages": num_stages}


# Rows are (channel of a head, head, element), so that sums over the channels of a head stay in a thread.


def _grouped(tensor: Tensor, axis: int, size: int, rows: int, order: int) -> Tensor:
    """A view whose axis of channels is (group of heads, channel of a head, head)."""
    return tensor.unflatten(axis, (-1, rows // (size * order), size)).transpose(axis + 1, axis + 2)


def _packed(field: Tensor, size: int, rows: int) -> Tensor:
    """A copy of a field as (image, group of heads, pixel, row)."""
    order = field.shape[2]
    view = _grouped(field, 1, size, rows, order)  # (B, groups, channel, head, |H|, height, width)
    pixels = view.permute(0, 1, 5, 6, 2, 3, 4)
    return pixels.reshape(len(field), -1, field.shape[3] * field.shape[4], rows).contiguous()  # not a view


def _unpacked(packed: Tensor, like: Tensor, size: int) -> Tensor:
    """A field from (image, group of heads, pixel, row), as a view where possible."""
    _, _, order, height, width = like.shape
    rows = packed.unflatten(3, (size, -1, order)).unflatten(2, (height, width))
    return rows.permute(0, 1, 5, 4, 6, 2, 3).reshape(like.shape)


def _diagonal(matrices: Tensor, order: int) -> Tensor:
    """The blocks of ``(offsets, groups, rows, rows)`` as a view, (offsets, groups, |H|, |H|, channel and head)."""
    return matrices.unflatten(3, (-1, order)).unflatten(2, (-1, order)).diagonal(0, 2, 4)


def _matrices(psi: Tensor, dtype: torch.dtype, size: int, rows: int) -> Tensor:
    """The block-diagonal matrices of ``(C, |H|, |H|, offsets)``: (offsets, groups, rows, rows)."""
    order = psi.shape[1]
    blocks = _grouped(psi, 0, size, rows, order).flatten(1, 2).permute(4, 0, 2, 3, 1)
    matrices = torch.zeros(*blocks.shape[:2], rows, rows, dtype=dtype, device=psi.device)
    _diagonal(matrices, order).copy_(blocks)
    return matrices


def _constants_of(beta: Tensor, size: int, rows: int) -> Tensor:
    """``(C, |H|, offsets)`` as (offsets, groups, rows)."""
    return _grouped(beta.float(), 0, size, rows, beta.shape[1]).flatten(1, 3).permute(2, 0, 1).contiguous()


def _to_maps(parts: Tensor, maps: Sequence[Tensor], size: int, rows: int) -> None:
    """Writes gradients of matrices and constants, (offsets, groups, rows · (rows + 1)), to those of the maps."""
    psi, beta = maps
    order = psi.shape[1]
    blocks = _diagonal(parts[..., : rows * rows].unflatten(2, (rows, rows)), order)
    _grouped(psi, 0, size, rows, order).copy_(blocks.permute(1, 4, 2, 3, 0).unflatten(1, (size, -1)))
    constants = parts[..., rows * rows :].unflatten(2, (size, -1, order))
    _grouped(beta, 0, size, rows, order).copy_(constants.permute(1, 2, 3, 4, 0))


def _prepared(tensors: Sequence[Tensor], size: int, rows: int) -> list[Tensor]:
    """Fields, and matrices and constants of their maps; those of keys once more where there are no values."""
    fields = len(tensors) // 3
    packed = [_packed(field, size, rows) for field in tensors[:fields]]
    maps: list[Tensor] = []
    for psi, beta in zip(tensors[fields::2], tensors[fields + 1 :: 2], strict=True):
        maps += [_matrices(psi, tensors[0].dtype, size, rows), _constants_of(beta, size, rows)]
    return [*packed, *maps] if fields == 3 else [*packed, packed[1], *maps, *maps[2:]]


@on_own_device
def forward(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    """As `cuda.forward`, for fields that `fits` accepts, in any layout."""
    query = tensors[0]
    if not query.numel():
        return torch.empty_like(query)
    batch, _, _, height, width = query.shape
    constants = _constants(tensors, kernel_size, num_heads)
    size, rows = constants["SIZE"], constants["ROWS"]
    prepared = _prepared(tensors, size, rows)
    out = torch.empty_like(prepared[0])
    groups, tile = out.shape[1], _tile(query, rows, *_FORWARD)
    grid = (batch * groups * triton.cdiv(height * width, tile["BLOCK"]),)
    _forward[grid](*prepared, out, groups, height, width, scale, **constants, **tile)
    return _unpacked(out, query, size)


@on_own_device
def backward(grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> list[Tensor]:
    """As `cuda.backward`, for fields that `fits` accepts, in any layout."""
    query = tensors[0]
    if not query.numel():
        return [torch.zeros_like(t) for t in tensors]
    batch, _, _, height, width = query.shape
    constants = _constants(tensors, kernel_size, num_heads)
    size, rows = constants["SIZE"], constants["ROWS"]
    packed_query, key, value, *maps = _prepared(tensors, size, rows)
    grad = _packed(grad, size, rows)
    fields, groups, plane = len(tensors) // 3, grad.shape[1], height * width
    numbers = rows * (rows + 1)
    grads = [torch.empty_like(grad) for _ in range(fields)]
    of_maps = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors[fields:]]
    mapped = torch.empty_like(grad)
    level, mean = grad.new_empty(2, batch, groups, plane, rows // size, dtype=torch.float32)
    tile = _tile(query, rows, *_QUERIES)
    tiles = triton.cdiv(plane, tile["BLOCK"])
    parts = level.new_empty(batch, groups, tiles, numbers)
    _backward_queries[(batch * groups * tiles,)](
        grad, packed_query, key, value, *maps, mapped, level, mean, grads[0], parts, groups, height, width, scale,
        **constants, **tile,
    )  # fmt: skip
    _to_maps(parts.sum((0, 2))[None], of_maps[:2], size, rows)
    tile = _tile(query, rows, *_FIELDS)
    _backward_fields[(batch * groups * triton.cdiv(plane, tile["BLOCK"]),)](
        grad, key, value, *maps[2:], mapped, level, mean, grads[1], grads[-1], groups, height, width,
        **constants, **tile,
    )  # fmt: skip
    tile = _tile(query, rows, *_MAPS)
    tiles = triton.cdiv(plane, tile["BLOCK"])
    programs = groups * kernel_size**2
    shares = max(1, min(batch * tiles, _PROGRAMS // programs))
    parts = level.new_empty(shares, fields - 1, kernel_size**2, groups, numbers)
    _backward_maps[(programs, shares)](
        grad, key, value, *maps[2:], mapped, level, mean, parts, groups, tiles, batch * tiles, height, width,
        **constants, **tile,
    )  # fmt: skip
    for own, place in zip(parts.sum(0), range(2, len(of_maps), 2), strict=True):
        _to_maps(own, of_maps[place : place + 2], size, rows)
    return [*(_unpacked(g, query, size) for g in grads), *of_maps]
