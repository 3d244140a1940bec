"""Attentive convolutions: reference, equivariance, fused forms, and the networks made of them."""

import copy
from functools import partial

import pytest
import timm
import torch

import eqzoo
from eqzoo.equivariance import equivariance_error
from eqzoo.groups import P4, P4M, Z2, Z2M
from eqzoo.layers import AttentiveGroupConv2d, AttentiveLiftingConv2d, InputAttention2d, attentive
from eqzoo.models import AllCNN, ResNet44
from eqzoo.ops import attentive_conv, use_backend
from eqzoo.ops import reference as formulas
from tests.layers import reference_attentive as reference
from tests.layers.reference import assert_same_with_gradients

GRID = [Z2, Z2M, P4, P4M]
ON_RESPONSES = ["full", "channel", "spatial"]
ON_INPUT = ["input", "pose"]
LAYERS = [AttentiveLiftingConv2d, AttentiveGroupConv2d]


def drawn(layer):
    """The layer with weights that are large enough for attention to matter."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return layer


def image(layer, height=4, width=5):
    lead = (layer.in_channels,) if layer.in_field == "trivial" else (layer.in_channels, layer.group.order)
    return torch.randn(2, *lead, height, width)


@pytest.mark.parametrize("attention", ON_RESPONSES)
@pytest.mark.parametrize("layer_cls", LAYERS)
@pytest.mark.parametrize("group", GRID)
def test_attention_on_responses_is_its_equations(group, layer_cls, attention):
    layer = drawn(layer_cls(group, 3, 2, 3, padding=1, attention=attention, hidden_channels=2, attention_size=3))
    x = image(layer)
    assert_same_with_gradients(layer, x, lambda x: reference.attentive_conv(x, layer, padding=1))


@pytest.mark.parametrize("layer_cls", LAYERS)
def test_sampling_options_are_the_equations_too(layer_cls):
    options = {"stride": 2, "padding": 1, "dilation": 2, "attention_dilation": 2}
    layer = drawn(layer_cls(P4, 2, 3, 2, attention_size=3, bias=False, **options))
    x = image(layer, 7, 5)
    assert_same_with_gradients(layer, x, lambda x: reference.attentive_conv(x, layer, **options))


@pytest.mark.parametrize("attention", ON_INPUT)
@pytest.mark.parametrize("field", ["trivial", "regular"])
@pytest.mark.parametrize("group", GRID)
def test_attention_on_the_input_is_its_equations(group, field, attention):
    layer = drawn(InputAttention2d(group, 3, field, attention, 2, attention_size=3, attention_dilation=2))
    x = torch.randn(2, 3, *([group.order] if field == "regular" else []), 4, 5)
    assert_same_with_gradients(layer, x, lambda x: reference.attend_input(x, layer))


@pytest.mark.parametrize("attention", ON_INPUT)
@pytest.mark.parametrize("layer_cls", LAYERS)
def test_attention_on_the_input_comes_before_a_plain_convolution(layer_cls, attention):
    layer = drawn(layer_cls(P4, 3, 2, 3, bias=False, attention=attention, attention_size=3))
    x = image(layer)
    expected = reference.group_conv(reference.attend_input(x, layer.attention), layer.weight, P4)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["input", "pose"])
def test_the_convolution_behind_attention_on_the_input_can_run_through_irreps(attention):
    layer = AttentiveGroupConv2d(P4, 3, 5, 3, padding=1, attention=attention)
    x = torch.randn(2, 3, 4, 7, 7)
    found = []
    for backend in ("irreps", "expanded"):
        with use_backend(backend), torch.profiler.profile() as profile:
            found.append(layer(x))
        assert any(event.name == "eqzoo::group_conv2d" for event in profile.events()) == (backend == "irreps")
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_the_comparison_can_fail(monkeypatch):
    """Negative control: attention that passes α instead of 1 − α is far from the equations, as is one of zeros."""
    layer = drawn(AttentiveGroupConv2d(P4, 2, 2, 3, attention_size=3, bias=False))
    x = image(layer)
    plain = reference.group_conv(x, layer.weight, P4)
    assert (plain - layer(x) - layer(x)).abs().max() > 0.1
    assert (plain - layer(x)).abs().max() > 0.1
    monkeypatch.setattr(formulas, "channel_attention", lambda mean, *_: torch.zeros_like(mean))
    with use_backend("reference"):
        assert (reference.attentive_conv(x, layer) - layer(x)).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ON_RESPONSES + ON_INPUT)
@pytest.mark.parametrize("layer_cls", LAYERS)
@pytest.mark.parametrize("group", GRID[1:])
def test_layers_are_equivariant(group, layer_cls, attention):
    layer = drawn(layer_cls(group, 3, 2, 3, padding=1, attention=attention, attention_size=5))
    assert equivariance_error(layer, image(layer, 6, 8)) < 1e-14


@pytest.mark.parametrize("index", ["pose_index", "orbit_index"])
@pytest.mark.parametrize("attention", ["full", "input"])
def test_attention_that_is_not_permuted_breaks_equivariance(attention, index):
    """Negative control: the attention weights of the identity for all elements."""
    layer = drawn(AttentiveGroupConv2d(P4, 3, 2, 3, attention=attention, attention_size=3))
    x = image(layer, 6, 6)
    assert equivariance_error(layer, x) < 1e-14
    own = getattr(layer.attention, index)
    layer.attention.register_table(index, own[:1].expand_as(own).numpy())
    assert equivariance_error(layer, x) > 1e-3


@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_chunks_take_less_memory_and_give_the_same(chunk, monkeypatch):
    """In eager torch the largest tensor holds the responses of a chunk."""
    layer = drawn(AttentiveGroupConv2d(P4, 2, 5, 3))
    x = image(layer, 6, 6)
    expected, sizes, convolve = layer(x), [], torch.nn.functional.conv2d
    monkeypatch.setattr(
        torch.nn.functional, "conv2d", lambda *a, **k: (y := convolve(*a, **k), sizes.append(y.numel()))[0]
    )
    monkeypatch.setattr(attentive, "_FIELDS_AT_ONCE", chunk)
    with use_backend("eager"):
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)
    assert max(sizes) == 2 * (2 * 4) * (min(chunk, 5) * 4) * 4 * 4


@pytest.mark.parametrize("attention", ON_RESPONSES + ON_INPUT)
@pytest.mark.parametrize("layer_cls", LAYERS)
@pytest.mark.parametrize("bias", [False, True])
def test_fuse_gives_the_same_map_on_planes(layer_cls, attention, bias):
    layer = drawn(layer_cls(P4M, 3, 2, 3, attention=attention, attention_size=3, bias=bias))
    x = image(layer, 6, 7)
    planes = x if x.ndim == 4 else x.flatten(1, 2)
    torch.testing.assert_close(layer.fuse()(planes), layer(x).flatten(1, 2), rtol=0, atol=1e-13)


def test_sizes_that_break_equivariance_are_refused():
    with pytest.raises(ValueError, match="exact at height 7 or 9"):
        AttentiveGroupConv2d(P4, 2, 2, 3, stride=2)(torch.zeros(1, 2, 4, 8, 8))


@pytest.mark.parametrize("attention", [None, "full", "input"])
@pytest.mark.parametrize("kind", [partial(AllCNN, width=2), partial(ResNet44, widths=(2, 3, 2), depth=2)], ids=str)
def test_strided_networks_are_exact_where_no_window_is_cut(kind, attention):
    model = kind(group=P4, attention=attention, downsample="stride")
    assert equivariance_error(model, torch.randn(2, 3, 9, 9), randomize=True) < 1e-12
    assert equivariance_error(model, torch.randn(2, 3, 8, 8), randomize=True) > 1e-4


@pytest.mark.parametrize(
    ("layer_cls", "attention"),
    [
        *((AttentiveGroupConv2d, attention) for attention in ON_RESPONSES + ON_INPUT),
        *((AttentiveLiftingConv2d, attention) for attention in ("full", "input")),
    ],
)
def test_layers_work_in_all_formats(layer_cls, attention):
    layer = drawn(layer_cls(P4M, 2, 3, 3, attention=attention, attention_size=3))
    x = image(layer)
    expected = layer(x)
    last = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    x_last = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    torch.testing.assert_close(last(x_last), expected, rtol=0, atol=1e-10)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=1e-10)
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(exported.module()(x[[0, 1, 0]]), expected[[0, 1, 0]], rtol=0, atol=1e-10)
    single = copy.deepcopy(layer).float()
    torch.testing.assert_close(single(x.float()).double(), expected, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        half = single.train()(x.float())
    assert half.dtype == torch.bfloat16
    half.float().sum().backward()
    assert torch.isfinite(half).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in single.parameters())


@pytest.mark.parametrize("name", ["p4_alpha_cnn", "p4_alpha_f_cnn", "p4_alpha_f_allcnn"])
def test_weights_load_into_networks_of_other_channels_and_classes(name, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    torch.set_default_dtype(torch.float32)
    model = eqzoo.create_model(name).eval()
    tag = timm.models.get_pretrained_cfg(name).tag
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / f"{name}.{tag}.safetensors")
    monkeypatch.setenv("EQZOO_WEIGHTS", str(tmp_path))
    channels = model.in_chans + 1
    with pytest.warns(UserWarning, match="depends on in_chans"):
        other = eqzoo.create_model(f"{name}.{tag}", pretrained=True, in_chans=channels, num_classes=4).eval()
    assert other(torch.randn(1, channels, *model.input_size[1:])).shape == (1, 4)
    own, loaded = model.state_dict(), other.state_dict()
    assert all(torch.equal(own[key], loaded[key]) for key in own if key.startswith("blocks."))
    # Where attention stays as it is, there is no warning, which would be an error.
    again = eqzoo.create_model(f"{name}.{tag}", pretrained=True, num_classes=4).state_dict()
    assert all(torch.equal(own[key], again[key]) for key in own if not key.startswith("head."))


def test_the_operation_takes_planes():
    """The operation without a module, given all transformed filters."""
    layer = AttentiveGroupConv2d(P4, 2, 3, 3, bias=False)
    x = image(layer, 5, 5)
    y = attentive_conv(x.flatten(1, 2), layer.filters(), *layer.attention.banks(), poses=4)
    torch.testing.assert_close(y.unflatten(1, (3, 4)), layer(x), rtol=0, atol=1e-13)
