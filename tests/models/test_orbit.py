"""Any classifier made invariant: a mean over the copies of an image, or canonical copies; test-time augmentation."""

import copy
import functools
import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from timm.models import group_parameters, save_for_hf
from torch.fx.experimental.proxy_tensor import make_fx

import eqzoo
from eqzoo.data import Split, normalize
from eqzoo.evaluation.predictor import Predictor, averaged
from eqzoo.export.onnx_file import OnnxFile, write_onnx
from eqzoo.groups import P4M, transform
from eqzoo.layers._layout import is_channels_last
from eqzoo.models import OrbitNet
from eqzoo.models.canonical import canonical_elements, group_of_sides, take_copies
from tests.cli.commands import IMAGE, run


def plain():
    """A timm network with random weights and norms, in float64."""
    generator = torch.Generator().manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=5).double().eval()
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value.copy_(1 + 0.1 * noise if value.ndim == 1 else noise / value[0].numel() ** 0.5)
    return model


def images(side=32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1)).double()


def largest_change(function, x, group=P4M):
    y = function(x)
    return max((function(transform(x, group, g, "trivial")) - y).abs().max().item() for g in group.elements)


@torch.no_grad()
def test_it_is_the_mean_over_the_copies_and_invariant():
    model, x = plain(), images()
    mean, canonical = OrbitNet(model, "p4m"), OrbitNet(model, "p4m", copies=1)
    logits = torch.stack([model(transform(x, P4M, g, "trivial")) for g in P4M.elements])
    torch.testing.assert_close(mean(x), logits.mean(0), rtol=1e-12, atol=1e-14)
    features = mean.forward_features(x)
    assert features.shape[:2] == (2, 8)
    pooled = mean.forward_head(features, pre_logits=True)
    torch.testing.assert_close(model.get_classifier()(pooled), mean(x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mean.forward_head(features), mean(x), rtol=1e-12, atol=1e-14)
    averaged = OrbitNet(model, "p4m", average="probabilities")
    torch.testing.assert_close(averaged(x).exp(), logits.softmax(2).mean(0), rtol=1e-12, atol=0)
    for network in (mean, averaged):
        assert largest_change(network, x) < 1e-13
    for copies in (1, 2, 7):
        assert largest_change(OrbitNet(model, "p4m", copies), x) == 0
    assert (canonical(x) - mean(x)).abs().max() > 1e-4
    assert largest_change(model, x) > 1e-3  # the network alone is not invariant
    of_rotations = OrbitNet(model, eqzoo.P4)
    assert largest_change(of_rotations, x, eqzoo.P4) < 1e-13
    assert (of_rotations(x.flip(3)) - of_rotations(x)).abs().max() > 1e-4
    wide = x[..., :16, :]  # which 90° rotations would not keep
    for network in (mean, canonical, OrbitNet(model, "z2m")):
        assert largest_change(network, wide, group_of_sides(network.group, 16, 32)) < 1e-13


def kinds_of_images():
    """10,000 random, flat, symmetric and real images, of 8 bits: many have several copies with the same moments."""
    generator = torch.Generator().manual_seed(0)

    def draw(levels, *shape):
        return torch.randint(levels, shape, dtype=torch.uint8, generator=generator)

    half = draw(3, 1000, 1, 5, 5)
    upper = half.triu()
    yield draw(2, 5000, 1, 3, 3)
    yield draw(256, 1000, 3, 8, 8)
    yield torch.arange(250, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 4)
    yield torch.cat([half, half.flip(3)], 3)  # not square, and its own reflection
    yield torch.cat([torch.cat([part, part.rot90(1, (2, 3))], 3) for part in (half, half.rot90(2, (2, 3)))], 2)
    yield upper + upper.mT
    digits, _ = load_digits(return_X_y=True)
    yield torch.from_numpy(digits[:800] * 15).to(torch.uint8).reshape(-1, 1, 8, 8)


@pytest.mark.parametrize("group", [eqzoo.P4, P4M, eqzoo.Z2M])
def test_all_copies_of_an_image_have_one_canonical_copy(group):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for pixels in kinds_of_images():
        channels = pixels.shape[1]
        own = group_of_sides(group, *pixels.shape[2:])
        chosen = {}
        for dtype in (torch.uint8, torch.float32, torch.float64):
            norm = {} if dtype == torch.uint8 else {"mean": mean[:channels], "std": std[:channels]}
            x = pixels if dtype == torch.uint8 else normalize(pixels, *norm.values(), dtype)
            expected = take_copies(x, own, canonical_elements(x, group, **norm))
            for g in own.elements:
                copy = transform(x, own, g, "trivial")
                elements = canonical_elements(copy, group, **norm)
                assert torch.equal(take_copies(copy, own, elements), expected)
            chosen[dtype] = take_copies(pixels, own, canonical_elements(x, group, **norm))
            part = canonical_elements(x[5:6], group, **norm)  # any batch
            assert torch.equal(take_copies(pixels[5:6], own, part), chosen[dtype][5:6])
        assert all(torch.equal(found, chosen[torch.uint8]) for found in chosen.values())


def test_a_choice_by_sums_of_floats_is_not_exact():
    """Negative control of the test above: rounded sums, and their order where they are equal, depend on the copy."""
    x = torch.cat([part.expand(-1, 3, -1, -1).float() / 255 for part in kinds_of_images() if part.shape[2:] == (3, 3)])

    def choose(images):
        ramp = torch.linspace(-0.1, 0.1, 3)
        copies = torch.stack([transform(images, P4M, g, "trivial") for g in P4M.elements], 1)
        return copies[torch.arange(len(x)), ((copies * ramp).sum((2, 3, 4)) + copies.sum((2, 3, 4))).argmax(1)]

    assert not torch.equal(choose(x.rot90(1, (2, 3))), choose(x))


class Canonical(torch.nn.Module):
    """The canonical copies themselves."""

    def forward(self, x):
        return take_copies(x, P4M, canonical_elements(x, P4M))


def test_onnx_files_choose_the_same_copies(tmp_path):
    pixels = torch.cat([part.float().div(255) for part in kinds_of_images() if part.shape[1:] == (1, 8, 8)])
    pixels = torch.cat([pixels[:100], torch.full((3, 1, 8, 8), 0.5), pixels[:20] + pixels[:20].flip(3)])
    # Traced with two images.
    program = torch.export.export(Canonical(), (pixels[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    write_onnx(program, tmp_path / "copies.onnx", 18, {"eqzoo_version": "", "group": "p4m"}, irreps=True)
    run = OnnxFile(tmp_path / "copies.onnx")
    expected = Canonical()(pixels)
    assert not torch.equal(expected, pixels)
    for g in P4M.elements:
        copies = transform(pixels, P4M, g, "trivial")
        assert torch.equal(run(copies), expected)
        assert torch.equal(program.module()(copies), expected)
        assert torch.equal(run(copies[:1]), expected[:1])


@pytest.mark.parametrize("copies", [None, 1])
def test_exported_files_hold_the_copies(copies, tmp_path):
    model = timm.create_model("test_efficientnet", num_classes=3).eval()
    network = OrbitNet(model, "p4m", copies)
    report = eqzoo.export_onnx(network, tmp_path / "net.onnx", size=32)
    assert max(report.equivariance.values()) < 1e-5
    assert report.group == "p4m"
    x = torch.rand(3, 3, 32, 32, dtype=torch.float32)
    assert largest_change(OnnxFile(tmp_path / "net.onnx"), x) < 1e-6
    assert largest_change(model, x.double()) > 1e-4
    assert report.operators["Conv"] == sum(isinstance(layer, torch.nn.Conv2d) for layer in model.modules())
    if copies == 1:
        assert eqzoo.export_pt2(network, tmp_path / "net.pt2", size=32).difference < 1e-6


def test_training_takes_some_copies_of_each_image():
    model = OrbitNet(plain(), "p4m", train_copies=2).train()
    seen = []
    model.network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = images()
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    copies = [[transform(x, P4M, g, "trivial")[i] for g in P4M.elements] for i in range(2)]
    drawn = [
        {g for g in range(8) for y in part if torch.equal(copies[i][g], y)} for i, part in enumerate(seen[0].split(2))
    ]
    assert [len(elements) for elements in drawn] == [2, 2]
    model.eval()(x)
    assert sum(map(len, seen[1:])) == 16


def test_it_has_the_interface_of_the_network():
    model = timm.create_model("test_vit", num_classes=3, img_size=32, patch_size=8)
    network = OrbitNet(model, "p4", copies=1)
    assert network.pretrained_cfg is model.pretrained_cfg
    assert (network.num_classes, network.in_chans, network.num_features) == (3, 3, model.num_features)
    assert {f"network.{key}" for key in model.state_dict()} == network.state_dict().keys()
    assert network.no_weight_decay() == {f"network.{name}" for name in model.no_weight_decay()}
    network.set_grad_checkpointing()
    assert model.grad_checkpointing
    network.reset_classifier(7)
    assert network.num_classes == 7
    assert network.get_classifier() is model.get_classifier()
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    with pytest.raises(AttributeError, match="'OrbitNet' object has no attribute 'patch_embed'"):
        _ = network.patch_embed
    assert copy.deepcopy(network).num_classes == 7


@pytest.mark.parametrize(
    "name", ["test_vit", "test_efficientnet", "test_convnext", "resnet10t", "mobilenetv3_small_050"]
)
def test_depths_of_parameters_are_those_of_the_network(name):
    model = timm.create_model(name)
    own, wrapped = (
        group_parameters(each, each.group_matcher(coarse=False), reverse=True)
        for each in (model, OrbitNet(model, "p4"))
    )
    assert {f"network.{key}": depth for key, depth in own.items()} == wrapped
    assert len(set(own.values())) > 4


def test_probabilities_that_vanish_stay_numbers():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    with torch.no_grad():
        network[1].weight.mul_(1e4)
    x = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert OrbitNet(network, "p4", average="probabilities")(x).isfinite().all()


def test_the_head_averages_as_the_network_does_and_features_are_averaged_as_they_are():
    network = timm.create_model("test_resnet", num_classes=5).eval()
    model, plain = (OrbitNet(network, "p4m", average=of).eval() for of in ("probabilities", "logits"))
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    logits, features = model(x), model.forward_features(x)
    torch.testing.assert_close(model.forward_head(features), logits)
    assert not torch.allclose(logits, plain(x), atol=1e-2)
    pooled = model.forward_head(features, pre_logits=True)
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)


@pytest.mark.parametrize("channels", [1, 2, 13])
def test_a_canonical_copy_of_any_number_of_channels(channels):
    model = OrbitNet(timm.create_model("test_resnet", num_classes=5, in_chans=channels), "p4m", copies=1).eval()
    x = torch.rand(2, channels, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x.rot90(1, (2, 3))), model(x))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_copies_have_the_memory_format_of_the_images(last, channels):
    seen = []
    network = torch.nn.Sequential(
        torch.nn.Conv2d(channels, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ).float()
    network.register_forward_pre_hook(lambda _, args: seen.append(is_channels_last(args[0])))
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(2, channels, 8, 8, dtype=torch.float32)
    for copies in (None, 1, 2):
        seen.clear()
        OrbitNet(network, "p4", copies)(torch.empty_like(x, memory_format=layout).copy_(x))
        assert set(seen) == {last}


def test_other_groups_are_errors():
    with pytest.raises(ValueError, match="exact copies under p4, p4m and z2m"):
        OrbitNet(plain(), "r8")
    with pytest.raises(ValueError, match="an image has 4 copies under p4, got 5"):
        OrbitNet(plain(), "p4", copies=5)


def test_what_is_inside_may_have_another_group():
    """Layers of z2 and z2m are not equivariant to rotations; their mean is."""
    for name in ("z2_cnn", "p4_cnn"):
        check = eqzoo.check_equivariance(OrbitNet(eqzoo.create_model(name, pretrained=True), "p4m"))
        assert check.exact, check
        assert check.diagnosis == ()
        assert check.group == "p4m"
    assert eqzoo.equivariance_error(OrbitNet(eqzoo.create_model("z2_cnn", pretrained=True), "z2m")) < 1e-12


@pytest.mark.parametrize("copies", [None, 1, 2])
def test_an_empty_batch(copies):
    network = OrbitNet(eqzoo.create_model("z2_cnn"), "p4m", copies).eval()
    assert network(torch.zeros(0, 1, 28, 28)).shape == (0, 10)


def test_the_mean_keeps_the_group_of_the_network_and_the_choice_of_one_copy_does_not():
    p4 = eqzoo.create_model("p4_cnn", pretrained=True)
    both, one = OrbitNet(p4, "z2m"), OrbitNet(p4, "z2m", copies=1)
    assert (both.group.name, one.group.name) == ("p4m", "z2m")
    assert eqzoo.equivariance_error(both) < 1e-12
    assert eqzoo.equivariance_error(one, group="z2m") < 1e-12
    assert eqzoo.equivariance_error(one, group="p4m") > 1e-6
    assert eqzoo.equivariance_error(p4, group="p4m") > 1e-6


def test_options_that_give_up_exactness_are_averaged_over_the_whole_group():
    model = eqzoo.create_model("p4_resnet29", pretrained=True, downsample="stride").eval()
    (predictor,) = averaged([Predictor(model, "a", "a")], "p4")
    assert predictor.name == "a (mean of 4)"
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        alone, mean = (
            (net(x).softmax(1) - net(x.rot90(1, (2, 3))).softmax(1)).abs().max() for net in (model, predictor.network)
        )
    assert mean < 1e-12 < 1e-5 < alone
    exact = Predictor(eqzoo.create_model("r4_gsanet_t").eval(), "b", "b")
    with pytest.raises(ValueError, match="b is invariant under p4"):
        averaged([exact], "p4")


def test_commands_average_what_is_not_invariant(capsys, tmp_path):
    code, out, _ = run(capsys, "predict", IMAGE, "--model", "p4_cnn", "z2_cnn", "--tta", "p4", "--json")
    invariant, averaged = json.loads(out)["networks"]
    assert code == 0
    assert (invariant["name"], averaged["name"]) == ("p4_cnn.rotmnist", "z2_cnn.rotmnist (mean of 4)")
    assert averaged["largest_change"] < 1e-12
    alone = json.loads(run(capsys, "predict", IMAGE, "--model", "z2_cnn", "--json")[1])["networks"][0]
    assert alone["largest_change"] > 1e-3
    mean = np.mean([copy["probabilities"] for copy in alone["copies"][:4]], 0)
    np.testing.assert_allclose(averaged["copies"][0]["probabilities"], mean, rtol=1e-9)

    generator = torch.Generator().manual_seed(0)
    digits = Split(torch.randint(256, (6, 1, 28, 28), dtype=torch.uint8, generator=generator), torch.arange(6))
    single = eqzoo.evaluate("z2_cnn", digits, predictions=True)
    found = eqzoo.evaluate("z2_cnn", digits, tta="p4", predictions=True)
    assert found["network"] == "z2_cnn (mean of 4)"
    assert found["same_class_at_all_quarter_rotations"] == 100
    assert found["predictions"] != single["predictions"]
    for name, group in (("p4_cnn", "p4"), ("p4m_cnn", "p4"), ("p4m_cnn", "p4m")):
        with pytest.raises(ValueError, match=f"{name} is invariant under {group}, so that a mean .* leave tta"):
            eqzoo.evaluate(name, digits, tta=group)
    # A network that is invariant to rotations is averaged over the reflection alone, with the same result.
    found = eqzoo.evaluate("p4_cnn", digits, tta="p4m", predictions=True)
    assert found["network"] == "p4_cnn (mean of 2)"
    whole = OrbitNet(eqzoo.create_model("p4_cnn", pretrained=True).eval(), "p4m", average="probabilities")
    again = eqzoo.evaluate(whole, digits, predictions=True)["predictions"]
    assert eqzoo.evaluate(whole, digits)["network"] == "p4_cnn (mean of 8)"
    plain_network = eqzoo.create_model("z2_cnn", pretrained=True).train()
    plain_network.stem.eval()
    for tta in (None, "p4m"):
        eqzoo.evaluate(plain_network, digits, tta=tta)
        modes = plain_network.training, plain_network.blocks.training, plain_network.stem.training
        assert modes == (True, True, False)
    of_timm = OrbitNet(timm.create_model("test_resnet", num_classes=6, in_chans=1).eval(), "p4m")
    of_timm.pretrained_cfg |= {"mean": (0.5,), "std": (0.5,), "input_size": (1, 32, 32)}
    assert eqzoo.evaluate(of_timm, digits)["same_class_at_all_quarter_rotations"] == 100
    for row, other in zip(found["predictions"], again, strict=True):
        np.testing.assert_allclose(row["probabilities"], other["probabilities"], atol=1e-5)
    code, _, error = run(capsys, "evaluate", "p4_cnn", tmp_path, "--tta", "p4")
    assert code == 2
    assert "p4_cnn is invariant under p4" in error


def same(first, second):
    """Whether two networks have the same weights and logits."""
    x = torch.rand(2, 3, 32, 32, dtype=torch.float32)
    assert first.state_dict().keys() == second.state_dict().keys()
    return torch.equal(first.eval()(x), second.eval()(x))


def test_a_folder_rebuilds_the_network(tmp_path):
    torch.set_default_dtype(torch.float32)
    given = {"network": "test_efficientnet", "group": "p4m", "copies": 1, "num_classes": 4}
    network = timm.create_model("orbitnet", **given)
    assert (network.pretrained_cfg["architecture"], network.group, network.copies) == ("orbitnet", P4M, 1)
    save_for_hf(network, tmp_path / "net", model_args=given, safe_serialization=True)
    name = f"local-dir:{tmp_path / 'net'}"
    for create in (timm.create_model, eqzoo.create_model):
        found = create(name, pretrained=True)
        assert (found.group, found.copies, found.num_classes) == (P4M, 1, 4)
        assert same(found, network)
        assert not same(create(name), network)  # random weights
    other = timm.create_model(name, pretrained=True, num_classes=7, group="p4", copies=None)
    assert (other.num_classes, other.group) == (7, eqzoo.P4)
    kept = network.state_dict().keys() - {"network.classifier.weight", "network.classifier.bias"}
    assert all(torch.equal(other.state_dict()[key], network.state_dict()[key]) for key in kept)


@pytest.mark.parametrize("network", ["p4_resnet29.eurosat", "test_vit", "test_resnet"])
def test_another_pooling_is_saved_with_it(network, tmp_path):
    torch.set_default_dtype(torch.float32)
    given = {"img_size": 32} if network == "test_vit" else {}
    model = timm.create_model("orbitnet", network=network, group="z2m", pretrained=network.startswith("p4"), **given)
    named = model.pretrained_cfg.get("label_names")
    assert bool(named) == network.startswith("p4")
    model.reset_classifier(10, "avg" if network == "test_vit" else "max")
    save_for_hf(model, tmp_path, safe_serialization=True)
    found = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert same(found, model)
    assert model.pretrained_cfg.get("label_names") is found.pretrained_cfg.get("label_names") is None


def test_it_takes_the_channels_of_its_network():
    torch.set_default_dtype(torch.float32)
    model = timm.create_model("orbitnet", network="p4_cnn.rotmnist", group="p4m", pretrained=True)
    assert timm.data.resolve_data_config({}, model=model)["input_size"] == model.input_size == (1, 28, 28)
    with pytest.raises(ValueError, match="features_only"):
        timm.create_model("orbitnet", network="test_resnet", group="p4m", features_only=True)


@pytest.mark.parametrize("copies", [None, 1, 2])
def test_recorded_operations_do_not_depend_on_the_images(copies):
    model, x = OrbitNet(plain(), P4M, copies=copies).eval(), images().repeat(2, 1, 1, 1)
    x[2:] = x[:2].rot90(1, (2, 3))
    with torch.no_grad():
        wanted = model(x)
        for found in (
            torch.jit.trace(model, x[:1])(x),
            torch.func.vmap(model)(x[:, None])[:, 0],
            make_fx(model)(x[1:2].repeat(4, 1, 1, 1))(x),
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_weights_of_a_file_start_it(ending, tmp_path):
    torch.set_default_dtype(torch.float32)
    source, file = timm.create_model("test_resnet"), tmp_path / f"weights.{ending}"
    if ending == "pth":
        torch.save(source.state_dict(), file)
    else:
        save_file(source.state_dict(), file)
    build = functools.partial(timm.create_model, "orbitnet", network="test_resnet", group="p4")
    found = build(pretrained=True, pretrained_cfg_overlay={"file": str(file)})
    assert same(found.network, source)
    assert not same(build().network, source)
    gray = build(pretrained=True, pretrained_cfg_overlay={"file": str(file)}, num_classes=2, in_chans=1)
    assert gray.input_size[0] == len(gray.pretrained_cfg["mean"]) == 1
    assert gray.default_cfg is gray.pretrained_cfg
    conv = gray.pretrained_cfg["first_conv"] + ".weight"
    own = source.state_dict()[conv.removeprefix("network.")]
    torch.testing.assert_close(gray.state_dict()[conv], own.sum(1, keepdim=True))
