"""Parameters that are drawn anew by `reset_parameters`, as after a construction on the meta device."""

import pytest
import torch

import eqzoo
from eqzoo.analysis.sizes import weightless
from eqzoo.groups import P4M
from eqzoo.layers import FieldLayerNorm2d, FieldLayerScale2d, OcticLayerNorm, OcticPatchEmbed2d
from eqzoo.layers.octic import OcticResidual
from eqzoo.layers.octic_embed import OcticPosition2d

# Layers, with the mean and the deviation of each of their parameters.
LAYERS = {
    "norm": (lambda: FieldLayerNorm2d(P4M, 4), [(1, 0), (0, 0)]),
    "scale": (lambda: FieldLayerScale2d(P4M, 4, 0.1), [(0.1, 0)]),
    "octic norm": (lambda: OcticLayerNorm(16), [(1, 0), (0, 0)]),
    "octic patches": (lambda: OcticPatchEmbed2d(4, 256, 4), [(0, 0.25), (0, 0)]),
    "octic positions": (lambda: OcticPosition2d(256, 4), [(0, 0.02)]),
    "octic scale": (lambda: OcticResidual(16, 0.1), [(0.1, 0)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_the_meta_device_is_drawn_anew(name):
    make, expected = LAYERS[name]
    with torch.device("meta"):
        layer = make()
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    for parameter, (mean, deviation) in zip(layer.parameters(), expected, strict=True):
        assert parameter.mean().item() == pytest.approx(mean, abs=deviation / 5 + 1e-12)
        assert parameter.std().item() == pytest.approx(deviation, rel=0.1, abs=1e-12)


@pytest.mark.parametrize("name", eqzoo.list_models())
def test_every_layer_with_parameters_can_be_drawn_anew(name):
    for module in weightless(name).modules():
        assert not list(module.parameters(recurse=False)) or hasattr(module, "reset_parameters"), type(module)
