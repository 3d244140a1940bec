"""Values that layers and checks would take without a word."""

import math

import pytest
import torch
from torch import nn

import eqzoo
from eqzoo.equivariance import equivariance_report
from eqzoo.groups import P4
from eqzoo.layers import (
    AffineSelfConv2d,
    AttentiveGroupConv2d,
    DepthwiseGroupConv2d,
    E4Layer2d,
    FieldLayerNorm2d,
    FieldLayerScale2d,
    FieldResponseNorm2d,
    GlobalPool,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupLayerNorm2d,
    GroupPool,
    GroupSelfAttention2d,
    GroupSqueezeExcite,
    HalvingPool2d,
    InputAttention2d,
    Irreps,
    LiftingConv2d,
    LiftingDilationSelfAttention2d,
    OcticBlock,
    OcticInvariants,
    OcticLayerNorm,
    OcticResidual,
    PointwiseConv2d,
    SpatialAdaptiveAvgPool2d,
    SpatialPool2d,
)
from eqzoo.layers.octic_embed import OcticPatchEmbed2d, OcticPosition2d


def test_an_attention_dilation_below_one_is_refused():
    for make in (
        lambda d: AttentiveGroupConv2d(P4, 4, 4, 3, padding=1, attention_dilation=d),
        lambda d: InputAttention2d(P4, 4, attention_dilation=d),
    ):
        for dilation in (0, -1):
            with pytest.raises(ValueError, match="dilation of the spatial attention is at least 1 pixel"):
                make(dilation)
    layer = AttentiveGroupConv2d(P4, 2, 2, 3, padding=1)
    layer.attention_dilation = -1  # the operation itself checks it, before a kernel reads beyond the field
    with pytest.raises(ValueError, match="at least 1 pixel, got -1"):
        layer(torch.ones(1, 2, 4, 5, 5))


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
    for make in (OcticLayerNorm, OcticResidual, OcticInvariants, lambda width: OcticPosition2d(width, 4)):
        with pytest.raises(ValueError, match="multiples of 8, got 12"):
            make(12)


def test_powers_of_a_root_are_the_scales_that_they_mean():
    """Of the pixels closer than h k/2 = 3, there are 5 in a row."""
    dense = LiftingDilationSelfAttention2d(3, 6, 3, base=math.sqrt(2), sparse=False)
    assert math.sqrt(2) ** 2 > 2
    assert dense._window(math.sqrt(2) ** 2) == dense._window(2.0) == (5, 1)


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


def test_torch_func_differentiates_octic_blocks():
    block = OcticBlock(32, 2).double().eval()
    generator = torch.Generator().manual_seed(0)
    ab, e = (torch.randn(n, 1, 4, w, dtype=torch.float64, generator=generator) for n, w in ((4, 4), (2, 8)))

    def loss(ab):
        return sum(part.sin().sum() for part in block(Irreps(ab, e)))

    found = torch.func.grad(loss)(ab)
    ab.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(loss(ab), ab)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupConv2d(P4, 4, 4, (3, 3)), r"kernel_size is one whole number, .*, got \(3, 3\)"),
        (lambda: GroupConv2d(P4, 4, 4, 3, padding="same"), "padding is one whole number, .*, got 'same'"),
        (lambda: LiftingConv2d(P4, 1, 4, 3, stride=(2, 2)), r"stride is one whole number, .*, got \(2, 2\)"),
        (lambda: SpatialPool2d(P4, (2, 2)), r"kernel_size is one whole number, .*, got \(2, 2\)"),
        (lambda: DepthwiseGroupConv2d(P4, 4, 7.0), "kernel_size is one whole number, .*, got 7.0"),
        (lambda: AffineSelfConv2d(P4, 8, (5, 5)), r"kernel_size is one whole number, .*, got \(5, 5\)"),
        (
            lambda: E4Layer2d(P4, 4, 4, kernel_size=(5, 5)),
            r"kernel_size is one whole number, .*, got \(5, 5\)",
        ),
        (
            lambda: InputAttention2d(P4, 4, attention_size=(7, 7)),
            r"attention_size is one whole number, .*, got \(7, 7\)",
        ),
        (
            lambda: AttentiveGroupConv2d(P4, 4, 4, 3, attention_dilation=(1, 1)),
            "attention_dilation is one whole number",
        ),
        (
            lambda: AttentiveGroupConv2d(P4, 4, 4, 3, attention_size="7"),
            "attention_size is one whole number, .*, got '7'",
        ),
        (lambda: OcticPatchEmbed2d(3, 16, (16, 16)), r"patch_size is one whole number, .*, got \(16, 16\)"),
        (lambda: OcticPosition2d(16, (14, 14)), r"grid is one whole number, .*, got \(14, 14\)"),
        (lambda: SpatialAdaptiveAvgPool2d((2, 2)), r"output_size is one whole number, .*, got \(2, 2\)"),
        (lambda: GroupSelfAttention2d(P4, 4, 8, num_heads=1.5), "num_heads is a whole number, got 1.5"),
    ],
)
def test_numbers_of_other_types_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


GIVEN_A_GROUP = {
    GroupConv2d: (4, 4, 3),
    LiftingConv2d: (1, 4, 3),
    AttentiveGroupConv2d: (4, 4, 3),
    InputAttention2d: (4,),
    DepthwiseGroupConv2d: (4, 3),
    PointwiseConv2d: (4, 4),
    AffineSelfConv2d: (8,),
    E4Layer2d: (4, 4),
    GroupSelfAttention2d: (4, 8),
    GroupBatchNorm2d: (4,),
    GroupLayerNorm2d: (4,),
    FieldLayerNorm2d: (4,),
    FieldResponseNorm2d: (4,),
    FieldLayerScale2d: (4,),
    GroupSqueezeExcite: (16,),
}


@pytest.mark.parametrize("layer", GIVEN_A_GROUP, ids=lambda layer: layer.__name__)
def test_a_layer_needs_a_group_and_channels(layer):
    layer(P4, *GIVEN_A_GROUP[layer])
    for other in ("p4", None):
        with pytest.raises(TypeError, match=rf"group is an eqzoo\.Group such as eqzoo\.groups\.P4, got {other!r}"):
            layer(other, *GIVEN_A_GROUP[layer])
    with pytest.raises(ValueError, match=r"(channels|num_features) is at least 1, got 0"):
        layer(P4, 0, *GIVEN_A_GROUP[layer][1:])


@pytest.mark.parametrize("layer", GIVEN_A_GROUP, ids=lambda layer: layer.__name__)
def test_a_layer_names_the_field_that_it_takes(layer):
    args = GIVEN_A_GROUP[layer]
    wanted = (args[0], 7, 7) if layer is LiftingConv2d else (args[0], 4, 7, 7)
    shape = ", ".join(map(str, ("B", *wanted[:-2], "height", "width")))
    with pytest.raises(ValueError, match=rf"{layer.__name__}\(p4, .*takes \({shape}\), got \(2, 5, 3, 7, 7\)"):
        layer(P4, *args)(torch.zeros(2, 5, 3, 7, 7))
    with pytest.raises(TypeError, match=r"takes floating point tensors, got torch\.uint8; eqzoo\.data\.normalize"):
        layer(P4, *args)(torch.zeros(2, *wanted, dtype=torch.uint8))


@pytest.mark.parametrize("pool", [GroupPool, GlobalPool, HalvingPool2d])
def test_a_pool_needs_a_group(pool):
    with pytest.raises(TypeError, match="got 'max'"):
        pool("max")
