"""Octic operations in C++ and as formulas: the same numbers, and the law of p4m."""

import pytest
import torch
import torch.nn.functional as F

from eqzoo.groups import P4M
from eqzoo.layers import Irreps, OcticResidual, transform_irreps
from eqzoo.ops import _compile, octic_gelu, octic_norm, split_heads, stack_heads, use_backend
from eqzoo.ops.octic import eight_parts, regular_matrix
from tests.conftest import threads


@pytest.fixture(params=["c++", "eager"])
def backend(request):
    if request.param == "eager":
        with use_backend("eager"):
            yield
    elif _compile.cpu_function("octic/cpu", "octic_gelu", torch.ones(1)) is None:
        pytest.skip("no C++ compiler")
    else:
        yield


def field(c, tokens=5, dtype=torch.float64):
    shapes = (4, 2, tokens, c), (2, 2, tokens, 2 * c)
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def norm_inputs(c, dtype=torch.float64):
    weight, bias = torch.rand(6 * c, dtype=dtype) + 0.5, torch.randn(c, dtype=dtype)
    return (*field(c, dtype=dtype), weight.requires_grad_(), bias.requires_grad_())


def with_gradients(function, arguments):
    """The outputs, and the gradients of a weighted sum of them."""
    out = function(*arguments)
    out = out if isinstance(out, tuple) else (out,)
    weights = [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y) for y in out]
    return (*out, *torch.autograd.grad(out, arguments, weights))


def test_the_matrix_is_orthonormal_and_turns_irreps_into_the_regular_representation():
    """The group permutes the eight values as it permutes a regular field."""
    ab, e = field(3)
    matrix = regular_matrix(ab)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(8))
    values = torch.tensordot(matrix, eight_parts(ab, e), 1)
    orders = {tuple(range(8))}
    for g in P4M.elements:
        moved = torch.tensordot(matrix, eight_parts(*transform_irreps(Irreps(ab, e), g)), 1)
        order = [next(i for i in range(8) if torch.allclose(values[i], row)) for row in moved]
        assert sorted(order) == list(range(8))
        orders.add(tuple(order))
    assert len(orders) == 8  # faithful


@pytest.mark.usefixtures("backend")
def test_gelu_is_that_of_the_regular_representation():
    ab, e = field(6)
    matrix = regular_matrix(ab)
    expected = torch.tensordot(matrix.T, F.gelu(torch.tensordot(matrix, eight_parts(ab, e), 1)), 1)
    torch.testing.assert_close(eight_parts(*octic_gelu(ab, e)), expected)
    assert (eight_parts(*octic_gelu(ab, e)) - F.gelu(eight_parts(ab, e))).abs().max() > 0.1  # not part by part


@pytest.mark.usefixtures("backend")
def test_norm_is_its_formula():
    ab, e, weight, bias = norm_inputs(6)
    found = octic_norm(ab, e, weight, bias, 0.3)
    for n in range(2):
        for t in range(5):
            parts = [*ab[:, n, t], *e[:, n, t]]
            variance = sum(p.var(unbiased=False) for p in parts[:4]) + sum(p.var(unbiased=False) for p in parts[4:]) / 2
            scale = 2**0.5 / 4 * (variance + 0.3).sqrt()
            weights = [*weight[:24].view(4, 6), weight[24:], weight[24:]]
            expected = [(p - p.mean()) / scale * w for p, w in zip(parts, weights, strict=True)]
            expected[0] = expected[0] + bias
            torch.testing.assert_close(torch.cat([*found[0][:, n, t], *found[1][:, n, t]]), torch.cat(expected))


def test_heads_are_shares_of_every_part():
    ab, e = field(3 * 2 * 4)
    x = stack_heads(ab, e, 3, 2)
    assert x.shape == (3, 2, 2, 5, 32)
    k, n, h, t = 1, 1, 0, 3
    shares = [part[n, t].view(3, 2, -1)[k, h] for part in [*ab, *e]]
    assert torch.equal(x[k, n, h, t], torch.cat(shares))
    assert all(torch.equal(a, b) for a, b in zip(split_heads(x), (ab, e), strict=True))


@pytest.mark.parametrize("c", [1, 8, 10, 19])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_kernels_are_the_formulas(c, dtype, tolerance):
    for function, arguments in ((octic_gelu, field(c, dtype=dtype)), (octic_norm, norm_inputs(c, dtype))):
        found = with_gradients(function, arguments)
        with use_backend("eager"):
            expected = with_gradients(function, arguments)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() < tolerance * b.abs().max().clamp_min(1)


def test_single_precision_is_right_far_from_zero():
    """The kernel's error function is a polynomial over another; at the ends it has to be 1."""
    ab = torch.zeros(4, 1, 2001, 1, dtype=torch.float32)
    ab[0, 0, :, 0] = torch.linspace(-60, 60, 2001)
    e = torch.zeros(2, 1, 2001, 2, dtype=torch.float32)
    expected = octic_gelu(ab.double(), e.double())[0]
    error = (octic_gelu(ab, e)[0] - expected).abs() / expected.abs().clamp_min(1)
    assert error.max() < 3e-6  # torch's own GELU is as far off


def test_threads_share_the_tokens():
    arguments = norm_inputs(4)
    expected = with_gradients(octic_norm, arguments)
    with threads(3):
        torch.testing.assert_close(with_gradients(octic_norm, arguments), expected)


def test_norm_of_fields_over_places_is_that_of_tokens(backend):
    ab, e, weight, bias = norm_inputs(3)
    ab, e = (x.detach().unflatten(2, (1, 5)) for x in (ab, e))
    places = octic_norm(ab, e, weight, bias)
    tokens = octic_norm(ab.flatten(2, 3), e.flatten(2, 3), weight.expand(18).clone(), bias)
    for one, other in zip(places, tokens, strict=True):
        torch.testing.assert_close(one.flatten(2, 3), other)
    spread = torch.stack([weight, weight], 1)[:, 0]  # with gaps in memory
    torch.testing.assert_close(octic_norm(ab, e, spread, bias)[0], places[0])


@pytest.mark.parametrize("places", [(5,), (2, 3)], ids=["tokens", "places"])
def test_residuals_of_tokens_and_places(places):
    layer = OcticResidual(24, init_values=0.5, drop_path=0.5)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(18))
    x, y = (Irreps(torch.randn(4, 3, *places, 3), torch.randn(2, 3, *places, 6)) for _ in range(2))
    whole = layer.eval()(x, y)
    torch.testing.assert_close(whole.ab[1], x.ab[1] + layer.weight[3:6] * y.ab[1])
    torch.testing.assert_close(whole.e, x.e + layer.weight[12:] * y.e)
    dropped = layer.train()(x, y).ab - x.ab
    kept = dropped.flatten(2).abs().sum(2) > 0  # for all irreps of an image or for none
    assert (kept == kept[0]).all()


def test_forward_mode_has_tangents():
    ab, e = (x.detach() for x in field(3))
    given, tangents = (ab, e), (torch.randn_like(ab), torch.randn_like(e))
    step = 1e-6
    moved = [octic_gelu(*(x + sign * step * v for x, v in zip(given, tangents, strict=True))) for sign in (1, -1)]
    _, found = torch.func.jvp(octic_gelu, given, tangents)
    for one, more, less in zip(found, *moved, strict=True):
        torch.testing.assert_close(one, (more - less) / (2 * step), rtol=1e-5, atol=1e-7)
