"""Certificates: what passes, what fails and why, and what proves nothing."""

import json
import math
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import eqzoo
from eqzoo.analysis.diagnosis import diagnose
from eqzoo.equivariance import equivariance_report, randomize_norms
from eqzoo.groups import P4, Z2, Z2M, transform
from eqzoo.hub import WeightsNotFoundError
from eqzoo.layers import (
    GlobalPool,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupPool,
    GroupSelfAttention2d,
    LiftingConv2d,
    PointwiseConv2d,
)
from eqzoo.models.gcnn import GroupCNN
from eqzoo.models.load import load_network
from eqzoo.ops import use_backend
from tests.conftest import ROOT

CARD = ROOT / "model_cards" / "p4_cnn.rotmnist"


@pytest.mark.parametrize("source", ["p4_cnn", "p4_cnn.rotmnist", CARD, CARD / "model.safetensors", f"local-dir:{CARD}"])
def test_a_trained_network_passes_whatever_it_is_called(source):
    report = eqzoo.check_equivariance(source)
    assert report.exact
    assert report.largest < 1e-12
    assert set(report.logits) == set(report.features)
    assert list(report.logits) == ["as it is", *(f"rotated by {a}°" for a in (90, 180, 270))]
    assert report.worst_layer is not None
    assert not report.diagnosis
    assert "is exactly equivariant under p4" in str(report)


def test_a_network_that_is_not_trained_is_checked_as_if_it_were():
    report = eqzoo.check_equivariance("p4_convnext_atto", size=64)
    assert report.exact
    assert len(report.logits) == 4
    assert "random" in report.notes[0]


def test_a_baseline_fails_and_says_why():
    report = eqzoo.check_equivariance("z2_cnn")
    assert not report.exact
    assert min(list(report.logits.values())[1:]) > 1e-2
    assert "likely filters that are not symmetric: 7 layers, the first stem.conv" in report.diagnosis[0]
    assert "so p4 was checked" in report.notes[0]
    assert "is NOT exactly equivariant under p4" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["exact"] is False


def test_a_larger_group_than_the_networks_own():
    report = eqzoo.check_equivariance("p4_cnn", group="p4m")
    assert not report.exact
    assert report.logits["rotated by 90°"] < 1e-12
    assert report.logits["reflected"] > 1e-2
    assert report.diagnosis == ("the network's group is p4, and p4m has elements that are not in it",)
    assert eqzoo.check_equivariance("p4m_cnn", group="p4").exact


def test_a_broken_layer_is_named():
    network = load_network("p4_cnn").network
    conv = network.blocks[1].conv
    conv.register_table("orbit_index", conv.orbit_index[:, [1, 0, 2, 3]].numpy())
    with use_backend("expanded"):  # the irreps do not read this table
        report, layers = eqzoo.check_equivariance(network), equivariance_report(network, randomize=True).layers
    assert not report.exact
    assert report.worst_layer[0] == "blocks.1.conv"
    assert len(report.diagnosis) == 1
    assert [name for name, error in layers.items() if error > 1e-9] == ["blocks.1.conv"]


def test_timms_networks_fail_instructively():
    report = eqzoo.check_equivariance("resnet18", size=64)
    assert not report.exact
    assert report.kind == "timm"
    strides, filters = report.diagnosis
    assert strides.startswith("likely strided windows that do not end at the edge: 8 layers, the first conv1, on 64 ")
    assert "a 7 x 7 window with stride 2 ends 1 before the edge, exact on 63 or 65" in strides
    assert filters.startswith("likely filters that are not symmetric: 17 layers, the first conv1")
    assert eqzoo.check_equivariance("resnet18", size=64) == report
    # On 65 pixels all strides end at the edge, and the filters are left.
    assert len(eqzoo.check_equivariance("resnet18", size=65).diagnosis) == 1


def test_networks_with_a_batch_norm_behind_the_pool_are_checked():
    """Whose statistics a single image does not give."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(4))
    network.input_size = (3, 8, 8)
    assert not eqzoo.check_equivariance(network, "p4").exact
    assert not eqzoo.check_equivariance("skresnet18", size=64).exact


@pytest.mark.parametrize(
    ("name", "word"), [("vit_tiny_patch16_224", "pos_embed"), ("tf_efficientnet_lite0", "asymmetric padding")]
)
def test_positions_and_paddings_are_named(name, word):
    network = timm.create_model(name, pretrained=False)
    size = network.pretrained_cfg["input_size"][-1] if "vit" in name else 32
    x = torch.randn(1, 3, size, size)
    assert any(word in cause for cause in diagnose(network.double().eval(), x, eqzoo.P4))


def test_filters_that_are_symmetric_pass():
    """A network that nobody promised anything of, and that is exact for 180° rotations."""
    conv = nn.Conv2d(1, 3, 3, padding=1)
    conv.weight.data += conv.weight.data.rot90(2, (2, 3))
    network = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.pretrained_cfg = {"input_size": (1, 8, 8)}
    assert eqzoo.check_equivariance(network, group="r2").exact
    assert not eqzoo.check_equivariance(network, group="p4").exact


def test_an_answer_that_does_not_depend_on_the_image_proves_nothing():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    network.pretrained_cfg = {"input_size": (1, 8, 8)}
    assert not eqzoo.check_equivariance(network).exact
    nn.init.normal_(network[1].weight, std=1e-12)
    with pytest.raises(ValueError, match="hardly depends on the image"):
        eqzoo.check_equivariance(network)


def test_onnx_files(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    eqzoo.export_onnx(load_network("p4_cnn").network, tmp_path / "p4.onnx")
    report = eqzoo.check_equivariance(tmp_path / "p4.onnx")
    assert report.exact
    assert (report.group, report.precision, report.tolerance) == ("p4", "float32", 1e-4)
    assert 0 < report.largest < 1e-5
    assert not eqzoo.check_equivariance(tmp_path / "p4.onnx", tolerance=1e-12).exact
    shutil.copy(tmp_path / "p4.onnx", tmp_path / "p4.ONNX")
    assert eqzoo.check_equivariance(tmp_path / "p4.ONNX").exact
    eqzoo.export_onnx(load_network("z2_cnn").network, tmp_path / "z2.onnx")
    assert not eqzoo.check_equivariance(tmp_path / "z2.onnx").exact
    with pytest.raises(ValueError, match="not of size=32"):
        eqzoo.check_equivariance(tmp_path / "p4.onnx", size=32)
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    with pytest.raises(ValueError, match="not an ONNX file"):
        eqzoo.check_equivariance(tmp_path / "broken.onnx")
    with pytest.raises(FileNotFoundError, match="no file at"):
        eqzoo.check_equivariance(tmp_path / "none.onnx")


def write_onnx(path, nodes, shape, filters, outputs="y"):
    """Writes the ONNX file of a graph from "x" of a shape, with filters "w"; nodes are (kind, in, out, attributes)."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(end, kind, None) for end in outputs]
    images = [helper.make_tensor_value_info("x", kind, shape)] if shape else []
    made = [helper.make_node(name, ins.split(), [out], **attributes) for name, ins, out, attributes in nodes]
    weight = onnx.numpy_helper.from_array(filters.float().numpy(), "w")
    graph = helper.make_graph(made, "net", images, ends, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


CONV = {"strides": [2, 2], "pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}


def test_onnx_files_of_others(tmp_path):
    """A strided convolution with a fixed batch and a free size, and one that takes channels last."""
    filters = torch.randn(4, 3, 3, 3)
    path = write_onnx(tmp_path / "a.onnx", [("Conv", "x w", "y", CONV)], [1, 3, "h", "w"], filters)
    with pytest.raises(ValueError, match="give their side"):
        eqzoo.check_equivariance(path)
    assert not eqzoo.check_equivariance(path, size=8).exact
    last = [("Transpose", "x", "t", {"perm": [0, 3, 1, 2]}), ("Conv", "t w", "y", CONV | {"pads": [0, 0, 1, 1]})]
    report = eqzoo.check_equivariance(write_onnx(tmp_path / "b.onnx", last, ["n", 8, 8, 3], filters))
    assert report.image == (3, 8, 8)
    assert "likely asymmetric padding" in report.diagnosis[0]
    for nodes, shape, said in (
        ([("Flatten", "x", "y", {})], ["n", 5], "not a batch of images"),
        ([("Identity", "w", "y", {})], None, "no input"),
    ):
        with pytest.raises(ValueError, match=said):
            eqzoo.check_equivariance(write_onnx(tmp_path / "c.onnx", nodes, shape, filters))


def test_all_outputs_of_an_onnx_file_are_checked(tmp_path):
    nodes = [("GlobalAveragePool", "x", "y", {}), ("Conv", "x w", "z", {"kernel_shape": [3, 3]})]
    for outputs, exact in (("y", True), ("yz", False)):
        path, used = tmp_path / f"{outputs}.onnx", nodes[: len(outputs)]
        write_onnx(path, used, ["n", 3, 8, 8], torch.randn(4, 3, 3, 3), outputs)
        assert eqzoo.check_equivariance(path).exact == exact


def test_free_sizes_of_onnx_files_are_those_of_the_images(tmp_path):
    """Only its stride breaks the symmetry, on an even side."""
    filters = torch.randn(4, 1, 3, 3)
    filters = sum(torch.rot90(filters, k, (2, 3)) for k in range(4))
    nodes = [("Conv", "x w", "c", CONV), ("Relu", "c", "r", {}), ("GlobalAveragePool", "r", "y", {})]
    for name, sides in (("fixed", [32, 32]), ("free", ["h", "w"])):
        path = write_onnx(tmp_path / f"{name}.onnx", nodes, ["b", 1, *sides], filters)
        (cause,) = eqzoo.check_equivariance(path, size=32).diagnosis
        assert "strided windows that do not end at the edge" in cause
        assert "exact on 31 or 33" in cause
    assert eqzoo.check_equivariance(tmp_path / "free.onnx", size=33).exact


def test_sizes_that_do_not_go_are_refused_with_those_that_do():
    network = load_network("p4_cnn").network
    for source in ("p4_cnn", network):
        with pytest.raises(
            ValueError, match=r"does not accept images of 29 x 29 pixels; the nearest sizes that work are 28 x 28 and"
        ):
            eqzoo.check_equivariance(source, size=29)


def test_sources_that_do_not_say_what_they_are(tmp_path):
    save_file(load_network("p4_cnn").network.state_dict(), tmp_path / "best.safetensors")
    assert load_network(tmp_path / "best.safetensors", model="p4_cnn").trained
    for name, message in (("none.safetensors", "nothing is called"), ("best.safetensors", "config")):
        with pytest.raises(FileNotFoundError, match=message):
            eqzoo.check_equivariance(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no weights at"):
        load_network("p4_cnn", model="p4_cnn")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is of the network None"):
        load_network(tmp_path / "best.safetensors")


def test_a_large_tolerance_passes_and_one_that_is_no_number_does_not():
    assert eqzoo.check_equivariance("p4_cnn", tolerance=0.2).exact  # more than another image changes the output
    assert not eqzoo.check_equivariance("p4_cnn", tolerance=math.nan).exact


def test_arguments_for_names_are_not_ignored(tmp_path):
    with pytest.raises(WeightsNotFoundError, match="z2m_gsanet_b"):
        eqzoo.check_equivariance("z2m_gsanet_b", pretrained=True)
    for source in (tmp_path / "net.onnx", nn.Flatten()):
        for option in ({"model": "p4_cnn"}, {"pretrained": True}):
            with pytest.raises(ValueError, match="leave model, pretrained and randomize out"):
                eqzoo.check_equivariance(source, **option)


def test_a_layer_that_takes_no_rotated_input_is_passed_over():
    class ChannelsLast(nn.Module):
        def forward(self, x):
            return nn.functional.layer_norm(x, (3,))  # rotated, the channels are not last

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 3, 3), ChannelsLast()

        def forward(self, x):
            return self.norm(self.conv(x).movedim(1, -1))

    (cause,) = diagnose(Network(), torch.rand(1, 1, 8, 8), eqzoo.P4)
    assert cause.startswith("likely filters that are not symmetric: conv")


def test_a_network_that_is_built_by_its_class_is_checked_at_a_size():
    network = GroupCNN(eqzoo.P4, width=2)
    assert eqzoo.check_equivariance(network, size=28).image == (1, 28, 28)
    with pytest.raises(ValueError, match="GroupCNN has no input_size and no pretrained_cfg; set its input_size"):
        eqzoo.check_equivariance(network)
    with pytest.raises(ValueError, match=r"Flatten has .*; set its input_size = \(channels, height, width\)"):
        eqzoo.check_equivariance(nn.Flatten(), size=28)


def test_a_fused_network_that_is_not_trained_is_not_given_other_norms():
    fused = timm.utils.reparameterize_model(eqzoo.create_model("p4_cnn").eval())
    found = eqzoo.check_equivariance(fused)
    assert found.exact
    assert "left as they are" in found.notes[0]
    assert not eqzoo.check_equivariance(fused, group="p4m").exact
    assert "p4m has elements" in eqzoo.check_equivariance(fused, group="p4m").diagnosis[0]


@pytest.mark.parametrize("name", ["r4_gsanet_t", "p4_se_resnet29", "p4m_octic_vit_tiny_patch16_224"])
def test_layers_of_a_group_that_a_deployed_network_still_has_do_not_give_its_norms_other_values(name):
    options = {"depth": 2, "img_size": 32, "patch_size": 4} if "octic" in name else {}
    model = eqzoo.create_model(name, **options).eval()
    fused = timm.utils.reparameterize_model(model)
    x = torch.randn(1, *((1, 22, 22) if "gsanet" in name else (3, 32, 32)))
    assert eqzoo.equivariance_error(fused, x, randomize=True) < 1e-9
    inside = nn.Sequential(fused)
    randomize_norms(inside.double(), torch.Generator().manual_seed(0), x.double())
    assert eqzoo.equivariance_error(inside, x, group=model.group) < 1e-9
    found = eqzoo.check_equivariance(fused, size=x.shape[-1])
    assert found.exact
    assert "left as they are" in found.notes[0]


@pytest.mark.parametrize(("layers", "group", "said"), [(P4, "p4m", "p4, which has not all"), (Z2M, None, "z2m, which")])
def test_a_sequence_of_layers_is_told_which_group_it_has(layers, group, said):
    network = nn.Sequential(LiftingConv2d(layers, 1, 4, 3), GroupConv2d(layers, 4, 4, 3), GlobalPool(layers))
    network.input_size = (1, 9, 9)
    found = eqzoo.check_equivariance(network, group=group)
    assert not found.exact
    assert f"the layer 0 (LiftingConv2d) has the group {said}" in found.diagnosis[0]
    assert f"check it with group='{layers.name}'" in found.diagnosis[0]


def test_a_group_without_rotations_of_the_pixel_grid_is_not_advised():
    network = nn.Sequential(LiftingConv2d(Z2, 1, 2, 1), nn.Flatten(), nn.Linear(162, 3))
    network.input_size = (1, 9, 9)
    said = eqzoo.check_equivariance(network, group="p4").diagnosis
    assert "the layer 0 (LiftingConv2d) has the group z2, which has not all elements of p4" in said, said


def test_where_every_layer_with_a_group_is_exact_the_others_are_named():
    planes = [nn.Flatten(1, 2), nn.BatchNorm2d(8), nn.Unflatten(1, (2, 4))]
    wrong = network_of(LiftingConv2d(eqzoo.P4, 1, 2, 3), *planes, GlobalPool(eqzoo.P4, "avg"), group=eqzoo.P4)
    found = eqzoo.check_equivariance(wrong)
    assert not found.exact
    assert "2 (BatchNorm2d)" in found.diagnosis[0]


class Gain(nn.Module):
    """A factor for each pose, which breaks equivariance as soon as it is trained."""

    def __init__(self, *shape):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return x * self.factor


def network_of(*layers, group=eqzoo.P4M):
    network = nn.Sequential(*layers)
    network.group, network.input_size = group, (1, 8, 8)
    return network


class Branch(nn.Module):
    """A branch on planes that begins as zeros, as is usual."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        nn.init.zeros_(self.conv.weight)

    def forward(self, x):
        return x + self.conv(x.flatten(1, 2)).unflatten(1, (2, 8))


class Gate(nn.Module):
    """A branch that begins closed."""

    def __init__(self, gate):
        super().__init__()
        self.gate, self.conv = nn.Parameter(gate), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return x + self.gate * self.conv(x.flatten(1, 2)).unflatten(1, (2, 8))


HIDDEN = {
    "a gain of ones": lambda: [GroupBatchNorm2d(eqzoo.P4M, 2), nn.ReLU(), Gain(1, 2, 8, 1, 1), GlobalPool(eqzoo.P4M)],
    "statistics of planes": lambda: [
        nn.Flatten(1, 2),
        nn.BatchNorm2d(16, affine=False),
        nn.Unflatten(1, (2, 8)),
        nn.ReLU(),
        GlobalPool(eqzoo.P4M, "avg"),
    ],
    "slopes of planes": lambda: [nn.Flatten(1, 2), nn.PReLU(16), nn.Unflatten(1, (2, 8)), GlobalPool(eqzoo.P4M, "avg")],
    "a layer norm over poses": lambda: [nn.LayerNorm((2, 8, 8, 8)), nn.ReLU(), GlobalPool(eqzoo.P4M)],
    "a branch of zeros": lambda: [GroupBatchNorm2d(eqzoo.P4M, 2), nn.ReLU(), Branch(), GlobalPool(eqzoo.P4M)],
    "a closed gate": lambda: [Gate(torch.tensor(0.0)), GlobalPool(eqzoo.P4M)],
    "a closed gate of one number": lambda: [Gate(torch.zeros(1)), GlobalPool(eqzoo.P4M)],
}


@pytest.mark.parametrize("layers", HIDDEN.values(), ids=HIDDEN)
def test_what_initial_values_hide_is_found(layers):
    network = network_of(LiftingConv2d(eqzoo.P4M, 1, 2, 3, padding=1), *layers())
    report = eqzoo.check_equivariance(network)
    assert not report.exact
    assert report.diagnosis
    assert "untrained" in report.notes[-1]
    assert eqzoo.equivariance_error(network, randomize=True) > 1e-6
    as_it_is = eqzoo.check_equivariance(network, randomize=False)
    assert as_it_is.exact
    assert not as_it_is.notes


def test_a_trained_network_is_randomized_on_request():
    network = load_network("p4_cnn").network
    network.blocks[1].norm = nn.Sequential(network.blocks[1].norm, Gain(1, 10, 4, 1, 1))
    assert eqzoo.check_equivariance(network).exact
    report = eqzoo.check_equivariance(network, randomize=True)
    assert not report.exact
    assert "as asked" in report.notes[-1]
    assert not eqzoo.check_equivariance("p4_cnn.rotmnist").notes
    assert "as asked" in eqzoo.check_equivariance("p4_cnn.rotmnist", randomize=True).notes[-1]
    with pytest.raises(ValueError, match="randomize out"):
        eqzoo.check_equivariance("network.onnx", randomize=True)


def test_layers_of_two_groups_of_equal_order_are_told():
    r8 = eqzoo.cyclic(8)
    mixed = GroupSelfAttention2d(r8, 2, 6, 3, num_heads=1)
    network = network_of(
        LiftingConv2d(eqzoo.P4M, 1, 2, 3, padding=1), nn.ReLU(), mixed, GlobalPool(r8), nn.Linear(6, 2)
    )
    said = "the layer 2 (GroupSelfAttention2d) has the group r8 and the network p4m, of equal order"
    report = eqzoo.check_equivariance(network)
    assert not report.exact
    assert said in report.diagnosis[0]
    assert said in report.notes[-1]
    assert said in eqzoo.check_equivariance(network, group="p4").diagnosis[0]
    del network.group
    assert "r8 and the layer 0 p4m" in eqzoo.check_equivariance(network).diagnosis[0]
    harmless = network_of(LiftingConv2d(eqzoo.P4M, 1, 2, 3), PointwiseConv2d(r8, 2, 2), GlobalPool(eqzoo.P4M))
    assert eqzoo.check_equivariance(harmless).exact


class Maps(nn.Module):
    """Whose features are maps, and not planes of fields."""

    def __init__(self, channels):
        super().__init__()
        self.group, self.input_size = eqzoo.P4M, (1, 8, 8)
        self.trunk = nn.Sequential(
            LiftingConv2d(eqzoo.P4M, 1, channels, 3, padding=1), nn.ReLU(), GroupPool(eqzoo.P4M), nn.Softplus()
        )

    def forward_features(self, x):
        return self.trunk(x)

    def forward(self, x):
        return self.forward_features(x).mean((2, 3))


class PlaneBlock(nn.Module):
    """A block with a group that takes planes."""

    def __init__(self):
        super().__init__()
        self.group, self.conv = eqzoo.P4M, GroupConv2d(eqzoo.P4M, 2, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x.unflatten(1, (2, 8))).flatten(1, 2)

    def transform_field(self, value, element):
        return transform(value.unflatten(1, (2, 8)), eqzoo.P4M, element, "regular").flatten(1, 2)


@pytest.mark.parametrize("channels", [6, 8])
def test_features_of_a_network_of_ones_own_are_maps(channels):
    network = Maps(channels)
    report = eqzoo.check_equivariance(network)
    assert report.exact
    assert report.features
    network.trunk[3] = nn.Conv2d(channels, 8, 3, padding=1)
    assert not eqzoo.check_equivariance(network).exact


def test_a_block_of_ones_own_that_takes_planes_declares_its_law(monkeypatch):
    lift, block = LiftingConv2d(eqzoo.P4M, 1, 2, 3, padding=1), PlaneBlock()
    network = network_of(lift, nn.Flatten(1, 2), block, nn.Unflatten(1, (2, 8)), GlobalPool(eqzoo.P4M))
    assert eqzoo.check_equivariance(network).exact
    block.forward = lambda x: block.conv(x.unflatten(1, (2, 8))).flatten(1, 2) * torch.arange(1.0, 17)[:, None, None]
    assert "the layer 2 has error" in eqzoo.check_equivariance(network).diagnosis[0]
    del block.forward
    monkeypatch.delattr(PlaneBlock, "transform_field")
    (cause,) = eqzoo.check_equivariance(network).diagnosis
    assert "the output is exact; the layer 2, read by shape, has error" in cause


def test_parts_of_exact_layers_are_not_suspected():
    attention = GroupSelfAttention2d(eqzoo.P4, 2, 6, 3, num_heads=1)
    lift = LiftingConv2d(eqzoo.P4, 1, 2, 3, padding=1)
    network = network_of(lift, attention, nn.Flatten(), nn.Linear(6 * 4 * 64, 2), group=eqzoo.P4)
    (cause,) = eqzoo.check_equivariance(network).diagnosis
    assert "likely one of the others: 3 (Linear);" in cause


class Directions(nn.Module):
    """Vectors, maps of vectors or a number for each pose, from the last field."""

    def __init__(self, kind):
        super().__init__()
        self.group, self.input_size, self.kind = eqzoo.P4, (1, 8, 8), kind
        self.field = nn.Sequential(
            LiftingConv2d(eqzoo.P4, 1, 3, 3, padding=1), nn.ReLU(), GroupConv2d(eqzoo.P4, 3, 1, 3, padding=1)
        )
        self.register_buffer("axes", torch.stack([eqzoo.P4.matrix(g)[:, 0] for g in eqzoo.P4.elements]))

    def forward(self, x):
        field = self.field(x)[:, 0]
        maps = torch.einsum("bghw,gi->bihw", field, self.axes)
        return {"vectors": maps.mean((2, 3)), "maps": maps, "poses": field.mean((2, 3))[:, None]}[self.kind]


def test_an_output_of_another_law_is_exact_where_the_network_states_it():
    """Vectors rotate with the image; a check does not try which law would make a network pass."""

    class Stated(Directions):
        def transform_field(self, value, element):
            if value.ndim == 4:
                return transform(value, self.group, element, "trivial")
            return value @ self.group.matrix(element).to(value).T

    assert eqzoo.check_equivariance(Stated("vectors")).exact
    report = eqzoo.check_equivariance(Directions("vectors"))
    assert not report.exact
    assert "transform_field" in report.diagnosis[0]
    wrong = Stated("vectors")
    wrong.axes += torch.randn(4, 2)
    assert not eqzoo.check_equivariance(wrong).exact


def test_features_alone_that_are_no_fields_are_told():
    network = Maps(6)
    network.forward_features = lambda x: network.trunk(x).cumsum(1) * torch.arange(1.0, 9)
    network.forward = lambda x: network.trunk(x).mean((2, 3))
    report = eqzoo.check_equivariance(network)
    assert not report.exact
    assert report.diagnosis[0].startswith("the output is exact; the last features, read by shape, has error")


class Blur(nn.Module):
    """A fixed filter."""

    def __init__(self, trained):
        super().__init__()
        self.filter = nn.Parameter(torch.full((1, 1, 3, 3), 1 / 9), requires_grad=trained)

    def forward(self, x):
        return nn.functional.conv2d(x, self.filter)


@pytest.mark.parametrize("trained", [False, True])
def test_frozen_constants_stay(trained):
    lift, norm = LiftingConv2d(eqzoo.P4M, 1, 2, 3), GroupBatchNorm2d(eqzoo.P4M, 2)
    network = network_of(Blur(trained), lift, norm, nn.ReLU(), GlobalPool(eqzoo.P4M))
    assert eqzoo.check_equivariance(network).exact is not trained
    without = network_of(Blur(trained), lift, GlobalPool(eqzoo.P4M))
    assert eqzoo.check_equivariance(without).exact is not trained


def test_the_group_of_a_network_is_no_name():
    network = network_of(LiftingConv2d(eqzoo.P4M, 1, 2, 3), GlobalPool(eqzoo.P4M), group="p4m")
    with pytest.raises(ValueError, match="has no group of eqzoo as its attribute"):
        eqzoo.equivariance_error(network)
    assert eqzoo.check_equivariance(network).group == "p4"


def test_a_network_that_does_not_take_the_rotated_image_says_so():
    class Positioned(nn.Module):
        input_size = (3, 8, 16)

        def __init__(self):
            super().__init__()
            self.position = nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x):
            return (x * self.position).sum((2, 3))

    with pytest.raises(ValueError, match=r"takes images of 8 x 16 .* but not all that p4 makes of them; check r2"):
        eqzoo.check_equivariance(Positioned())
    assert not eqzoo.check_equivariance(Positioned(), "r2").exact


class Offset(nn.Module):
    """A network that reads the top left pixel, behind a large constant."""

    def __init__(self, offset, share):
        super().__init__()
        self.net, self.offset, self.share = load_network("p4_cnn").network, offset, share
        self.group, self.input_size = self.net.group, self.net.input_size

    def forward(self, x):
        return self.net(x) + self.offset + self.share * x[:, :, 0, 0]


@pytest.mark.parametrize("offset", [0, 1e4, 1e8])
def test_a_constant_in_the_output_hides_nothing(offset):
    assert not eqzoo.check_equivariance(Offset(offset, 0.01)).exact
    assert offset > 1e6 or eqzoo.check_equivariance(Offset(offset, 0.0)).exact
