"""torch.func differentiates and maps the layers, whose custom operators have no rules for it."""

import pytest
import torch
from torch.autograd import forward_ad

from eqzoo.groups import P4
from eqzoo.layers import E4Layer2d, GroupBatchNorm2d, GroupConv2d, Irreps, OcticBlock
from eqzoo.models import ConvNeXt
from tests.ops.test_higher_derivatives import LAYERS, drawn_layer

LAYERS = LAYERS | {
    "generated": lambda: E4Layer2d(P4, 4, 4, 3),
    "convolution": lambda: GroupConv2d(P4, 4, 2, 3, padding=1),
    "norm": lambda: GroupBatchNorm2d(P4, 4),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_torch_func_differentiates(make):
    layer, x = drawn_layer(make)
    layer.eval()
    expected = torch.autograd.grad(layer(x).sin().sum(), x)[0]
    x, v, step = x.detach(), torch.randn_like(x), 1e-6
    found = torch.func.grad(lambda x: layer(x).sin().sum())(x)
    of_each = torch.func.vmap(torch.func.grad(lambda x: layer(x[None]).sin().sum()))(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(of_each, expected, rtol=1e-9, atol=1e-9)
    y, tangent = torch.func.jvp(layer, (x,), (v,))  # torch would take the tangent behind a custom operator for zero
    torch.testing.assert_close(y, layer(x))
    differences = (layer(x + step * v) - layer(x - step * v)) / (2 * step)
    torch.testing.assert_close(tangent, differences, rtol=1e-5, atol=1e-7)
    assert differences.norm() > 1e-3
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(found, tangent)


def test_torch_func_maps_networks_and_fields_that_are_channels_last():
    nets = [ConvNeXt(P4, planes=(8, 8), depths=(1, 1), num_classes=3).double().eval() for _ in range(2)]
    weights, x = torch.func.stack_module_state(nets), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found = torch.vmap(lambda p, b: torch.func.functional_call(nets[0], (p, b), (x,)))(*weights)
    torch.testing.assert_close(found, torch.stack([net(x) for net in nets]))
    fields = torch.randn(2, 5, 5, 4, 4, dtype=torch.float64).permute(0, 4, 3, 1, 2)
    conv = GroupConv2d(P4, 4, 2, 3, padding=1).double()
    torch.testing.assert_close(torch.vmap(lambda one: conv(one[None])[0])(fields), conv(fields))


def test_torch_func_differentiates_octic_blocks():
    block = OcticBlock(32, 2).double().eval()
    generator = torch.Generator().manual_seed(0)
    ab, e = (torch.randn(n, 1, 4, w, dtype=torch.float64, generator=generator) for n, w in ((4, 4), (2, 8)))

    def loss(ab):
        return sum(part.sin().sum() for part in block(Irreps(ab, e)))

    found = torch.func.grad(loss)(ab)
    ab.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(loss(ab), ab)[0], rtol=1e-9, atol=1e-9)
