"""Depthwise correlation with a filter at every pixel: C++, Triton and eager torch against the reference and loops."""

import pytest
import torch

from eqzoo.groups import P4, P4M, Z2
from eqzoo.layers import E4Layer2d
from eqzoo.ops import _chunks, _compile, generated_depthwise, use_backend
from eqzoo.ops.e4 import eager
from tests.conftest import kept_numbers, threads
from tests.layers import reference_e4 as slow
from tests.ops.test_octic_kernels import with_gradients

# Images, fields C and J, slices, |H|, height, width, k: odd sides, sides below the window, one pixel, large batches.
SHAPES = [
    (2, 6, 3, 2, 4, 5, 7, 3),
    (1, 4, 2, 1, 1, 1, 1, 5),
    (1, 3, 1, 3, 2, 4, 3, 5),
    (3, 10, 5, 1, 1, 6, 4, 3),
    (1, 2, 17, 2, 8, 3, 2, 1),
]


def use(implementation, monkeypatch):
    """Has the operators run in C++, in eager torch an image at a time, or in Triton on the CPU."""
    if implementation == "c++":
        if _compile.cpu_function("e4/cpu", "generated_depthwise", torch.ones(1)) is None:
            pytest.skip("no C++ compiler")
        return
    monkeypatch.setattr(_compile, "cpu_function", lambda *_: None)
    monkeypatch.setattr(_chunks, "CPU_ELEMENTS", 1)
    if implementation == "triton":
        pytest.importorskip("triton")
        from eqzoo.ops.e4 import cuda

        for name in ("filtered_sum", "filter_gradient", "field_gradient"):
            monkeypatch.setattr(eager, name, getattr(cuda, name))


def generated(shape, dtype=torch.float64):
    batch, channels, fields, slices, order, height, width, k = shape
    hidden = torch.randn(batch, fields, order, height, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(order, slices, k * k, fields, dtype=dtype, requires_grad=True)
    bias = torch.randn(order, slices, k * k, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randn(batch, channels, order, height, width, dtype=dtype, requires_grad=True)


def loops(hidden, weight, bias, value):
    kernel = torch.einsum("hsdj,bjhyx->bshdyx", weight, hidden) + bias.transpose(0, 1)[..., None, None]
    k = int(kernel.shape[3] ** 0.5)
    return slow.dynamic_depthwise(kernel.unflatten(3, (k, k)), value)


@pytest.mark.parametrize("implementation", ["c++", "torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_its_equation(shape, implementation, monkeypatch):
    if implementation != "reference":
        use(implementation, monkeypatch)
    arguments = generated(shape)
    expected = with_gradients(loops, arguments)
    with use_backend("reference" if implementation == "reference" else "auto"):
        torch.testing.assert_close(with_gradients(generated_depthwise, arguments), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "implementation"),
    [
        *((shape, "c++") for shape in SHAPES[:4]),
        *((shape, "triton") for shape in (SHAPES[0], SHAPES[1], SHAPES[3])),
        pytest.param(SHAPES[2], "triton", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_single_precision_is_the_reference(shape, implementation, monkeypatch):
    use(implementation, monkeypatch)
    arguments = generated(shape, torch.float32)
    with use_backend("reference"):
        expected = with_gradients(generated_depthwise, arguments)
    torch.testing.assert_close(with_gradients(generated_depthwise, arguments), expected, rtol=1e-5, atol=1e-4)


def test_the_comparison_sees_a_rotated_filter_and_a_lost_edge(monkeypatch):
    use("torch", monkeypatch)
    arguments = generated(SHAPES[0])
    expected = loops(*arguments)
    right = eager.filtered_sum
    for planted in (lambda k: k.flip(3), lambda k: k.roll(1, 5)):
        monkeypatch.setattr(eager, "filtered_sum", lambda k, v, out, planted=planted: right(planted(k), v, out))
        assert (generated_depthwise(*arguments) - expected).abs().max() > 0.1


def test_large_images_many_fields_and_threads():
    """The loops' other paths: several vectors a row, several parts of channels, and more threads than images."""
    for shape in ((3, 20, 7, 2, 2, 17, 19, 3), (21, 4, 9, 4, 2, 8, 8, 3), (2, 2, 3, 1, 1, 28, 28, 5)):
        arguments = generated(shape)
        found = with_gradients(generated_depthwise, arguments)
        with use_backend("eager"):
            torch.testing.assert_close(found, with_gradients(generated_depthwise, arguments), rtol=0, atol=1e-11)
        with threads(3):
            torch.testing.assert_close(with_gradients(generated_depthwise, arguments), found, rtol=0, atol=1e-11)


def test_any_layout_of_memory_is_read():
    arguments = generated(SHAPES[0])
    expected = with_gradients(generated_depthwise, arguments)
    last = [x.detach().transpose(1, -1).contiguous().transpose(1, -1).requires_grad_() for x in arguments]
    assert not last[0].is_contiguous()
    torch.testing.assert_close(with_gradients(generated_depthwise, last), expected)


def test_halves_and_mixed_types_are_brought_to_one():
    hidden, weight, bias, value = (x.detach() for x in generated(SHAPES[0], torch.float32))
    expected = generated_depthwise(hidden, weight, bias, value)
    for backend in ("auto", "eager"):
        with use_backend(backend):
            half = generated_depthwise(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16(), value.bfloat16())
            assert half.dtype == torch.bfloat16
            torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.3)
            assert generated_depthwise(hidden, weight, bias, value.bfloat16()).dtype == torch.float32
            with torch.autocast("cpu", torch.bfloat16):
                assert generated_depthwise(hidden, weight, bias, value.bfloat16()).dtype == torch.bfloat16


def test_the_operator_keeps_torchs_rules():
    arguments = generated((1, 2, 1, 1, 2, 2, 3, 3))
    torch.library.opcheck(torch.ops.eqzoo.generated_depthwise.default, arguments)
    assert torch.autograd.gradcheck(generated_depthwise, arguments)
    assert torch.autograd.gradgradcheck(generated_depthwise, arguments)


def test_gradients_that_are_not_asked_for():
    arguments = generated(SHAPES[0])
    expected = with_gradients(generated_depthwise, arguments)[1:]
    for asked in ((3,), (0,), (1, 2)):
        frozen = [x.detach().requires_grad_(i in asked) for i, x in enumerate(arguments)]
        out = generated_depthwise(*frozen)
        weights = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
        found = torch.autograd.grad(out, [frozen[i] for i in asked], weights)
        torch.testing.assert_close(found, tuple(expected[i] for i in asked))


@pytest.mark.parametrize("group", [Z2, P4, P4M])
def test_what_is_kept_does_not_grow_with_the_window(group):
    x = torch.randn(2, 2, group.order, 6, 6)

    def growth():
        small, large = (kept_numbers(E4Layer2d(group, 2, 2, k, 2), x) for k in (1, 7))
        return large - small

    assert growth() < 1_000 * group.order  # of the map that generates filters
    with use_backend("reference"):  # negative control: filters are stored
        assert growth() > 10_000 * group.order


def test_shapes_that_do_not_belong_together_are_refused():
    hidden, weight, bias, value = generated(SHAPES[0])
    for arguments, message in (
        ((hidden[:1], weight, bias, value), "hidden has shape"),
        ((hidden, weight[..., :1], bias, value), "hidden has shape"),
        ((hidden, weight, bias, value[:, :5]), "value has shape"),
        ((hidden, weight[:, :, :4], bias[:, :, :4], value), "odd sides"),
    ):
        with pytest.raises(ValueError, match=message):
            generated_depthwise(*arguments)
