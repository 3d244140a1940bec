"""The groups and outputs that are measured, and devices that are not the CPU."""

import math

import pytest
import timm
import torch
from torch import nn

import eqzoo
from eqzoo import viz
from eqzoo.equivariance import element_errors, equivariance_report
from eqzoo.groups import P4, cyclic
from eqzoo.layers import (
    AttentiveLiftingConv2d,
    GroupBatchNorm2d,
    GroupPool,
    GroupSelfAttention2d,
    Irreps,
    LiftingConv2d,
    OcticLinear,
    OcticPatchEmbed2d,
)


def measures(group):
    """All that compares an image with its copies under a given group, on a small layer of p4."""
    layer, attentive = LiftingConv2d(P4, 1, 2, 3), GroupSelfAttention2d(P4, 6, 6, 3, num_heads=2)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.input_size = (1, 6, 6)
    x, field = torch.randn(1, 1, 6, 6), torch.randn(1, 6, 4, 5, 5)
    return {
        "equivariance_error": lambda: eqzoo.equivariance_error(layer, x, group),
        "check_equivariance": lambda: eqzoo.check_equivariance(network, group),
        "attention": lambda: viz.attention(attentive, field, group=group).error,
        "error_maps": lambda: viz.error_maps(layer, x, group=group).errors,
    }


NAMES = list(measures(P4))


def test_single_layers_on_fields_of_irreps():
    patches, linear = OcticPatchEmbed2d(3, 64, 4), OcticLinear(64, 64)
    x, field = torch.randn(1, 3, 16, 16), Irreps(torch.randn(4, 1, 5, 8), torch.randn(2, 1, 5, 16))
    assert eqzoo.equivariance_error(patches, x, randomize=True) < 1e-14
    assert eqzoo.equivariance_error(linear, field, randomize=True) < 1e-14
    changed = patches.register_forward_hook(lambda module, args, y: Irreps(y.ab + 1, y.e))
    assert eqzoo.equivariance_error(patches, x) > 1e-2
    changed.remove()


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_a_rotation_of_the_grid_proves_nothing(name):
    with pytest.raises(ValueError, match="r3 has only the identity on the pixel grid"):
        measures(cyclic(3))[name]()
    layer, x = LiftingConv2d(cyclic(1), 1, 2, 3), torch.randn(1, 1, 6, 6)
    with pytest.raises(ValueError, match=r"z2 has only the identity .* pass a group= that"):
        eqzoo.equivariance_error(layer, x)
    assert equivariance_report(layer, x).largest == 0  # as documented
    assert eqzoo.equivariance_error(layer, x, group="p4") > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_given_by_name_as_well(name):
    torch.manual_seed(1)
    expected = measures(P4)[name]()
    torch.manual_seed(1)
    assert measures("p4")[name]() == expected
    with pytest.raises(TypeError):
        measures(4)[name]()


def test_another_default_device_changes_nothing():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.input_size = (1, 6, 6)
    x, field = torch.randn(1, 1, 6, 6), torch.randn(1, 6, 4, 5, 5)
    window, everywhere = (GroupSelfAttention2d(P4, 6, 6, side, num_heads=2) for side in (3, "global"))
    attentive = AttentiveLiftingConv2d(P4, 1, 2, 3, attention="full")
    computed = {
        "equivariance_error": lambda: eqzoo.equivariance_error(network, group=P4, randomize=True),
        "check": lambda: eqzoo.check_equivariance(network).largest,
        "check of a name": lambda: eqzoo.check_equivariance("p4_cnn").largest,
        "error_maps": lambda: viz.error_maps(network[0], x, group=P4).errors,
        "attention": lambda: viz.attention(window, field).error,
        "attention at a place": lambda: viz.attention(window, field, place=(1, 2)).error,
        "attention without a window": lambda: viz.attention(everywhere, field).error,
        "attention on the responses": lambda: viz.attention(attentive, x[0]).error,
    }
    expected = {name: compute() for name, compute in computed.items()}
    with torch.device("meta"):
        assert {name: compute() for name, compute in computed.items()} == expected


def test_checks_leave_the_random_numbers_of_gpus(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    state = torch.get_rng_state()
    eqzoo.check_equivariance("p4_cnn_w11")
    assert not seeded
    assert torch.equal(torch.get_rng_state(), state)


class Mask(nn.Module):
    """A network whose maps become another output."""

    def __init__(self, output, group=P4):
        super().__init__()
        self.group, self.input_size, self.output = group, (1, 12, 12), output
        torch.manual_seed(0)
        self.lift, self.pool = LiftingConv2d(group, 1, 4, 3, padding=1), GroupPool(group)

    def forward(self, x):
        fields = self.lift(x)
        return self.output(fields, self.pool(fields))


MAPS = {
    "maps": lambda _, maps: maps,
    "a mask": lambda _, maps: maps[:, 0],
    "a mask of classes": lambda _, maps: maps.argmax(1),
    "a dictionary": lambda fields, maps: {"out": maps, "others": [maps[:, 1], (fields, maps.mean((2, 3)))]},
    "one that is zero": lambda _, maps: [maps, torch.zeros_like(maps)],
}


@pytest.mark.parametrize("output", MAPS)
def test_dense_outputs_rotate_with_the_image(output):
    model = Mask(MAPS[output])
    assert eqzoo.equivariance_error(model) < 1e-15
    check = eqzoo.check_equivariance(model)
    assert check.exact, str(check)
    with torch.no_grad():
        model.lift.weight[:, :, 0, 0] += 1
    assert eqzoo.equivariance_error(model) < 1e-15  # of any filters
    broken = Mask(lambda fields, maps: MAPS[output](fields * torch.linspace(1, 2, 12), maps.roll(1, 3)))
    assert eqzoo.equivariance_error(broken) > 0.1
    assert not eqzoo.check_equivariance(broken).exact


def test_a_part_that_is_zero_for_the_image_alone_is_compared():
    """The sum over columns weighted by their distance from the center changes its sign under a rotation by 180°."""

    def output(_, maps):
        return [maps, (maps[:, :1] * torch.linspace(-1, 1, 12)).sum((2, 3)).relu()]

    model, x = Mask(output).requires_grad_(False), torch.randn(1, 1, 12, 12)
    images = x, x.rot90(2, (2, 3))
    assert sorted(model(image)[1].any().item() for image in images) == [False, True]
    for image in images:
        assert max(element_errors(model, image, P4).values()) > 1e-3


def test_what_the_shape_of_an_output_does_not_tell_is_not_guessed():
    for output in (
        lambda fields, _: fields.flatten(1, 2),
        lambda _, maps: torch.nn.functional.avg_pool2d(maps, 2)[:, 0],
        lambda fields, _: fields.flatten(1, 2).roll(1, 3),
    ):
        check = eqzoo.check_equivariance(Mask(output))
        assert not check.exact
        assert "transform_field" in check.diagnosis[0]


def test_features_are_compared_as_fields():
    features = eqzoo.create_model("p4_resnet29", pretrained=True, features_only=True)
    assert eqzoo.equivariance_error(features) < 1e-14
    assert eqzoo.check_equivariance(features).exact
    assert eqzoo.multiply_adds(features) > 1e7
    x = torch.randn(1, 3, 16, 20)
    assert eqzoo.equivariance_error(features, x, "r2") < 1e-14
    with pytest.raises(ValueError, match=r"p4m does not act on a field of shape \(1, 32, 4, 16, 20\)"):
        eqzoo.equivariance_error(features, x, "p4m")
    octic = eqzoo.create_model("p4m_octic_vit_tiny_patch16_224", img_size=32, features_only=True)
    with pytest.raises(ValueError, match="features of a OcticViT are no regular fields"):
        eqzoo.equivariance_error(octic, x)


def test_no_tensor_of_an_output_and_no_element_is_passed_over():
    for output in (
        lambda _, maps: [maps, maps * math.nan],
        lambda _, maps: [maps * math.nan, maps],
        lambda _, maps: [torch.zeros_like(maps), maps * math.nan],
    ):
        with pytest.raises(ValueError, match="the output is not finite"):
            eqzoo.equivariance_error(Mask(output))
    factors = iter((1.0, 1.0, 1.0, math.nan, 1.0))  # after a rotation by 180° alone
    with pytest.raises(ValueError, match="not finite"):
        eqzoo.equivariance_error(Mask(lambda _, maps: maps * next(factors)))
    assert eqzoo.equivariance_error(Mask(lambda _, maps: torch.complex(maps, maps.roll(1, 3)))) > 0.1
    counts = iter((4, 3))
    with pytest.raises(ValueError, match="has shapes"):
        eqzoo.equivariance_error(Mask(lambda _, maps: [maps] * next(counts)))


def test_tokens_that_are_not_exact_are_diagnosed():
    """Their axes are no sides, so that they are no maps."""
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool="", img_size=32, depth=1)
    check = eqzoo.check_equivariance(network, group="p4", size=32)
    assert not check.exact
    assert any("pos_embed" in cause for cause in check.diagnosis)


def test_outputs_that_cannot_be_compared():
    model = Mask(lambda _, maps: {"out": maps, "names": "mask"})
    for measure in (eqzoo.equivariance_error, eqzoo.check_equivariance):
        with pytest.raises(TypeError, match="outputs are tensors, or lists, tuples and dictionaries of them, got str"):
            measure(model)
    with pytest.raises(ValueError, match=r"has shapes \[\(2, 4, 8, 12\)\] instead of \[\(2, 4, 12, 8\)\]"):
        eqzoo.equivariance_error(Mask(lambda _, maps: maps[:, :, :8]))
    with pytest.raises(ValueError, match="the output is zero everywhere"):
        eqzoo.equivariance_error(Mask(lambda _, maps: [0 * maps]))
    own = nn.Sequential(LiftingConv2d(P4, 1, 4, 3), GroupPool(P4))
    own.group = P4
    with pytest.raises(ValueError, match=r"no pretrained_cfg; set its input_size = \(channels, height, width\)"):
        eqzoo.check_equivariance(own, size=8)
    with pytest.raises(ValueError, match="Sequential has no input_size; pass one"):
        eqzoo.multiply_adds(own)


def test_an_image_without_a_batch_is_not_measured():
    conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"image\[None\]"):
        eqzoo.equivariance_error(conv, torch.rand(3, 8, 8), group="p4")
    assert eqzoo.equivariance_error(conv, torch.rand(1, 3, 8, 8), group="p4") > 0.1


class Residual(nn.Module):
    """A branch that starts at zero, and a layer of two inputs."""

    def __init__(self):
        super().__init__()
        self.group = P4
        self.lift = LiftingConv2d(P4, 1, 4, 3)
        self.norm = GroupBatchNorm2d(P4, 4)
        nn.init.zeros_(self.norm.weight)
        self.add = Add()

    def forward(self, x):
        x = self.lift(x=x)  # by keyword
        return self.add(x, self.norm(x))


class Add(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = P4

    def forward(self, x, y):
        return x + y


def test_branches_of_zeros_and_layers_of_two_inputs_are_passed_over():
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    report = equivariance_report(Residual(), x)
    assert set(report.layers) == {"lift"}
    assert report.largest < 1e-12
    none = Residual()
    none.group = None
    assert eqzoo.equivariance_error(none, x, P4) < 1e-12
