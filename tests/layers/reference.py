"""Slow versions written straight from the equations: loops over group elements and positions, no shared code.

Only a group's product, inverse and matrices are taken from the package; their laws are tested on their own.
"""

import torch

from eqzoo.ops import use_backend


def assert_same_with_gradients(layer, x, slow, backends=("auto", "eager", "reference")):
    """The output and the gradients of a layer are those of loops, in each backend."""
    inputs = (x.requires_grad_(), *layer.parameters())
    expected = slow(x)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * direction).sum(), inputs)
    for backend in backends:
        with use_backend(backend):
            y = layer(x)
            found = torch.autograd.grad((y * direction).sum(), inputs)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)
        torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-10)


def act(f, group, g):
    """(g f)(x) = f(g⁻¹ x) on the last two axes, pixel by pixel, with positions counted from the center."""
    height, width = f.shape[-2:]
    matrix = group.matrix(g)
    size = (width, height) if matrix[0, 0] == 0 else (height, width)
    center_in = torch.tensor([(height - 1) / 2, (width - 1) / 2], dtype=torch.float64)
    center_out = torch.tensor([(side - 1) / 2 for side in size], dtype=torch.float64)
    places = {}
    for i in range(height):
        for j in range(width):
            position = torch.tensor([i, j], dtype=torch.float64) - center_in
            places[tuple((matrix @ position + center_out).round().long().tolist())] = f[..., i, j]
    pixels = [places[place] for place in sorted(places)]
    return torch.stack(pixels, -1).reshape(*f.shape[:-2], *size)


def act_regular(f, group, g):
    """(g f)(h, x) = f(g⁻¹ h, g⁻¹ x) with the group axis third from the end."""
    inverse = group.inverse(g)
    return torch.stack([act(f[..., group.product(inverse, h), :, :], group, g) for h in group.elements], -3)


def correlate(f, w, stride, padding, dilation):
    """Σ_c Σ_d f(c, x·stride + d·dilation − padding) w(c, d) for one filter: (B, C, H, W) and (C, k, k)."""
    batch, channels, height, width = f.shape
    padded = f.new_zeros(batch, channels, height + 2 * padding, width + 2 * padding)
    padded[:, :, padding : padding + height, padding : padding + width] = f
    span = dilation * (w.shape[-1] - 1) + 1
    rows, columns = ((side + 2 * padding - span) // stride + 1 for side in (height, width))
    pixels = []
    for i in range(rows):
        for j in range(columns):
            y, x = i * stride, j * stride
            window = padded[:, :, y : y + span : dilation, x : x + span : dilation]
            pixels.append((window * w).sum((1, 2, 3)))
    return torch.stack(pixels, 1).reshape(batch, rows, columns)


def lifting_conv(f, weight, bias, group, stride=1, padding=0, dilation=1):
    """out(h) = f ⋆ (h·ψ) + b."""
    maps = [
        [correlate(f, act(w, group, h), stride, padding, dilation) + b for h in group.elements]
        for w, b in zip(weight, bias, strict=True)
    ]
    return torch.stack([torch.stack(m, 1) for m in maps], 1)


def group_conv(f, weight, bias, group, stride=1, padding=0, dilation=1):
    """out(h) = Σ_h' f(h') ⋆ h·ψ(h⁻¹h') + b, with weight read as (C', C, |H|, k, k)."""
    maps = []
    for w, b in zip(weight.unflatten(1, (-1, group.order)), bias, strict=True):
        poses = []
        for h in group.elements:
            total = b
            for other in group.elements:
                copy = act(w[:, group.product(group.inverse(h), other)], group, h)
                total = total + correlate(f[:, :, other], copy, stride, padding, dilation)
            poses.append(total)
        maps.append(torch.stack(poses, 1))
    return torch.stack(maps, 1)
