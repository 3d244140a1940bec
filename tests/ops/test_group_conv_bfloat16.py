"""Group convolutions through the irreps in bfloat16: rounding, equivariance, and when they are chosen."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from eqzoo import groups
from eqzoo.groups import P4, P4M, Z2M
from eqzoo.layers import GroupConv2d
from eqzoo.ops import group_conv2d, use_backend
from tests.conftest import threads
from tests.ops.test_group_conv_kernels import CHOICE, GROUPS, assert_near, case, channels_last, with_gradients

# Batch, fields in and out, k, stride, padding, dilation, height, width: 32 channels at a time, 16, and parts of them;
# half a block of rows left over; more rows than are multiplied at a time; tiles of few and of many pixels.
SHAPES = [
    (2, 64, 32, 3, 1, 1, 1, 8, 8),
    (3, 48, 16, 3, 1, 1, 1, 7, 5),
    (2, 20, 70, 3, 1, 2, 2, 7, 9),
    (1, 160, 33, 3, 2, 1, 1, 9, 9),
    (9, 100, 24, 1, 1, 0, 1, 9, 9),
    (40, 16, 16, 3, 1, 1, 1, 6, 6),
]

needs_products = pytest.mark.skipif(not CHOICE.multiplies(), reason="no products in bfloat16 here")


def errors(found, expected):
    """The relative error of each of them."""
    return [float((f.detach().double() - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]


@needs_products
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_at_most_twice_that_of_the_expanded_convolution(shape, group, last):
    arguments, options = case(group, shape, last=last)
    half = [v.detach().bfloat16().requires_grad_() for v in arguments]
    exact = with_gradients("eager", [v.detach().double().requires_grad_() for v in half], group, options)
    found = errors(with_gradients("irreps", half, group, options)[:3], [v.detach() for v in exact[:3]])
    expanded = errors(with_gradients("expanded", half, group, options)[:3], [v.detach() for v in exact[:3]])
    for ours, theirs in zip(found, expanded, strict=True):
        assert ours <= 2 * theirs <= 0.01


@needs_products
@pytest.mark.parametrize("group", [Z2M, P4, P4M])
def test_the_layer_is_equivariant_up_to_rounding(group):
    layer = GroupConv2d(group, 40, 32, 3, padding=1).bfloat16()
    x = torch.randn(2, 40, group.order, 7, 7).bfloat16()
    with use_backend("irreps"):
        y = layer(x)
        for g in group.elements:
            rotated = layer(groups.transform(x, group, g, "regular"))
            assert_near([rotated], [groups.transform(y, group, g, "regular")], 5e-3)
            if g != group.elements[0]:
                with pytest.raises(AssertionError):
                    assert_near([rotated], [y], 5e-3)


@needs_products
def test_what_was_computed_before_does_not_matter():
    """Buffers are kept from call to call; what is not finite in them must not reach other fields."""
    (x, weight, bias), options = case(P4, (1, 17, 20, 3, 1, 1, 1, 5, 5), torch.bfloat16)
    expected = with_gradients("irreps", (x, weight, bias), P4, options)
    spoiled = torch.full((2, 64, 4, 9, 9), float("nan")).bfloat16().requires_grad_()
    filters = torch.randn(64, 256, 3, 3).bfloat16().requires_grad_()
    with use_backend("irreps"):
        y = group_conv2d(spoiled, filters, None, P4, padding=1)
        torch.autograd.grad(y, (spoiled, filters), torch.full_like(y, float("nan")))
    assert y.isnan().all()
    for found, wanted in zip(with_gradients("irreps", (x, weight, bias), P4, options), expected, strict=True):
        assert torch.equal(found, wanted)


@needs_products
def test_threads_give_the_same():
    arguments, options = case(P4M, (7, 20, 36, 3, 1, 1, 1, 9, 9), torch.bfloat16)
    expected = with_gradients("irreps", arguments, P4M, options)
    with threads(3):
        found = with_gradients("irreps", arguments, P4M, options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert_near(found[2:], expected[2:], 1e-2)


@needs_products
def test_other_operators_find_the_processor_as_they_left_it():
    """Both oneDNN and these kernels set up the registers of matrices, and each sets up its own."""
    x, w = torch.randn(2, 64, 4, 9, 9).bfloat16(), torch.randn(64, 256, 3, 3).bfloat16()
    a, b = torch.randn(160, 96).bfloat16(), torch.randn(96, 80).bfloat16()
    with use_backend("irreps"):
        first = group_conv2d(x, w, None, P4, padding=1), a @ b
        for _ in range(3):
            assert torch.equal(a @ b, first[1])
            assert torch.equal(group_conv2d(x, w, None, P4, padding=1), first[0])


def test_a_layer_compiled_checkpointed_and_in_evaluation_mode_under_autocast():
    layer, x = GroupConv2d(P4, 48, 64, 3, padding=1).float(), torch.randn(2, 48, 4, 6, 6).float()
    x = channels_last(x).requires_grad_()

    def run(function):
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x)
        assert y.dtype == torch.bfloat16
        return y, *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))

    expected = run(layer)
    assert all(v.dtype == torch.float32 for v in expected[1:])
    torch.compiler.reset()
    assert_near(run(torch.compile(layer, fullgraph=True, backend="aot_eager")), expected, 1e-2)
    assert_near(run(lambda v: checkpoint(layer, v, use_reentrant=False)), expected, 1e-12)
    fixed = copy.deepcopy(layer).eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert_near([fixed(x), fixed(x)], [expected[0]] * 2, 1e-2)
        fixed.weight.mul_(2)
        fixed.bias.mul_(2)
        assert_near([fixed(x)], [2 * expected[0]], 1e-2)


@needs_products
def test_many_fields_go_through_the_irreps_and_few_are_expanded():
    """By layout, and in inference by more fields than in training."""
    assert CHOICE.multiplies_bfloat16()

    def chosen(group, channels, side, last, trains):
        x = torch.empty(1, channels, group.order, 8, 8, dtype=torch.bfloat16)
        weight = torch.empty(channels, channels * group.order, side, side, dtype=torch.bfloat16)
        with torch.set_grad_enabled(trains):
            return CHOICE.through_irreps(channels_last(x) if last else x, weight, group)

    for group, side, last, trains, few, many in [
        (P4, 3, True, False, 24, 32),
        (P4, 3, True, True, 16, 24),
        (P4, 3, False, False, 16, 24),
        (P4, 1, True, False, 64, 96),
        (P4, 1, True, True, 32, 64),
        (P4M, 1, True, False, 32, 64),
        (P4M, 3, True, False, 12, 16),
    ]:
        assert not chosen(group, few, side, last, trains)
        assert chosen(group, many, side, last, trains)
        with use_backend("irreps"):
            assert chosen(group, few, side, last, trains)
        with use_backend("expanded"):
            assert not chosen(group, many, side, last, trains)
