"""The groups that are measured, and devices that are not the CPU."""

import pytest
import torch
from torch import nn

import eqzoo
from eqzoo import viz
from eqzoo.groups import P4, cyclic
from eqzoo.layers import GroupSelfAttention2d, LiftingConv2d


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
