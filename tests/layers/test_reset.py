"""Parameters that are drawn anew by `reset_parameters`, as after a construction on the meta device."""

import pytest
import torch
from torch import nn

import eqzoo
from eqzoo.analysis.sizes import weightless
from eqzoo.groups import P4M
from eqzoo.layers import FieldLayerNorm2d, FieldLayerScale2d, OcticLayerNorm, OcticPatchEmbed2d
from eqzoo.layers.octic import OcticResidual
from eqzoo.layers.octic_embed import OcticPosition2d

LAYERS = {
    "norm": lambda: FieldLayerNorm2d(P4M, 4),
    "scale": lambda: FieldLayerScale2d(P4M, 4, 0.1),
    "octic norm": lambda: OcticLayerNorm(16),
    "octic patches": lambda: OcticPatchEmbed2d(3, 16, 4),
    "octic positions": lambda: OcticPosition2d(16, 4),
    "octic scale": lambda: OcticResidual(16, 0.1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_the_meta_device_is_drawn_as_a_new_one(name):
    torch.manual_seed(0)
    new = LAYERS[name]()
    with torch.device("meta"):
        layer = LAYERS[name]()
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 7)
    torch.manual_seed(0)
    layer.reset_parameters()
    for value, expected in zip(layer.parameters(), new.parameters(), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", eqzoo.list_models())
def test_every_layer_with_parameters_can_be_drawn_anew(name):
    for module in weightless(name).modules():
        assert not list(module.parameters(recurse=False)) or hasattr(module, "reset_parameters"), type(module)
