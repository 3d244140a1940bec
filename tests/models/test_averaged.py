"""Test-time augmentation: the mean of a network's probabilities over the copies of an image."""

import json

import numpy as np
import pytest
import timm
import torch

import eqzoo
from eqzoo.data import Split
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


@pytest.mark.parametrize("last", [False, True])
def test_copies_have_the_memory_format_of_the_images(last):
    seen = []
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).float()
    network.register_forward_pre_hook(lambda _, args: seen.append(is_channels_last(args[0])))
    x = images().float()
    AveragedNet(network, "p4m")(x.contiguous(memory_format=torch.channels_last) if last else x)
    assert seen == [last] * 8


@pytest.mark.parametrize("group", ["z2", "r8", "r3"])
def test_other_groups_are_errors(group):
    with pytest.raises(ValueError, match=f"rotations by 90° and reflections, p4, p4m or z2m, got {group}"):
        AveragedNet(plain(), group)


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
    assert eqzoo.evaluate("p4_cnn", digits, tta="p4m")["network"] == "p4_cnn (mean of 8)"
    code, _, error = run(capsys, "evaluate", "p4_cnn", tmp_path, "--tta", "p4")
    assert code == 2
    assert "p4_cnn is invariant under p4" in error


def test_timm_networks_pass_the_check_once_they_are_averaged():
    assert eqzoo.equivariance_error(AveragedNet(plain(), "p4m"), images(), group="p4m") < 1e-12
    assert eqzoo.equivariance_error(plain(), images(), group="p4m") > 1e-3
