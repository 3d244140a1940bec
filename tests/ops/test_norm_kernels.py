"""Batch norm with its sum and ReLU, by the kernel: the formula, in every order of memory, with all derivatives."""

import itertools

import pytest
import torch
from torch import nn

from eqzoo.equivariance import randomize_norms
from eqzoo.groups import P4, P4M, Z2
from eqzoo.layers import GroupBatchNorm2d
from eqzoo.ops import _compile, batch_norm, use_backend
from eqzoo.ops._dtypes import accumulation_dtype
from tests.conftest import threads

# The axes of a field from the slowest in memory to the fastest.
ORDERS = {
    "planes first": (0, 1, 2, 3, 4),
    "fields fastest": (0, 3, 4, 2, 1),
    "poses fastest": (0, 3, 4, 1, 2),
    "pixels slowest": (3, 4, 0, 1, 2),
}
SIZES = [(2, 3, 4, 5, 6), (3, 5, 1, 9, 8), (2, 6, 8, 1, 1), (1, 10, 4, 14, 14), (17, 7, 4, 2, 3), (70, 8, 8, 1, 2)]


def laid(x, order):
    """The same field with its axes in another order in memory."""
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(5)])


def field(size, order="planes first", dtype=torch.float64):
    return laid(torch.randn(size) * 3 + 2, ORDERS[order]).to(dtype)


def vectors(fields, dtype=torch.float64):
    """Running mean and variance, weight and bias."""
    low = (-1.0, 0.5, -1.5, -1.0)
    return [torch.empty(fields, dtype=dtype).uniform_(a, a + 2) for a in low]


def formula(x, mean, var, weight, bias, training, residual=None, relu=False):
    """The definition; in training the statistics are those of x."""
    if training:
        mean, var = x.mean((0, 2, 3, 4)), x.var((0, 2, 3, 4), correction=0)
    mean, var, weight, bias = (v.view(1, -1, 1, 1, 1) for v in (mean, var, weight, bias))
    y = (x - mean) / (var + 1e-5).sqrt() * weight + bias
    y = y if residual is None else y + residual
    return y.clamp_min(0) if relu else y


def grads(y, inputs):
    cotangent = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    return torch.autograd.grad((y * cotangent).sum(), inputs)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("with_residual", "relu"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_its_formula(size, order, with_residual, relu, training):
    x = field(size, order).requires_grad_()
    residual = field(size, "planes first").requires_grad_() if with_residual else None
    mean, var, weight, bias = vectors(size[1])
    inputs = [x, weight.requires_grad_(), bias.requires_grad_(), *([residual] if with_residual else [])]
    wanted = formula(x, mean, var, weight, bias, training, residual, relu)
    kept = mean.clone(), var.clone()
    got = batch_norm(x, mean, var, weight, bias, training, 0.1, 1e-5, residual, relu)
    assert got.stride() == x.stride()
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(grads(got, inputs), grads(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    if training:
        kept = (
            torch.lerp(kept[0], x.detach().mean((0, 2, 3, 4)), 0.1),
            torch.lerp(kept[1], x.detach().var((0, 2, 3, 4)), 0.1),
        )
    torch.testing.assert_close((mean, var), kept, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_the_kernel_and_torch_agree(order):
    """torch's own batch norm does the same work where there is no kernel."""
    found = []
    for backend in ("auto", "eager"):
        torch.manual_seed(1)
        x = field((4, 3, 4, 5, 6), order).requires_grad_()
        norm = GroupBatchNorm2d(P4, 3)
        with use_backend(backend):
            y = norm(x, residual=x.detach(), relu=True)
            found.append((y, *grads(y, [x, norm.weight, norm.bias]), norm.state_dict()))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


def test_a_large_mean_costs_no_digits_of_the_variance():
    """Negative control: the difference of the mean square and the square of the mean has none left."""
    for order in ORDERS:
        x = laid((torch.randn(64, 4, 4, 8, 8) + 3000).float(), ORDERS[order])
        expected = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
        got = batch_norm(x, None, None, training=True)
        assert (got - expected).abs().max() < 2e-4
        naive = (x * x).mean((0, 2, 3, 4)) - x.mean((0, 2, 3, 4)) ** 2
        assert (naive - 1).abs().max() > 0.1


def test_a_variance_of_zero_stays_one():
    for order in ORDERS:
        x = laid(torch.full((4, 3, 4, 8, 8), 0.1, dtype=torch.float32), ORDERS[order])
        var = torch.ones(3, dtype=torch.float32)
        assert batch_norm(x, torch.zeros_like(var), var, training=True, momentum=1.0).abs().max() < 1e-4
        assert var.max() < 1e-12


@pytest.mark.parametrize("order", ORDERS)
def test_numbers_that_are_none_are_kept(order):
    for bad in (float("nan"), float("inf")):
        for dtype in (torch.float32, torch.bfloat16):
            x = field((2, 3, 4, 5, 6), order, dtype)
            x[0, 1, 2, 3, 4] = bad
            y = batch_norm(x, None, None, training=True, relu=True)
            assert y[:, 1].isnan().all()
            assert y[:, ::2].isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("training", [True, False])
def test_bfloat16_is_rounded_once(order, training):
    size = (6, 5, 4, 7, 7)
    x, residual = field(size, order, torch.bfloat16).requires_grad_(), field(size, order, torch.bfloat16)
    mean, var, weight, bias = vectors(5, torch.float32)
    given = [v.double() for v in (mean, var, weight, bias)]
    got = batch_norm(x, mean, var, weight, bias, training, residual=residual, relu=True)
    assert got.dtype == torch.bfloat16
    wide = x.detach().double().requires_grad_()
    wanted = formula(wide, *given, training, residual.double(), True)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(grads(got, [x])[0].double(), grads(wanted, [wide])[0], rtol=2**-6, atol=2e-3)


def test_autocast_keeps_bfloat16_and_trains_the_parameters_in_float32():
    norm = GroupBatchNorm2d(P4, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(field((4, 3, 4, 5, 5), dtype=torch.bfloat16).requires_grad_(), relu=True)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert norm.weight.grad.dtype == norm.running_mean.dtype == torch.float32
    wide = field((4, 3, 4, 5, 5), dtype=torch.float32)
    assert norm(y.detach(), residual=wide).dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_second_derivatives(training, relu):
    x, residual = field((2, 2, 4, 2, 3)).requires_grad_(), field((2, 2, 4, 2, 3), "fields fastest").requires_grad_()
    mean, var, weight, bias = vectors(2)
    inputs = (x, residual, weight.requires_grad_(), bias.requires_grad_())

    def function(x, residual, weight, bias):
        return batch_norm(x, mean.clone(), var.clone(), weight, bias, training, 0.1, 1e-5, residual, relu)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_some_inputs_alone(order):
    mean, var, weight, bias = vectors(3)
    x, residual = field((2, 3, 4, 5, 6), order), field((2, 3, 4, 5, 6), order)
    for relu, place in itertools.product([False, True], range(4)):
        inputs = [x.clone(), residual.clone(), weight.clone(), bias.clone()]
        inputs[place].requires_grad_()
        got = batch_norm(inputs[0], mean, var, *inputs[2:], True, residual=inputs[1], relu=relu)
        wanted = formula(inputs[0], mean, var, *inputs[2:], True, inputs[1], relu)
        torch.testing.assert_close(grads(got, [inputs[place]]), grads(wanted, [inputs[place]]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("training", [True, False])
def test_it_compiles_as_one_graph(order, training):
    norm = GroupBatchNorm2d(P4M, 3).train(training)
    randomize_norms(norm, torch.Generator().manual_seed(0), field((4, 3, 8, 5, 5)))
    x, residual = (field((4, 3, 8, 5, 5), order).requires_grad_() for _ in range(2))

    def run(norm):
        y = norm(x * 2, residual=residual.sin(), relu=True)
        return y, *grads(y, [x, residual, norm.weight, norm.bias]), norm.running_mean, norm.running_var

    state = {name: value.clone() for name, value in norm.state_dict().items()}
    wanted = [value.clone() for value in run(norm)]
    norm.load_state_dict(state)
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    got = run(compiled)
    torch.testing.assert_close(list(got), wanted, rtol=1e-10, atol=1e-10)
    run(compiled)  # nothing of the first step is left in the second
    assert not norm.running_mean.requires_grad
    torch.library.opcheck(
        torch.ops.eqzoo.batch_norm.default, (x, residual, norm.weight, norm.bias, None, None, 1e-5, True)
    )


def test_a_cumulative_average_is_torch_s():
    norm, plain = GroupBatchNorm2d(Z2, 3), nn.BatchNorm3d(3, momentum=None)
    norm.momentum = None
    for _ in range(3):
        x = field((4, 3, 1, 5, 5))
        torch.testing.assert_close(norm(x), plain(x))
    torch.testing.assert_close(norm.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


def test_one_number_a_field_has_no_variance():
    norm = GroupBatchNorm2d(Z2, 3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.zeros(1, 3, 1, 1, 1))
    assert norm.eval()(torch.zeros(1, 3, 1, 1, 1)).shape == (1, 3, 1, 1, 1)


def test_threads_give_the_same_numbers():
    x = field((40, 6, 4, 14, 14), "fields fastest")
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append([batch_norm(y, None, None, training=True) for y in (x, x.contiguous())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


def test_many_gradients_at_once():
    norm, x = GroupBatchNorm2d(P4, 3), field((2, 3, 4, 5, 5)).requires_grad_()
    y, cotangents = norm(x, relu=True), torch.randn(3, 2, 3, 4, 5, 5)
    inputs = [x, norm.weight, norm.bias]
    found = torch.autograd.grad(y, inputs, cotangents, retain_graph=True, is_grads_batched=True)
    for place, cotangent in enumerate(cotangents):
        for all_of_them, one in zip(found, torch.autograd.grad(y, inputs, cotangent, retain_graph=True), strict=True):
            torch.testing.assert_close(all_of_them[place], one)


def test_what_would_be_read_beyond_memory_or_broadcast_is_refused():
    x, vector = field((2, 3, 4, 5, 5)), torch.ones(3)
    for mean, var in ((vector, None), (None, vector), (None, None)):
        with pytest.raises((ValueError, RuntimeError), match="running_"):
            batch_norm(x, mean, var)
    for residual in (torch.zeros(3, 1, 3, 4, 5, 5), torch.zeros(3, 4, 5, 5)):
        with pytest.raises(ValueError, match="residual has shape"):
            batch_norm(x, vector, vector, residual=residual)
    with pytest.raises(RuntimeError, match="device"):
        batch_norm(x, vector, vector, residual=torch.zeros(x.shape, device="meta"))
    for call in (batch_norm, torch.compile(batch_norm, backend="eager")):
        with pytest.raises(RuntimeError, match="weight should contain 3 elements"):
            call(x, vector, vector, torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("relu", [False, True])
def test_an_infinite_image_leaves_the_gradients_of_others_alone_in_evaluation(relu, order, dtype):
    size = (4, 3, 4, 9, 8)
    x, (mean, var, weight, bias) = field(size, order, dtype), vectors(3, accumulation_dtype(dtype))
    x[0, 1, 2, 3, 4] = torch.inf
    x.requires_grad_()
    batch_norm(x, mean, var, weight, bias, relu=relu)[1:].sum().backward()
    assert x.grad[1:].isfinite().all()
    assert x.grad[1:].any()
    assert not x.grad[0].any()


@pytest.mark.parametrize("way", ["kernel", "torch's operators", "functions to differentiate in turn"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_the_relu_cuts_off_has_no_gradient_in_evaluation(order, way, monkeypatch):
    x, (mean, var, weight, bias) = field((4, 3, 4, 9, 8), order), vectors(3)
    x.requires_grad_()
    y = batch_norm(x, mean, var, weight, bias, relu=True)
    if way == "torch's operators":
        monkeypatch.setattr(_compile, "cpu_function", lambda *_, **__: None)
    cotangent = torch.where(y > 0, 1.0, torch.inf)
    (grad,) = torch.autograd.grad(y, x, cotangent, create_graph=way.startswith("functions"))
    assert grad[y == 0].eq(0).all()
    assert grad.isfinite().all()
