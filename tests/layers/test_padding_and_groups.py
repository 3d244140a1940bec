"""Convolutions of parts of the fields, of one field each, and with other pixels than zeros around the image."""

import io
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import eqzoo
from eqzoo.equivariance import equivariance_error
from eqzoo.groups import P4, P4M, Z2M, cyclic
from eqzoo.layers import DepthwiseGroupConv2d, GlobalPool, GroupConv2d, LiftingConv2d
from eqzoo.ops import use_backend
from tests.layers import reference

GROUPS = [Z2M, cyclic(2), P4, P4M]
MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}  # torch's and numpy's


def field(group, channels, *sides, batch=2, last=False):
    x = torch.randn(batch, channels, group.order, *sides)
    return x.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2) if last else x


def around(x, padding, mode):
    width = [(0, 0)] * (x.ndim - 2) + [(padding, padding)] * 2
    return torch.from_numpy(np.pad(x.numpy(), width, mode=MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", GROUPS)
def test_layers_are_their_equations_on_a_padded_image(group, mode):
    for layer, slow in (
        (LiftingConv2d(group, 2, 2, 3, padding=2, padding_mode=mode), reference.lifting_conv),
        (GroupConv2d(group, 2, 2, 3, padding=2, padding_mode=mode), reference.group_conv),
    ):
        x = torch.randn(1, 2, 3, 4) if layer.in_field == "trivial" else field(group, 2, 3, 4, batch=1)
        expected = slow(around(x, 2, mode), layer.weight, layer.bias, group)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("group", GROUPS)
def test_a_depthwise_layer_is_its_equation(group, stride, dilation, mode):
    """out(c, h) = f(c, h) ⋆ (h·ψ_c) + b_c."""
    layer = DepthwiseGroupConv2d(group, 2, 3, padding=2, stride=stride, dilation=dilation, padding_mode=mode)
    x = field(group, 2, 3, 5, batch=1)
    wide, columns = around(x, 2, mode), []
    for c, (weight, bias) in enumerate(zip(layer.weight, layer.bias, strict=True)):
        maps = [
            reference.correlate(wide[:, c : c + 1, h], reference.act(weight, group, h), stride, 0, dilation) + bias
            for h in group.elements
        ]
        columns.append(torch.stack(maps, 1))
    torch.testing.assert_close(layer(x), torch.stack(columns, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["expanded", "irreps"])
@pytest.mark.parametrize("last", [False, True])
def test_each_part_of_the_fields_is_convolved_for_itself(last, backend):
    conv = GroupConv2d(P4, 6, 9, 3, padding=1, groups=3)
    assert conv.weight.shape == (9, 2 * 4, 3, 3)
    x, parts = field(P4, 6, 8, 8, last=last), []
    for k in range(3):
        alone = GroupConv2d(P4, 2, 3, 3, padding=1)
        alone.load_state_dict({"weight": conv.weight[3 * k : 3 * k + 3], "bias": conv.bias[3 * k : 3 * k + 3]})
        parts.append(alone(x[:, 2 * k : 2 * k + 2]))
    with use_backend(backend), torch.profiler.profile() as profile:
        y = conv(x)
    assert sum(event.name == "eqzoo::group_conv2d" for event in profile.events()) == 3 * (backend == "irreps")
    torch.testing.assert_close(y, torch.cat(parts, 1), rtol=0, atol=1e-13)
    assert (y.stride(1) == 1) == last  # the layout stays
    assert conv.weight.abs().max() <= 1 / np.sqrt(2 * 4 * 9)
    lifting = LiftingConv2d(P4, 2, 4, 3, groups=2)
    image = torch.randn(1, 2, 5, 5)
    other = image.clone()
    other[:, 1] = 0
    assert torch.equal(lifting(image)[:, :2], lifting(other)[:, :2])
    assert not torch.equal(lifting(image)[:, 2:], lifting(other)[:, 2:])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", GROUPS)
def test_layers_are_equivariant_and_stay_so_as_plain_convolutions(group, mode, last):
    for layer in (
        GroupConv2d(group, 4, 8, 3, stride=2, padding=1, groups=4, padding_mode=mode),
        GroupConv2d(group, 4, 8, 4, padding=2, dilation=2, padding_mode=mode),
        DepthwiseGroupConv2d(group, 4, 3, padding=1, stride=2, padding_mode=mode),
        DepthwiseGroupConv2d(group, 4, 3, padding=2, dilation=2, padding_mode=mode),
    ):
        x = field(group, 4, 9, 11, last=last)
        assert (layer(x).stride(1) == 1) == last  # the layout stays
        assert equivariance_error(layer, x) < 1e-14
        plain = layer.fuse()(x.flatten(1, 2))
        torch.testing.assert_close(plain, layer(x).flatten(1, 2), rtol=0, atol=1e-13)
        if layer.stride == 2:
            for net in (layer, layer.fuse()):
                with pytest.raises(ValueError, match="would break"):
                    net(x[..., :8, :8] if net is layer else x[..., :8, :8].flatten(1, 2))


@pytest.mark.parametrize(("channels", "mode"), [(1, "zeros"), *((3, mode) for mode in MODES)])
def test_images_keep_their_layout_too(channels, mode):
    x = torch.randn(2, channels, 9, 9)
    layer = LiftingConv2d(P4, channels, 4, 3, padding=1, padding_mode=mode)
    y = layer(x.to(memory_format=torch.channels_last))
    assert y.stride(1) == 1
    assert layer(x).is_contiguous()
    torch.testing.assert_close(y, layer(x), rtol=0, atol=1e-13)


def test_a_wrong_part_of_the_fields_breaks_equivariance():
    """Planes of a channels-last field are ordered by pose: parts of these would be other ones than those of fields."""

    class ByPose(GroupConv2d):
        def forward(self, x):
            y = nn.functional.conv2d(x.transpose(1, 2).flatten(1, 2), self.filters(), padding=1, groups=2)
            return y.unflatten(1, (4, 4)).transpose(1, 2)

    assert equivariance_error(ByPose(P4, 4, 4, 3, padding=1, groups=2, bias=False), field(P4, 4, 6, 6)) > 0.1


@pytest.mark.parametrize(
    ("name", "value"), [("kernel_size", (3, 3)), ("padding", "same"), ("stride", 2.0), ("dilation", (1, 1))]
)
def test_torchs_other_forms_of_arguments_are_named(name, value):
    options = {"kernel_size": np.int64(3), "padding": 1, name: value}
    for kind, channels in ((GroupConv2d, (2, 2)), (LiftingConv2d, (2, 2)), (DepthwiseGroupConv2d, (2,))):
        layer = partial(kind, P4, *channels)
        layer(kernel_size=np.int64(3))
        with pytest.raises(TypeError, match=name):
            layer(**options)
    with pytest.raises(TypeError, match="'p4'"):
        GroupConv2d("p4", 2, 2, 3)


@pytest.mark.parametrize(("channels", "groups"), [(6, 4), (2, 4), (2, 0)])
def test_groups_divide_the_fields(channels, groups):
    """Four groups divide the eight planes of two fields, and would part their poses."""
    with pytest.raises(ValueError, match=f"groups divides the channels, 4 and {channels}; got {groups}"):
        GroupConv2d(P4, 4, channels, 3, groups=groups)


def test_a_network_of_such_layers_passes_the_check_and_is_exported():
    torch.set_default_dtype(torch.float32)
    lift = LiftingConv2d(P4, 1, 4, 3, padding=1, padding_mode="reflect")
    mix = GroupConv2d(P4, 4, 4, 3, stride=2, padding=1, groups=2, padding_mode="reflect")
    depthwise = DepthwiseGroupConv2d(P4, 4, 3, padding=1, stride=2, padding_mode="replicate")
    network = nn.Sequential(lift, nn.ReLU(), mix, nn.ReLU(), depthwise, GlobalPool(P4, "avg")).eval()
    network.group, network.input_size = P4, (1, 9, 9)
    assert eqzoo.check_equivariance(network).exact
    x = torch.randn(2, 1, 9, 9)
    program = torch.export.export(network, (x,))
    torch.export.save(program, file := io.BytesIO())
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), network(x))
