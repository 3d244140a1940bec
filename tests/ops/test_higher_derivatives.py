"""Second and third derivatives of the operators whose second derivatives go through formulas."""

import pytest
import torch

from eqzoo.groups import P4, P4M, cyclic
from eqzoo.layers import (
    AffineSelfConv2d,
    AttentiveGroupConv2d,
    AttentiveLiftingConv2d,
    GroupSelfAttention2d,
    InputAttention2d,
    LiftingSelfAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from eqzoo.ops import generated_depthwise, use_backend
from eqzoo.ops.octic import octic_gelu, octic_norm


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (generated_depthwise, ((1, 2, 2, 2, 2), (2, 1, 9, 2), (2, 1, 9), (1, 2, 2, 2, 2))),
        (octic_gelu, ((4, 1, 1, 2), (2, 1, 1, 4))),
        (octic_norm, ((4, 1, 1, 2), (2, 1, 1, 4), (12,), (2,))),
    ],
)
def test_third_derivatives(function, shapes):
    inputs = drawn(*shapes)

    def first(*inputs):
        out = function(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(sum(x.sin().sum() for x in out), inputs, create_graph=True)

    assert torch.autograd.gradgradcheck(first, inputs)
    # Which compares the recorded second derivatives with themselves alone.
    second = [
        torch.autograd.grad(sum(x.square().sum() for x in first(*inputs)), inputs, create_graph=recorded)
        for recorded in (True, False)
    ]
    torch.testing.assert_close(*second)


LAYERS = {
    "affine": lambda: AffineSelfConv2d(P4, 4, 3, num_heads=2),
    "affine, one embedding": lambda: SimpleAffineSelfConv2d(P4, 4, 3, num_heads=2),
    "stand-alone": lambda: StandAloneSelfAttention2d(P4, 4, 3, num_heads=2),
    "group": lambda: GroupSelfAttention2d(P4, 4, 6, 3, num_heads=2),
    "group, everywhere": lambda: GroupSelfAttention2d(P4, 4, 6, "global", num_heads=1),
    "group, dropout": lambda: GroupSelfAttention2d(P4, 4, 6, 3, num_heads=1, attn_drop=0.3),
    "group of eight": lambda: LiftingSelfAttention2d(cyclic(8), 2, 6, 3, num_heads=1),
    "input": lambda: InputAttention2d(P4, 4, "regular", hidden_channels=2, attention_size=3),
    "poses of the input": lambda: InputAttention2d(P4, 4, "regular", "pose", attention_size=3),
    **{
        f"responses, {kind}": lambda kind=kind: AttentiveGroupConv2d(
            P4, 4, 3, 3, attention=kind, hidden_channels=2, attention_size=3
        )
        for kind in ("full", "channel", "spatial", "pose")
    },
    "responses of an image": lambda: AttentiveLiftingConv2d(P4M, 2, 2, 3, attention="full", attention_size=3),
}


def drawn_layer(make):
    """A layer with random weights, and an image or field for it."""
    layer = make()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    lifts = isinstance(layer, AttentiveLiftingConv2d | LiftingSelfAttention2d)
    return layer, torch.randn(2, *([2] if lifts else [4, 4]), 5, 4, requires_grad=True)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_gradient_penalties_of_attention(make):
    """The gradients of a norm of gradients, as training with a penalty needs them, are those of torch's operators."""
    layer, x = drawn_layer(make)

    def penalty():
        torch.manual_seed(1)  # of dropout
        inputs = (x, *layer.parameters())
        (slope,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), inputs, allow_unused=True, materialize_grads=True)

    found = penalty()
    with use_backend("eager"):
        torch.testing.assert_close(found, penalty(), rtol=1e-9, atol=1e-9)
    assert all(gradient.isfinite().all() for gradient in found)
    assert found[0].abs().max() > 1e-6
