"""Exported files: what they hold, that they do what the network does, and that a wrong one is never left behind."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eqzoo
from eqzoo.equivariance import randomize_norms
from eqzoo.export.onnx_file import OnnxFile, write_onnx
from eqzoo.groups import P4
from eqzoo.layers import AffineSelfConv2d, E4Layer2d, GlobalPool, LiftingConv2d
from eqzoo.models import EquivariantNet, GroupCNN
from tests.conftest import ROOT, slow
from tests.models.test_models import GSA_SIDES, NAMES, SIDES

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    pytest.skip("the exporter of older releases of torch does not write all networks", allow_module_level=True)

QUICK = {"z2_cnn", "p4_cnn", "p4_alpha_rh_cnn"}
SHIPPED = ROOT / "model_cards" / "p4_cnn.rotmnist" / "model.safetensors"


def side(name, model):
    return SIDES.get(type(model).__name__) or GSA_SIDES[name[-1]]


def fresh(name):
    """A network that looks trained, and the side of the smallest image that it takes."""
    model = eqzoo.create_model(name).eval()
    small = side(name, model)
    randomize_norms(model, torch.Generator().manual_seed(1), torch.randn(2, model.in_chans, small, small))
    return model, small


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - QUICK))
def test_every_network_becomes_onnx(name, tmp_path):
    model, small = fresh(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = eqzoo.export_onnx(model, tmp_path / "net.onnx", size=small)
    assert set(report.equivariance) == set(model.group.grid_elements)
    assert max(report.equivariance.values()) < report.tolerance
    assert report.size == (tmp_path / "net.onnx").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    assert not {"Einsum", "GatherElements", "Range"} & set(report.operators)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - {"p4_cnn"}))
def test_every_network_becomes_a_program(name, tmp_path):
    model, small = fresh(name)
    report = eqzoo.export_pt2(model, tmp_path / "net.pt2", size=small)
    assert report.difference < 1e-9  # it keeps float64
    assert max(report.equivariance.values()) < 1e-9
    program = torch.export.load(tmp_path / "net.pt2")
    x = torch.randn(4, model.in_chans, small, small)
    torch.testing.assert_close(program.module()(x), model(x))


def test_a_convolutional_network_becomes_plain_convolutions(tmp_path):
    model = eqzoo.create_model("p4_cnn", pretrained=True).float()
    report = eqzoo.export_onnx(model, tmp_path / "net.onnx")
    assert report.operators == {"Conv": 7, "Relu": 6, "MaxPool": 1, "Reshape": 1, "ReduceMax": 1}
    assert 0 < report.folding < 1e-12
    size = (tmp_path / "net.onnx").stat().st_size
    assert size < 1.5 * 4 * sum(parameter.numel() for parameter in model.parameters())
    for text in ("p4", f"{size / 1e6:.2f} MB", "Conv 7", "1 x 28 x 28", "ms"):
        assert text in str(report)
    assert json.loads(json.dumps(report.as_dict()))["operators"]["Conv"] == 7
    wide = eqzoo.export_pt2(model, tmp_path / "net.pt2")
    assert wide.operators["conv2d"] == 7
    assert "batch_norm" not in wide.operators


def test_the_metadata_say_how_to_use_the_file(tmp_path):
    model = eqzoo.create_model("p4_cnn", pretrained=True).float()
    report = eqzoo.export_onnx(model, tmp_path / "net.onnx", opset=20)
    proto = onnx.load(tmp_path / "net.onnx")
    said = {entry.key: entry.value for entry in proto.metadata_props}
    assert said == report.metadata
    assert proto.producer_name == "eqzoo"
    assert proto.opset_import[0].version == 20
    assert json.loads(said["classes"]) == list("0123456789")
    assert json.loads(said["mean"]) == [0.1314]
    assert json.loads(said["input_size"]) == [1, 28, 28]
    assert (said["group"], said["architecture"], said["eqzoo_version"]) == ("p4", "p4_cnn", eqzoo.__version__)
    assert said["weights_sha256"] == hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    assert str(ROOT).encode() not in (tmp_path / "net.onnx").read_bytes()  # no trace of where it was made
    other = eqzoo.create_model("p4_cnn", pretrained=True, in_chans=3, num_classes=2)
    said = eqzoo.export.metadata(other)
    assert (json.loads(said["mean"]), json.loads(said["classes"])) == ([0.1314] * 3, ["0", "1"])


def test_a_file_runs_without_the_package(tmp_path):
    model = eqzoo.create_model("p4_cnn", pretrained=True).float()
    eqzoo.export_onnx(model, tmp_path / "net.onnx")
    eqzoo.export_pt2(model, tmp_path / "net.pt2")
    script = """
import onnxruntime, numpy, sys, torch
session = onnxruntime.InferenceSession("net.onnx")
x = numpy.random.default_rng(0).normal(size=(2, 1, 28, 28)).astype("float32")
first = session.run(["logits"], {"image": x})[0]
second = torch.export.load("net.pt2").module()(torch.from_numpy(x))
assert abs(first - second.detach().numpy()).max() < 1e-4
assert "eqzoo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


def test_other_sizes_and_oblong_images(tmp_path):
    model = eqzoo.create_model("p4_cnn", pretrained=True)
    assert eqzoo.export_onnx(model, tmp_path / "a.onnx", size=40).image == (1, 40, 40)
    oblong = eqzoo.export_onnx(model, tmp_path / "b.onnx", size=(40, 36))
    assert (oblong.group, len(oblong.equivariance)) == ("r2", 2)
    with pytest.raises(ValueError, match="the nearest sizes that work are 28 x 28 and 30 x 30"):
        eqzoo.export_onnx(model, tmp_path / "c.onnx", size=29)


class Tiny(EquivariantNet):
    """A lifting convolution and a layer of attention."""

    def __init__(self, layer):
        super().__init__(P4, num_classes=4, in_chans=1, num_features=4)
        self.pretrained_cfg = {"input_size": (1, 9, 9), "mean": (0.0,), "std": (1.0,)}
        self.stem = LiftingConv2d(P4, 1, 4, 3, padding=1)
        self.blocks = nn.Sequential(layer)
        self.head = GlobalPool(P4)

    def forward_head(self, x, pre_logits=False):
        return self.head(x)


@pytest.mark.parametrize(
    ("layer", "operator"),
    [
        (lambda: AffineSelfConv2d(P4, 4, kernel_size=3, num_heads=2), "Concat"),
        (lambda: E4Layer2d(P4, 4, 4, kernel_size=3), "Slice"),
    ],
    ids=["affine", "e4"],
)
def test_attention_becomes_products_and_slices(layer, operator, tmp_path):
    report = eqzoo.export_onnx(Tiny(layer()), tmp_path / "net.onnx")
    assert not {"Einsum", "Range", "If", "Loop"} & set(report.operators)
    assert operator in report.operators


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def through_onnx(function, x, path, scale=1):
    program = torch.export.export(Function(function), (x,), dynamic_shapes=(({0: torch.export.Dim("batch")},),))
    operators = write_onnx(program, path, 18, {"eqzoo_version": "0", "group": "z2"}, irreps=True)
    larger = scale * torch.randn(3, *x.shape[1:]).float()
    torch.testing.assert_close(OnnxFile(path)(larger), function(larger), atol=1e-5, rtol=1e-5)
    return operators


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (lambda t: t.softmax(1), {"Softmax": 0}),
        (lambda t: t.softmax(2), {"Softmax": 0}),
        (lambda t: t.softmax(-1), {"Softmax": 1}),
        # Softmax and logsumexp share their steps.
        (lambda t: t.softmax(2).amax(2) + t.logsumexp(2), {"Exp": 1, "ReduceSum": 1, "Log": 1}),
        (lambda t: t.softmax(2).amax(2) + t.logsumexp(2, True).flatten(2), {"Exp": 1, "ReduceSum": 1, "Log": 1}),
        # So do slices along several axes.
        (lambda t: t[:, 1:3, 2:6, ::2], {"Slice": 1}),
        (lambda t: t[:, -2:, :-1], {"Slice": 1}),
        (lambda t: t[:, :, 1:5][:, :, 1:3, 4:], {"Slice": 2}),  # the same axis twice
        (lambda t: t[:, 1:][:, :, 1:] + t[:, 1:][:, :, :-1], {"Slice": 2}),
        (lambda t: F.unfold(t, 3, padding=2, dilation=2), {"Gather": 0}),
        (lambda t: F.unfold(t, (3, 2), stride=2), {"Gather": 0}),
        (lambda t: torch.addcmul(t, t, t, value=0.5), {}),
    ],
)
def test_softmax_slices_and_neighborhoods_take_few_operators(function, counts, tmp_path):
    operators = through_onnx(function, torch.randn(2, 5, 6, 7).float(), tmp_path / "net.onnx", scale=100)
    assert {name: operators[name] for name in counts} == counts


@pytest.mark.parametrize(
    ("equation", "first", "second", "written"),
    [
        ("bcrdn,cprd->bcpdn", (2, 3, 4, 9, 40), (3, 4, 4, 9), "MatMul"),
        ("bcrdn,cprd->bcpdn", (2, 3, 1, 9, 40), (3, 1, 1, 9), "Mul"),
        ("bncgi,cvij->bnvgij", (2, 3, 2, 4, 30), (2, 4, 1, 5), "MatMul"),
        ("bncgi,cgm->bngim", (2, 3, 2, 4, 30), (2, 4, 4), "MatMul"),
        ("bncgi,ncm->bgm", (2, 3, 2, 4, 1), (3, 2, 4), "MatMul"),
        ("bcso,osnc->bosn", (2, 3, 4, 8), (8, 4, 2, 3), "Mul"),
        ("ab,c->bca", (2, 3), (4,), "Mul"),
    ],
)
def test_products_of_tensors(equation, first, second, written, tmp_path):
    other = torch.randn(second).float()
    operators = through_onnx(
        lambda x: torch.einsum(equation, x, other), torch.randn(first).float(), tmp_path / "x.onnx"
    )
    assert written in operators
    assert "Einsum" not in operators


@pytest.mark.parametrize("equation", ["bvgij,bgimj->bvimj", "bvimj,bcmij->bcvi", "bcgi,bcmij->bgimj"])
def test_products_that_share_the_batch(equation, tmp_path):
    sizes = {"b": 2, "v": 4, "g": 3, "i": 11, "j": 5, "m": 4, "c": 2}
    first, second = ([sizes[label] for label in term] for term in equation.partition("->")[0].split(","))
    split = torch.Size(first[1:]).numel()

    def function(x):
        left, right = x[:, :split].unflatten(1, first[1:]), x[:, split:].unflatten(1, second[1:])
        return torch.einsum(equation, left, right)

    x = torch.randn(2, split + torch.Size(second[1:]).numel()).float()
    assert "Einsum" not in through_onnx(function, x, tmp_path / "x.onnx")


@pytest.mark.parametrize(
    ("right_calls", "message"),
    [(0, "would differ from the network by 1.0e-03"), (4, "would not be equivariant under elements")],
)
def test_a_wrong_file_is_not_left(right_calls, message, tmp_path, monkeypatch):
    """Negative control: a file that is wrong, at once or for rotated images alone, never gets its name."""
    model = eqzoo.create_model("p4_cnn", pretrained=True).float().eval()
    calls = []

    def run(self, x):
        calls.append(x)
        return model(x) * (1 if len(calls) <= right_calls else 1.001)

    (tmp_path / "net.onnx").write_bytes(b"the one before")
    monkeypatch.setattr("eqzoo.export.OnnxFile.__call__", run)
    with pytest.raises(eqzoo.ExportError, match=message):
        eqzoo.export_onnx(model, tmp_path / "net.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    assert (tmp_path / "net.onnx").read_bytes() == b"the one before"


def test_a_network_built_by_its_class_needs_a_size_alone(tmp_path):
    model = GroupCNN(eqzoo.P4).eval()
    with pytest.raises(ValueError, match=r"a GroupCNN that eqzoo\.create_model did not build has no image size"):
        eqzoo.export_onnx(model, tmp_path / "net.onnx")
    report = eqzoo.export_onnx(torch.nn.DataParallel(model), tmp_path / "net.onnx", size=28)
    assert report.metadata["mean"] == "[0.0]"
    assert report.metadata["input_size"] == "[1, 28, 28]"


def test_bad_requests_are_named(tmp_path, monkeypatch):
    model = eqzoo.create_model("p4_cnn", pretrained=True)
    for path, opset, message in (("x.txt", 18, "ends in .onnx"), ("x.onnx", 13, "opset 13 .* opset 18")):
        with pytest.raises(ValueError, match=message):
            eqzoo.export_onnx(model, tmp_path / path, opset=opset)
    with pytest.raises(FileNotFoundError, match="no folder"):
        eqzoo.export_onnx(model, tmp_path / "none" / "x.onnx")
    with pytest.raises(ValueError, match="only networks of this package"):
        eqzoo.export_onnx(nn.Linear(2, 2), tmp_path / "x.onnx")
    with pytest.raises(ValueError, match=r"ends in \.pt2"):
        eqzoo.export_pt2(model, tmp_path / "x.onnx")
    nn.init.zeros_(model.head.weight)
    with pytest.raises(ValueError, match="zero or not finite"):
        eqzoo.export_onnx(model, tmp_path / "x.onnx")
    monkeypatch.setattr("eqzoo.export.onnx_file.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "eqzoo\[export\]"'):
        eqzoo.export_onnx(model, tmp_path / "x.onnx")
