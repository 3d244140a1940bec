"""Local group self-attention: C++, Triton and eager torch against the reference, outputs and gradients."""

import pytest
import torch

from eqzoo.equivariance import equivariance_error
from eqzoo.groups import P4, P4M, cyclic
from eqzoo.layers import GroupSelfAttention2d
from eqzoo.ops import _chunks, _compile, local_group_attention, use_backend
from eqzoo.ops.gsa import operator as gsa
from eqzoo.ops.gsa.eager import Problem, Window, attend, attend_backward
from tests.conftest import kept_numbers
from tests.layers.test_gsa import trained_like

# Poses in and out, channels, those of positions and poses, sides, window: odd and one-sided cases among them.
CASES = [
    (1, 4, 5, 4, 0, (5, 7), (5, 5)),
    (4, 4, 10, 6, 4, (6, 6), (5, 5)),
    (8, 8, 3, 2, 1, (1, 1), (3, 3)),
    (2, 2, 4, 2, 2, (4, 3), (5, 5)),
    (3, 1, 5, 2, 3, (5, 4), (3, 3)),
    (4, 6, 3, 2, 1, (9, 2), (1, 1)),
    (2, 3, 4, 4, 1, (4, 5), (7, 9)),
    (1, 2, 3, 2, 0, (3, 20), (1, 5)),
]


@pytest.fixture
def fallback(monkeypatch):
    """No kernel: eager torch in pieces."""
    monkeypatch.setattr(_compile, "cpu_function", lambda *_: None)


def problem(case, batch=2, heads=2, dtype=torch.float64, dropout=0.0):
    order, outputs, channels, coded, posed, sides, kernel_size = case
    qkv = torch.randn(batch, 3, heads, channels, order, *sides, dtype=dtype)
    position = torch.randn(coded, outputs, kernel_size[0] * kernel_size[1], dtype=dtype)
    pose = torch.randn(posed, order, order, dtype=dtype) if posed else None
    options = {"kernel_size": kernel_size, "scale": 0.7, "dropout": dropout}
    return [qkv, position, pose], options


def run(inputs, options, weight):
    """The output, and the gradients of a weighted sum of it."""
    torch.manual_seed(7)  # of dropout
    leaves = [t.detach().requires_grad_() if t is not None else None for t in inputs]
    y = local_group_attention(*leaves, **options)
    return [y, *torch.autograd.grad((y * weight).sum(), [t for t in leaves if t is not None])]


def compare(inputs, options, dtype):
    weight = torch.randn(local_group_attention(*inputs, **options).shape, dtype=dtype)
    # The reference has the same law of dropout, but other draws.
    with use_backend("eager" if options["dropout"] else "reference"):
        expected = run(inputs, options, weight)
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    for ours, theirs in zip(run(inputs, options, weight), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpp_is_the_reference(case, dtype, dropout):
    compare(*problem(case, dtype=dtype, dropout=dropout), dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_kernel_too(case, dropout, fallback, monkeypatch):
    monkeypatch.setattr(_chunks, "CPU_ELEMENTS", 500)  # head by head
    compare(*problem(case, heads=3, dropout=dropout), torch.float64)


@pytest.mark.parametrize(
    ("case", "dropout"),
    [
        ((2, 3, 5, 2, 2, (2, 3), (1, 3)), 0.3),
        ((3, 2, 3, 2, 1, (3, 1), (3, 1)), 0.0),
        ((1, 2, 2, 2, 0, (2, 2), (1, 3)), 0.3),
        ((2, 1, 2, 1, 1, (2, 1), (1, 1)), 0.0),
        ((2, 1, 2, 1, 1, (9, 8), (1, 3)), 0.3),  # more than one block of pixels
    ],
    ids=str,
)
def test_triton_is_eager(case, dropout):
    pytest.importorskip("triton")
    from eqzoo.ops.gsa import cuda as kernels

    inputs, options = problem(case, 1, 2, torch.float32, dropout)
    seed = torch.tensor([0x123456789ABCDEF]) if dropout else None
    window = Window(*options["kernel_size"])
    given = (*inputs, seed)
    whole = Problem(*given, torch.arange(2).view(1, 2), window, options["scale"], dropout)
    expected = attend(whole)
    grad = torch.randn(expected.shape, dtype=torch.float32)
    arguments = (options["kernel_size"], options["scale"], dropout)
    torch.testing.assert_close(kernels.forward(*given, *arguments), expected, rtol=1e-5, atol=1e-5)
    grads = kernels.backward(grad, inputs[0], *given[1:], *arguments)
    for ours, theirs in zip(grads, attend_backward(whole, grad), strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bugs_are_noticed(monkeypatch):
    """Negative control: a window whose taps are rotated around, as a correlation taken for a convolution."""
    inputs, options = problem(CASES[0])
    monkeypatch.setattr(_compile, "launch", lambda function, qkv, position, *rest: launch(qkv, position.flip(2), rest))

    def launch(qkv, position, rest):
        torch.manual_seed(0)
        rest[2].copy_(attend(Problem(qkv, position, *rest[:2], torch.arange(4).view(2, 2), Window(5, 5), 0.7, 0.0)))

    with torch.no_grad():
        ours = local_group_attention(*inputs, **options)
        with use_backend("eager"):
            assert (local_group_attention(*inputs, **options) - ours).abs().max() > 0.1


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_dropout_has_its_law(backend):
    """Keys are kept with the right probability, whatever the seed, and differently for each pixel, key pose and head.

    For all output poses they are the same.
    """
    qkv = torch.zeros(2, 3, 3, 2, 4, 8, 8)
    qkv[:, 2] = 1.0

    def dropped():
        with use_backend(backend):
            return local_group_attention(qkv, torch.zeros(2, 3, 1), kernel_size=(1, 1), dropout=0.25)

    torch.manual_seed(0)
    out = dropped()
    # Each pixel sums 16 pairs of poses, of weight 1/4, and 4/3 where it was kept.
    kept = out[:, :, 0, 0] * 4 * 0.75
    assert kept.mean() == pytest.approx(12, abs=0.15)
    assert kept.var() == pytest.approx(16 * 0.25 * 0.75, rel=0.25)
    heads = kept.flatten(0, 1).flatten(1)
    assert heads.corrcoef().fill_diagonal_(0).abs().max() < 0.4
    assert torch.equal(out[:, :, :, 0], out[:, :, :, 2])
    assert (dropped() != out).any()
    torch.manual_seed(0)
    assert torch.equal(dropped(), out)


@pytest.mark.parametrize("group", [P4, P4M, cyclic(8)])
def test_wide_scores_stay_finite_and_exact(group):
    layer = trained_like(GroupSelfAttention2d(group, 2, 6, 5, num_heads=2))
    with torch.no_grad():
        layer.qkv.weight *= 30  # scores of some hundreds
    x = torch.randn(1, 2, group.order, 5, 7)
    assert layer(x).isfinite().all()
    single = layer.float()(x.float())
    assert single.isfinite().all()
    assert equivariance_error(layer.double(), x) < 1e-11


def test_any_layout_is_taken():
    inputs, options = problem(CASES[1])
    expected = run(inputs, options, 1.0)
    strided = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in inputs]
    last = inputs[0].flatten(1, 4).contiguous(memory_format=torch.channels_last).view_as(inputs[0])
    for other in (strided, [last, *inputs[1:]]):
        for ours, theirs in zip(run(other, options, 1.0), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_the_operator_keeps_torch_s_rules():
    inputs, _ = problem(CASES[3])
    inputs = [t.requires_grad_() for t in inputs]
    seed = torch.tensor([3])
    torch.library.opcheck(gsa._attention.op, (*inputs, seed, [5, 5], 0.5, 0.2))
    torch.library.opcheck(gsa._attention.op, (inputs[0], inputs[1], None, None, [5, 5], 0.5, 0.0))


def test_memory_does_not_grow_with_the_window():
    x = torch.randn(1, 4, 4, 12, 12)
    small, large = (kept_numbers(GroupSelfAttention2d(P4, 4, 6, k), x) for k in (3, 11))
    # Only the encoders of positions know the window; each keeps some numbers of every tap and pose.
    assert large - small < (11**2 - 3**2) * 4 * 200
    assert small < 20 * 9 * 6 * x[0, 0].numel()


def test_wrong_arguments_are_refused():
    inputs, options = problem(CASES[0])
    for change, message in (
        ({"kernel_size": (4, 4)}, "odd sides"),
        ({"dropout": 1.0}, "below 1"),
        ({"kernel_size": (3, 3)}, "position has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            local_group_attention(*inputs, **options | change)
    for wrong, message in (
        ([inputs[0][0], *inputs[1:]], "qkv has shape"),
        ([*inputs[:2], torch.zeros(2, 3, 3)], "pose has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            local_group_attention(*wrong, **options)
