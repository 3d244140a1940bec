"""Attentive group convolutions by loops over fields, poses and offsets, and the released networks as released."""

import math

import torch
import torch.nn.functional as F

from tests.layers import reference
from tests.layers.reference import act


def correlate(f, w, stride=1, padding=0, dilation=1):
    """Σ_d f(x·stride + d·dilation − padding) w(d) for maps and a filter without channels: (B, H, W) and (k, k)."""
    return reference.correlate(f[:, None], w[None], stride, padding, dilation)


def sum_over(terms):
    return torch.stack(list(terms)).sum(0)


def perceptron(w1, w2, t):
    """W₂ ReLU(W₁ t) with t as a list over channels of (B,) tensors."""
    hidden = [sum_over(w1[n, c] * t[c] for c in range(len(t))).relu() for n in range(len(w1))]
    return [sum_over(w2[c, n] * hidden[n] for n in range(len(hidden))) for c in range(len(t))]


def attentive_conv(f, layer, stride=1, padding=0, dilation=1, attention_dilation=1):
    """Equations 16 to 19 for `AttentiveLiftingConv2d` and `AttentiveGroupConv2d` with attention on responses."""
    group, attention = layer.group, layer.attention
    regular = f.ndim == 5
    poses = group.order if regular else 1
    f = f if regular else f[:, :, None]
    weight = layer.weight.unflatten(1, (-1, poses))
    fields = []
    for o in range(len(weight)):
        maps = []
        for h in group.elements:
            total = 0 if layer.bias is None else layer.bias[o]
            for other in range(poses):
                place = group.product(group.inverse(h), other) if regular else 0
                copy = act(weight[o, :, place], group, h)
                response = [correlate(f[:, c, other], copy[c], stride, padding, dilation) for c in range(f.shape[1])]
                attended = response
                if attention.reduce is not None:
                    w1, w2 = attention.reduce[o, :, :, place], attention.expand[o, :, :, place]
                    means = perceptron(w1, w2, [r.mean((1, 2)) for r in response])
                    peaks = perceptron(w1, w2, [r.amax((1, 2)) for r in response])
                    alphas = [(mean + peak).sigmoid()[:, None, None] for mean, peak in zip(means, peaks, strict=True)]
                    attended = [a * r for a, r in zip(alphas, response, strict=True)]
                suppressed = attended
                if attention.spatial is not None:
                    psi = act(attention.spatial.unflatten(1, (2, poses))[o, :, place], group, h)
                    reach = attention_dilation * (psi.shape[-1] // 2)
                    stacked = torch.stack(attended)
                    alpha = sum_over(
                        correlate(statistic, psi[i], 1, reach, attention_dilation)
                        for i, statistic in enumerate((stacked.mean(0), stacked.amax(0)))
                    ).sigmoid()
                    suppressed = [alpha * a for a in attended]
                total = total + sum_over(r - s for r, s in zip(response, suppressed, strict=True))
            maps.append(total)
        fields.append(torch.stack(maps, 1))
    return torch.stack(fields, 1)


def group_conv(f, weight, group, padding=0, dilation=1):
    """The group convolution of a field, or the lifting convolution of an image, without a bias."""
    conv = reference.group_conv if f.ndim == 5 else reference.lifting_conv
    return conv(f, weight, torch.zeros(len(weight)), group, 1, padding, dilation)


def attend_input(f, layer):
    """Equation 20 and section 3.4 for `InputAttention2d`."""
    group, regular = layer.group, f.ndim == 5
    attended = statistics = f
    if layer.reduce is not None:
        alpha = 0
        for statistic in (f.mean((-2, -1)), f.amax((-2, -1))):
            if regular:
                hidden = group_conv(statistic[..., None, None], layer.reduce, group).relu()
                alpha = alpha + group_conv(hidden, layer.expand, group)
            else:
                hidden = (statistic @ layer.reduce[:, :, 0, 0].T).relu()
                alpha = alpha + (hidden @ layer.expand[:, :, 0, 0].T)[..., None, None]
        attended = alpha.sigmoid() * f
        statistics = torch.stack((attended.mean(1), attended.amax(1)), 1)
    reach = layer.attention_dilation * (layer.attention_size // 2)
    logits = group_conv(statistics, layer.spatial, group, reach, layer.attention_dilation)
    alpha = logits.sigmoid() if regular else logits.amax(2).sigmoid()
    return f - alpha * attended


# What follows are the released networks: their elements are F^m R^r with F the reflection of the rows.


class Released:
    """The released networks, from their state dicts alone: p4 or p4m, or plain where the filters have no poses."""

    def __init__(self, state, order):
        self.state = {name.removeprefix("module."): value.double() for name, value in state.items()}
        self.order = order
        self.haar = {1: 1.0, 4: math.pi / 2, 8: math.pi}[order]

    def element(self, a):
        return divmod(a, 4)

    def rotated(self, w, a):
        reflected, rotations = self.element(a)
        w = torch.rot90(w, rotations, (-2, -1))
        return w.flip(-2) if reflected else w

    def source(self, a, s):
        """The slot that slot s of a filter or matrix takes under element a."""
        (m, r), (ms, rs) = self.element(a), self.element(s)
        return 4 * (ms ^ m) + ((rs + r) if ms ^ m else (rs - r)) % 4

    def permuted(self, w, a, axis):
        return w.index_select(axis, torch.tensor([self.source(a, s) for s in range(self.order)]))

    def conv(self, x, w):
        if self.order == 1:
            return F.conv2d(x, w)
        if x.ndim == 4:
            return torch.stack([F.conv2d(x, self.rotated(w, a)) for a in range(self.order)], 2)
        maps = [
            F.conv2d(x.flatten(1, 2), self.rotated(self.permuted(w, a, 2), a).flatten(1, 2)) for a in range(self.order)
        ]
        return self.haar * torch.stack(maps, 2)

    def norm(self, x, name):
        mean, var, weight, bias = (
            self.state[f"{name}.{part}"].reshape(1, -1, *[1] * (x.ndim - 2))
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 2e-5).sqrt() * weight + bias


class ReleasedCNN(Released):
    """The networks for rotated MNIST: plain, full attention, attention on the input."""

    def layer(self, x, name):
        w1 = self.state.get(f"{name}.channel_attention.weight_fc1")
        if w1 is None:
            return self.conv(x, self.state[f"{name}.weight"])
        w2, psi = self.state[f"{name}.channel_attention.weight_fc2"], self.state[f"{name}.spatial_attention.weight"]
        lifting = name == "c1"
        if w1.ndim == (3 if lifting else 4):
            return self.full(x, self.state[f"{name}.weight"], w1, w2, psi)
        return self.conv(self.suppress(x, w1, w2, psi, dilation=4 if lifting else 1), self.state[f"{name}.weight"])

    def full(self, x, w, w1, w2, psi):
        lifting = x.ndim == 4
        if lifting:
            x, w, w1, w2, psi = x[:, :, None], w[:, :, None], w1[..., None], w2[..., None], psi[:, :, None]
        fields = []
        for a in range(self.order):
            # Without poses nothing is permuted.
            wa, w1a, w2a, psia = (
                v if lifting else self.permuted(v, a, axis) for v, axis in ((w, 2), (w1, 3), (w2, 3), (psi, 2))
            )
            wa, psia = self.rotated(wa, a), self.rotated(psia, a)
            maps = []
            for o in range(len(w)):
                total = 0
                for s in range(x.shape[2]):
                    response = torch.cat(
                        [F.conv2d(x[:, c : c + 1, s], wa[o, c, s][None, None]) for c in range(x.shape[1])], 1
                    )
                    alpha = 0
                    for t in (response.mean((2, 3)), response.amax((2, 3))):
                        alpha = alpha + (t @ w1a[o, :, :, s].T).relu() @ w2a[o, :, :, s].T
                    alpha = alpha.sigmoid()[..., None, None]
                    attended = alpha * response
                    stats = torch.stack((attended.mean(1), attended.amax(1)), 1)
                    place = F.conv2d(stats, psia[o, None, :, s], padding=3).sigmoid()
                    total = total + (response * (1 - alpha * place)).sum(1)
                maps.append(total)
            fields.append(torch.stack(maps, 1))
        return torch.stack(fields, 2) * (1 if lifting else self.haar)

    def suppress(self, x, w1, w2, psi, dilation):
        lifting = x.ndim == 4

        def linear(t, w):
            if lifting:
                return t @ w.T
            rows = [(self.permuted(w, a, 2)[None] * t[:, None]).sum((2, 3)) for a in range(self.order)]
            return torch.stack(rows, 2)

        stats = (x.mean((-2, -1)), x.amax((-2, -1)))
        alpha = sum(linear(linear(t, w1).relu(), w2) for t in stats).sigmoid()[..., None, None]
        attended = alpha * x
        stats = torch.stack((attended.mean(1), attended.amax(1)), 1)
        maps = []
        for a in range(self.order):
            kernel = self.rotated(psi if lifting else self.permuted(psi, a, 2), a)
            planes = (stats, kernel) if lifting else (stats.flatten(1, 2), kernel.flatten(1, 2))
            maps.append(F.conv2d(*planes, padding=3 * dilation, dilation=dilation))
        logits = torch.stack(maps, 2)
        logits = logits.amax(2) if lifting else self.haar * logits
        return x * (1 - alpha * logits.sigmoid())

    def __call__(self, x):
        for i in range(1, 7):
            x = self.norm(self.layer(x, f"c{i}"), f"bn{i}").relu()
            if i == 2:
                lead = x.shape[:-2]
                x = F.max_pool2d(x.flatten(1, -3), 2)
                x = x.reshape(*lead, *x.shape[-2:])
        x = self.layer(x, "c7")
        return x.flatten(2).amax(2)


class ReleasedDenseNet(Released):
    """The network for PatchCamelyon."""

    def __call__(self, x):
        x = self.conv(x, self.state["c1.weight"])
        for i in range(5):
            name = f"block_layers.{i}"
            new = self.conv(self.norm(x, f"{name}.bn").relu(), self.state[f"{name}.conv.weight"])
            x = torch.cat((new, x[..., 1:-1, 1:-1]), 1)
            if i < 4:
                name = f"trans_layers.{i}"
                x = self.conv(self.norm(x, f"{name}.bn").relu(), self.state[f"{name}.conv.weight"])
                lead = x.shape[:-2]
                x = F.avg_pool2d(x.flatten(1, 2), 2)
                x = x.reshape(*lead, *x.shape[-2:])
        x = self.conv(self.norm(x, "bn_out").relu(), self.state["c_out.weight"])
        return x.mean((2, 3, 4))
