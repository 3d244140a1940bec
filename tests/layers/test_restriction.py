"""Restriction of fields to a subgroup: its law, equivariance of networks, fused form, layout and errors."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

import eqzoo
from eqzoo.equivariance import equivariance_report
from eqzoo.groups import P4, P4M, Z2, Z2M, cyclic, dihedral, transform
from eqzoo.layers import (
    GlobalPool,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupPool,
    GroupRestriction,
    LiftingConv2d,
    LiftingSelfAttention2d,
)
from eqzoo.layers._layout import is_channels_last

PAIRS = [(P4M, P4), (P4M, Z2M), (P4M, dihedral(2)), (P4M, cyclic(2)), (P4M, Z2), (P4, cyclic(2)), (cyclic(8), P4)]


@pytest.mark.parametrize(("group", "subgroup"), PAIRS)
def test_a_field_is_permuted_into_fields_of_the_subgroup(group, subgroup):
    layer, x = GroupRestriction(group, subgroup), torch.randn(2, 3, group.order, 5, 7)
    y = layer(x)
    assert y.shape == (2, 3 * group.order // subgroup.order, subgroup.order, 5, 7)
    assert torch.equal(y.flatten().sort()[0], x.flatten().sort()[0])
    assert torch.equal(y[:, :: group.order // subgroup.order, 0], x[:, :, 0])  # the identity is in the first coset
    for h in subgroup.grid_elements:
        g = group.element(subgroup.matrix(h))
        assert torch.equal(layer(transform(x, group, g, "regular")), transform(y, subgroup, h, "regular"))
    assert not layer.state_dict()
    if len(subgroup.grid_elements) > 1:
        assert equivariance_report(layer, x, subgroup).largest == 0
    planes = layer.fuse()(x.flatten(1, 2))
    assert torch.equal(planes, y.flatten(1, 2))


def test_other_orders_of_the_poses_break_the_law():
    """Negative control: cosets t H in place of H t."""
    layer, x = GroupRestriction(P4M, P4), torch.randn(2, 3, 8, 5, 5)
    layer.register_table("poses", np.array([*range(4), *(P4M.product(4, h) for h in range(4))]))
    assert equivariance_report(layer, x, P4).largest > 0.1


def network(subgroup=P4, own=None):
    fields = 4 * 8 // subgroup.order
    net = nn.Sequential(
        LiftingConv2d(P4M, 3, 4, 3, padding=1),
        GroupBatchNorm2d(P4M, 4),
        nn.ReLU(),
        GroupRestriction(P4M, subgroup),
        GroupConv2d(subgroup, fields, 5, 3, padding=1),
        GroupBatchNorm2d(subgroup, 5),
        nn.ReLU(),
        GlobalPool(subgroup),
        nn.Linear(5, 3),
    )
    net.input_size = (3, 12, 12)
    if own:
        net.group = own
    return net


@pytest.mark.parametrize("subgroup", [P4, Z2M, cyclic(2), dihedral(2)])
def test_a_network_is_equivariant_under_the_subgroup_alone(subgroup):
    report = eqzoo.check_equivariance(network(subgroup, own=subgroup))
    assert report.exact
    assert report.group == subgroup.name
    report = eqzoo.check_equivariance(network(subgroup), group="p4m")
    assert not report.exact
    for wrong in (report, eqzoo.check_equivariance(network(subgroup, own=P4M))):
        (line,) = wrong.diagnosis
        assert "(GroupRestriction)" in line
        assert f"has the group {subgroup.name}" in line


def test_a_harmless_layer_of_another_group_is_not_blamed():
    """Negative controls: what breaks these networks is a plain convolution."""
    for first, harmless in (
        ([LiftingConv2d(P4, 3, 4, 3, padding=1), GroupPool(P4)], LiftingConv2d(Z2, 4, 4, 1)),
        ([LiftingSelfAttention2d(cyclic(8), 3, 4, 3, num_heads=1), GroupPool(cyclic(8))], LiftingConv2d(P4, 4, 4, 1)),
    ):
        net = nn.Sequential(*first, harmless, nn.Flatten(1, 2), nn.Conv2d(4 * harmless.group.order, 4, 3))
        net.input_size = (3, 8, 8)
        assert not (report := eqzoo.check_equivariance(net, group="p4")).exact
        assert len(report.diagnosis) == 1
        assert report.diagnosis[0].startswith("likely filters that are not symmetric: 4")


def test_a_group_that_has_the_elements_of_the_grid_loses_none():
    """A linear layer on pixels breaks this network; p4 has all elements of r8 that are checked."""
    r8 = cyclic(8)
    net = nn.Sequential(
        LiftingSelfAttention2d(r8, 3, 4, 3, num_heads=1),
        GroupPool(r8),
        LiftingConv2d(P4, 4, 4, 1),
        GroupPool(P4),
        nn.Flatten(),
        nn.Linear(4 * 64, 2),
    )
    net.input_size = (3, 8, 8)
    (said,) = eqzoo.check_equivariance(net, group=r8).diagnosis
    assert "mix pixels in a fixed order" in said


def test_a_fused_and_an_exported_network_give_the_same(tmp_path):
    net, x = network(own=P4).eval(), torch.randn(2, 3, 12, 12)
    fused = timm.utils.reparameterize_model(net)
    torch.testing.assert_close(fused(x), net(x))
    runtime = pytest.importorskip("onnxruntime")
    file = tmp_path / "network.onnx"
    torch.onnx.export(net.float(), (x.float(),), file, dynamo=True, input_names=["image"])
    (found,) = runtime.InferenceSession(file).run(None, {"image": x.float().numpy()})
    torch.testing.assert_close(torch.from_numpy(found), net(x.float()), rtol=1e-4, atol=1e-5)


def test_a_network_of_the_meta_device_takes_weights():
    whole, x = network().eval(), torch.randn(2, 3, 8, 8)
    with torch.device("meta"):
        empty = network().eval()
    empty.load_state_dict(whole.state_dict(), assign=True)
    torch.testing.assert_close(empty.to("cpu")(x), whole(x))
    empty[3].poses = empty[3].poses.to("meta")  # as of another device than the image
    torch.testing.assert_close(empty(x), whole(x))


def test_layout_and_gradients():
    x = torch.randn(2, 5, 7, 8, 6).permute(0, 4, 3, 1, 2).requires_grad_()
    assert is_channels_last(x)
    layer = GroupRestriction(P4M, P4)
    assert is_channels_last(layer(x))
    assert not is_channels_last(layer(x.detach().contiguous()))
    assert torch.autograd.gradcheck(layer, torch.randn(1, 1, 8, 2, 3, requires_grad=True))
    assert torch.equal(GroupRestriction(P4, P4)(x[:, :, :4]), x[:, :, :4])


def test_errors():
    with pytest.raises(ValueError, match="p4m is no subgroup of p4"):
        GroupRestriction(P4, P4M)
    with pytest.raises(ValueError, match="r8 is no subgroup of p4m"):
        GroupRestriction(P4M, cyclic(8))
    with pytest.raises(
        ValueError, match=r"GroupRestriction\(p4m, p4\) takes \(B, C, 8, height, width\), got \(2, 3, 4"
    ):
        GroupRestriction(P4M, P4)(torch.zeros(2, 3, 4, 5, 5))
