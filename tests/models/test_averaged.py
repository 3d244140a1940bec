"""Test-time augmentation: the mean of a network's probabilities over the copies of an image."""

import json

import numpy as np
import pytest
import timm
import torch

import eqzoo
from eqzoo.data import Split
from eqzoo.evaluation.predictor import Predictor, averaged
from eqzoo.groups import P4M, transform
from eqzoo.layers._layout import is_channels_last
from eqzoo.models import AveragedNet
from tests.cli.test_cli import IMAGE, run


def plain():
    """A network of timm with random weights and norms, in float64."""
    generator = torch.Generator().manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=5).double().eval()
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value.copy_(1 + 0.1 * noise if value.ndim == 1 else noise / value[0].numel() ** 0.5)
    return model


def images(side=32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1)).double()


def test_it_is_the_mean_of_the_probabilities_and_invariant():
    model, x = plain(), images()
    averaged = AveragedNet(model, "p4m")
    with torch.no_grad():
        copies = [model(transform(x, P4M, g, "trivial")).softmax(1) for g in P4M.elements]
        mean = sum(copies) / 8
        torch.testing.assert_close(averaged(x).softmax(1), mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(averaged(x).exp(), mean, rtol=1e-12, atol=0)
        for g in P4M.elements:
            torch.testing.assert_close(averaged(transform(x, P4M, g, "trivial")).softmax(1), mean, rtol=1e-12, atol=0)
        assert (copies[1] - copies[0]).abs().max() > 1e-3  # the network alone is not invariant
        of_rotations = AveragedNet(model, eqzoo.P4)
        torch.testing.assert_close(of_rotations(x.rot90(1, (2, 3))), of_rotations(x), rtol=1e-12, atol=1e-12)
        assert (of_rotations(x.flip(3)) - of_rotations(x)).abs().max() > 1e-4
        of_reflections = AveragedNet(model, "z2m")  # takes images that are not square
        wide = x[..., :16, :]
        torch.testing.assert_close(of_reflections(wide.flip(3)), of_reflections(wide), rtol=1e-12, atol=1e-12)


def test_probabilities_that_vanish_stay_numbers():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    with torch.no_grad():
        network[1].weight.mul_(1e4)
    x = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert AveragedNet(network, "p4")(x).isfinite().all()


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
    AveragedNet(network, "p4m")(torch.empty_like(x, memory_format=layout).copy_(x))
    assert seen == [last] * 8


def test_other_groups_are_errors():
    for group in ("z2", "r3"):
        with pytest.raises(ValueError, match=f"{group} has only the identity on the pixel grid"):
            AveragedNet(plain(), group)
    with pytest.raises(ValueError, match="rotations by 90° and reflections, p4, p4m or z2m, got r8"):
        AveragedNet(plain(), "r8")
    with pytest.raises(TypeError, match="or its name, got 4"):
        AveragedNet(plain(), 4)


def test_a_single_output_is_no_class():
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"two or more, and the model has num_classes={count}"):
            AveragedNet(eqzoo.create_model("z2_cnn", num_classes=count), "p4")
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 1))
    with pytest.raises(ValueError, match="num_classes=1"):
        AveragedNet(network, "p4")(torch.zeros(1, 1, 4, 4))


def test_what_is_inside_may_have_another_group():
    """Layers of z2 and z2m are not equivariant to rotations; their mean is."""
    for name in ("z2_cnn", "p4_cnn"):
        check = eqzoo.check_equivariance(AveragedNet(eqzoo.create_model(name, pretrained=True), "p4m"))
        assert check.exact, check
        assert check.diagnosis == ()
        assert check.group == "p4m"
    assert eqzoo.equivariance_error(AveragedNet(eqzoo.create_model("z2_cnn", pretrained=True), "z2m")) < 1e-12


@pytest.mark.parametrize(("given", "side"), [({"downsample": "floor"}, 27), ({"pose_index": "released"}, 28)])
def test_options_that_give_up_exactness_are_averaged_over_the_whole_group(given, side):
    model = eqzoo.create_model("r4_gsanet_t", pretrained=True, **given).eval()
    (predictor,) = averaged([Predictor(model, "a", "a")], "p4")
    assert predictor.name == "a (mean of 4)"
    x = torch.rand(1, 1, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        alone, mean = (
            (net(x).softmax(1) - net(x.rot90(1, (2, 3))).softmax(1)).abs().max() for net in (model, predictor.network)
        )
    assert mean < 1e-12 < 1e-5 < alone
    exact = Predictor(eqzoo.create_model("r4_gsanet_t").eval(), "b", "b")
    with pytest.raises(ValueError, match="b is invariant under p4"):
        averaged([exact], "p4")


def test_images_that_are_rotated_are_square():
    with pytest.raises(ValueError, match="images of 16 x 32 pixels are rotated by 90°; they must be square"):
        AveragedNet(plain(), "p4")(images()[..., :16, :])


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
    for name in ("p4_cnn", "p4m_cnn"):
        with pytest.raises(ValueError, match=f"{name} is invariant under p4, so that a mean .* leave tta"):
            eqzoo.evaluate(name, digits, tta="p4")
    # A network that is invariant to rotations is averaged over the reflection alone, with the same result.
    found = eqzoo.evaluate("p4_cnn", digits, tta="p4m", predictions=True)
    assert found["network"] == "p4_cnn (mean of 2)"
    whole = AveragedNet(eqzoo.create_model("p4_cnn", pretrained=True).eval(), "p4m")
    again = eqzoo.evaluate(whole, digits, predictions=True)["predictions"]
    assert eqzoo.evaluate(whole, digits)["network"] == "p4_cnn (mean of 8)"
    plain_network = eqzoo.create_model("z2_cnn", pretrained=True).train()
    plain_network.stem.eval()
    for tta in (None, "p4m"):
        eqzoo.evaluate(plain_network, digits, tta=tta)
        modes = plain_network.training, plain_network.blocks.training, plain_network.stem.training
        assert modes == (True, True, False)
    nameless = AveragedNet(torch.nn.Flatten(), "p4")
    nameless.pretrained_cfg = {"mean": (0.5,), "std": (0.5,), "input_size": (1, 4, 4)}
    with pytest.raises(ValueError, match="has no num_classes and no input_size; set it there"):
        eqzoo.evaluate(nameless, digits)
    of_timm = AveragedNet(timm.create_model("test_resnet", num_classes=6, in_chans=1).eval(), "p4m")
    of_timm.pretrained_cfg = of_timm.pretrained_cfg | {"mean": (0.5,), "std": (0.5,)}
    of_timm.input_size, of_timm.in_chans = (1, 32, 32), 1
    assert eqzoo.evaluate(of_timm, digits)["same_class_at_all_quarter_rotations"] == 100
    for row, other in zip(found["predictions"], again, strict=True):
        np.testing.assert_allclose(row["probabilities"], other["probabilities"], atol=1e-5)
    code, _, error = run(capsys, "evaluate", "p4_cnn", tmp_path, "--tta", "p4")
    assert code == 2
    assert "p4_cnn is invariant under p4" in error


def test_timm_networks_pass_the_check_once_they_are_averaged():
    assert eqzoo.equivariance_error(AveragedNet(plain(), "p4m"), images(), group="p4m") < 1e-12
    assert eqzoo.equivariance_error(plain(), images(), group="p4m") > 1e-3
