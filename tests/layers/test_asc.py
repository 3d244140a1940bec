"""Affine self convolutions and their ResNets: reference, equivariance, fused forms, and timm's interface."""

import copy

import pytest
import torch
from timm.utils import reparameterize_model

from eqzoo.equivariance import equivariance_error, equivariance_report, randomize_norms
from eqzoo.groups import P4, P4M, Z2, Z2M, cyclic, dihedral
from eqzoo.layers import (
    AffineSelfConv2d,
    GroupConv2d,
    GroupSqueezeExcite,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from eqzoo.models import ASCResNet
from tests.layers import reference_asc
from tests.layers.reference import assert_same_with_gradients

GRID = [Z2, Z2M, cyclic(2), dihedral(2), P4, P4M]
SLOW_FORM = {
    AffineSelfConv2d: reference_asc.affine_self_conv,
    SimpleAffineSelfConv2d: reference_asc.simple_affine_self_conv,
    StandAloneSelfAttention2d: reference_asc.stand_alone_self_attention,
}
TINY = {"depth": 11, "width": 4}
SMALL = TINY | {"num_heads": 2, "kernel_size": 3}


def sizes(middle):
    """The arguments of a small network; those of attention are errors where there is none."""
    return TINY if middle == "conv" else SMALL


def small_layer(kind, group):
    return kind(group, 4, kernel_size=3, num_heads=2), torch.randn(2, 4, group.order, 4, 3)


def trained_like(model, side):
    """A network with random norms and biases, and two images."""
    x = torch.randn(2, model.in_chans, side, side)
    randomize_norms(model.eval(), torch.Generator().manual_seed(0), x)
    return model, x


@pytest.mark.parametrize("kind", SLOW_FORM)
@pytest.mark.parametrize("group", [Z2, Z2M, P4, P4M])
def test_layers_are_their_equations(group, kind):
    layer, x = small_layer(kind, group)
    assert_same_with_gradients(layer, x[:1], lambda x: SLOW_FORM[kind](x, layer))


def test_the_reference_detects_small_deviations():
    """Negative control: a shift counted once for every element, larger scores, one head in place of two."""
    layer, x = small_layer(AffineSelfConv2d, P4)
    expected = reference_asc.affine_self_conv(x, layer)
    shifted, scaled, merged = copy.deepcopy(layer), copy.deepcopy(layer), copy.deepcopy(layer)
    with torch.no_grad():
        shifted.key_map.beta.mul_(4)
    scaled.score_factor *= scaled.num_heads
    merged.num_heads = 1
    for wrong in (shifted, scaled, merged):
        assert (wrong(x) - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("kind", [*SLOW_FORM, GroupSqueezeExcite])
@pytest.mark.parametrize("group", GRID[1:])
def test_layers_are_equivariant(group, kind):
    if kind is GroupSqueezeExcite:
        layer, x = kind(group, 4, 2), torch.randn(2, 4, group.order, 4, 3)
    else:
        layer, x = small_layer(kind, group)
    assert layer(x).std() > 1e-3
    assert equivariance_error(layer, x, randomize=True) < 1e-14


@pytest.mark.parametrize("index", ["psi_index", "beta_index"])
@pytest.mark.parametrize("part", ["key_map", "value_map"])
def test_filters_that_are_not_transformed_break_equivariance(part, index):
    """Negative control: the filters of the identity for all elements."""
    layer, x = small_layer(AffineSelfConv2d, P4)
    own = getattr(layer, part)
    rows = getattr(own, index).unflatten(0, (4, -1))
    own.register_table(index, rows[:1].expand_as(rows).flatten().numpy())
    assert equivariance_error(layer, x) > 1e-2


def test_wrong_query_maps_and_embeddings_break_equivariance():
    """Negative control: query maps with permuted elements, and embeddings that are not transformed."""
    layer, x = small_layer(AffineSelfConv2d, P4)
    planted = layer.query_map.psi_index[[1, 0, 2, 3, *range(4, 16)]]
    layer.query_map.register_table("psi_index", planted.numpy())
    assert equivariance_error(layer, x) > 1e-3
    layer, x = small_layer(StandAloneSelfAttention2d, P4)
    layer.register_table("embedding_index", torch.arange(9).repeat(4).numpy())
    assert equivariance_error(layer, x) > 1e-3


def test_without_queries_it_is_a_depthwise_group_convolution():
    layer, x = small_layer(AffineSelfConv2d, P4)
    with torch.no_grad():
        for zero in (layer.query_map.psi, layer.query_map.beta, layer.value_map.beta, layer.project.weight):
            zero.zero_()
        layer.project.weight[range(4), range(0, 16, 4)] = 1  # the identity element of each field alone
        depthwise = GroupConv2d(P4, 4, 4, 3, padding=1, bias=False)
        depthwise.weight.zero_()
        for c in range(4):
            depthwise.weight[c, 4 * c : 4 * c + 4] = layer.value_map.psi[c] / 9
    torch.testing.assert_close(layer(x), depthwise(layer.value(x)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("group", [Z2, P4M])
def test_squeeze_and_excitation_is_its_equation(group):
    layer, x = GroupSqueezeExcite(group, 4, 2), torch.randn(2, 4, group.order, 3, 4)
    assert_same_with_gradients(layer, x, lambda x: reference_asc.squeeze_excite(x, layer))


def test_errors_say_what_would_work():
    with pytest.raises(ValueError, match="depth is 9n"):
        ASCResNet(P4, depth=18)
    with pytest.raises(ValueError, match="the nearest sizes that work are 16 x 16 and 20 x 20"):
        ASCResNet(P4, **SMALL)(torch.zeros(1, 3, 17, 17))
    for middle, settings in (("conv", {"se_reduction": 64}), ("asc", {"num_heads": 3}), ("sasa", {"num_heads": 4})):
        with pytest.raises(ValueError, match=r"does not divide|are a multiple of"):
            ASCResNet(P4, **TINY | {"middle": middle} | settings)


@pytest.mark.parametrize("middle", ["conv", "sasa", "simple_asc", "asc"])
@pytest.mark.parametrize("group", [Z2, Z2M, P4, P4M])
def test_networks_are_equivariant(group, middle):
    model, x = trained_like(ASCResNet(group, middle=middle, se_reduction=2, **sizes(middle)), 8)
    report = equivariance_report(model, x)
    assert report.largest < 1e-12
    assert set(report.features) == set(group.elements)
    torch.testing.assert_close(reparameterize_model(model)(x), model(x), rtol=1e-9, atol=1e-9)


def test_the_equivariance_error_can_be_large():
    """Negative control: no rotations, strides, and a norm that treats elements differently."""
    model, x = trained_like(ASCResNet(Z2, **SMALL), 8)
    assert equivariance_error(model, x, P4) > 1e-2
    for middle in ("conv", "asc"):
        model, x = trained_like(ASCResNet(P4, middle=middle, downsample="stride", **sizes(middle)), 8)
        assert equivariance_error(model, x) > 1e-2
    model, x = trained_like(ASCResNet(P4, **SMALL), 8)
    norm = model.blocks[0][0].branch.norm2
    norm.register_forward_hook(lambda _, args, y: y * torch.arange(1, 5)[:, None, None])
    assert equivariance_error(model, x) > 1e-2


def test_initialization_is_that_of_the_paper():
    model = ASCResNet(P4, depth=11, width=64, middle="asc")
    convs = [module for module in model.modules() if isinstance(module, GroupConv2d)]
    for conv in convs:
        assert conv.weight.std().item() == pytest.approx((2 / (4 * conv.in_channels)) ** 0.5, rel=0.1)
        assert conv.bias is None or not conv.bias.any()
    for name, value in model.named_parameters():
        if name.endswith(("psi", "beta")):
            assert abs(value.mean()) < 0.5
            assert value.std().item() == pytest.approx(1, abs=0.3)
    for stage in model.blocks:
        for block in stage:
            assert not block.branch.norm3.weight.any()
            assert block.branch.norm1.weight.eq(1).all()


def test_export_with_any_batch():
    model, x = trained_like(ASCResNet(P4, middle="asc", **SMALL), 8)
    net = reparameterize_model(model)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    three = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(program.module()(three), net(three))
