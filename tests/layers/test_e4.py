"""Efficient equivariant layers and networks: reference, equivariance, fused forms, and ablations."""

import copy

import pytest
import torch

from eqzoo.equivariance import equivariance_error, equivariance_report, randomize_norms
from eqzoo.groups import P4, P4M, Z2, Z2M, cyclic, dihedral
from eqzoo.layers import E4Layer2d
from eqzoo.models import E4Net, E4ResNet
from tests.layers import reference_e4 as slow
from tests.layers.reference import assert_same_with_gradients

GRID = [Z2, Z2M, cyclic(2), dihedral(2), P4, P4M]
CASES = [
    {"kernel_size": 1, "slices": 1},
    {"kernel_size": 3, "slices": 2, "reduction": 2},
    {"kernel_size": 3, "slices": 4, "reduction": 4},
    {"kernel_size": 5, "slices": 1},
]
# Tables 1 to 3 of the paper: the parameters with the norm of the authors' code and with the tied one. The paper prints
# up to 5 % more than either.
ABLATIONS = [
    ({}, 18_694, 18_118),
    ({"width": 24, "slices": 3}, 40_852, 39_988),
    ({"slices": 1}, 16_144, 15_568),
    ({"slices": 4}, 23_794, 23_218),
    ({"reduction": 2}, 12_838, 12_550),
    ({"reduction": 4}, 9_910, 9_766),
    ({"kernel_size": 3}, 15_430, 14_854),
    ({"kernel_size": 7}, 23_590, 23_014),
]


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def trained_like(model):
    """Gives norms and biases random values."""
    lead = (model.in_channels, model.order) if isinstance(model, E4Layer2d) else (model.in_chans,)
    randomize_norms(model.eval(), torch.Generator().manual_seed(1), torch.randn(2, *lead, 8, 8))
    return model


def small_net(group=P4, **kwargs):
    return trained_like(E4Net(group, **({"width": 4, "kernel_size": 3} | kwargs)))


def small_resnet(**kwargs):
    return trained_like(E4ResNet(**({"depths": (1, 1)} | kwargs)))


# The layer


def layer_and_field(group, case, side=4, out_channels=4):
    layer = trained_like(E4Layer2d(group, 4, out_channels, **case))
    return layer, torch.randn(2, 4, group.order, side, side + 1)


@pytest.mark.parametrize("affine", ["tied", "per_element"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("group", [Z2, Z2M, P4, P4M])
def test_the_layer_is_its_equations(group, case, affine):
    layer, x = layer_and_field(group, case | {"kernel_norm_affine": affine}, side=3, out_channels=8)
    assert_same_with_gradients(layer, x, lambda x: slow.e4_layer(x, layer, group))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("group", GRID[1:])
def test_layers_are_equivariant(group, case):
    layer, x = layer_and_field(group, case, side=6)
    assert layer(x).std() > 1e-3
    assert equivariance_error(layer, x, randomize=True) < 1e-13


def test_the_error_can_be_large():
    """Negative controls: filters that are not transformed, or transformed by the wrong element."""
    layer, x = layer_and_field(P4M, {"kernel_size": 3})
    rows = layer.taps.rows.unflatten(0, (8, -1))
    for planted in (rows[:1].expand(8, -1), rows[[1, 0, 2, 3, 4, 5, 6, 7]], rows[[0, 3, 2, 1, 4, 5, 6, 7]]):
        broken = copy.deepcopy(layer)
        broken.taps.register_table("rows", planted.flatten().numpy())
        assert equivariance_error(broken, x) > 0.1


def test_separate_affine_parameters_for_each_element_break_equivariance():
    layer, x = layer_and_field(P4, {"kernel_size": 3, "kernel_norm_affine": "per_element"})
    assert equivariance_error(layer, x, randomize=True) > 0.01
    assert equivariance_report(layer, x, randomize=True).layers["norm"] > 0.01
    layer.norm.reset_parameters()
    assert equivariance_error(layer, x) < 1e-13  # at initialization they are equal, which hides the error


def test_the_reference_detects_a_wrong_slice_and_a_wrong_norm():
    layer, x = layer_and_field(P4, {"kernel_size": 3, "slices": 2})
    expected = slow.e4_layer(x, layer, P4)
    strided = layer(x)[:, [0, 2, 1, 3]]  # consecutive channels share a filter, not every second one
    assert (strided - expected).abs().max() > 1e-2
    layer.norm.num_groups = 2  # statistics over two fields
    assert (layer(x) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("affine", ["tied", "per_element"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fuse_gives_the_same_map_on_planes(case, affine):
    layer, x = layer_and_field(P4M, case | {"kernel_norm_affine": affine}, out_channels=8)
    layer = layer.to(memory_format=torch.channels_last)
    before = copy.deepcopy(layer.state_dict())
    fused = layer.fuse()
    assert not fused.training
    torch.testing.assert_close(fused(x.flatten(1, 2)), layer(x).flatten(1, 2), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.state_dict(), before)


def test_initialization_has_the_deviation_of_its_fan_in():
    layer = E4Layer2d(P4, 64, 64, kernel_size=3)
    for mix in (layer.hidden, layer.value):
        assert abs(mix.weight.std().item() - (2 / (4 * 64)) ** 0.5) < 2e-3
    lift = E4Net(P4, width=64).stem.conv
    assert abs(lift.weight.std().item() - (2 / 9) ** 0.5) < 0.06


def test_a_single_pixel_of_a_single_image():
    """Its generated filters are those of the norm's biases: one number is normalized to 0."""
    layer, x = E4Layer2d(Z2, 4, 4).eval(), torch.randn(1, 4, 1, 1, 1)
    torch.testing.assert_close(layer(x), layer(torch.cat([x, x]))[:1])


def test_errors_say_what_would_work():
    with pytest.raises(ValueError, match=r"slice_channels must divide all widths, \[6, 12"):
        E4ResNet(width=6, slice_channels=4)
    with pytest.raises(ValueError, match="depths"):
        E4ResNet(depths=(2, 0, 2))
    with pytest.raises(ValueError, match="the nearest sizes that work are 24 x 28 and 28 x 28"):
        small_net()(torch.zeros(1, 1, 27, 28))


# The networks


@pytest.mark.parametrize(("arguments", "released", "tied"), ABLATIONS, ids=str)
def test_counts_of_the_ablations(arguments, released, tied):
    assert count(E4Net(P4, **arguments)) == tied
    assert count(E4Net(P4, **arguments, kernel_norm_affine="per_element")) == released


def test_counts_of_the_released_resnets():
    for group, width, expected in ((P4, 32, 6_343_178), (P4M, 22, 5_809_572)):
        assert count(E4ResNet(group, width, kernel_norm_affine="per_element")) == expected


def test_the_error_of_approximate_networks_is_large():
    """Negative controls: stride 2 on even maps, a norm with parameters per element, and a plain network."""
    x = torch.randn(2, 3, 8, 8)
    assert equivariance_error(small_resnet(width=4, downsample="stride"), x) > 0.01
    assert equivariance_error(small_resnet(width=4, kernel_norm_affine="per_element"), x) > 0.01
    plain = small_resnet(group=Z2, width=4, mechanism="conv", downsample="stride")
    assert equivariance_error(plain, x, P4) > 0.01
    assert equivariance_error(small_resnet(width=4), x) < 1e-12
