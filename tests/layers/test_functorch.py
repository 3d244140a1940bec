"""torch.func differentiates and maps the layers, whose custom operators have no rules for it."""

import pytest
import torch

from eqzoo.groups import P4
from eqzoo.layers import (
    AffineSelfConv2d,
    AttentiveGroupConv2d,
    E4Layer2d,
    GroupConv2d,
    GroupSelfAttention2d,
    InputAttention2d,
    Irreps,
    OcticBlock,
)
from eqzoo.models import ConvNeXt


@pytest.mark.parametrize(
    "layer",
    [
        GroupSelfAttention2d(P4, 4, 6, 3, num_heads=2),
        AffineSelfConv2d(P4, 4, 3, num_heads=2),
        E4Layer2d(P4, 4, 4, 3),
        InputAttention2d(P4, 4),
        AttentiveGroupConv2d(P4, 4, 2, 3, padding=1),
        GroupConv2d(P4, 4, 2, 3, padding=1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_torch_func_differentiates(layer):
    layer = layer.double().eval()
    x = torch.randn(2, 4, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = torch.func.grad(lambda x: layer(x).sin().sum())(x)
    of_each = torch.func.vmap(torch.func.grad(lambda x: layer(x[None]).sin().sum()))(x)
    x.requires_grad_()
    expected = torch.autograd.grad(layer(x).sin().sum(), x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(of_each, expected, rtol=1e-9, atol=1e-9)


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
