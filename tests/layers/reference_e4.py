"""The efficient equivariant layer written straight from its equations: loops over elements, offsets and pixels."""

import torch

from tests.layers import reference
from tests.layers.reference_asc import pointwise


def kernel_norm(f, scale, shift, eps=1e-5):
    """(f − mean)/√(variance + eps) · scale + shift, with one mean and variance for each image and field.

    Scale and shift are (C,), or (C·|H|,) where every element has its own.
    """
    out = torch.zeros_like(f)
    for b in range(f.shape[0]):
        for c in range(f.shape[1]):
            values = f[b, c]
            mean = values.sum() / values.numel()
            variance = ((values - mean) ** 2).sum() / values.numel()
            for h in range(f.shape[2]):
                place = c if len(scale) == f.shape[1] else c * f.shape[2] + h
                out[b, c, h] = (values[h] - mean) / (variance + eps).sqrt() * scale[place] + shift[place]
    return out


def dynamic_depthwise(kernel, value):
    """out(c, h, y, x) = Σ_d K(slice(c), h, d, y, x) V(c, h, y + dy, x + dx), filters (B, s, |H|, k, k, H, W)."""
    slices, k = kernel.shape[1], kernel.shape[3]
    batch, channels, order, height, width = value.shape
    out = value.new_zeros(batch, channels, order, height, width)
    for c in range(channels):
        owner = c // (channels // slices)
        for y in range(height):
            for x in range(width):
                for i in range(k):
                    for j in range(k):
                        row, column = y + i - k // 2, x + j - k // 2
                        if 0 <= row < height and 0 <= column < width:
                            term = kernel[:, owner, :, i, j, y, x] * value[:, c, :, row, column]
                            out[:, c, :, y, x] = out[:, c, :, y, x] + term
    return out


def e4_layer(f, layer, group):
    """out_c(h, x) = Σ_d (h·K)_slice(c)(h, d, x) V_c(h, x + d) with K = W₂ ReLU(norm(W₁ f)) + b."""
    state = dict(layer.named_parameters())
    hidden = pointwise(f, state["hidden.weight"], None, group)
    hidden = kernel_norm(hidden, state["norm.weight"], state["norm.bias"]).relu()
    k, slices = layer.kernel_size, layer.slices
    kernels = []
    for h in group.elements:
        flat = torch.einsum("oc,bcyx->boyx", state["taps.weight"][:, :, 0, 0], hidden[:, :, h])
        flat = flat + state["taps.bias"][:, None, None]
        taps = flat.unflatten(1, (slices, k, k)).movedim((2, 3), (-2, -1))  # offsets last, to be rotated
        kernels.append(reference.act(taps, group, h).movedim((-2, -1), (2, 3)))
    value = pointwise(f, state["value.weight"], None, group)
    return dynamic_depthwise(torch.stack(kernels, 2), value)
