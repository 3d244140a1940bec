"""The groups that are measured, and devices that are not the CPU."""

import pytest
import torch
from torch import nn

import eqzoo
from eqzoo import viz
from eqzoo.groups import P4, cyclic
from eqzoo.layers import (
    AttentiveLiftingConv2d,
    GroupSelfAttention2d,
    Irreps,
    LiftingConv2d,
    OcticLinear,
    OcticPatchEmbed2d,
)


def measures(group):
    """All that compares an image with its copies under a given group, on a small layer of p4."""
    layer, attentive = LiftingConv2d(P4, 1, 2, 3), GroupSelfAttention2d(P4, 6, 6, 3, num_heads=2)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.input_size = (1, 6, 6)
    x, field = torch.randn(1, 1, 6, 6), torch.randn(1, 6, 4, 5, 5)
    return {
        "equivariance_error": lambda: eqzoo.equivariance_error(layer, x, group),
        "check_equivariance": lambda: eqzoo.check_equivariance(network, group),
        "attention": lambda: viz.attention(attentive, field, group=group).error,
        "error_maps": lambda: viz.error_maps(layer, x, group=group).errors,
    }


NAMES = list(measures(P4))


def test_single_layers_on_fields_of_irreps():
    patches, linear = OcticPatchEmbed2d(3, 64, 4), OcticLinear(64, 64)
    x, field = torch.randn(1, 3, 16, 16), Irreps(torch.randn(4, 1, 5, 8), torch.randn(2, 1, 5, 16))
    assert eqzoo.equivariance_error(patches, x, randomize=True) < 1e-14
    assert eqzoo.equivariance_error(linear, field, randomize=True) < 1e-14
    changed = patches.register_forward_hook(lambda module, args, y: Irreps(y.ab + 1, y.e))
    assert eqzoo.equivariance_error(patches, x) > 1e-2
    changed.remove()


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_a_rotation_of_the_grid_proves_nothing(name):
    with pytest.raises(ValueError, match="r3 has only the identity on the pixel grid"):
        measures(cyclic(3))[name]()
    assert eqzoo.equivariance_error(LiftingConv2d(cyclic(1), 1, 2, 3), torch.randn(1, 1, 6, 6)) == 0  # as documented


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_given_by_name_as_well(name):
    torch.manual_seed(1)
    expected = measures(P4)[name]()
    torch.manual_seed(1)
    assert measures("p4")[name]() == expected
    with pytest.raises(TypeError, match="group is an eqzoo"):
        measures(4)[name]()


def test_another_default_device_changes_nothing():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.input_size = (1, 6, 6)
    x, field = torch.randn(1, 1, 6, 6), torch.randn(1, 6, 4, 5, 5)
    window, everywhere = (GroupSelfAttention2d(P4, 6, 6, side, num_heads=2) for side in (3, "global"))
    attentive = AttentiveLiftingConv2d(P4, 1, 2, 3, attention="full")
    computed = {
        "equivariance_error": lambda: eqzoo.equivariance_error(network, group=P4, randomize=True),
        "check": lambda: eqzoo.check_equivariance(network).largest,
        "check of a name": lambda: eqzoo.check_equivariance("p4_cnn").largest,
        "error_maps": lambda: viz.error_maps(network[0], x, group=P4).errors,
        "attention": lambda: viz.attention(window, field).error,
        "attention at a place": lambda: viz.attention(window, field, place=(1, 2)).error,
        "attention without a window": lambda: viz.attention(everywhere, field).error,
        "attention on the responses": lambda: viz.attention(attentive, x[0]).error,
    }
    expected = {name: compute() for name, compute in computed.items()}
    with torch.device("meta"):
        assert {name: compute() for name, compute in computed.items()} == expected


def test_checks_leave_the_random_numbers_of_gpus(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    state = torch.get_rng_state()
    eqzoo.check_equivariance("p4_cnn_w11")
    assert not seeded
    assert torch.equal(torch.get_rng_state(), state)
