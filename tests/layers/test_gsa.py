"""Group self-attention: reference, equivariance under rotations of the grid, and the networks made of it."""

import copy
from functools import partial

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import eqzoo
from eqzoo.equivariance import equivariance_error, randomize_norms
from eqzoo.groups import P4, P4M, Z2, Z2M, cyclic, dihedral, transform
from eqzoo.layers import (
    GroupLayerNorm2d,
    GroupSelfAttention2d,
    HalvingPool2d,
    LiftingSelfAttention2d,
    PointwiseConv2d,
    SpatialPool2d,
)
from eqzoo.models.gsanet import GSANet, Stage
from eqzoo.ops import local_group_attention, use_backend
from tests.layers import reference_gsa as reference
from tests.layers.reference import assert_same_with_gradients

GROUPS = [Z2, Z2M, P4, P4M, cyclic(8), cyclic(12), cyclic(16), dihedral(8)]
SMALL = (Stage((6,), (1,)), Stage((8,), (0,), pool=False))


def trained_like(module):
    """The same module with random norms and biases."""
    with torch.no_grad():
        randomize_norms(module, torch.Generator().manual_seed(1))
    return module


def lifting(group, **options):
    return trained_like(LiftingSelfAttention2d(group, 2, 4, num_heads=2, **options))


def attention(group, **options):
    return trained_like(GroupSelfAttention2d(group, 2, 3, num_heads=2, head_channels=4, **options))


def small(group, **options):
    return GSANet(group, 6, SMALL, True, True, **{"kernel_size": 3, "num_heads": 1} | options)


@pytest.mark.parametrize("kernel_size", [3, "global"])
@pytest.mark.parametrize("group", [Z2, Z2M, P4, cyclic(3), dihedral(3)])
def test_layers_are_their_equations(group, kernel_size):
    lift = lifting(group, kernel_size=kernel_size)
    assert_same_with_gradients(lift, torch.randn(1, 2, 2, 3), partial(reference.lifting_self_attention, lift))
    attend, x = attention(group, kernel_size=kernel_size), torch.randn(1, 2, group.order, 2, 2)
    assert_same_with_gradients(attend, x, partial(reference.group_self_attention, attend))


@pytest.mark.parametrize("kernel_size", [1, 5, "global"])
@pytest.mark.parametrize("group", GROUPS[1:])
def test_layers_are_equivariant(group, kernel_size):
    for layer in (
        LiftingSelfAttention2d(group, 2, 6, kernel_size, num_heads=2),
        GroupSelfAttention2d(group, 2, 6, kernel_size, num_heads=2),
    ):
        x = torch.randn(1, 2, *([] if layer.lifts else [group.order]), 3, 4)
        assert equivariance_error(layer, x, randomize=True) < 1e-13
        # The encoders of a new layer have no bias, and their layer norm amplifies the last bit of positions near zero.
        assert equivariance_error(layer, x) < 1e-13


@pytest.mark.parametrize("group", [Z2M, P4, P4M, cyclic(8)])
def test_the_error_can_be_large(group):
    """Negative controls: positions without the group action, and g m⁻¹ for g⁻¹ m."""
    x = torch.randn(1, 2, group.order, 3, 4)
    wrong = attention(group)
    wrong.position.column_action = [wrong.position.column_action[0]] * group.order
    assert equivariance_error(wrong, x) > 1e-4
    if group == P4M:  # in other groups here, g m⁻¹ is invariant as well
        wrong = attention(group)
        rows = [[group.product(g, group.inverse(m)) for m in group.elements] for g in group.elements]
        wrong.register_table("pose_table", np.array(rows))
        assert equivariance_error(wrong, x) > 1e-4


def test_scores_far_apart_stay_finite():
    """One softmax over poses and places underflows nowhere, though content and position prefer other keys."""
    qkv = torch.zeros(1, 3, 1, 2, 2, 1, 2, dtype=torch.float32)
    qkv[:, 0, :, 0], qkv[:, 0, :, 1] = 1.0, 1000.0
    qkv[:, 1:, :, 1, :, :, 0] = -1.0  # content: 1000 against the first place
    position = torch.tensor([[[0.0, 2000.0, 0.0]]])  # position: 2000 for it
    for backend in ("auto", "eager"):
        with use_backend(backend):
            out = local_group_attention(qkv, position, kernel_size=(1, 3))
        torch.testing.assert_close(out[..., 0].flatten(), torch.tensor([0.0, -2.0], dtype=torch.float32))


def test_positions_are_computed_in_float64():
    """Positions do not lose precision when a layer is cast to float32 and back."""
    layer = lifting(cyclic(8))
    rounded = copy.deepcopy(layer).float().double()
    row, _ = rounded.position.positions((5, 5))
    expected, _ = layer.position.positions((5, 5))
    assert torch.equal(row, expected)


def test_positions_are_encoded_by_a_linear_layer_without_parameters():
    """As those are that torch quantizes dynamically, whose ``weight`` is a method."""
    layer = lifting(cyclic(8)).requires_grad_(False)
    x = torch.randn(1, 2, 5, 5)
    expected, linear = layer(x), layer.position.row.expand
    quantized = nn.Module()
    quantized.weight, quantized.forward = (lambda: linear.weight), linear.forward
    layer.position.row.expand = quantized
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("side", [6, 7, 8, 9])
def test_halving_is_exact_at_every_side(side):
    x = torch.randn(2, 3, 8, side, side + 1)
    y = HalvingPool2d(P4M)(x)
    assert y.shape == (2, 3, 8, side // 2, (side + 1) // 2)
    assert equivariance_error(HalvingPool2d(P4M), x) == 0
    assert equivariance_error(HalvingPool2d(P4M, reduce="avg"), x) < 1e-15
    assert equivariance_error(SpatialPool2d(P4M, 2, exact=False), x) > 0.1  # a side is odd
    if side % 2 == 0:
        square = x[..., :side]
        assert torch.equal(HalvingPool2d(P4M)(square), SpatialPool2d(P4M, 2)(square))


def test_layer_norm_is_its_equation():
    norm = trained_like(GroupLayerNorm2d(P4, 3, eps=1e-12))
    x = torch.randn(2, 3, 4, 3, 3)
    for sample, y in zip(x, norm(x), strict=True):
        plain = (sample - sample.mean()) / sample.var(unbiased=False).sqrt()
        expected = plain * norm.weight[:, None, None, None] + norm.bias[:, None, None, None]
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)
    assert equivariance_error(norm, x) < 1e-14
    torch.testing.assert_close(norm.fuse()(x.flatten(1, 2)), norm(x).flatten(1, 2), rtol=0, atol=1e-13)


def test_pointwise_convolution_is_its_equation():
    layer = trained_like(PointwiseConv2d(P4M, 3, 2))
    x = torch.randn(2, 3, 8, 3, 4)
    expected = torch.einsum("bcgij,oc->bogij", x, layer.weight[:, :, 0, 0]) + layer.bias[:, None, None, None]
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(layer.fuse()(x.flatten(1, 2)), expected.flatten(1, 2), rtol=0, atol=1e-13)
    assert equivariance_error(layer, x) < 1e-14


@pytest.mark.parametrize(
    ("group", "option"),
    [(Z2M, {}), (cyclic(8), {}), (P4, {"global_pool": "sum_max"}), (P4, {"kernel_size": "global"})],
)
def test_small_networks_are_equivariant(group, option):
    x = torch.randn(1, 2, 14, 14)  # 7 after the stem, 5 after the crop: a pool meets an odd side
    assert equivariance_error(small(group, in_chans=2, **option), x, randomize=True) < 1e-12


def logit_error(net, group, g):
    x = torch.randn(1, *net.input_size)
    net = trained_like(net.eval())
    with torch.no_grad():
        y = net(x)
        return (net(transform(x, group, g, "trivial")) - y).norm() / y.norm()


@pytest.fixture
def weights(tmp_path):
    """Writes the weights of a network with random norms; returns the arguments that load them."""

    def write(net):
        save_file(trained_like(net).state_dict(), tmp_path / "model.safetensors")
        return {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "model.safetensors")}}

    return write


POSES = "blocks.1.block.attention.attention.pose.weight"


def test_weights_load_for_another_number_of_rotations(weights):
    four = eqzoo.create_model("r4_gsanet_t", kernel_size=3)
    options = weights(four) | {"kernel_size": 3}
    eight = eqzoo.create_model("r4_gsanet_t", group=cyclic(8), **options)
    twelve = eqzoo.create_model("r4_gsanet_t", group=cyclic(12), **options)
    table = four.state_dict()[POSES]
    halves = torch.stack([table, (table + table[[1, 2, 3, 0]]) / 2], 1).flatten(0, 1)
    torch.testing.assert_close(eight.state_dict()[POSES], halves)
    torch.testing.assert_close(twelve.state_dict()[POSES][[0, 3, 6, 9]], table)
    torch.testing.assert_close(twelve.state_dict()[POSES][11], (table[3] + 2 * table[0]) / 3)
    for name, value in four.state_dict().items():
        assert name.endswith("pose.weight") or torch.equal(eight.state_dict()[name], value)
    assert logit_error(eight, cyclic(8), 2) < 1e-12 < 1e-4 < logit_error(eight, P4M, 4)

    back = eqzoo.create_model("r8_gsanet_t", group=P4, **(weights(eight) | {"kernel_size": 3}))
    assert all(torch.equal(back.state_dict()[name], value) for name, value in four.state_dict().items())


def test_weights_load_with_reflections_and_without_them(weights, tmp_path):
    reflected = eqzoo.create_model("r4m_gsanet_s")
    options = weights(reflected)
    plain = eqzoo.create_model("r4m_gsanet_s", group=P4, **options)
    assert torch.equal(plain.state_dict()[POSES], reflected.state_dict()[POSES][:4])
    both = eqzoo.create_model("r4m_gsanet_s", group=dihedral(8), **options)
    table, finer = reflected.state_dict()[POSES], both.state_dict()[POSES]
    assert torch.equal(finer[::2], table)
    torch.testing.assert_close(finer[[7, 15]], (table[[3, 7]] + table[[0, 4]]) / 2)
    with pytest.raises(ValueError, match="does not fit"):  # nothing says of which group these are
        eqzoo.create_model("r4_gsanet_s", group=P4M, **weights(plain))
    eight = eqzoo.create_model("r8_gsanet_s")
    with pytest.raises(ValueError, match="does not fit"):  # both have eight poses, but different ones
        eqzoo.create_model("r8_gsanet_s", group=P4M, **weights(eight))
    timm.models.save_for_hf(eight, tmp_path / "eight", safe_serialization=True)  # with a config.json
    both = eqzoo.create_model(f"local-dir:{tmp_path / 'eight'}", pretrained=True, group=P4M)
    assert torch.equal(both.state_dict()[POSES], eight.state_dict()[POSES][::2].repeat(2, 1))
    assert logit_error(both, P4M, 4) < 1e-12


@pytest.mark.parametrize(
    ("name", "group"), [("r4_gsanet_t", "r2m"), ("r8_gsanet_s", "p4m"), ("r4m_gsanet_s", cyclic(8))]
)
def test_a_saved_network_of_another_group_loads_as_it_was(name, group, tmp_path):
    """The config.json that timm writes has its group; a third group takes the weights from that one."""
    model = eqzoo.create_model(name, group=group, kernel_size=3).eval()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    for again in (
        eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True),
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True),
    ):
        assert again.group == model.group
        assert all(torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items())
    if model.group == cyclic(8):
        fewer = eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True, group="p4")
        assert torch.equal(fewer.state_dict()[POSES], model.state_dict()[POSES][::2])


@pytest.mark.parametrize("channels", [2, 3])
def test_weights_for_gray_images_give_the_same_for_images_of_equal_channels(channels, weights):
    gray = eqzoo.create_model("r4_gsanet_t", kernel_size=3).eval()
    color = eqzoo.create_model("r4_gsanet_t", in_chans=channels, **(weights(gray) | {"kernel_size": 3})).eval()
    x = torch.randn(1, 1, 22, 22)
    with torch.no_grad():
        torch.testing.assert_close(color(x.expand(-1, channels, -1, -1)), gray(x))


def test_weights_of_the_same_group_are_not_changed(weights):
    own = eqzoo.create_model("r4_gsanet_t", group=cyclic(8))
    again = eqzoo.create_model("r4_gsanet_t", group=cyclic(8), **weights(own))
    assert all(torch.equal(again.state_dict()[name], value) for name, value in own.state_dict().items())
    options = weights(eqzoo.create_model("r4_gsanet_t"))
    with torch.device("meta"):
        assert eqzoo.create_model("r4_gsanet_t", group=cyclic(8), **options).head.weight.is_meta


def test_read_outs():
    for read_out in ("max_avg", "sum_max"):
        net = small(P4, in_chans=2, global_pool=read_out).eval()
        x = torch.randn(2, 2, 12, 12)
        field = net.head(net.forward_features(x))
        expected = field.amax(2).mean((2, 3)) if read_out == "max_avg" else field.sum((3, 4)).amax(2)
        torch.testing.assert_close(net(x), expected)


def test_initialization():
    net = eqzoo.create_model("z2_gsanet_b")
    weight = net.blocks[3].block.attention.attention.qkv.weight
    assert weight.std().item() == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.02)
    weight = eqzoo.create_model("z2_gsanet_t").blocks[3].block.attention.attention.qkv.weight
    assert weight.std().item() == pytest.approx(weight[0].numel() ** -0.5, rel=0.05)
    assert all((v == 0).all() for k, v in net.named_parameters() if k.endswith("bias"))


@pytest.mark.parametrize("kernel_size", [3, pytest.param("global", marks=pytest.mark.slow)])
def test_networks_are_one_graph_with_any_batch(kernel_size):
    net = GSANet(P4, 6, SMALL, num_heads=1, kernel_size=kernel_size).eval()
    x = torch.randn(2, 1, 8, 8)
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), net(x))
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(program.module()(x), net(x))


def test_errors_say_what_would_work():
    with pytest.raises(ValueError, match="give head_channels, or 6 output channels"):
        GroupSelfAttention2d(P4, 2, 4)
    with pytest.raises(ValueError, match="4 x 4 pixels; the nearest size that works is 8 x 8"):
        small(P4, in_chans=2)(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="sides of 2 pixels or more"):
        HalvingPool2d(P4)(torch.zeros(1, 2, 4, 1, 8))
    with pytest.raises(ValueError, match="'max_avg' or 'sum_max'"):
        small(P4).reset_classifier(3, "avg")
