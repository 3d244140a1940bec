"""Values that layers and checks would take without a word."""

import math

import pytest
import torch
from torch import nn

import eqzoo
from eqzoo.equivariance import equivariance_report
from eqzoo.groups import P4
from eqzoo.layers import (
    AttentiveGroupConv2d,
    E4Layer2d,
    FieldLayerScale2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupPool,
    GroupSelfAttention2d,
    InputAttention2d,
    LiftingConv2d,
    LiftingDilationSelfAttention2d,
)
from eqzoo.layers.octic_embed import OcticPosition2d


def test_an_attention_dilation_below_one_is_refused():
    for make in (
        lambda d: AttentiveGroupConv2d(P4, 4, 4, 3, padding=1, attention_dilation=d),
        lambda d: InputAttention2d(P4, 4, attention_dilation=d),
    ):
        for dilation in (0, -1):
            with pytest.raises(ValueError, match="attention_dilation"):
                make(dilation)


def test_an_image_without_a_batch_is_not_measured():
    conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"image\[None\]"):
        eqzoo.equivariance_error(conv, torch.rand(3, 8, 8), group="p4")
    assert eqzoo.equivariance_error(conv, torch.rand(1, 3, 8, 8), group="p4") > 0.1
    with pytest.raises(TypeError, match="complex"):
        eqzoo.equivariance_error(LiftingConv2d(P4, 1, 2, 3).to(torch.complex64), torch.rand(1, 1, 8, 8))


class OverPoses(nn.Module):
    """A layer norm with a weight for each pose, which is not equivariant once it is trained."""

    def __init__(self):
        super().__init__()
        self.group = P4
        self.lift = LiftingConv2d(P4, 1, 8, 3)
        self.norm = nn.LayerNorm((8, 4))
        self.pool = GroupPool(P4)

    def forward(self, x):
        x = self.lift(x=x)  # by keyword
        return self.pool(self.norm(x.movedim((1, 2), (-2, -1))).movedim((-2, -1), (1, 2)))


def test_a_layer_norm_over_poses_is_found():
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert eqzoo.equivariance_error(OverPoses(), x) < 1e-12
    assert eqzoo.equivariance_error(OverPoses(), x, randomize=True) > 0.1


class Residual(nn.Module):
    """A branch that starts at zero, and a layer of two inputs."""

    def __init__(self):
        super().__init__()
        self.group = P4
        self.lift = LiftingConv2d(P4, 1, 4, 3)
        self.norm = GroupBatchNorm2d(P4, 4)
        nn.init.zeros_(self.norm.weight)
        self.add = Add()

    def forward(self, x):
        x = self.lift(x)
        return self.add(x, self.norm(x))


class Add(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = P4

    def forward(self, x, y):
        return x + y


def test_branches_of_zeros_and_layers_of_two_inputs_are_passed_over():
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    report = equivariance_report(Residual(), x)
    assert set(report.layers) == {"lift"}
    assert report.largest < 1e-12
    none = Residual()
    none.group = None
    assert eqzoo.equivariance_error(none, x, P4) < 1e-12


def test_shapes_of_small_layers():
    with pytest.raises(ValueError, match="takes"):
        FieldLayerScale2d(P4, 3)(torch.ones(1, 3, 8, 8))
    with pytest.raises(ValueError, match="multiples of 8"):
        OcticPosition2d(12, 4)
    dense = LiftingDilationSelfAttention2d(3, 6, 3, base=math.sqrt(2), sparse=False)
    assert dense._window(2.0000000000000004) == dense._window(2.0) == (5, 1)


@pytest.mark.parametrize(
    "layer",
    [
        GroupSelfAttention2d(P4, 2, 6, 3, num_heads=2),
        E4Layer2d(P4, 4, 4, 3),
        AttentiveGroupConv2d(P4, 2, 2, 3, padding=1),
        GroupConv2d(P4, 2, 2, 3, padding=1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_torch_func_differentiates(layer):
    layer = layer.double().eval()
    channels = 4 if isinstance(layer, E4Layer2d) else 2
    x = torch.randn(2, channels, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = torch.func.grad(lambda x: layer(x).sin().sum())(x)
    x.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(layer(x).sin().sum(), x)[0], rtol=1e-9, atol=1e-9)
