"""Filters that are kept in evaluation mode: built once, and anew when anything that they depend on changes."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from eqzoo.groups import P4
from eqzoo.layers import AffineSelfConv2d, AttentiveGroupConv2d, E4Layer2d, GroupConv2d, _cache

LAYERS = {
    "conv": lambda: GroupConv2d(P4, 6, 4, 3, padding=1),
    "attention on responses": lambda: AttentiveGroupConv2d(P4, 6, 4, 3, padding=1, attention_size=3),
    "attention on the input": lambda: AttentiveGroupConv2d(P4, 6, 4, 3, padding=1, attention="input"),
    "self convolution": lambda: AffineSelfConv2d(P4, 6, 3, num_heads=3),
    "e4": lambda: E4Layer2d(P4, 6, 6, 3, 2, 2),
}


def field(last=False):
    x = torch.randn(2, 7, 7, 4, 6).permute(0, 4, 3, 1, 2)
    return x if last else x.contiguous()


@pytest.fixture
def built(monkeypatch):
    """Counts what is built and kept."""
    count, entry = [], _cache._Entry

    def counting(*args):
        count.append(args)
        return entry(*args)

    monkeypatch.setattr(_cache, "_Entry", counting)
    return count


def expected(layer, x):
    """What a fresh copy gives, with gradients on: nothing is kept then."""
    fresh = copy.deepcopy(layer)
    with torch.enable_grad():
        return fresh.requires_grad_()(x).detach()


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", LAYERS)
def test_filters_are_built_once(name, last, built):
    layer, x = LAYERS[name]().eval(), field(last)
    wanted = layer(x)
    assert not built  # a gradient may be asked for
    with torch.no_grad():
        first = layer(x)
        count = len(built)
        assert count > 0
        torch.testing.assert_close(first, wanted, rtol=1e-12, atol=1e-12)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(layer(x), first)
        assert len(built) == count


def test_the_layouts_have_filters_of_their_own(built):
    conv = LAYERS["conv"]().eval()
    with torch.no_grad():
        for last in (False, True, False, True):
            x = field(last)
            torch.testing.assert_close(conv(x), expected(conv, x))
    assert len(built) == 3  # filters and bias apart, and both together with channels last; then none again


def test_what_is_made_in_inference_mode_serves_outside_of_it():
    conv, x = LAYERS["conv"]().eval().requires_grad_(False), field()
    with torch.inference_mode():
        conv(x)
    x.requires_grad_()
    conv(x).sum().backward()
    assert x.grad is not None


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def check_nothing_is_kept(layer, built):
    """A write that changes no version, as of FSDP or another process, is seen."""
    x = field()
    with torch.no_grad():
        before = layer(x)
        with torch.autograd._unsafe_preserve_version_counter(tuple(layer.parameters())):
            for parameter in layer.parameters():
                parameter.mul_(3)
        assert not built
        assert not torch.allclose(layer(x), before)
        torch.testing.assert_close(layer(x), expected(layer, x))


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_kept_of_shared_memory(name, built):
    check_nothing_is_kept(LAYERS[name]().share_memory().eval(), built)


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_kept_beside_other_processes(name, built, process_group):
    check_nothing_is_kept(LAYERS[name]().eval(), built)


CHANGES = {
    "in place": lambda layer, p: p.add_(1),
    "data, another": lambda layer, p: setattr(p, "data", p.data + 1),
    "state dict": lambda layer, p: layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}),
    "state dict, assigned": lambda layer, p: layer.load_state_dict(
        {k: v + 1 for k, v in layer.state_dict().items()}, assign=True
    ),
    "another parameter": lambda layer, p: [
        setattr(module, name, nn.Parameter(value.detach() + 1))
        for module in layer.modules()
        for name, value in list(module.named_parameters(recurse=False))
    ],
    "optimizer": lambda layer, p: optimize(layer),
    "data, and eval": lambda layer, p: (p.data.add_(1), layer.eval()),
    "data, and a pass with gradients": lambda layer, p: (p.data.add_(1), with_gradients(layer)),
}


def with_gradients(layer):
    with torch.enable_grad():
        layer(field())


WHOLE = ("state dict", "state dict, assigned", "another parameter", "optimizer")  # all parameters at once


def optimize(layer):
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_they_follow_their_weights(name, change):
    layer, x = LAYERS[name]().eval(), field()
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before)
        for p in list(layer.parameters())[: 1 if change in WHOLE else None]:
            CHANGES[change](layer, p)
        after = layer(x)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, expected(layer, x), rtol=1e-12, atol=1e-12)


def test_without_the_check_old_filters_would_be_used(monkeypatch):
    """Negative control of the test above."""
    conv, x = LAYERS["conv"]().eval(), field()
    monkeypatch.setattr(_cache._Entry, "is_valid", lambda *_: True)
    with torch.no_grad():
        before = conv(x)
        conv.weight.add_(1)
        assert torch.equal(conv(x), before)


def test_pruned_and_parametrized_layers_keep_nothing():
    x = field()
    with torch.no_grad():
        for bias in (False, True):
            conv = GroupConv2d(P4, 6, 4, 3, padding=1, bias=bias).eval()
            for amount in (0.5, 0.9):
                before = conv(x)
                prune.l1_unstructured(conv, "weight", amount)
                assert (conv(x) - before).abs().max() > 1e-3
            prune.remove(conv, "weight")
            parametrizations.weight_norm(conv)
            before = conv(x)
            conv.parametrizations.weight.original0.mul_(2)
            assert (conv(x) - before).abs().max() > 1e-3


class Named(torch.Tensor):
    """A subclass, as libraries have of their own."""


def test_a_tensor_in_place_of_a_parameter_is_followed():
    """As hypernetworks set weights: the bias alone would say that nothing has changed."""
    conv, x = GroupConv2d(P4, 6, 4, 3, padding=1).eval(), field()
    conv.bias.requires_grad_(False)
    del conv.weight
    with torch.no_grad():
        conv.weight = torch.randn(4, 24, 3, 3)
        before = conv(x)
        conv.weight = torch.randn(4, 24, 3, 3)
        assert (conv(x) - before).abs().max() > 1e-3
    with torch.no_grad():
        conv.weight = torch.randn(4, 24, 3, 3).as_subclass(Named)
        before = conv(x)
        conv.weight = torch.randn(4, 24, 3, 3).as_subclass(Named)
        assert (conv(x) - before).abs().max() > 1e-3
    conv.weight = torch.randn(4, 24, 3, 3, requires_grad=True) * 1
    assert conv(x).requires_grad


def test_training_mode_and_other_types_drop_them():
    conv, x = LAYERS["conv"]().eval(), field()
    with torch.no_grad():
        conv(x)
        assert _cache._CACHE[conv]
        assert conv.train() not in _cache._CACHE
        conv.eval()(x)
        single = conv.float()
        assert single not in _cache._CACHE
        assert single(x.float()).dtype == torch.float32


def test_a_result_that_somebody_wrote_to_is_built_anew():
    conv, x = LAYERS["conv"]().eval(), field()
    with torch.no_grad():
        before = conv(x)
        conv.filters().zero_()
        assert torch.equal(conv(x), before)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_and_files_hold_nothing_of_it(name, tmp_path):
    layer, x = LAYERS[name]().eval(), field()
    fresh, used = io.BytesIO(), io.BytesIO()
    torch.save(layer, fresh)
    with torch.no_grad():
        wanted = layer(x)
        torch.save(layer, used)
        assert used.tell() - fresh.tell() < 1000 * len(list(layer.modules()))
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert not any(module in _cache._CACHE for module in copied.modules())
            assert torch.equal(copied(x), wanted)
            for p in copied.parameters():
                p.mul_(2)
            assert not torch.equal(copied(x), wanted)
        assert torch.equal(layer(x), wanted)
    assert list(layer.state_dict()) == list(LAYERS[name]().state_dict())


def test_threads_share_them():
    conv, x = LAYERS["conv"]().eval(), field()

    def run(_):
        with torch.no_grad():
            return conv(x)

    wanted = expected(conv, x)
    with ThreadPoolExecutor(8) as pool:
        for y in pool.map(run, range(64)):
            torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)


def test_functional_calls_use_the_weights_that_they_are_given():
    conv, x = LAYERS["conv"]().eval(), field()
    with torch.no_grad():
        before = conv(x)
        doubled = {name: 2 * value for name, value in conv.named_parameters()}
        torch.testing.assert_close(torch.func.functional_call(conv, doubled, (x,)), 2 * before)
        stacked = {name: torch.stack([value, 2 * value]) for name, value in conv.named_parameters()}
        both = torch.vmap(lambda weights: torch.func.functional_call(conv, weights, (x,)))(stacked)
        torch.testing.assert_close(both, torch.stack([before, 2 * before]))
        assert torch.equal(conv(x), before)


def test_compiled_and_exported_graphs_build_their_own():
    conv, x = LAYERS["conv"]().eval(), field()
    with torch.no_grad():
        before = conv(x)
        torch._dynamo.reset()
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
        program = torch.export.export(conv, (x,)).module()
        traced = torch.jit.trace(conv, (x,), check_trace=False)
        for graph in (compiled, program, traced):
            torch.testing.assert_close(graph(x), before)
        conv.weight.mul_(2)
        conv.bias.mul_(2)
        torch.testing.assert_close(compiled(x), 2 * before)
        torch.testing.assert_close(traced(x), 2 * before)


@pytest.mark.parametrize("route", ["compiled forward", "compiled step", "given gradients"])
def test_steps_of_fused_optimizers_and_averages_behind_them_are_followed(route):
    """They change parameters but not their versions, and none of these routes runs the layer's forward pass."""
    torch._dynamo.reset()
    layer, average, x = GroupConv2d(P4, 6, 4, 3).eval(), GroupConv2d(P4, 6, 4, 3).eval(), field()
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-2, fused=True)
    forward = layer if route == "given gradients" else torch.compile(layer, backend="eager")
    step = torch.compile(optimizer.step, backend="eager") if route == "compiled step" else optimizer.step
    with torch.no_grad():
        before = layer(x), average(x)
    if route == "given gradients":
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
    else:
        forward(x).square().sum().backward()
    step()
    for old, new in zip(average.parameters(), layer.parameters(), strict=True):
        old.data.lerp_(new.data, 0.5)
    with torch.no_grad():
        for each, old in zip((layer, average), before, strict=True):
            torch.testing.assert_close(each(x), expected(each, x), rtol=1e-12, atol=1e-12)
            assert (each(x) - old).abs().max() > 1e-3


def test_a_parameter_without_memory_of_its_own():
    conv, x = GroupConv2d(P4, 6, 4, 1).eval(), field()
    conv.weight = nn.Parameter(torch.ones(1, 1, 1, 1).expand(4, 24, 1, 1))
    with torch.no_grad():
        torch.testing.assert_close(conv(x), conv(x))
