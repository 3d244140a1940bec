"""Fields with their channels last in memory: the same numbers, gradients among them, and a layout that layers keep."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eqzoo import create_model
from eqzoo.equivariance import randomise_norms
from eqzoo.groups import P4, P4M, Z2
from eqzoo.layers import (
    AffineSelfConv2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupSqueezeExcite,
    HalvingPool2d,
    LiftingConv2d,
    PointwiseConv2d,
    SpatialAdaptiveAvgPool2d,
    SpatialPool2d,
)
from eqzoo.layers._layout import is_channels_last, to_planes

LAYERS = {
    "conv 3": lambda group: GroupConv2d(group, 6, 4, 3, padding=1),
    "conv 1": lambda group: GroupConv2d(group, 6, 4, 1),
    "conv, stride and dilation": lambda group: GroupConv2d(group, 6, 4, 3, stride=2, padding=2, dilation=2, bias=False),
    "norm": lambda group: GroupBatchNorm2d(group, 6),
    "norm, evaluation": lambda group: GroupBatchNorm2d(group, 6).eval(),
    "pointwise": lambda group: PointwiseConv2d(group, 6, 4),
    "max pool": lambda group: SpatialPool2d(group, 3, 2, 1),
    "mean pool": lambda group: SpatialPool2d(group, 3, 2, 1, reduce="avg"),
    "halving pool": lambda group: HalvingPool2d(group),
    "adaptive pool": lambda group: SpatialAdaptiveAvgPool2d(2),
    "squeeze and excitation": lambda group: GroupSqueezeExcite(group, 6, 2),
    "self convolution": lambda group: AffineSelfConv2d(group, 6, 3, num_heads=3),
}


def field(group, height=7, width=5):
    """A field, and the same one with its channels last."""
    memory = torch.randn(2, height, width, group.order, 6)
    last = memory.permute(0, 4, 3, 1, 2)
    return last.contiguous(), last


def results(layer, x):
    """The output, and the gradients of input and parameters for a cotangent that depends on the place."""
    x = x.detach().requires_grad_()
    y = layer(x)
    cotangent = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    return y, *torch.autograd.grad((y * cotangent).sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("group", [Z2, P4, P4M], ids=lambda g: g.name)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_keep_the_layout_and_the_numbers(name, group):
    layer = LAYERS[name](group)
    if isinstance(layer, GroupBatchNorm2d):
        randomise_norms(layer, torch.Generator().manual_seed(0), field(group)[0])
    first, last = field(group)
    assert is_channels_last(last)
    assert not is_channels_last(first)
    wanted, got = results(layer, first), results(copy.deepcopy(layer), last)
    assert is_channels_last(got[0])
    assert wanted[0].is_contiguous()
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_filters_of_planes_are_in_the_order_of_the_planes():
    """Negative control: planes with channels last and the usual filter bank give another field."""
    conv = GroupConv2d(P4, 6, 4, 3, padding=1)
    first, last = field(P4)
    assert torch.equal(to_planes(first), first.flatten(1, 2))
    wrong = F.conv2d(to_planes(last), conv.filters(), conv.expanded_bias(), padding=1).unflatten(1, (4, 4))
    assert (wrong - conv(first)).abs().max() > 0.1


def test_running_statistics_do_not_depend_on_the_layout():
    norms = [GroupBatchNorm2d(P4, 6) for _ in range(2)]
    for norm, x in zip(norms, field(P4), strict=True):
        norm(x * 3 + 1)
    torch.testing.assert_close(norms[0].state_dict(), norms[1].state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_with_channels_last_are_lifted_to_such_fields(channels):
    conv = LiftingConv2d(P4, channels, 6, 3, padding=1)
    x = torch.randn(2, channels, 7, 7)
    y = conv(x.to(memory_format=torch.channels_last))
    assert is_channels_last(y)
    assert conv(x).is_contiguous()
    torch.testing.assert_close(y, conv(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 1, 4, 5, 5), (2, 6, 4, 1, 1), (0, 6, 4, 5, 5), (1, 1, 4, 1, 1)], ids=str)
def test_degenerate_fields(shape):
    x = torch.randn(shape)
    last = x.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    conv = GroupConv2d(P4, shape[1], 3, 1)
    torch.testing.assert_close(conv(last), conv(x), rtol=1e-12, atol=1e-12)


def test_a_layout_of_torch_s_own_is_read_as_it_is():
    """channels_last planes, cut into a field, have their group axis fastest: a third layout."""
    x = torch.randn(2, 24, 7, 7).to(memory_format=torch.channels_last).unflatten(1, (6, 4))
    assert not is_channels_last(x)
    for make in LAYERS.values():
        layer = make(P4)
        torch.testing.assert_close(layer(x), layer(x.contiguous()), rtol=1e-10, atol=1e-12)


def test_squeeze_and_excitation_in_bfloat16_takes_the_mean():
    """Sums are rounded once, by 2^-8 at most, however many numbers they are of."""
    layer = GroupSqueezeExcite(P4, 6, 2).bfloat16()
    seen = []
    layer.reduce.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for x in field(P4, 64, 64):
        layer(x.bfloat16() + 1)
        torch.testing.assert_close(seen[-1].double(), (x.bfloat16() + 1).double().mean((2, 3, 4)), rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    "name", ["p4_cnn", "p4m_resnet18", "p4_se_resnet29", "p4m_resnet44", "p4_allcnn", "p4_asc_resnet29"]
)
def test_networks_keep_the_layout(name):
    model = create_model(name)
    x = torch.randn(2, *model.pretrained_cfg["input_size"])
    assert is_channels_last(model.forward_features(x.to(memory_format=torch.channels_last)))
    assert model.forward_features(x).is_contiguous()


def test_compiled_networks_take_the_layout():
    model = create_model("p4_se_resnet29").eval()
    x = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-12)


def test_a_layer_of_planes_in_a_sequence():
    """What torch's own layers make of a field with channels last, its layout, is kept between ours."""
    net = nn.Sequential(GroupConv2d(P4, 6, 6, 3, padding=1), nn.ReLU(), nn.Dropout(0.0), GroupBatchNorm2d(P4, 6))
    assert is_channels_last(net(field(P4)[1]))
