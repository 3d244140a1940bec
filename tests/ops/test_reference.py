"""The reference operations: the same numbers as loops over elements, pixels and offsets, and as the eager forms."""

import pytest
import torch

from eqzoo.groups import P4, P4M, Z2
from eqzoo.layers import (
    AffineSelfConv2d,
    AttentiveGroupConv2d,
    AttentiveLiftingConv2d,
    E4Layer2d,
    GroupSelfAttention2d,
    InputAttention2d,
    LiftingSelfAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from eqzoo.ops import reference, use_backend
from eqzoo.ops.asc.eager import mapped
from eqzoo.ops.gsa.attention import probabilities
from tests.layers import reference_asc, reference_attentive, reference_e4, reference_gsa
from tests.ops import (
    test_asc_kernels,
    test_attentive_kernels,
)


def flipped(loops):
    return lambda x, layer: loops(layer, x)


GSA, SPATIAL = {"kernel_size": 3, "num_heads": 2}, {"attention": "spatial", "attention_size": 3}
ATTEND, ON_INPUT = reference_attentive.attentive_conv, reference_attentive.attend_input
# A layer, its arguments, the shape of its input where it is no field of 4 x 5 pixels, and its loops.
LAYERS = {
    "e4": (E4Layer2d, (2, 4, 3, 2), {}, None, lambda x, m: reference_e4.e4_layer(x, m, m.group)),
    "asc": (AffineSelfConv2d, (4, 3, 2), {}, None, reference_asc.affine_self_conv),
    "simple asc": (SimpleAffineSelfConv2d, (4, 3, 2), {}, None, reference_asc.simple_affine_self_conv),
    "sasa": (StandAloneSelfAttention2d, (4, 3, 2), {}, None, reference_asc.stand_alone_self_attention),
    "attentive": (AttentiveGroupConv2d, (2, 2, 3), {"attention_size": 3}, None, ATTEND),
    "attentive, channel": (AttentiveGroupConv2d, (2, 2, 3), {"attention": "channel"}, None, ATTEND),
    "attentive, spatial": (AttentiveGroupConv2d, (2, 2, 3), SPATIAL, None, ATTEND),
    "attentive, lifting": (AttentiveLiftingConv2d, (2, 2, 3), {"attention_size": 3}, (2, 4, 5), ATTEND),
    "input attention": (InputAttention2d, (3, "regular"), {"attention_size": 3}, None, ON_INPUT),
    "input attention, image": (InputAttention2d, (3, "trivial"), {"attention_size": 3}, (3, 4, 5), ON_INPUT),
    "gsa": (GroupSelfAttention2d, (2, 6), GSA, None, flipped(reference_gsa.group_self_attention)),
    "gsa, lifting": (LiftingSelfAttention2d, (2, 6), GSA, (2, 2, 3), flipped(reference_gsa.lifting_self_attention)),
}


def drawn(name, group):
    """A layer, an image or field for it, and its loops."""
    kind, args, options, shape, loops = LAYERS[name]
    return kind(group, *args, **options), torch.randn(1, *(shape or (args[0], group.order, 4, 5))), loops


@pytest.mark.parametrize("group", [Z2, P4, P4M], ids=lambda group: group.name)
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_loops(name, group):
    layer, x, loops = drawn(name, group)
    with use_backend("reference"):
        found = layer(x)
    torch.testing.assert_close(found, loops(x, layer), rtol=0, atol=1e-12)


def eager_and_reference(run):
    results = []
    for backend in ("eager", "reference"):
        torch.manual_seed(3)
        with use_backend(backend):
            results.append(run())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", test_attentive_kernels.CASES)
def test_eager_attentive_convolution_is_it(name):
    arguments, sources = test_attentive_kernels.case(name)
    eager_and_reference(lambda: test_attentive_kernels.with_gradients(arguments, sources))


@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize("poses", [1, 4])
def test_eager_attention_on_the_input_is_it(poses, channel):
    eager_and_reference(lambda: test_attentive_kernels.on_input(poses, channel))


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("order", [1, 3, 8])
def test_eager_affine_attention_is_it(order, values):
    tensors = test_asc_kernels.draw(order, values=values)
    eager_and_reference(lambda: test_asc_kernels.with_gradients(tensors))


def test_eager_affine_map_is_it():
    x, psi, beta = torch.randn(2, 3, 4, 5, 6), torch.randn(3, 4, 4, 9), torch.randn(3, 4, 9)
    for bank in (reference.AffineBank(psi, beta), reference.AffineBank(None, beta), reference.AffineBank(psi, None)):
        torch.testing.assert_close(mapped(x, bank, 3), reference.affine_map(x, bank, 3), rtol=1e-10, atol=1e-10)


def test_the_factorized_softmax_is_it():
    query, key = torch.randn(2, 3, 6, 4, 5), torch.randn(2, 3, 6, 2, 5, 7)
    position, pose = torch.randn(4, 3, 5, 7), torch.randn(2, 4, 2)
    mask = torch.rand(5, 7) < 0.7
    mask[:, 0] = True
    among_poses, among_places = probabilities(0.3 * query, key, position, pose, mask)
    found = among_places[..., None, :] * among_poses[:, :, None]
    expected = reference.group_attention_weights(query, key, position, pose, mask, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_dropout_of_the_reference_has_its_law():
    qkv = torch.zeros(2, 3, 3, 2, 4, 8, 8)
    qkv[:, 2] = 1.0
    options = {"kernel_size": (1, 1), "dropout": 0.25}
    out = reference.local_group_attention(qkv, torch.zeros(2, 3, 1), **options)
    kept = out * 4 * 0.75  # each pixel sums 16 pairs of poses, of weight 1/4, and 4/3 where it was kept
    assert kept.mean() == pytest.approx(12, abs=0.15)
    assert kept[:, :, 0, 0].var() == pytest.approx(16 * 0.25 * 0.75, rel=0.25)
    assert torch.equal(out[:, :, :, 0], out[:, :, :, 2])  # the same for all output poses


def test_the_comparison_can_fail(monkeypatch):
    """Negative control: attention that does not suppress."""
    layer, x, loops = drawn("attentive", P4)
    monkeypatch.setattr(reference, "channel_attention", lambda mean, *_: torch.zeros_like(mean))
    with use_backend("reference"):
        assert (layer(x) - loops(x, layer)).abs().max() > 1e-2


@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_has_the_tangents_that_differences_have(name):
    """torch would take the tangents behind a custom operator for zero."""
    layer, x, _ = drawn(name, P4)
    layer.eval().requires_grad_(False)
    v = torch.randn_like(x)
    step = 1e-6
    expected = (layer(x + step * v) - layer(x - step * v)) / (2 * step)
    y, tangent = torch.func.jvp(layer, (x,), (v,))
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(tangent, expected, rtol=1e-5, atol=1e-7)
    assert expected.norm() > 1e-3
