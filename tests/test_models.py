"""What every registered network promises, whatever its architecture."""

import copy

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from timm.utils import reparameterize_model
from torch import nn

import eqzoo
from eqzoo.equivariance import equivariance_report, randomise_norms
from eqzoo.groups import P4, P4M, transform

NAMES = eqzoo.list_models("*_cnn*")
COUNTS = {
    "z2_cnn": 21_620,
    "p4_cnn": 24_610,
    "p4_cnn_w11": 29_051,
    "p4_cnn_w15": 50_415,
    "p4_cnn_w19": 77_539,
    "p4m_cnn": 26_747,
}


def trained_like(name, **kwargs):
    """A network whose norms and biases are away from their (symmetric) first values, and two pictures."""
    model = eqzoo.create_model(name, **kwargs).eval()
    x = torch.randn(2, *model.input_size)
    randomise_norms(model, x, torch.Generator().manual_seed(1))
    return model, x


@pytest.mark.parametrize("name", NAMES)
def test_parameters(name):
    model = eqzoo.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]
    assert all(parameter.ndim <= 4 for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_turning_the_picture_turns_the_features_and_keeps_the_logits(name):
    model, x = trained_like(name)
    features, logits = model.forward_features(x), model(x)
    assert features.std() > 1e-3
    assert (logits[0] - logits[1]).abs().max() > 1e-3  # logits that depend on the picture
    for g in model.group.elements:
        turned = transform(x, model.group, g, "trivial")
        expected = transform(features, model.group, g, "regular")
        torch.testing.assert_close(model.forward_features(turned), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(turned), logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_equivariance_report(name):
    report = equivariance_report(eqzoo.create_model(name), randomise=True)
    assert report.largest < 1e-9
    assert set(report.logits) == set(report.features) == set(report.group.elements)
    assert len(report.layers) > 10


def test_the_checks_above_can_fail():
    """Negative controls: a network outside its group, and one with a head that reads one element."""
    baseline, x = trained_like("z2_cnn")
    assert (baseline(transform(x, P4, 1, "trivial")) - baseline(x)).abs().max() > 1e-2
    assert eqzoo.equivariance_error(baseline, group=P4) > 1e-3
    model, _ = trained_like("p4_cnn")
    assert eqzoo.equivariance_error(model, group=P4M) > 1e-3
    model.global_pool = nn.Sequential(nn.Flatten(2), nn.AdaptiveMaxPool1d(3), nn.Flatten())
    model.global_pool.forward = lambda field: field[:, :, 0].amax((2, 3))
    report = equivariance_report(model)
    assert max(report.logits.values()) > 1e-3
    assert max(report.features.values()) < 1e-12


def test_the_report_names_the_layer_that_breaks():
    model, _ = trained_like("p4_cnn")
    conv = model.blocks[1].conv
    conv.orbit_index = conv.orbit_index[:, [1, 0, 2, 3]]
    layers = equivariance_report(model).layers
    assert [name for name, error in layers.items() if error > 1e-9] == ["blocks.1.conv"]


@pytest.mark.parametrize("name", NAMES)
def test_reparameterized_is_plain_and_equal(name):
    model, x = trained_like(name)
    plain = reparameterize_model(model)
    torch.testing.assert_close(plain(x), model(x))
    torch.testing.assert_close(plain.forward_features(x), model.forward_features(x).flatten(1, 2))
    weighted = {type(module) for module in plain.modules() if list(module.parameters(recurse=False))}
    assert weighted == {nn.Conv2d, nn.BatchNorm2d}
    assert equivariance_report(plain).largest < 1e-9
    torch.testing.assert_close(reparameterize_model(plain)(x), plain(x))


@pytest.mark.parametrize("name", NAMES)
def test_channels_classes_and_state(name):
    model, x = trained_like(name, in_chans=5, num_classes=3)
    assert x.shape[1] == 5
    assert model(x).shape == (2, 3)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, model.num_features)
    assert model.get_classifier() is model.head
    assert list(model.state_dict()) == list(copy.deepcopy(model).train().state_dict())
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features)


@pytest.mark.parametrize("name", NAMES)
def test_features_are_planes_in_both_of_timms_ways(name):
    model, x = trained_like(name)
    last, features = model.forward_intermediates(x)
    assert torch.equal(last, model.forward_features(x))
    assert torch.equal(features[-1], last.flatten(1, 2))
    extractor = timm.create_model(name, features_only=True, out_indices=(0, 2)).double().eval()
    first, third = extractor(x)
    assert [first.shape[1], third.shape[1]] == extractor.feature_info.channels()
    assert third.shape == features[2].shape
    assert len(model.forward_intermediates(x, indices=2, intermediates_only=True)) == 2
    with pytest.raises(ValueError, match="numbered 0"):
        model.forward_intermediates(x, indices=[9])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name):
    model, x = trained_like(name)
    model.train()
    model.set_grad_checkpointing()
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", ["p4_cnn", "p4m_cnn"])
def test_channels_last_and_bfloat16(name):
    model, x = trained_like(name)
    expected = model(x)
    torch.testing.assert_close(
        model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last)), expected
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.float()(x.float())
    torch.testing.assert_close(low.double(), expected, rtol=0.2, atol=0.1 * expected.abs().max().item())


def test_export_with_a_dynamic_batch():
    model, x = trained_like("p4_cnn")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    larger = torch.randn(5, *model.input_size)
    torch.testing.assert_close(program.module()(larger), model(larger))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_whole(name):
    model, x = trained_like(name)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_larger_pictures_and_the_sizes_that_are_refused():
    model, _ = trained_like("p4_cnn")
    assert model(torch.randn(1, 1, 40, 36)).shape == (1, 10)
    assert eqzoo.equivariance_error(model, torch.randn(1, 1, 40, 36)) < 1e-12
    with pytest.raises(ValueError, match="exact at height 24 or 26"):
        model(torch.randn(1, 1, 29, 29))
    with pytest.raises(ValueError, match="larger"):
        model(torch.randn(1, 1, 26, 26))


def test_the_zoo_is_registered_with_timm_and_changes_nothing_of_its_own():
    assert timm.list_models("p4_cnn*") == ["p4_cnn", "p4_cnn_w11", "p4_cnn_w15", "p4_cnn_w19"]
    assert eqzoo.list_models("p4*") == sorted(name for name in NAMES if name.startswith("p4"))
    assert set(eqzoo.list_pretrained()) <= set(timm.list_models(pretrained=True))
    with pytest.raises(ValueError, match="no network 'p4_cn' here"):
        eqzoo.create_model("p4_cn")


def test_timms_optimizers_group_layers_by_depth():
    model = timm.create_model("p4_cnn")
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    assert len({group["lr_scale"] for group in groups}) == 7
