"""Affine self convolutions written straight from the equations: loops over elements, positions and offsets.

Only a group's product, inverse and matrices are taken from the package.
"""

import torch

from tests.layers.reference import act


def pointwise(f, weight, bias, group):
    """out(P, x) = Σ_R W(P⁻¹R) f(R, x) + b, with weight read as (C', C, |H|)."""
    weight = weight.reshape(weight.shape[0], -1, group.order)
    poses = []
    for p in group.elements:
        total = 0 if bias is None else bias[:, None, None]
        for r in group.elements:
            matrix = weight[:, :, group.product(group.inverse(p), r)]
            total = total + torch.einsum("oc,bchw->bohw", matrix, f[:, :, r])
        poses.append(total)
    return torch.stack(poses, 2)


def affine_map(f, psi, beta, group, kernel_size):
    """t(P, x, d) = Σ_R f(R, x + d) (P·ψ)(R, d) + (P·β)(d) as a nested dictionary; None is the identity or zero."""
    height, width = f.shape[-2:]
    half = kernel_size // 2
    mapped = {}
    for p in group.elements:
        if psi is not None:
            copies = [act(psi[:, group.product(group.inverse(p), r)], group, p) for r in group.elements]
            filters = torch.stack(copies, 1)  # (C, R, u, v)
        shift = act(beta[:, 0], group, p) if beta is not None else None
        for i in range(height):
            for j in range(width):
                for u in range(kernel_size):
                    for v in range(kernel_size):
                        row, column = i + u - half, j + v - half
                        inside = 0 <= row < height and 0 <= column < width
                        total = f.new_zeros(f.shape[:2])
                        if inside and psi is None:
                            total = f[:, :, p, row, column]
                        elif inside:
                            total = (f[:, :, :, row, column] * filters[:, :, u, v]).sum(2)
                        if shift is not None:
                            total = total + shift[:, u, v]
                        mapped[p, i, j, u, v] = total
    return mapped


def attend(query, key, value, shape, kernel_size, num_heads, factor):
    """out(P, x) = Σ_d softmax_d(factor · Σ_c q(P, x) k(P, x, d)) v(P, x, d) for every head, one after the other."""
    _, channels, order, height, width = shape
    size = channels // num_heads
    offsets = [(u, v) for u in range(kernel_size) for v in range(kernel_size)]
    pixels = []
    for p in range(order):
        for i in range(height):
            for j in range(width):
                for head in range(num_heads):
                    own = slice(head * size, (head + 1) * size)
                    scores = [(query[p, i, j, 0, 0] * key[p, i, j, u, v])[:, own].sum(1) for u, v in offsets]
                    exponentials = [(factor * score).exp() for score in scores]
                    values = [value[p, i, j, u, v][:, own] for u, v in offsets]
                    mixed = sum(e[:, None] * v for e, v in zip(exponentials, values, strict=True))
                    pixels.append(mixed / sum(exponentials)[:, None])
    return torch.stack(pixels, -1).reshape(-1, size, *shape[2:], num_heads).movedim(-1, 1).flatten(1, 2)


def affine_self_conv(f, layer):
    """The general form: an embedding and an affine map each for queries, keys and values."""
    group, k = layer.group, layer.kernel_size
    parts = []
    for conv, own, size in (
        (layer.query, layer.query_map, 1),
        (layer.key, layer.key_map, k),
        (layer.value, layer.value_map, k),
    ):
        parts.append(affine_map(pointwise(f, conv.weight, conv.bias, group), own.psi, own.beta, group, size))
    y = attend(*parts, f.shape, k, layer.num_heads, 1 / layer.channels)
    return pointwise(y, layer.project.weight, None, group)


def simple_affine_self_conv(f, layer):
    """The simple form: one embedding and one map; the query is the map at the center."""
    group, k = layer.group, layer.kernel_size
    embedded = pointwise(f, layer.embed.weight, layer.embed.bias, group)
    mapped = affine_map(embedded, layer.map.psi, layer.map.beta, group, k)
    query = {(p, i, j, 0, 0): t for (p, i, j, u, v), t in mapped.items() if u == v == k // 2}
    y = attend(query, mapped, mapped, f.shape, k, layer.num_heads, 1 / layer.channels)
    return pointwise(y, layer.project.weight, None, group)


def stand_alone_self_attention(f, layer):
    """No filters; keys get e(d), in each head by row in the first half of the channels and by column in the second."""
    group, k, half = layer.group, layer.kernel_size, layer.channels // layer.num_heads // 2
    embedding = f.new_zeros(layer.channels, 1, k, k)
    for head in range(layer.num_heads):
        for c in range(half):
            for u in range(k):
                for v in range(k):
                    embedding[2 * head * half + c, 0, u, v] = layer.rows[head * half + c, 0, u, 0]
                    embedding[(2 * head + 1) * half + c, 0, u, v] = layer.columns[head * half + c, 0, 0, v]
    query, key, value = (
        affine_map(pointwise(f, conv.weight, conv.bias, group), None, beta, group, size)
        for conv, beta, size in ((layer.query, None, 1), (layer.key, embedding, k), (layer.value, None, k))
    )
    y = attend(query, key, value, f.shape, k, layer.num_heads, 1 / layer.channels)
    return pointwise(y, layer.project.weight, None, group)


def squeeze_excite(f, layer):
    """Field by field: a mean over everything, two linear maps, a gate."""
    batch, channels, order, height, width = f.shape
    means = f.new_zeros(batch, channels)
    for h in range(order):
        for i in range(height):
            for j in range(width):
                means = means + f[:, :, h, i, j] / (order * height * width)
    hidden = (means @ layer.reduce.weight.T + layer.reduce.bias).clamp(min=0)
    gates = 1 / (1 + (-(hidden @ layer.expand.weight.T + layer.expand.bias)).exp())
    return torch.stack([f[:, :, h] * gates[:, :, None, None] for h in range(order)], 2)
