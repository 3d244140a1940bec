"""Attentive convolutions: C++ and Triton against the reference and against loops, gradients, and what they keep."""

import pytest
import torch

from eqzoo.ops import _chunks, _compile, attend_input, attentive_conv, use_backend
from eqzoo.ops.attentive import eager, responses
from eqzoo.ops.attentive import input as input_attention
from tests.conftest import slow, threads

# (C, S, O), k, (height, width), (stride, padding, dilation), (n, attention dilation), attention
CASES = {
    "plain": ((3, 4, 8), 3, (7, 5), (1, 1, 1), (3, 1), "full"),
    "more planes than lanes": ((1, 2, 35), 3, (4, 5), (1, 0, 1), (3, 1), "full"),
    "an image, sampled": ((2, 1, 5), 2, (6, 7), (2, 1, 2), (5, 2), "full"),
    "one output": ((3, 2, 4), 4, (4, 4), (1, 0, 1), (7, 1), "full"),
    "many columns": ((2, 2, 5), 3, (3, 15), (1, 1, 1), (3, 1), "full"),  # 8 + 4 + 2 + 1 of them
    "many columns, sampled": ((1, 2, 3), 2, (4, 22), (2, 0, 1), (3, 1), "full"),
    "one pixel, wide filter": ((2, 2, 3), 5, (1, 1), (1, 2, 1), (3, 1), "full"),
    "three columns, wide filter": ((2, 1, 3), 5, (6, 3), (1, 2, 1), (3, 1), "spatial"),
    "1 x 1": ((4, 2, 6), 1, (5, 7), (1, 0, 1), (3, 1), "full"),
    "channels alone": ((3, 2, 12), 3, (5, 7), (1, 1, 1), (1, 1), "channel"),
}
TINY = [name for name in CASES if name not in ("plain", "many columns", "many columns, sampled")]


def case(name, dtype=torch.float64, batch=2):
    """The arguments of the operation, and those of them that have gradients."""
    (channels, poses, out), k, sides, sampling, (n, step), attention = CASES[name]

    def drawn(*shape):
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    x, filters = drawn(batch, channels * poses, *sides), drawn(out, channels * poses, k, k)
    matrices = (
        (None, None) if attention == "spatial" else (drawn(out, poses, 2, channels), drawn(out, poses, channels, 2))
    )
    spatial = None if attention == "channel" else drawn(out, 2 * poses, n, n)
    arguments = (x, filters, *matrices, spatial, poses, *sampling, step)
    return arguments, [v for v in arguments if isinstance(v, torch.Tensor)]


def with_gradients(arguments, sources):
    y = attentive_conv(*arguments)
    torch.manual_seed(1)
    return y, *torch.autograd.grad((y * torch.randn(y.shape, dtype=y.dtype)).sum(), sources)


def assert_near(found, expected, tolerance):
    """Errors as parts of the largest number of each tensor."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp_min(1e-3)


@pytest.fixture
def no_eager(monkeypatch):
    """Fails where eager torch would step in for a kernel."""
    if _compile._library("attentive/cpu", "double") is None:
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(eager, "responses", lambda *_: pytest.fail("eager torch computed responses"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_the_cpu_kernels_are_the_reference(name, dtype, tolerance, no_eager, monkeypatch):
    arguments, sources = case(name, dtype, batch=3)
    found = with_gradients(arguments, sources)
    monkeypatch.undo()
    with use_backend("reference"):
        assert_near(found, with_gradients(arguments, sources), tolerance)


@pytest.mark.parametrize("name", ["plain", "an image, sampled", "channels alone", "three columns, wide filter"])
def test_without_kernels_the_operations_are_eager_torch_too(name, monkeypatch):
    arguments, sources = case(name)
    with use_backend("eager"):
        expected = with_gradients(arguments, sources)
    monkeypatch.setattr(_compile, "cpu_function", lambda *_: None)
    monkeypatch.setattr(_chunks, "CPU_ELEMENTS", 1)
    assert_near(with_gradients(arguments, sources), expected, 1e-13)


def test_strided_and_channels_last_inputs_are_read_as_they_are(no_eager):
    arguments, sources = case("plain")
    expected = with_gradients(arguments, sources)
    x = arguments[0].detach()
    wide = torch.zeros(*x.shape[:3], 2 * x.shape[3])
    wide[..., ::2] = x
    for other in (x.to(memory_format=torch.channels_last), wide[..., ::2]):
        other.requires_grad_()
        assert not other.is_contiguous()
        assert_near(with_gradients((other, *arguments[1:]), [other, *sources[1:]]), expected, 1e-14)


def test_threads_change_nothing_but_rounding(no_eager):
    arguments, sources = case("plain", batch=5)
    expected = with_gradients(arguments, sources)
    with threads(3):
        found = with_gradients(arguments, sources)
        assert_near(found, expected, 1e-14)
        assert all(torch.equal(a, b) for a, b in zip(found, with_gradients(arguments, sources), strict=True))


def test_a_kernel_with_a_bug_is_noticed(no_eager, monkeypatch):
    """Negative control: with the filters' copies in another order, output and gradients are far off."""
    arguments, sources = case("plain")
    expected = with_gradients(arguments, sources)
    launch = _compile.launch
    monkeypatch.setattr(_compile, "launch", lambda f, x, w, *rest: launch(f, x, w.flip(1), *rest))
    for found, right in zip(with_gradients(arguments, sources), expected, strict=True):
        assert (found - right).abs().max() > 1e-2 * right.abs().max()


def test_no_response_is_kept(no_eager):
    """What a gradient keeps, apart from the input and what has no pixels, does not grow with the channels."""

    def kept(channels, training=True):
        maps = []
        x = torch.randn(2, channels * 4, 12, 12, requires_grad=training)
        weights = torch.randn(8, channels * 4, 3, 3), torch.randn(8, 4, 1, channels), torch.randn(8, 4, channels, 1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (maps.append(t.shape), t)[1], lambda t: t):
            attentive_conv(x, *weights, torch.randn(8, 8, 7, 7), 4)
        return [tuple(shape) for shape in maps if 10 in shape]

    assert kept(2) == kept(9) == 3 * [(2, 4, 10, 10, 8)]
    assert kept(2, training=False) == []


@pytest.mark.parametrize("name", ["plain", "channels alone", "three columns, wide filter"])
def test_the_operations_are_well_registered(name):
    (x, filters, reduce, _, spatial, poses, *sampling, step), _ = case(name)
    torch.library.opcheck(responses.response_peak.op, (x, filters, [poses, *sampling]))
    shape = (len(x), poses, x.shape[1] // poses, len(filters))
    alpha = None if reduce is None else torch.rand(shape, requires_grad=True)
    torch.library.opcheck(responses.response_sum.op, (x, filters, alpha, spatial, [poses, *sampling, step, 1]))


def test_mixed_types_are_brought_to_one(no_eager):
    arguments, _ = case("plain", torch.float32)
    half = arguments[0].detach().bfloat16().requires_grad_()
    y = attentive_conv(half.float(), *arguments[1:])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attentive_conv(half, *arguments[1:])
    mixed.float().sum().backward()
    assert half.grad.dtype == torch.bfloat16
    assert (mixed.float() - y).abs().max() < 0.05 * y.abs().max()


def on_input(poses, channel, dtype=torch.float64):
    """`attend_input`, its output and gradients, on maps of odd sides that are not contiguous."""
    torch.manual_seed(2)
    x = torch.randn(3, 5 * poses, 7, 5, dtype=dtype).transpose(2, 3).requires_grad_()
    maps = 2 if channel else 5
    shapes = [(2 * poses, 5 * poses, 1, 1), (5 * poses, 2 * poses, 1, 1)] if channel else []
    banks = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in (*shapes, (4, maps * poses, 3, 3))]
    y = attend_input(x, *(banks if channel else (None, None, *banks)), poses)
    return y, *torch.autograd.grad((y * torch.randn(y.shape, dtype=dtype)).sum(), (x, *banks))


@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize("poses", [1, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_attention_on_the_input_is_the_reference(poses, channel, dtype, tolerance, monkeypatch):
    with use_backend("reference"):
        expected = on_input(poses, channel, dtype)
    assert_near(on_input(poses, channel, dtype), expected, tolerance)
    monkeypatch.setattr(_compile, "cpu_function", lambda *_: None)
    assert_near(on_input(poses, channel, dtype), expected, tolerance)


def test_attention_on_the_input_is_well_registered():
    x, alpha, weight = (torch.randn(s, requires_grad=True) for s in ((2, 3, 4, 5, 7), (2, 3, 4), (2, 4, 5, 7)))
    torch.library.opcheck(input_attention.field_statistics.op, (x, alpha))
    for some in (alpha, None):
        torch.library.opcheck(input_attention.suppress.op, (x, some, weight))


@pytest.mark.parametrize(
    "name", slow(TINY, {"one output", "one pixel, wide filter", "1 x 1", "more planes than lanes"})
)
def test_the_gpu_kernels_are_the_cpu_kernels(name, monkeypatch):
    """Under Triton's interpreter, in single precision; images in two parts, as large batches are."""
    pytest.importorskip("triton")
    from eqzoo.ops.attentive import cuda as triton

    if name == "an image, sampled":
        monkeypatch.setattr(triton, "_OUT", 4)  # two blocks of its five outputs
    (x, filters, reduce, _, spatial, poses, *sampling, step), _ = case(name, torch.float32, batch=3)
    x, filters, spatial = (None if v is None else v.detach() for v in (x, filters, spatial))
    with torch.no_grad():
        peak, where = responses.response_peak(x, filters, [poses, *sampling])
        found = torch.empty_like(peak), torch.empty_like(where)
        triton.response_peak(x, filters, *found, poses, *sampling)
        assert_near(found, (peak, where), 1e-6)
        slope = torch.randn_like(peak)
        expected = responses._peak_backward(slope, x, filters, where, [poses, *sampling])
        assert_near(triton.response_peak_backward(slope, x, filters, where, poses, *sampling), expected, 1e-5)
        alpha = None if reduce is None else torch.rand_like(peak)
        inputs, sizes = (x, filters, alpha, spatial), (poses, *sampling, step)
        y, *kept = responses.response_sum(*inputs, [*sizes, 1])
        out = torch.empty_like(y)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_chunks, "CPU_ELEMENTS", 4 * poses * y[0].numel())  # two images
            triton.response_sum(*inputs, out, *sizes)
            assert_near([out], [y], 1e-5)
            slope = torch.randn_like(y)
            found = triton.response_sum_backward(slope, *inputs, *sizes)
        expected = responses._sum_backward(slope, *inputs, *kept, [*sizes, 1])
        pairs = [(f, e) for f, e in zip(found, expected, strict=True) if e.numel()]
        assert_near(*zip(*pairs, strict=True), 1e-5)
