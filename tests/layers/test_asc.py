"""Affine self convolutions and their ResNets: reference, equivariance, fused forms, and timm's interface."""

import copy

import pytest
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay
from timm.utils import reparameterize_model

from eqzoo.equivariance import equivariance_error, equivariance_report, randomize_norms
from eqzoo.groups import P4, P4M, Z2, Z2M, cyclic, dihedral
from eqzoo.layers import (
    AffineSelfConv2d,
    GroupConv2d,
    GroupSqueezeExcite,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from eqzoo.models import ASCResNet, create_model, list_models
from tests.layers import reference_asc

GRID = [Z2, Z2M, cyclic(2), dihedral(2), P4, P4M]
SLOW_FORM = {
    AffineSelfConv2d: reference_asc.affine_self_conv,
    SimpleAffineSelfConv2d: reference_asc.simple_affine_self_conv,
    StandAloneSelfAttention2d: reference_asc.stand_alone_self_attention,
}
NAMES = list_models("*_resnet29") + list_models("*_resnet83")
TINY = {"depth": 11, "width": 4}
SMALL = TINY | {"num_heads": 2, "kernel_size": 3}


def sizes(middle):
    """The arguments of a small network; those of attention are errors where there is none."""
    return TINY if middle == "conv" else SMALL


def names(value):
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)


def small_layer(kind, group, channels=4, num_heads=2, **options):
    layer = kind(group, channels, kernel_size=3, num_heads=num_heads, **options)
    return layer, torch.randn(2, channels, group.order, 4, 3)


def trained_like(model, side):
    """A network with random norms and biases, and two images."""
    x = torch.randn(2, model.in_chans, side, side)
    randomize_norms(model.eval(), torch.Generator().manual_seed(0), x)
    return model, x


@pytest.mark.parametrize("kind", SLOW_FORM, ids=names)
@pytest.mark.parametrize(
    ("group", "scale"), [(Z2, "head"), (Z2, "total"), (Z2M, "total"), (P4, "head"), (P4M, "total")], ids=names
)
def test_layers_are_their_equations(group, scale, kind):
    layer, x = small_layer(kind, group, scale=scale)
    x = x[:1].requires_grad_()
    expected = SLOW_FORM[kind](x, layer)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    inputs = (x, *layer.parameters())
    grads = torch.autograd.grad(layer(x).square().sum(), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), inputs), rtol=0, atol=1e-10)


def test_the_reference_detects_small_deviations():
    """Negative control: a shift counted once for every element, the other scale, one head in place of two."""
    layer, x = small_layer(AffineSelfConv2d, P4)
    expected = reference_asc.affine_self_conv(x, layer)
    shifted, scaled, merged = copy.deepcopy(layer), copy.deepcopy(layer), copy.deepcopy(layer)
    with torch.no_grad():
        shifted.key_map.beta.mul_(4)
    scaled.score_factor *= scaled.num_heads
    merged.num_heads = 1
    for wrong in (shifted, scaled, merged):
        assert (wrong(x) - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("kind", [*SLOW_FORM, GroupSqueezeExcite], ids=names)
@pytest.mark.parametrize("group", GRID[1:], ids=names)
def test_layers_are_equivariant(group, kind):
    if kind is GroupSqueezeExcite:
        layer, x = kind(group, 4, 2), torch.randn(2, 4, group.order, 4, 3)
    else:
        layer, x = small_layer(kind, group)
    assert layer(x).std() > 1e-3
    assert equivariance_error(layer, x, randomize=True) < 1e-14


@pytest.mark.parametrize("index", ["psi_index", "beta_index"])
@pytest.mark.parametrize("part", ["key_map", "value_map"])
def test_filters_that_are_not_transformed_break_equivariance(part, index):
    """Negative control: the filters of the identity for all elements."""
    layer, x = small_layer(AffineSelfConv2d, P4)
    own = getattr(layer, part)
    rows = getattr(own, index).unflatten(0, (4, -1))
    own.register_table(index, rows[:1].expand_as(rows).flatten().numpy())
    assert equivariance_error(layer, x) > 1e-2


def test_wrong_query_maps_and_embeddings_break_equivariance():
    """Negative control: query maps with permuted elements, and embeddings that are not transformed."""
    layer, x = small_layer(AffineSelfConv2d, P4)
    planted = layer.query_map.psi_index[[1, 0, 2, 3, *range(4, 16)]]
    layer.query_map.register_table("psi_index", planted.numpy())
    assert equivariance_error(layer, x) > 1e-3
    layer, x = small_layer(StandAloneSelfAttention2d, P4)
    layer.register_table("embedding_index", torch.arange(9).repeat(4).numpy())
    assert equivariance_error(layer, x) > 1e-3


@pytest.mark.parametrize("kind", SLOW_FORM, ids=names)
def test_layers_are_translation_equivariant(kind):
    layer = kind(Z2, 4, 5, 2)
    x = torch.randn(1, 4, 1, 12, 12)
    inside = slice(4, 8)
    moved = layer(x.roll((1, 2), (-2, -1))).roll((-1, -2), (-2, -1))
    torch.testing.assert_close(moved[..., inside, inside], layer(x)[..., inside, inside], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", SLOW_FORM, ids=names)
def test_gradcheck(kind):
    layer = kind(P4, 2, 3, 1)
    x = torch.randn(1, 2, 4, 2, 2, requires_grad=True)
    parameters = dict(layer.named_parameters())
    assert torch.autograd.gradcheck(
        lambda x, *values: torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,)),
        (x, *parameters.values()),
    )


def test_without_queries_it_is_a_depthwise_group_convolution():
    layer, x = small_layer(AffineSelfConv2d, P4)
    with torch.no_grad():
        for zero in (layer.query_map.psi, layer.query_map.beta, layer.value_map.beta, layer.project.weight):
            zero.zero_()
        layer.project.weight[range(4), range(0, 16, 4)] = 1  # the identity element of each field alone
        depthwise = GroupConv2d(P4, 4, 4, 3, padding=1, bias=False)
        depthwise.weight.zero_()
        for c in range(4):
            depthwise.weight[c, 4 * c : 4 * c + 4] = layer.value_map.psi[c] / 9
    torch.testing.assert_close(layer(x), depthwise(layer.value(x)), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("group", "per_channel"), [(Z2, (105, 51, 8)), (P4, (258, 126, 8))], ids=names)
def test_layers_have_the_parameters_of_the_paper(group, per_channel):
    c = 16
    for kind, convs, own in zip(SLOW_FORM, (4, 2, 4), per_channel, strict=True):
        layer = kind(group, c)
        assert sum(p.numel() for p in layer.parameters()) == convs * group.order * c**2 + own * c
        assert all(p.ndim <= 4 for p in layer.parameters())
        assert set(layer.state_dict()) == dict(layer.named_parameters()).keys()
    assert sum(p.numel() for p in GroupSqueezeExcite(group, c, 4).parameters()) == 2 * c * 4 + 4 + c


@pytest.mark.parametrize("group", [Z2, P4M], ids=names)
def test_squeeze_and_excitation_is_its_equation(group):
    layer, x = GroupSqueezeExcite(group, 4, 2), torch.randn(2, 4, group.order, 3, 4)
    expected = reference_asc.squeeze_excite(x, layer)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    slow_grads = torch.autograd.grad(expected.square().sum(), layer.parameters())
    torch.testing.assert_close(grads, slow_grads, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [*SLOW_FORM, GroupSqueezeExcite], ids=names)
@pytest.mark.parametrize("group", [Z2, P4M], ids=names)
def test_fused_layers_give_the_same_planes(group, kind):
    layer = kind(group, 4, 3, 2) if kind in SLOW_FORM else kind(group, 4, 2)
    x = torch.randn(2, 4, group.order, 4, 5)
    parent = reparameterize_model(torch.nn.Sequential(layer))
    torch.testing.assert_close(parent(x.flatten(1, 2)), layer(x).flatten(1, 2), rtol=0, atol=1e-13)
    assert all(type(module) is not GroupConv2d for module in parent.modules())


def test_errors_say_what_would_work():
    with pytest.raises(ValueError, match=r"takes \(B, 8, 4, height, width\), got \(1, 8, 8, 4, 4\)"):
        AffineSelfConv2d(P4, 8)(torch.zeros(1, 8, 8, 4, 4))
    with pytest.raises(ValueError, match="use z2, z2m"):
        AffineSelfConv2d(cyclic(8), 8)
    with pytest.raises(ValueError, match=r"takes \(B, 8, 4, height, width\), got \(1, 8, 4, 4\)"):
        GroupSqueezeExcite(P4, 8, 2)(torch.zeros(1, 8, 4, 4))
    with pytest.raises(ValueError, match="depth is 9n"):
        ASCResNet(P4, depth=18)
    with pytest.raises(KeyError, match="lstm"):
        ASCResNet(P4, middle="lstm")
    with pytest.raises(KeyError, match="crop"):
        ASCResNet(P4, downsample="crop")
    with pytest.raises(ValueError, match="the nearest sizes that work are 16 x 16 and 20 x 20"):
        ASCResNet(P4, **SMALL)(torch.zeros(1, 3, 17, 17))


@pytest.mark.parametrize("middle", ["conv", "sasa", "simple_asc", "asc"])
@pytest.mark.parametrize("group", [Z2, Z2M, P4, P4M], ids=names)
def test_networks_are_equivariant(group, middle):
    model, x = trained_like(ASCResNet(group, middle=middle, se_reduction=2, **sizes(middle)), 8)
    report = equivariance_report(model, x)
    assert report.largest < 1e-12
    assert set(report.features) == set(group.elements)


def test_the_equivariance_error_can_be_large():
    """Negative control: no rotations, strides, and a norm that treats elements differently."""
    model, x = trained_like(ASCResNet(Z2, **SMALL), 8)
    assert equivariance_error(model, x, P4) > 1e-2
    for middle in ("conv", "asc"):
        model, x = trained_like(ASCResNet(P4, middle=middle, downsample="stride", **sizes(middle)), 8)
        assert equivariance_error(model, x) > 1e-2
    model, x = trained_like(ASCResNet(P4, **SMALL), 8)
    norm = model.blocks[0][0].branch.norm2
    norm.register_forward_hook(lambda _, args, y: y * torch.arange(1, 5)[:, None, None])
    assert equivariance_error(model, x) > 1e-2


@pytest.mark.parametrize("name", ["p4_asc_resnet29", "p4m_asc_resnet29"])
def test_registered_networks_are_equivariant(name):
    model, x = trained_like(create_model(name), 8)
    assert equivariance_error(model, x[:1]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_registered_networks_are_equivariant(name):
    model, x = trained_like(create_model(name), 16)
    assert equivariance_error(model, x[:1]) < 1e-11


@pytest.mark.parametrize("middle", ["conv", "sasa", "simple_asc", "asc"])
def test_fused_networks_give_the_same_logits_and_features(middle):
    model, x = trained_like(ASCResNet(P4, middle=middle, se_reduction=2, **sizes(middle)), 8)
    fused = reparameterize_model(model)
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    features = model.forward_features(x).flatten(1, 2)
    torch.testing.assert_close(fused.forward_features(x), features, rtol=0, atol=1e-12)
    assert not any(isinstance(module, (GroupConv2d, *SLOW_FORM)) for module in fused.modules())
    assert equivariance_error(fused, x[:1]) < 1e-12


def test_initialization_is_that_of_the_paper():
    model = ASCResNet(P4, depth=11, width=64, middle="asc")
    convs = [module for module in model.modules() if isinstance(module, GroupConv2d)]
    for conv in convs:
        assert conv.weight.std().item() == pytest.approx((2 / (4 * conv.in_channels)) ** 0.5, rel=0.1)
        assert conv.bias is None or not conv.bias.any()
    for name, value in model.named_parameters():
        if name.endswith(("psi", "beta")):
            assert abs(value.mean()) < 0.5
            assert value.std().item() == pytest.approx(1, abs=0.3)
    for stage in model.blocks:
        for block in stage:
            assert not block.last_norm.weight.any()
            assert block.branch.norm1.weight.eq(1).all()


def test_rotated_mnist_images_go_through():
    model = create_model("p4_asc_resnet29.rotmnist")
    assert model.input_size == (1, 28, 28)
    assert model.pretrained_cfg["num_classes"] == 10
    assert model(torch.randn(1, 1, 28, 28)).shape == (1, 10)
    assert model.forward_features(torch.randn(1, 1, 28, 28)).shape == (1, 128, 4, 7, 7)


def test_channels_and_classes_change():
    x = torch.randn(2, 5, 8, 8)
    model = ASCResNet(P4, in_chans=5, num_classes=3, **SMALL)
    assert model(x).shape == (2, 3)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, 64)
    model.reset_classifier(0, "max")
    assert model(x).shape == (2, model.num_features)
    model.reset_classifier(7)
    assert model.get_classifier().out_features == model(x).shape[1] == 7
    dropped = ASCResNet(P4, drop_rate=0.5, **SMALL)
    x = torch.randn(1, 3, 8, 8)
    assert not torch.equal(dropped.eval()(x), dropped.train()(x))


def test_features_are_planes_of_the_stages():
    model = create_model("p4m_asc_resnet29", features_only=True)
    features = model(torch.randn(1, 3, 8, 8))
    assert [tuple(f.shape[1:]) for f in features] == [(192, 8, 8), (384, 4, 4), (768, 2, 2)]
    assert model.feature_info.channels() == [192, 384, 768]
    assert model.feature_info.reduction() == [1, 2, 4]


def test_layer_decay_counts_bottlenecks():
    model = ASCResNet(P4, depth=20, width=2, num_heads=1)
    scales = {group["lr_scale"] for group in param_groups_layer_decay(model, layer_decay=0.5)}
    assert len(scales) == 1 + 6 + 1  # stem, bottlenecks, head
    assert model.group_matcher(coarse=True)["blocks"] == r"^blocks\.(\d+)"


def test_checkpointed_gradients_are_the_same_and_reach_every_parameter():
    model, x = ASCResNet(P4, se_reduction=2, **SMALL), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        for block in model.modules():
            if isinstance(block, torch.nn.BatchNorm3d):
                block.weight.fill_(1)
    grads = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        model(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-12)
    assert all(grad.abs().max() > 0 for grad in grads[0])


def test_states_hold_no_index_and_copies_work():
    model = ASCResNet(P4M, **SMALL)
    state = model.train().state_dict()
    assert state.keys() == model.eval().state_dict().keys()
    assert not any("index" in name for name in state)
    assert all(value.ndim <= 4 for value in state.values())
    twin = ASCResNet(P4M, **SMALL).eval()
    twin.load_state_dict(copy.deepcopy(model).state_dict())
    x = torch.randn(1, 3, 8, 12)
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("middle", ["simple_asc", "asc"])
def test_other_number_formats(middle):
    model, x = trained_like(ASCResNet(P4, middle=middle, se_reduction=2, **sizes(middle)), 8)
    model, x = model.float(), x.float()
    expected = model(x)
    permuted = copy.deepcopy(model).to(memory_format=torch.channels_last)
    torch.testing.assert_close(permuted(x.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(x) - expected).norm() < 0.1 * expected.norm()
    assert F.cosine_similarity(model.bfloat16()(x.bfloat16()).float(), expected).min() > 0.98


@pytest.mark.parametrize(
    ("middle", "fused"),
    [("asc", True)] + [pytest.param(middle, False, marks=pytest.mark.slow) for middle in ("asc", "sasa")],
)
def test_export_with_any_batch(middle, fused):
    model, x = trained_like(ASCResNet(P4, middle=middle, **sizes(middle)), 8)
    net = reparameterize_model(model) if fused else model
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    three = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(program.module()(three), net(three))


@pytest.mark.slow
def test_compiled_without_a_break():
    model, x = trained_like(ASCResNet(P4, se_reduction=2, **SMALL), 8)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))
