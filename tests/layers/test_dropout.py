"""Dropout without a mask: torch's law, from torch's seed, and the same draws in both passes."""

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import nn
from torch.utils.checkpoint import checkpoint

from eqzoo import create_model
from eqzoo.layers import Dropout
from eqzoo.ops import _compile, dropout, use_backend
from tests.conftest import threads

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def mask(shape, p, seed=0):
    torch.manual_seed(seed)
    return dropout(torch.ones(shape), p) != 0


@pytest.mark.parametrize("p", [0.001, 0.2, 0.3, 0.5, 0.9])
def test_numbers_are_dropped_with_their_probability(p):
    """Within five standard deviations: as a whole, and for pairs at a few distances, which would show a pattern."""
    kept = mask((4_000_000,), p).double()
    count = kept.numel()
    assert abs(kept.mean() - (1 - p)) < 5 * (p * (1 - p) / count) ** 0.5
    centred = kept - (1 - p)
    for distance in (1, 2, 3, 8, 31, 32, 33, 63, 64, 65, 128, 16384):
        correlation = (centred[:-distance] * centred[distance:]).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / count**0.5, distance


def test_calls_do_not_depend_on_each_other():
    torch.manual_seed(0)
    masks = torch.stack([(dropout(torch.ones(100_000)) != 0).double() - 0.5 for _ in range(8)])
    correlations = 4 * masks @ masks.T / 100_000 - torch.eye(8)
    assert correlations.abs().max() < 5 / 100_000**0.5


def test_the_threshold_is_exact_where_p_is_small():
    """One in a million numbers: 32 bits tell such probabilities apart, 16 would not."""
    dropped = (~mask((40_000_000,), 1e-6)).sum()
    assert 12 <= dropped <= 80  # 40 within 4.4 and 6.3 standard deviations


def test_the_seed_of_torch_decides():
    assert torch.equal(mask((1000,), 0.5), mask((1000,), 0.5))
    assert not torch.equal(mask((1000,), 0.5), mask((1000,), 0.5, seed=1))
    found = []
    for count in (3, 1):
        with threads(count):
            found.append(mask((100_001,), 0.5))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [(), (1,), (63,), (3, 5, 7, 2), (2, 6, 9, 8)], ids=str)
def test_both_passes_drop_the_same_numbers(size, dtype):
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-6
    for layout in LAYOUTS if len(size) == 4 else LAYOUTS[:1]:
        x = torch.randn(size).to(dtype).contiguous(memory_format=layout).requires_grad_()
        y = dropout(x, 0.3)
        assert y.stride() == x.stride()
        kept = y != 0
        torch.testing.assert_close(y, torch.where(kept, x / 0.7, 0.0), rtol=rtol, atol=0)
        cotangent = torch.randn(size).to(dtype)
        (grad,) = torch.autograd.grad(y, x, cotangent)
        assert torch.equal(grad != 0, kept)
        torch.testing.assert_close(grad[kept], (cotangent / 0.7)[kept], rtol=rtol, atol=0)


def test_fields_with_gaps_and_broadcast_gradients():
    x = torch.randn(4, 6, 10)[:, ::2].requires_grad_()
    y = dropout(x, 0.5)
    y.sum().backward(torch.ones(()))
    assert torch.equal(x.grad != 0, y != 0)
    x = torch.randn(3, 1).expand(3, 50)
    kept = dropout(x, 0.5) != 0
    assert 40 < kept.sum() < 110
    assert not torch.equal(kept[:, :25], kept[:, 25:])


def test_many_gradients_at_once_pass_through_the_same_mask():
    x = torch.randn(5, 7).requires_grad_()
    y, cotangents = dropout(x, 0.4), torch.randn(3, 5, 7)
    (grads,) = torch.autograd.grad(y, x, cotangents, retain_graph=True, is_grads_batched=True)
    for grad, cotangent in zip(grads, cotangents, strict=True):
        torch.testing.assert_close(grad, torch.autograd.grad(y, x, cotangent, retain_graph=True)[0])


def test_one_graph_serves_images_of_several_sizes():
    torch._dynamo.reset()
    compiled = torch.compile(Dropout(0.5), fullgraph=True, backend="eager")
    for side in (4, 6, 7):
        assert compiled(torch.ones(2, 3, 4, side, side)).unique().tolist() == [0.0, 2.0]


def test_derivatives_of_any_order():
    x = torch.randn(5, 7).requires_grad_()

    def run(x):
        torch.manual_seed(0)
        return dropout(x, 0.4) ** 3

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


def test_a_recomputed_block_drops_the_same():
    drop, x = Dropout(0.5), torch.randn(1000).requires_grad_()
    y = checkpoint(lambda x: drop(x).square(), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


def test_the_ends_and_evaluation():
    x = torch.randn(10)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x
    assert Dropout(0.5).eval()(x) is x
    assert torch.equal(dropout(x, 1.0), torch.zeros(10))
    assert dropout(torch.zeros(0), 0.5).shape == (0,)
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            dropout(x, bad)


def test_without_the_kernel_it_is_torch_s():
    x = torch.ones(1000)
    with use_backend("eager"):
        torch.manual_seed(0)
        y = dropout(x)
    torch.manual_seed(0)
    assert torch.equal(y, nn.functional.dropout(x))
    assert torch.vmap(dropout, randomness="different")(torch.ones(4, 100)).unique().tolist() == [0.0, 2.0]
    torch._dynamo.reset()
    assert torch.compile(dropout, fullgraph=True, backend="aot_eager")(x).unique().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiled_graphs_have_the_kernel(layout):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_module_simplified(graph, inputs, fw_compiler=lambda graph, _: make_boxed_func(graph))

    run = torch.compile(lambda x: dropout(x.relu(), 0.25), fullgraph=True, backend=backend)
    x = (torch.rand(4, 5, 6, 7) + 0.1).contiguous(memory_format=layout).requires_grad_()
    first, second = run(x), run(x)
    assert "eqzoo.dropout" in graphs[0].code
    assert len(graphs) == 1
    assert first.stride() == x.stride()
    assert not torch.equal(first, second)
    for y in (first, second):
        torch.testing.assert_close(y, torch.where(y != 0, x / 0.75, 0.0))
        assert 0.15 < (y == 0).double().mean() < 0.35
        (grad,) = torch.autograd.grad(y, x, torch.ones(x.shape))  # in the other layout, if x is channels last
        torch.testing.assert_close(grad, torch.where(y != 0, 1 / 0.75, 0.0))
    with use_backend("eager"):  # a graph of the kernel, where it is not to be used
        y = run(x)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0] != 0, y != 0)


def test_networks_draw_no_other_dropout(monkeypatch):
    """Each mask that torch draws takes a third of the step of a small network."""
    assert _compile.cpu_function("drop/cpu", "dropout", torch.ones(1)) is not None

    def drawn(*args, **kwargs):
        raise AssertionError("torch's dropout")

    for name in ("p4_cnn", "p4_allcnn", "p4_resnet18", "p4_e4net"):
        model = create_model(name)
        assert sum(isinstance(module, Dropout) for module in model.modules()) > 1
        assert not any(type(module) is nn.Dropout for module in model.modules())
        with monkeypatch.context() as patched:
            patched.setattr(torch, "dropout", drawn)
            patched.setattr(nn.functional, "dropout", drawn)
            model(torch.randn(2, *model.input_size))
