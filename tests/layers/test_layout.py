"""Channels-last fields: layers preserve the layout and give the same outputs and gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eqzoo import create_model
from eqzoo.equivariance import randomize_norms
from eqzoo.groups import P4, P4M, Z2
from eqzoo.layers import (
    AffineSelfConv2d,
    AttentiveGroupConv2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupSqueezeExcite,
    HalvingPool2d,
    LiftingConv2d,
    PointwiseConv2d,
    SimpleAffineSelfConv2d,
    SpatialAdaptiveAvgPool2d,
    SpatialPool2d,
    StandAloneSelfAttention2d,
    Upsample2d,
)
from eqzoo.layers._layout import is_channels_last, to_planes
from eqzoo.ops import use_backend

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
    "upsampling": lambda group: Upsample2d(group, 3),
    "adaptive pool": lambda group: SpatialAdaptiveAvgPool2d(2),
    "squeeze and excitation": lambda group: GroupSqueezeExcite(group, 6, 2),
    "self convolution": lambda group: AffineSelfConv2d(group, 6, 3, num_heads=3),
    "simple self convolution": lambda group: SimpleAffineSelfConv2d(group, 6, 3, num_heads=3),
    "self-attention": lambda group: StandAloneSelfAttention2d(group, 6, 3, num_heads=3),
}


def field(group, height=7, width=5):
    """A field, contiguous and channels last."""
    memory = torch.randn(2, height, width, group.order, 6)
    last = memory.permute(0, 4, 3, 1, 2)
    return last.contiguous(), last


def results(layer, x):
    """The output, and the gradients of input and parameters for a cotangent that depends on the position."""
    x = x.detach().requires_grad_()
    y = layer(x)
    cotangent = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    return y, *torch.autograd.grad((y * cotangent).sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("group", [Z2, P4, P4M])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_preserve_the_layout_and_the_values(name, group):
    layer = LAYERS[name](group)
    if isinstance(layer, GroupBatchNorm2d):
        randomize_norms(layer, torch.Generator().manual_seed(0), field(group)[0])
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


@pytest.mark.parametrize("shape", [(1, 6, 4, 7, 7), (2, 6, 4, 1, 1), (2, 6, 1, 5, 1)], ids=str)
def test_axes_of_length_one_preserve_the_layout(shape):
    channels, order = shape[1:3]
    group = P4 if order == 4 else Z2
    last = torch.randn([shape[axis] for axis in (0, 3, 4, 2, 1)]).permute(0, 4, 3, 1, 2)
    layers = [GroupConv2d(group, channels, 6, 3, padding=1), GroupBatchNorm2d(group, channels).eval()]
    for layer in [*layers, GroupSqueezeExcite(group, channels, 1), PointwiseConv2d(group, channels, 6)]:
        y = layer(last)
        assert is_channels_last(y)
        torch.testing.assert_close(y, layer(last.contiguous(memory_format=torch.contiguous_format).clone()))


def test_an_empty_batch():
    x = torch.zeros(0, 7, 7, 4, 6).permute(0, 4, 3, 1, 2)
    for make in LAYERS.values():
        assert len(make(P4).eval()(x)) == 0


def test_an_empty_batch_without_kernels():
    with use_backend("eager"):
        for attention in ("full", "channel", "spatial", "input"):
            layer = AttentiveGroupConv2d(P4, 6, 4, 3, padding=1, attention=attention, attention_size=3)
            assert layer(torch.zeros(0, 6, 4, 7, 7)).shape == (0, 4, 4, 7, 7)


def test_a_layout_with_the_group_axis_fastest():
    """channels_last planes, unflattened to a field, have the group axis fastest: a third layout."""
    x = torch.randn(2, 24, 7, 7).to(memory_format=torch.channels_last).unflatten(1, (6, 4))
    assert not is_channels_last(x)
    for make in LAYERS.values():
        layer = make(P4)
        torch.testing.assert_close(layer(x), layer(x.contiguous()), rtol=1e-10, atol=1e-12)


def test_squeeze_and_excitation_in_bfloat16_takes_the_mean():
    """Sums are accumulated in higher precision and rounded once, by at most 2⁻⁸."""
    layer = GroupSqueezeExcite(P4, 6, 2).bfloat16()
    seen = []
    layer.reduce.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for x in field(P4, 64, 64):
        layer(x.bfloat16() + 1)
        torch.testing.assert_close(seen[-1].double(), (x.bfloat16() + 1).double().mean((2, 3, 4)), rtol=2**-7, atol=0)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "name", ["p4_cnn", "p4m_resnet18", "p4_se_resnet29", "p4m_resnet44", "p4_allcnn", "p4_asc_resnet29"]
)
def test_networks_preserve_the_layout(name, batch):
    model = create_model(name).eval()
    x = torch.randn(batch, *model.pretrained_cfg["input_size"])
    last = x.to(memory_format=torch.channels_last)
    assert is_channels_last(model.forward_features(last))
    assert model.forward_features(x).is_contiguous()
    torch.testing.assert_close(model(last), model(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["p4_resnet29", "p4_se_resnet29"])
def test_gradients_preserve_the_layout(name):
    """A gradient with another layout than its field would be copied, or accumulated element by element."""
    model, seen = create_model(name), []

    def look(_, args):
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: seen.append(is_channels_last(gradient)))

    for module in model.modules():
        if isinstance(module, (GroupConv2d, GroupBatchNorm2d, GroupSqueezeExcite)):
            module.register_forward_pre_hook(look)
    model(torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)).square().sum().backward()
    assert len(seen) > 60
    assert all(seen)


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_compiled_and_exported_networks_take_images_in_any_layout(batch):
    model = create_model("p4_se_resnet29", depth=11).eval()
    x = torch.randn(batch, 3, 32, 32)
    last = x.to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    program = torch.export.export(model, (last,)).run_decompositions().module()
    for images in (last, x):
        torch.testing.assert_close(compiled(images), model(x), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(program(images), model(x), rtol=1e-9, atol=1e-11)


def test_compiled_networks_keep_channels_last():
    layer = nn.Sequential(LiftingConv2d(P4, 3, 4, 3, padding=1), GroupConv2d(P4, 4, 6, 3, padding=1))
    x = torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert is_channels_last(compiled(x))
    torch.testing.assert_close(compiled(x), layer(x))


def test_squeeze_and_excitation_compiles_with_dynamic_sides_in_bfloat16():
    layer = GroupSqueezeExcite(P4, 4, 2).bfloat16().eval()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for x in torch.randn(2, 4, 4, 8, 8).bfloat16(), torch.randn(2, 4, 4, 6, 9).bfloat16():
        torch.testing.assert_close(compiled(x), layer(x))
