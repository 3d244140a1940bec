"""Group convolutions in ONNX files through irreps: the layers' numbers, in files of networks too."""

import pytest
import torch

import eqzoo
from eqzoo.equivariance import randomize_norms
from eqzoo.export import onnx_irreps
from eqzoo.export.onnx_file import OnnxFile
from eqzoo.groups import P4, P4M, Z2M, dihedral
from eqzoo.layers import GroupConv2d
from tests.layers.test_group_conv import CASES, image

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def written(layer, x, path, bank=None, bias=None):
    """Writes the layer's plain convolution, in float64, through irreps; the number of convolutions that are."""
    bank = layer.filters().flatten(1, -3) if bank is None else bank
    bias = layer.bias.repeat_interleave(layer.group.order) if bias is None else bias
    tensors = [onnx.numpy_helper.from_array(each.detach().numpy(), name) for each, name in ((bank, "w"), (bias, "b"))]
    numbers = {"strides": layer.stride, "dilations": layer.dilation, "pads": layer.padding}
    given = {key: [value] * (4 if key == "pads" else 2) for key, value in numbers.items()}
    node = onnx.helper.make_node("Conv", ["x", "w", "b"], ["y"], **given)
    planes = ("n", x.shape[1] * x.shape[2], *x.shape[3:])
    out = (None, len(bank), *layer(x).shape[3:])
    double = onnx.TensorProto.DOUBLE
    ends = [onnx.helper.make_tensor_value_info(*each) for each in (("x", double, planes), ("y", double, out))]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "net", ends[:1], ends[1:], tensors),
        opset_imports=[onnx.helper.make_opsetid("", 18)],
        ir_version=9,
    )
    count = onnx_irreps.through_irreps(model, layer.group)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return count


@pytest.fixture
def always(monkeypatch):
    """All group convolutions go through irreps."""
    monkeypatch.setattr(onnx_irreps, "_LEAST_FIELDS", {2: 1, 4: 1, 8: 1})


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("group", [Z2M, dihedral(2), P4, P4M])
def test_the_numbers_are_those_of_the_layer(group, case, always, tmp_path):
    layer = GroupConv2d(group, 3, 2, **case)
    x = image(layer, 6, 10)
    assert written(layer, x, tmp_path / "a.onnx") == 1
    found = OnnxFile(tmp_path / "a.onnx")(x.flatten(1, 2))
    torch.testing.assert_close(found, layer(x).flatten(1, 2), rtol=0, atol=1e-13)


def test_what_is_no_group_convolution_stays(always, tmp_path):
    layer = GroupConv2d(P4, 2, 2, 3, padding=1)
    x = image(layer)
    bank = layer.filters().flatten(1, -3).detach()
    other = bank.clone()
    other[5, 3, 1, 1] += 1e-12
    assert written(layer, x, tmp_path / "a.onnx") == 1
    assert written(layer, x, tmp_path / "a.onnx", bank=other) == 0
    assert written(layer, x, tmp_path / "a.onnx", bias=torch.arange(8.0)) == 0


def test_files_of_networks_compute_the_same_and_can_be_plain(tmp_path):
    model = eqzoo.create_model("p4m_resnet_s").float().eval()
    randomize_norms(model, torch.Generator().manual_seed(1), torch.randn(2, *model.input_size).float())
    reports = [eqzoo.export_onnx(model, tmp_path / f"{irreps}.onnx", irreps=irreps) for irreps in (True, False)]
    assert [report.operators["Conv"] for report in reports] == [6, 11]
    assert reports[0].size < reports[1].size
    files = [OnnxFile(report.path) for report in reports]
    assert [file.metadata.get("irreps") for file in files] == ["5", None]
    assert [report.metadata for report in reports] == [file.metadata for file in files]
    x = torch.randn(3, *model.input_size).float()
    torch.testing.assert_close(files[0](x), files[1](x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"has group convolutions through irreps; .*irreps=False"):
        eqzoo.quantize_onnx(reports[0].path, x, tmp_path / "int8.onnx")
