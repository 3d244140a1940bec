"""Group self-attention written straight from its equations: one softmax for each output pose, query pose and place."""

import itertools
import math

import torch


def coordinates(group, v, shift, unit):
    """A_v⁻¹ (x_j − x_i), in units, from the product of matrix and vector."""
    matrix = group.matrix(group.inverse(v))
    return (matrix @ torch.tensor(shift, dtype=torch.float64)) / unit


def encode(encoder, scalar):
    """Linear, layer norm, swish, linear, of one number."""
    expand, norm, _, project = encoder
    hidden = expand.weight[:, 0] * scalar + expand.bias
    spread = ((hidden - hidden.mean()) ** 2).mean()
    hidden = (hidden - hidden.mean()) / (spread + norm.eps).sqrt() * norm.weight + norm.bias
    return project.weight @ (hidden / (1 + torch.exp(-hidden))) + project.bias


def heads(layer, pixel):
    """Queries, keys and values of one pixel, each (B, heads, d)."""
    y = pixel @ layer.qkv.weight[:, :, 0, 0].T + layer.qkv.bias
    return y.reshape(len(pixel), 3, layer.num_heads, layer.head_channels).unbind(1)


def attend(layer, x, windows, pose_row):
    """Attention of the field x (B, C, |G|, height, width) for all output poses.

    ``windows[v]`` is the list of (shift in pixels, position of that shift); ``pose_row(g, m)`` the code of the pose.
    """
    batch, _, order, height, width = x.shape
    places = list(itertools.product(range(height), range(width)))
    maps = {(g, i): heads(layer, x[:, :, g, i[0], i[1]]) for g in range(order) for i in places}
    d = layer.head_channels // (2 if pose_row is None else 3)
    out = x.new_zeros(batch, layer.num_heads, layer.head_channels, layer.group.order, height, width)
    for v in layer.group.elements:
        codes = {
            shift: torch.cat([encode(layer.position.row, p[0]), encode(layer.position.column, p[1])])
            for shift, p in windows(v)
        }
        for i, g in itertools.product(places, range(order)):
            query = maps[g, i][0]
            scores, values = [], []
            for shift, m in itertools.product(codes, range(order)):
                j = (i[0] + shift[0], i[1] + shift[1])
                if j not in places:
                    continue
                score = (query * maps[m, j][1]).sum(-1) + (query[..., : 2 * d] * codes[shift]).sum(-1)
                if pose_row is not None:
                    score = score + (query[..., 2 * d :] * pose_row(g, m)).sum(-1)
                score = score / math.sqrt(layer.in_channels)
                scores.append(torch.exp(score))
                values.append(maps[m, j][2])
            weights = torch.stack(scores) / torch.stack(scores).sum(0)
            total = (weights[..., None] * torch.stack(values)).sum(0)
            place = torch.zeros(layer.group.order, height, width)
            place[v, i[0], i[1]] = 1
            out = out + total[..., None, None, None] * place
    y = torch.einsum("bpvij,op->bovij", out.flatten(1, 2), layer.proj.weight[:, :, 0, 0])
    return y + layer.proj.bias[:, None, None, None]


def window(group, kernel_size, height, width):
    """The shifts of a neighborhood and their positions, as output pose v sees them."""
    reach = [s - 1 if kernel_size == "global" else kernel_size // 2 for s in (height, width)]
    unit = max(*reach, 1)

    def shifts(v):
        for shift in itertools.product(*(range(-r, r + 1) for r in reach)):
            yield shift, coordinates(group, v, shift, unit)

    return shifts


def lifting_self_attention(layer, x):
    """Equation 14."""
    shifts = window(layer.group, layer.kernel_size, *x.shape[-2:])
    return attend(layer, x[:, :, None], shifts, None)


def group_self_attention(layer, x):
    """Equation 16, with the relative pose g⁻¹ m."""
    group = layer.group
    shifts = window(group, layer.kernel_size, *x.shape[-2:])

    def row(g, m):
        return layer.pose.weight[group.product(group.inverse(g), m)]

    return attend(layer, x, shifts, row)
