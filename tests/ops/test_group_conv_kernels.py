"""Group convolutions through the irreps: the numbers of loops and of the expanded convolution."""

import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from eqzoo.analysis import multiply_adds
from eqzoo.groups import P4, P4M, Z2, Z2M, cyclic, dihedral
from eqzoo.layers import GroupConv2d
from eqzoo.ops import _compile, group_conv2d, use_backend
from eqzoo.ops._layout import is_last
from tests.conftest import threads
from tests.layers import reference

MODULE = sys.modules["eqzoo.ops.group_conv.operator"]
CHOICE = sys.modules["eqzoo.ops.group_conv.choice"]
GROUPS = [Z2M, cyclic(2), P4, P4M]
# Batch, fields in and out, k, stride, padding, dilation, height, width: fewer fields than a vector has lanes and more,
# odd numbers of them, several parts of the rows (k²C > 240) and of the columns, even filters, padding beyond those,
# tiles that span images, one pixel, the three products of complex irreps in both directions (from 32 fields).
SHAPES = [
    (2, 3, 5, 3, 1, 1, 1, 5, 7),
    (1, 10, 13, 3, 1, 0, 1, 6, 4),
    (2, 17, 9, 2, 1, 1, 2, 5, 5),
    (1, 4, 6, 4, 2, 2, 1, 8, 7),
    (2, 2, 3, 3, 1, 4, 1, 3, 3),
    (3, 33, 20, 1, 1, 0, 1, 4, 3),
    (1, 3, 2, 1, 2, 1, 1, 5, 5),
    (1, 32, 40, 3, 2, 1, 2, 7, 7),
    (1, 34, 33, 3, 1, 1, 1, 4, 3),
    (25, 8, 16, 3, 1, 1, 1, 2, 2),
    (1, 1, 1, 1, 1, 0, 1, 1, 1),
]


def channels_last(x):
    """The same field, (B, height, width, |H|, C) in memory."""
    return x.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)


def case(group, shape, dtype=torch.float64, last=False):
    batch, channels, outs, k, *options, height, width = shape
    x = torch.randn(batch, channels, group.order, height, width, dtype=dtype)
    weight = torch.randn(outs, channels * group.order, k, k, dtype=dtype) / (channels * group.order * k * k) ** 0.5
    x = (channels_last(x) if last else x).requires_grad_()
    return (x, weight.requires_grad_(), torch.randn(outs, dtype=dtype, requires_grad=True)), options


def with_gradients(backend, arguments, group, options):
    """The output and the gradients of everything, under a backend."""
    with use_backend(backend):
        out = group_conv2d(*arguments, group, *options)
        weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).cos().reshape(out.shape).to(out.dtype)
        return out, *torch.autograd.grad(out, arguments, weights)


def assert_near(found, expected, tolerance):
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        assert (f.double() - e.double()).norm() <= tolerance * e.double().norm()


@pytest.fixture(params=["c++", "torch"])
def kernels(request, monkeypatch):
    """Runs a test with the C++ kernels, and with none."""
    if request.param == "torch":
        monkeypatch.setattr(_compile, "cpu_function", lambda *_, **__: None)
    elif CHOICE.kernel("", torch.ones(1)) is None:
        pytest.skip("no C++ compiler")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_the_numbers_of_loops(group, shape):
    (x, weight, bias), options = case(group, (1, min(shape[1], 3), min(shape[2], 2), *shape[3:]))
    expected = reference.group_conv(x, weight, bias, group, *options)
    with use_backend("irreps"):
        assert_near([group_conv2d(x, weight, bias, group, *options)], [expected], 1e-12)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_numbers_of_the_expanded_convolution(kernels, shape, group, last):
    arguments, options = case(group, shape, last=last)
    expected = with_gradients("eager", arguments, group, options)
    found = with_gradients("irreps", arguments, group, options)
    assert_near(found, expected, 1e-12)
    assert is_last(found[0]) == is_last(arguments[0]) == is_last(found[1])
    single = [v.detach().float().requires_grad_() for v in arguments]
    assert_near(with_gradients("irreps", single, group, options), expected, 1e-5)
    half = [v.detach().bfloat16().requires_grad_() for v in arguments]
    rounded = [v.detach().double().requires_grad_() for v in half]
    found = with_gradients("irreps", half, group, options)
    assert all(v.dtype == torch.bfloat16 for v in found)
    assert_near(found[:3], with_gradients("eager", rounded, group, options)[:3], 1e-2)


def test_the_comparison_sees_a_wrong_tap_and_a_wrong_pose(monkeypatch):
    arguments, options = case(P4, SHAPES[0])
    expected = with_gradients("eager", arguments, P4, options)
    tables = MODULE._tables
    for planted in (lambda r, p: (r.roll(1, 0), p), lambda r, p: (r, p.roll(1, 1))):
        monkeypatch.setattr(
            MODULE, "_tables", lambda *a, planted=planted: tuple(v.contiguous() for v in planted(*tables(*a)))
        )
        if CHOICE.kernel("", torch.ones(1)) is None:
            pytest.skip("no C++ compiler")
        with pytest.raises(AssertionError):
            assert_near(with_gradients("irreps", arguments, P4, options)[:1], expected[:1], 1e-2)


def test_threads_give_the_same():
    arguments, options = case(P4M, (7, 20, 36, 3, 1, 1, 1, 9, 9))
    expected = with_gradients("irreps", arguments, P4M, options)
    with threads(3):
        assert_near(with_gradients("irreps", arguments, P4M, options), expected, 1e-13)


@pytest.mark.parametrize("stride", [1, 2])
def test_operators_keep_torchs_rules_and_have_second_derivatives(kernels, stride):
    (x, weight, bias), _ = case(P4, (1, 2, 3, 3, stride, 1, 1, 3, 5))
    steps = [4, 0, stride, 1, 1]
    y = MODULE._group_conv2d(x, weight, bias, steps).detach().requires_grad_()
    torch.library.opcheck(MODULE._group_conv2d.op, (x, weight, bias, steps))
    torch.library.opcheck(MODULE._field_gradient.op, (y, weight, [*steps, 3, 5]))
    torch.library.opcheck(MODULE._filters_gradient.op, (y, x, [*steps, 3]))
    assert torch.autograd.gradcheck(lambda *a: MODULE._group_conv2d(*a, steps), (x, weight, bias))
    assert torch.autograd.gradgradcheck(lambda *a: MODULE._group_conv2d(*a, steps), (x, weight, bias))


def test_gradients_that_are_not_asked_for():
    arguments, options = case(P4, SHAPES[1])
    expected = with_gradients("irreps", arguments, P4, options)[1:]
    for asked in ((0,), (1,), (2,), (0, 2)):
        some = [v.detach().requires_grad_(i in asked) for i, v in enumerate(arguments)]
        with use_backend("irreps"):
            out = group_conv2d(*some, P4, *options)
            weights = torch.linspace(-1, 2, out.numel()).cos().reshape(out.shape)
            found = torch.autograd.grad(out, [some[i] for i in asked], weights)
        assert_near(found, [expected[i] for i in asked], 1e-13)


def test_any_layout_of_memory_is_read():
    (x, weight, bias), options = case(P4, SHAPES[0])
    expected = with_gradients("irreps", (x, weight, bias), P4, options)
    strange = x.detach().transpose(1, -1).contiguous().transpose(1, -1).requires_grad_()
    other = weight.detach().mT.contiguous().mT.requires_grad_()
    assert_near(with_gradients("irreps", (strange, other, bias), P4, options), expected, 1e-13)


@pytest.mark.parametrize("last", [False, True])
def test_an_empty_batch(last):
    field = torch.zeros(2, 64, 8, 6, 6)
    field = (channels_last(field) if last else field)[:0].detach().requires_grad_()
    conv = GroupConv2d(P4M, 64, 64, 3, padding=1)
    out = conv(field)
    assert out.shape == (0, 64, 8, 6, 6)
    out.sum().backward()
    assert field.grad.shape == field.shape
    assert conv.weight.grad.abs().max() == 0


def test_a_layer_compiled_and_checkpointed(kernels):
    layer, x = GroupConv2d(P4, 16, 24, 3, padding=1), torch.randn(2, 16, 4, 6, 6, requires_grad=True)

    def run(function):
        with use_backend("irreps"):
            y = function(x)
            return y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))

    expected = run(layer)
    torch.compiler.reset()
    assert_near(run(torch.compile(layer, fullgraph=True, backend="aot_eager")), expected, 1e-12)
    assert_near(run(lambda v: checkpoint(layer, v, use_reentrant=False)), expected, 1e-12)


def test_what_is_exported_or_has_no_kernel_is_expanded(monkeypatch):
    monkeypatch.setattr(MODULE, "_group_conv2d", None)  # would fail if it were called
    layer, x = GroupConv2d(P4, 64, 64, 3, padding=1), torch.randn(1, 64, 4, 5, 5)
    with use_backend("eager"):
        expected = layer(x)
    program = torch.export.export(layer, (x,))
    assert not [node for node in program.graph.nodes if "eqzoo" in str(node.target)]
    torch.testing.assert_close(program.module()(x), expected)
    torch.testing.assert_close(torch.jit.trace(layer, x, check_trace=False)(x), expected)
    with use_backend("irreps"):
        assert layer.to("meta")(x.to("meta")).shape == expected.shape
        for group in (Z2, dihedral(2)):
            few = GroupConv2d(group, 2, 2, 3)
            assert few(torch.randn(1, 2, group.order, 5, 5)).shape == (1, 2, group.order, 3, 3)


def test_shapes_that_do_not_belong_together_are_refused():
    (x, weight, bias), _ = case(P4, SHAPES[0])
    for arguments, message in (
        ((x, weight, bias, P4M), r"field has shape \(\*, \*, 8"),
        ((x, weight[:, 1:], bias, P4), r"filters has shape \(\*, 12, 3, 3\)"),
        ((x, weight, bias[1:], P4), "bias has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            group_conv2d(*arguments)


def test_multiply_adds_are_those_of_the_expanded_convolution():
    conv = GroupConv2d(P4, 20, 24, 3, stride=2, padding=1)
    counts = []
    for backend in ("eager", "irreps"):
        with use_backend(backend):
            counts.append(multiply_adds(conv, (20, 4, 9, 9)))
    assert counts == [24 * 4 * 25 * 20 * 4 * 9] * 2


def test_torch_func_sees_through_the_layer():
    """torch.func has no rule for the operators; the expanded convolution runs instead."""
    conv, x = GroupConv2d(P4, 16, 16, 3, padding=1), torch.randn(3, 16, 4, 5, 5)
    assert CHOICE.through_irreps(x, conv.weight, P4)
    torch.testing.assert_close(torch.vmap(lambda one: conv(one[None])[0])(x), conv(x))
    _, tangent = torch.func.jvp(conv, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, conv(x + 1) - conv(x))


@pytest.mark.parametrize("backend", ["reference", "expanded"])
def test_some_backends_expand_every_group_convolution(backend):
    (x, weight, _), _ = case(P4, (1, 16, 16, 3, 1, 1, 1, 5, 5))
    assert CHOICE.through_irreps(x, weight, P4)
    with use_backend(backend):
        assert not CHOICE.through_irreps(x, weight, P4)


@pytest.mark.parametrize(
    ("flags", "pays"), [("avx avx2", True), ("avx", False), ("avx avx2 avx512f", False), ("asimd", False), ("", False)]
)
def test_irreps_of_few_fields_pay_with_avx2(monkeypatch, flags, pays):
    monkeypatch.setattr(_compile, "cpu_flags", lambda: f"flags : {flags}")
    assert CHOICE.faster(P4, 8, 8, 3, 32 * 32, True) is pays
    assert CHOICE.faster(P4, 48, 12, 1, 56 * 56, False, trains=False) is pays
    assert CHOICE.faster(P4M, 24, 6, 1, 56 * 56, False, trains=False) is pays
    assert not CHOICE.faster(P4, 32, 8, 1, 56 * 56, False)
    assert CHOICE.faster(P4M, 24, 6, 1, 32 * 32, True) is pays
    assert not CHOICE.faster(P4, 4, 4, 3, 32 * 32, True)
    assert CHOICE.faster(P4, 16, 16, 3, 32 * 32, True)


@pytest.mark.parametrize("backend", ["irreps", "expanded"])
@pytest.mark.parametrize("steps", [{"stride": 0}, {"padding": -1}, {"dilation": 0}, {"dilation": -2000}], ids=str)
def test_steps_out_of_range_are_refused(steps, backend):
    """A kernel would read beyond the memory of the field."""
    with use_backend(backend), pytest.raises(ValueError, match="the window does not fit"):
        group_conv2d(torch.randn(1, 4, 4, 6, 6), torch.randn(4, 16, 3, 3), None, P4, **steps)
