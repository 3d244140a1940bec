"""Fields of other shapes and options that do not exist are errors, and no wrong numbers."""

import pytest
import torch

from eqzoo.groups import P4, cyclic
from eqzoo.layers import (
    AffineSelfConv2d,
    AttentiveGroupConv2d,
    DepthwiseGroupConv2d,
    E4Layer2d,
    FieldLayerNorm2d,
    FieldLayerScale2d,
    GlobalPool,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupLayerNorm2d,
    GroupPool,
    GroupSelfAttention2d,
    GroupSqueezeExcite,
    InputAttention2d,
    LiftingConv2d,
    OcticInvariants,
    OcticLayerNorm,
    OcticPosition2d,
    OcticResidual,
    PointwiseConv2d,
)
from eqzoo.models import AllCNN, ASCResNet, E4ResNet, ResNet44

LAYERS = {
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
    FieldLayerScale2d: (4,),
    GroupSqueezeExcite: (16,),
    GroupPool: (),
    GlobalPool: (),
}


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_layer_names_the_field_that_it_takes(kind):
    args = LAYERS[kind]
    layer, channels = kind(P4, *args), args[0] if args else 2
    shape = (2, channels, 7, 7) if kind is LiftingConv2d else (2, channels, 4, 7, 7)
    layer(torch.zeros(shape))
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(p4.*takes \(B, .*height, width\), got \(2, 5, 3, 7, 7\)"):
        layer(torch.zeros(2, 5, 3, 7, 7))


def test_octic_layers_need_multiples_of_8_channels():
    for make in (OcticLayerNorm, OcticResidual, OcticInvariants, lambda width: OcticPosition2d(width, 4)):
        with pytest.raises(ValueError, match="multiples of 8, got 12"):
            make(12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentiveGroupConv2d(P4, 2, 2, 3, attention="alpha"),
        lambda: InputAttention2d(P4, 2, attention="full"),
        lambda: E4Layer2d(P4, 4, 4, kernel_norm_affine="none"),
        lambda: ASCResNet(middle="lstm"),
        lambda: ASCResNet(downsample="crop"),
        lambda: AllCNN(downsample="max"),
        lambda: ResNet44(depth=1, downsample="max"),
        lambda: E4ResNet(mechanism="attention"),
        lambda: E4ResNet(downsample="blur"),
    ],
)
def test_an_option_that_does_not_exist_is_no_default(make):
    with pytest.raises(KeyError):
        make()


@pytest.mark.parametrize("wrong", [{"out_channels": 3}, {"kernel_size": 4}, {"reduction": 3}], ids=str)
def test_an_e4_layer_is_not_built_with_numbers_that_do_not_fit(wrong):
    E4Layer2d(P4, **{"in_channels": 4, "out_channels": 4})
    with pytest.raises(ValueError, match="kernel_size"):
        E4Layer2d(P4, **{"in_channels": 4, "out_channels": 4} | wrong)


@pytest.mark.parametrize("kind", [GroupConv2d, AttentiveGroupConv2d, AffineSelfConv2d, E4Layer2d])
def test_a_group_that_does_not_map_the_pixel_grid_onto_itself_is_refused(kind):
    with pytest.raises(ValueError, match="r8"):
        kind(cyclic(8), *LAYERS[kind])
