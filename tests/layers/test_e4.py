"""Efficient equivariant layers and networks: reference, equivariance, fused forms, and ablations."""

import copy

import pytest
import timm
import torch

import eqzoo
from eqzoo.equivariance import equivariance_error, equivariance_report, randomize_norms
from eqzoo.groups import P4, P4M, Z2, Z2M, cyclic, dihedral
from eqzoo.layers import E4Layer2d
from eqzoo.models import E4Net, E4ResNet
from eqzoo.ops import dynamic_depthwise
from tests.layers import reference_e4 as slow

GRID = [Z2, Z2M, cyclic(2), dihedral(2), P4, P4M]
CASES = [
    {"kernel_size": 1, "slices": 1},
    {"kernel_size": 3, "slices": 2, "reduction": 2},
    {"kernel_size": 3, "slices": 4, "concat_kernel": False},
    {"kernel_size": 3, "slices": 2, "concat_value": False, "reduction": 4},
    {"kernel_size": 5, "slices": 1, "concat_kernel": False, "concat_value": False},
]
# Tables 1 to 3 of the paper: the parameters with the norm of the authors' code and with the tied one. The paper prints
# up to 5 % more than either.
ABLATIONS = [
    ({}, 18_694, 18_118),
    ({"width": 24, "slices": 3}, 40_852, 39_988),
    ({"concat_kernel": False, "concat_value": False}, 9_478, 8_902),
    ({"concat_value": False}, 14_086, 13_510),
    ({"concat_kernel": False}, 14_086, 13_510),
    ({"slices": 1}, 16_144, 15_568),
    ({"slices": 4}, 23_794, 23_218),
    ({"reduction": 2}, 12_838, 12_550),
    ({"reduction": 4}, 9_910, 9_766),
    ({"kernel_size": 3}, 15_430, 14_854),
    ({"kernel_size": 7}, 23_590, 23_014),
]
SMALL_RESNETS = [
    {"group": Z2, "width": 4, "mechanism": "conv", "downsample": "stride"},
    {"group": P4, "width": 2, "mechanism": "conv"},
    {"group": P4, "width": 4, "mechanism": "e4"},
    {"group": P4M, "width": 2, "mechanism": "e4"},
]


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def trained_like(model):
    """Gives norms and biases random values."""
    lead = (model.in_channels, model.order) if isinstance(model, E4Layer2d) else (model.in_chans,)
    randomize_norms(model.eval(), torch.Generator().manual_seed(1), torch.randn(2, *lead, 8, 8))
    return model


def small_net(group=P4, **kwargs):
    return trained_like(E4Net(group, **({"width": 4, "kernel_size": 3} | kwargs)))


def small_resnet(**kwargs):
    return trained_like(E4ResNet(**({"depths": (1, 1)} | kwargs)))


# The operation


def op_arguments(slices=2, channels=4, order=2, kernel_size=3, side=4):
    kernel = torch.randn(2, slices, order, kernel_size**2, side, side + 1, requires_grad=True)
    value = torch.randn(2, channels, order, side, side + 1, requires_grad=True)
    return kernel, value


@pytest.mark.parametrize(("slices", "kernel_size"), [(1, 1), (2, 3), (4, 5), (1, 7)])
def test_the_operation_is_its_equation(slices, kernel_size):
    kernel, value = op_arguments(slices, kernel_size=kernel_size)
    out = dynamic_depthwise(kernel, value)
    expected = slow.dynamic_depthwise(kernel.unflatten(3, (kernel_size, kernel_size)), value)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (kernel, value))
    slow_grads = torch.autograd.grad((expected * weights).sum(), (kernel, value))
    torch.testing.assert_close(grads, slow_grads, rtol=0, atol=1e-12)


def test_gradcheck_of_the_operation_twice():
    arguments = op_arguments(order=1, channels=2, side=2)
    assert torch.autograd.gradcheck(dynamic_depthwise, arguments)
    assert torch.autograd.gradgradcheck(dynamic_depthwise, arguments)


def test_the_operation_refuses_shapes_that_do_not_belong_together():
    kernel, value = op_arguments()
    for wrong in ((kernel, value[0]), (kernel, value[:, :3]), (kernel[:1], value)):
        with pytest.raises(ValueError, match=r"has shape|channels"):
            dynamic_depthwise(*wrong)
    with pytest.raises(ValueError, match="odd sides"):
        dynamic_depthwise(kernel[:, :, :, :4], value)


# The layer


def layer_and_field(group, case, side=4, out_channels=4):
    layer = trained_like(E4Layer2d(group, 4, out_channels, **case))
    return layer, torch.randn(2, 4, group.order, side, side + 1)


@pytest.mark.parametrize("affine", ["tied", "per_element"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("group", [Z2, Z2M, P4, P4M], ids=lambda g: g.name)
def test_the_layer_is_its_equations(group, case, affine):
    layer, x = layer_and_field(group, case | {"kernel_norm_affine": affine}, side=3, out_channels=8)
    x.requires_grad_()
    out, expected = layer(x), slow.e4_layer(x, layer, group)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    weights = torch.randn_like(out)
    inputs = (x, *layer.parameters())
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    slow_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(grads, slow_grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("group", GRID[1:], ids=lambda g: g.name)
def test_layers_are_equivariant(group, case):
    layer, x = layer_and_field(group, case, side=6)
    assert layer(x).std() > 1e-3
    assert equivariance_error(layer, x, randomize=True) < 1e-13


def test_the_error_can_be_large():
    """Negative controls: filters that are not transformed, or transformed by the wrong element."""
    layer, x = layer_and_field(P4M, {"kernel_size": 3})
    rows = layer.taps.rows.unflatten(0, (8, -1))
    for planted in (rows[:1].expand(8, -1), rows[[1, 0, 2, 3, 4, 5, 6, 7]], rows[[0, 3, 2, 1, 4, 5, 6, 7]]):
        broken = copy.deepcopy(layer)
        broken.taps.register_table("rows", planted.flatten().numpy())
        assert equivariance_error(broken, x) > 0.1


def test_separate_affine_parameters_for_each_element_break_equivariance():
    layer, x = layer_and_field(P4, {"kernel_size": 3, "kernel_norm_affine": "per_element"})
    assert equivariance_error(layer, x, randomize=True) > 0.01
    assert equivariance_report(layer, x, randomize=True).layers["norm"] > 0.01
    layer.norm.reset_parameters()
    assert equivariance_error(layer, x) < 1e-13  # at initialization they are equal, which hides the error


def test_the_reference_detects_a_wrong_slice_and_a_wrong_norm():
    layer, x = layer_and_field(P4, {"kernel_size": 3, "slices": 2})
    expected = slow.e4_layer(x, layer, P4)
    strided = layer(x)[:, [0, 2, 1, 3]]  # consecutive channels share a filter, not every second one
    assert (strided - expected).abs().max() > 1e-2
    layer.norm.num_groups = 2  # statistics over two fields
    assert (layer(x) - expected).abs().max() > 1e-2


def test_gradcheck():
    layer, x = layer_and_field(P4, {"kernel_size": 3}, side=2)
    assert torch.autograd.gradcheck(layer, x[:1].requires_grad_())


@pytest.mark.parametrize("affine", ["tied", "per_element"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fuse_gives_the_same_map_on_planes(case, affine):
    layer, x = layer_and_field(P4M, case | {"kernel_norm_affine": affine}, out_channels=8)
    layer = layer.to(memory_format=torch.channels_last)
    before = copy.deepcopy(layer.state_dict())
    fused = layer.fuse()
    assert not fused.training
    torch.testing.assert_close(fused(x.flatten(1, 2)), layer(x).flatten(1, 2), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.state_dict(), before)


def test_the_state_holds_parameters_alone():
    layer = E4Layer2d(P4, 4, 6, kernel_size=5, slices=3, reduction=2)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "hidden.weight": (2, 16, 1, 1),
        "norm.weight": (2,),
        "norm.bias": (2,),
        "taps.weight": (75, 2, 1, 1),
        "taps.bias": (75,),
        "value.weight": (6, 16, 1, 1),
    }


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("group", GRID, ids=lambda g: g.name)
def test_the_count_is_its_formula(group, reduction):
    """|H| C² (1 + 1/r) + (C/r + 1) s k² and the norm."""
    c, s, k, order = 4, 2, 3, group.order
    hidden = c // reduction
    expected = order * c * (c + hidden) + (hidden + 1) * s * k**2
    assert count(E4Layer2d(group, c, c, k, s, reduction)) == expected + 2 * hidden
    untied = E4Layer2d(group, c, c, k, s, reduction, kernel_norm_affine="per_element")
    assert count(untied) == expected + 2 * hidden * order


def test_initialization_has_the_deviation_of_its_fan_in():
    layer = E4Layer2d(P4, 64, 64, kernel_size=3)
    for mix in (layer.hidden, layer.value):
        assert abs(mix.weight.std().item() - (2 / (4 * 64)) ** 0.5) < 2e-3
    lift = E4Net(P4, width=64).stem.conv
    assert abs(lift.weight.std().item() - (2 / 9) ** 0.5) < 0.06


def test_a_single_pixel_of_a_single_image():
    """Its generated filters are those of the norm's biases: one number is normalized to 0."""
    layer, x = E4Layer2d(Z2, 4, 4).eval(), torch.randn(1, 4, 1, 1, 1)
    torch.testing.assert_close(layer(x), layer(torch.cat([x, x]))[:1])


def test_errors_say_what_would_work():
    with pytest.raises(ValueError, match="use z2, z2m"):
        E4Layer2d(cyclic(8), 4, 4)
    with pytest.raises(ValueError, match=r"takes \(B, 4, 4, height, width\), got \(1, 4, 8, 8\)"):
        E4Layer2d(P4, 4, 4)(torch.zeros(1, 4, 8, 8))
    with pytest.raises(ValueError, match=r"takes \(B, 4, 4, height, width\), got \(1, 4, 8, 6, 6\)"):
        E4Layer2d(P4, 4, 4, concat_kernel=False, concat_value=False)(torch.zeros(1, 4, 8, 6, 6))
    with pytest.raises(KeyError, match="attention"):
        E4ResNet(mechanism="attention")
    with pytest.raises(KeyError, match="blur"):
        E4ResNet(downsample="blur")
    with pytest.raises(ValueError, match=r"slice_channels must divide all widths, \[6, 12"):
        E4ResNet(width=6, slice_channels=4)
    with pytest.raises(ValueError, match="the nearest sizes that work are 24 x 28 and 28 x 28"):
        small_net()(torch.zeros(1, 1, 27, 28))


# The networks


@pytest.mark.parametrize(("arguments", "released", "tied"), ABLATIONS, ids=str)
def test_counts_of_the_ablations(arguments, released, tied):
    assert count(E4Net(P4, **arguments)) == tied
    assert count(E4Net(P4, **arguments, kernel_norm_affine="per_element")) == released


def test_counts_of_the_released_resnets():
    for group, width, expected in ((P4, 32, 6_343_178), (P4M, 22, 5_809_572)):
        assert count(E4ResNet(group, width, kernel_norm_affine="per_element")) == expected


@pytest.mark.parametrize("group", [Z2M, P4, P4M], ids=lambda g: g.name)
def test_the_rotated_mnist_network_is_exact(group):
    model = small_net(group)
    x = torch.randn(2, 1, 8, 8)
    assert model.forward_features(x).std() > 1e-3
    assert equivariance_error(model, x) < 1e-12


@pytest.mark.parametrize("arguments", SMALL_RESNETS[1:], ids=str)
def test_the_residual_networks_are_exact(arguments):
    model = small_resnet(**arguments)
    x = torch.randn(2, 3, 8, 8)
    assert model.forward_features(x).std() > 1e-3
    assert equivariance_error(model, x) < 1e-12


def test_the_error_of_approximate_networks_is_large():
    """Negative controls: stride 2 on even maps, a norm with parameters per element, and a plain network."""
    x = torch.randn(2, 3, 8, 8)
    assert equivariance_error(small_resnet(width=4, downsample="stride"), x) > 0.01
    assert equivariance_error(small_resnet(width=4, kernel_norm_affine="per_element"), x) > 0.01
    plain = small_resnet(**SMALL_RESNETS[0])
    assert equivariance_error(plain, x, P4) > 0.01


@pytest.mark.parametrize("name", ["p4_e4net", "p4m_e4net"])
def test_registered_networks_are_exact(name):
    assert equivariance_error(eqzoo.create_model(name), randomize=True) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["z2_resnet18", "p4_resnet18", "p4m_resnet18", "p4_e4_resnet18", "p4m_e4_resnet18"])
def test_registered_residual_networks_are_exact(name):
    assert equivariance_error(eqzoo.create_model(name), randomize=True) < 1e-12


@pytest.mark.parametrize("build", [small_net, lambda **k: small_resnet(width=4, **k)], ids=["e4net", "resnet"])
@pytest.mark.parametrize("in_chans", [1, 5])
def test_fused_networks_give_the_same_logits(build, in_chans):
    model = build(in_chans=in_chans)
    fused = timm.utils.reparameterize_model(model)
    x = torch.randn(2, in_chans, 8, 8)
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    assert fused.forward_features(x).ndim == 4
    assert not any(hasattr(module, "fuse") for module in fused.modules())


@pytest.mark.parametrize("build", [small_net, lambda **k: small_resnet(width=4, in_chans=1, **k)], ids=["net", "res"])
def test_training_reaches_every_parameter_and_every_deployment_runs(build):
    model = build(num_classes=3).float().train()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float32)
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model.eval()
    logits = model(x)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), logits, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), logits, rtol=0.1, atol=0.1 * logits.abs().max().item())
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: batch}}).module()
    more = torch.randn(5, 1, 8, 8, dtype=torch.float32)
    torch.testing.assert_close(program(more), model(more), rtol=1e-4, atol=1e-4)
    assert model.forward_features(more).ndim == 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_compiled_networks_give_the_same(mode):
    model = small_net(drop_rate=0.0).float().train(mode == "train")
    x = torch.randn(2, 1, 8, 8, dtype=torch.float32)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    grads = torch.autograd.grad(compiled(x).square().sum(), list(compiled.parameters()))
    torch.testing.assert_close(grads, expected, rtol=1e-2, atol=1e-3)


def test_classifiers_and_features():
    model = eqzoo.create_model("p4_e4net", num_classes=0)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 16)
    model.reset_classifier(4, "avg")
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    net = small_resnet(width=4, num_classes=0)
    assert net(torch.zeros(2, 3, 8, 8)).shape == (2, 8)
    net.reset_classifier(4, "avg")
    assert net(torch.zeros(2, 3, 8, 8)).shape == (2, 4)


def test_features_only():
    features = timm.create_model("p4_e4net", features_only=True)
    maps = features(torch.zeros(1, 1, 8, 8))
    assert [tuple(m.shape[1:]) for m in maps] == [(64, s, s) for s in (8, 4, 4, 2, 2, 2, 2)]
    assert features.feature_info.channels() == [64] * 7
    assert features.feature_info.reduction() == [1, 2, 2, 4, 4, 4, 4]
    features = timm.create_model("p4_e4_resnet18", features_only=True, width=4)
    maps = features(torch.zeros(1, 3, 16, 16))
    assert [tuple(m.shape[1:]) for m in maps] == [(16, 16, 16), (32, 8, 8), (64, 4, 4), (128, 2, 2)]
    assert features.feature_info.channels() == [16, 32, 64, 128]
    assert features.feature_info.reduction() == [1, 2, 4, 8]
