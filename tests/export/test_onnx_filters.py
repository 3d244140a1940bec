"""Filters in ONNX files: each is stored once, and ONNX Runtime computes with all its copies."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import eqzoo
from eqzoo.equivariance import randomize_norms
from eqzoo.export.onnx_file import OnnxFile
from eqzoo.export.onnx_filters import expand_filters, store_filters_once


@pytest.mark.parametrize("name", ["p4_cnn", "p4m_resnet_s", "p4m_convnext_atto", "z2_cnn"])
def test_a_file_has_the_size_of_the_weights_and_gives_the_logits(name, tmp_path):
    model = eqzoo.create_model(name).float().eval()
    randomize_norms(model, torch.Generator().manual_seed(1), torch.randn(2, *model.input_size).float())
    eqzoo.export_onnx(model, tmp_path / "net.onnx")
    x = torch.randn(2, *model.input_size).float()
    torch.testing.assert_close(OnnxFile(tmp_path / "net.onnx")(x), model(x), rtol=1e-4, atol=1e-5)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert (tmp_path / "net.onnx").stat().st_size < 1.2 * weights + 30_000


def test_expanding_gives_the_banks_bit_for_bit_and_other_filters_stay():
    conv = eqzoo.layers.GroupConv2d(eqzoo.P4M, 8, 8, 3)
    bank = conv.filters().detach().numpy()
    other = bank.copy()
    other[9, 3, 1, 1] = np.nextafter(other[9, 3, 1, 1], 1)  # negative control: no orbit by one bit
    banks = {"bank": bank, "other": other}
    inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.DOUBLE, (1, 64, 5, 5))]
    outputs = [
        onnx.helper.make_tensor_value_info(f"{name}_y", onnx.TensorProto.DOUBLE, (1, 64, 3, 3)) for name in banks
    ]
    nodes = [onnx.helper.make_node("Conv", ["x", name], [f"{name}_y"]) for name in banks]
    tensors = [numpy_helper.from_array(values, name) for name, values in banks.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "net", inputs, outputs, tensors))
    store_filters_once(model, eqzoo.P4M)
    onnx.checker.check_model(model, full_check=True)
    kept = {tensor.name: tensor for tensor in model.graph.initializer}
    assert "bank" not in kept
    assert "other" in kept
    assert np.prod(kept["bank_once"].dims) == conv.weight.numel()
    expand_filters(model)
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert found.keys() == banks.keys()
    assert all(np.array_equal(found[name], banks[name]) for name in banks)
