"""Lifting and group convolutions: reference, equivariance, fused forms, and sizes that raise."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.utils.fusion import fuse_conv_bn_eval

from eqzoo.equivariance import equivariance_error, equivariance_report
from eqzoo.groups import P4, P4M, Z2, Z2M, cyclic, dihedral
from eqzoo.layers import GroupConv2d, LiftingConv2d
from tests.layers import reference

GRID = [Z2, Z2M, cyclic(2), dihedral(2), P4, P4M]
CASES = [
    {"kernel_size": 1},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 4, "padding": 2},
    {"kernel_size": 3, "dilation": 2, "padding": 2},
    {"kernel_size": 2, "stride": 2, "padding": 1},
]


def image(layer, side=6, width=None):
    lead = (layer.in_channels,) if layer.in_field == "trivial" else (layer.in_channels, layer.group.order)
    return torch.randn(2, *lead, side, width or side)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("group", GRID)
def test_layers_are_their_equations(group, case):
    options = {name: value for name, value in case.items() if name != "kernel_size"}
    for layer, slow in (
        (LiftingConv2d(group, 2, 2, **case), reference.lifting_conv),
        (GroupConv2d(group, 2, 2, **case), reference.group_conv),
    ):
        x = image(layer, *((4, 6) if "stride" in case else (3, 4)))[:1]
        loops = partial(slow, weight=layer.weight, bias=layer.bias, group=group, **options)
        reference.assert_same_with_gradients(layer, x, loops, ("expanded", "irreps"))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("group", GRID[1:])
def test_layers_are_equivariant(group, case):
    for layer in (LiftingConv2d(group, 2, 3, **case), GroupConv2d(group, 2, 3, **case)):
        assert equivariance_error(layer, image(layer, 6, 10)) < 1e-14


def sees(side, kernel_size, stride, padding, dilation):
    """Whether some tap of some window reads a pixel rather than padding."""
    span = dilation * (kernel_size - 1) + 1
    starts = range(-padding, side + padding - span + 1, stride)
    return any(0 <= start + dilation * tap < side for start in starts for tap in range(kernel_size))


@settings(max_examples=40, deadline=None)
@example(group=P4, kernel_size=2, stride=1, padding=1, dilation=2, steps=(0, 3), bias=False)  # taps around the pixel
@example(group=P4M, kernel_size=1, stride=2, padding=1, dilation=1, steps=(2, 0), bias=False)  # windows beside it
@example(group=Z2, kernel_size=1, stride=3, padding=2, dilation=1, steps=(0, 0), bias=False)
@example(group=P4, kernel_size=2, stride=1, padding=1, dilation=2, steps=(0, 0), bias=True)
@given(
    group=st.sampled_from(GRID),
    kernel_size=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    steps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    bias=st.booleans(),
)
def test_every_size_that_is_accepted_is_exact(group, kernel_size, stride, padding, dilation, steps, bias):
    span = dilation * (kernel_size - 1) + 1
    height, width = (max(1, span - 2 * padding) + step * stride for step in steps)
    layer = GroupConv2d(group, 2, 2, kernel_size, stride, padding, dilation, bias)
    if (max(1, span - 2 * padding) + 2 * padding - span) % stride and group.order > 1:
        with pytest.raises(ValueError, match="would break"):
            layer(image(layer, height, width))
    elif bias or all(sees(side, kernel_size, stride, padding, dilation) for side in (height, width)):
        assert equivariance_report(layer, image(layer, height, width)).largest < 1e-14
    else:  # every window reads padding alone: there is no error relative to an output of zeros
        with pytest.raises(ValueError, match="zero everywhere"):
            equivariance_report(layer, image(layer, height, width))


def test_the_error_can_be_large():
    """Negative controls: a plain convolution, and a group convolution with permuted filters."""
    plain = torch.nn.Conv2d(2, 3, 3)
    assert equivariance_error(plain, torch.randn(2, 2, 6, 6), P4) > 0.1
    layer = GroupConv2d(P4, 2, 3, 3)
    # Two elements have each other's filters.
    layer.register_table("orbit_index", layer.orbit_index[:, [1, 0, 2, 3]].numpy())
    assert equivariance_error(layer, image(layer)) > 0.1


@pytest.mark.parametrize("layer", [LiftingConv2d, GroupConv2d])
@pytest.mark.parametrize("channels_last", [False, True])
def test_fuse_gives_a_plain_convolution(layer, channels_last):
    conv = layer(P4M, 2, 3, 3, stride=2, padding=1, dilation=1)
    if channels_last:
        conv = conv.to(memory_format=torch.channels_last)
    x = image(conv, 7)
    plain = conv.fuse()
    assert type(plain) is torch.nn.Conv2d
    planes = x if x.ndim == 4 else x.flatten(1, 2)
    torch.testing.assert_close(plain(planes), conv(x).flatten(1, 2), rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match=rf"{layer.__name__}.*would break p4m: at height 6"):
        plain(planes[..., :6, :6])
    with pytest.raises(ValueError, match="would break p4m"):
        fuse_conv_bn_eval(plain.eval(), torch.nn.BatchNorm2d(24).eval())(input=planes[..., :6, :6])
    assert layer(P4M, 2, 3, 3, stride=2, padding=1, exact=False).fuse()(planes[..., :6, :6]).shape[-1] == 3


def test_sizes_that_break_equivariance_raise_and_the_fix_is_named():
    layer = LiftingConv2d(P4, 1, 2, 3, stride=2, padding=1)
    with pytest.raises(ValueError, match="exact at height 31 or 33"):
        layer(torch.zeros(1, 1, 32, 32))
    assert layer(torch.zeros(1, 1, 33, 33)).shape == (1, 2, 4, 17, 17)
    with pytest.raises(ValueError, match="exact at width 31 or 33"):  # a reflection reverses the width alone
        LiftingConv2d(Z2M, 1, 2, 3, stride=2, padding=1)(torch.zeros(1, 1, 32, 32))
    assert LiftingConv2d(Z2M, 1, 2, 3, stride=2, padding=1)(torch.zeros(1, 1, 32, 33)).shape == (1, 2, 2, 16, 17)
    assert LiftingConv2d(Z2, 1, 2, 3, stride=2, padding=1)(torch.zeros(1, 1, 32, 32)).shape == (1, 2, 1, 16, 16)


def test_sizes_that_raise_do_break_equivariance(monkeypatch):
    """Negative control: without the check, the error is of the size of the output."""
    monkeypatch.setattr("eqzoo.layers.group_conv.check_size", lambda *_: None)
    layer = LiftingConv2d(P4, 1, 2, 3, stride=2, padding=1)
    assert equivariance_error(layer, torch.randn(1, 1, 32, 32)) > 0.5


def test_an_image_smaller_than_the_window_is_refused():
    with pytest.raises(ValueError, match="at least 2 pixels larger"):
        LiftingConv2d(P4, 1, 2, 5)(torch.zeros(1, 1, 3, 8))
