"""Files with 8-bit numbers: equivariant bit for bit, close to the float32 file, and refused where they would not be."""

import numpy as np
import pytest
import torch

import eqzoo
from eqzoo.equivariance import randomize_norms
from eqzoo.export import OnnxFile, quantization
from eqzoo.export.onnx_filters import expand_filters

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    pytest.skip("the exporter of older releases of torch does not write all networks", allow_module_level=True)


def noise(n, channels, side, seed=0):
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that exports a network of its name, with random norms, once."""
    folder = tmp_path_factory.mktemp("exported")

    def export(name, side, **settings):
        path = folder / f"{name}{side}.onnx"
        if not path.is_file():
            model = eqzoo.create_model(name, **settings).eval()
            images = torch.randn(4, model.in_chans, side, side, generator=torch.Generator().manual_seed(1))
            randomize_norms(model, torch.Generator().manual_seed(1), images)
            eqzoo.export_onnx(model, path, size=side, irreps=False)
        return path

    return export


# Plain; residual, with average pooling; with reflections and dense blocks.
@pytest.mark.parametrize(
    ("name", "side", "settings", "exactly"),
    [
        ("p4_cnn", 28, {}, True),
        ("p4_resnet29", 16, {"depth": 11}, False),  # the classifier is in float32
        ("p4m_resnet44", 16, {"depth": 1, "widths": (2, 2, 2)}, False),  # a convolution behind the mean as well
        ("p4m_densenet", 80, {"growth": 3}, True),
    ],
)
def test_quantized_files_stay_equivariant(name, side, settings, exactly, exported, tmp_path):
    source = exported(name, side, **settings)
    before = OnnxFile(source)
    images = noise(8, before.input_shape[1], side)
    report = eqzoo.quantize_onnx(source, images, tmp_path / "int8.onnx")
    worst = max(report.equivariance.values())
    assert worst == 0 if exactly else worst < 1e-6
    assert report.difference < 0.3
    assert report.size < report.float_size
    after = OnnxFile(tmp_path / "int8.onnx")
    assert after.metadata == before.metadata | {"quantized": "int8"}
    fresh = noise(5, before.input_shape[1], side, seed=7)  # that the ranges were not measured on
    rotated = torch.rot90(fresh, 1, (2, 3))
    assert torch.equal(after(rotated), after(fresh)) or not exactly
    assert (after(rotated) - after(fresh)).norm() < 1e-6 * after(fresh).norm()
    assert not torch.equal(before(rotated), before(fresh))  # float32 has round-off
    assert [path.name for path in tmp_path.iterdir()] == ["int8.onnx"]


def test_batch_norms_and_average_pools_become_convolutions_that_compute_the_same(exported):
    source = exported("p4_resnet29", 16, depth=11)
    model = onnx.load(source)
    operators = {node.op_type for node in model.graph.node}
    assert {"AveragePool", "BatchNormalization"} <= operators
    quantization._as_convolutions(model)
    onnx.checker.check_model(model, full_check=True)
    assert not {"AveragePool", "BatchNormalization"} & {node.op_type for node in model.graph.node}
    other = source.with_name("convolutions.onnx")
    onnx.save(model, other)
    images = noise(3, 3, 16)
    torch.testing.assert_close(OnnxFile(other)(images), OnnxFile(source)(images), rtol=1e-5, atol=1e-5)


def test_padded_pools_stay_as_they_are():
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    values = [helper.make_tensor_value_info(name, kind, [1, 2, 8, 8]) for name in ("x", "y")]
    model = helper.make_model(helper.make_graph([node], "pool", values[:1], values[1:]))
    quantization._as_convolutions(model)
    assert [node.op_type for node in model.graph.node] == ["AveragePool"]


@pytest.mark.parametrize(
    ("name", "side", "settings", "said"),
    [
        ("p4_se_resnet29", 16, {"depth": 11}, "ReduceMean"),
        pytest.param("p4_alpha_f_cnn", 28, {}, "ReduceMean", marks=pytest.mark.slow),
    ],
)
def test_networks_that_would_round_sums_in_float32_are_refused(name, side, settings, said, exported, tmp_path):
    target = tmp_path / "int8.onnx"
    target.write_bytes(b"earlier")
    source = exported(name, side, **settings)
    with pytest.raises(eqzoo.ExportError, match=f"would not stay equivariant: .*{said}.* keep the float32 file"):
        eqzoo.quantize_onnx(source, noise(8, OnnxFile(source).input_shape[1], side), target)
    assert target.read_bytes() == b"earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["int8.onnx"]


def test_means_in_float32_that_are_rounded_again_break_the_symmetry(exported, tmp_path, monkeypatch):
    """Without the convolutions in their place average pools are refused at three places, and rightly so."""
    source, images = exported("p4_resnet29", 16, depth=11), noise(32, 3, 16)
    quantize = quantization._quantize
    monkeypatch.setattr(quantization, "_as_convolutions", lambda model: None)
    monkeypatch.setattr(quantization, "_QUANTIZED", (*quantization._QUANTIZED, "AveragePool"))
    for message in (
        r"would not stay equivariant: .*computes AveragePool, BatchNormalization, Gemm, ReduceMean in float32",
        r"would not stay equivariant: .*computes AveragePool, BatchNormalization in float32",
        r"would not be equivariant under p4: ",
    ):
        with pytest.raises(eqzoo.ExportError, match=message):
            eqzoo.quantize_onnx(source, images, tmp_path / "int8.onnx")
        if "Gemm" in message:
            monkeypatch.setattr(quantization, "_LAST", 1.0)
            monkeypatch.setattr(
                quantization, "_quantize", lambda model, images, last, path: quantize(model, images, [], path)
            )
        else:
            monkeypatch.setattr(quantization, "_float_operators", lambda model: iter(()))


def test_a_file_that_is_less_equivariant_than_before_is_not_written(exported, tmp_path, monkeypatch):
    for errors, refused in ((iter((0.1, 0.0)), True), (iter((0.1, 0.1)), False)):  # of the new file and the one before
        monkeypatch.setattr(
            quantization,
            "element_errors",
            lambda function, x, group, errors=errors: dict.fromkeys(group.grid_elements, next(errors)),
        )
        if refused:
            with pytest.raises(eqzoo.ExportError, match="would not be equivariant under p4"):
                eqzoo.quantize_onnx(exported("p4_cnn", 28), noise(4, 1, 28), tmp_path / "int8.onnx")
            assert not list(tmp_path.iterdir())
        else:
            eqzoo.quantize_onnx(exported("p4_cnn", 28), noise(4, 1, 28), tmp_path / "int8.onnx")


def test_what_does_not_suit_a_file_is_refused(exported, tmp_path):
    source, target = exported("p4_cnn", 28), tmp_path / "int8.onnx"
    for images in (
        torch.full((4, 1, 28, 28), 255, dtype=torch.uint8),
        noise(4, 1, 28) / 0,
        noise(4, 1, 28) * torch.nan,
    ):
        with pytest.raises(ValueError, match=r"of magnitudes up to 2.* got .*; eqzoo.data.normalize does it"):
            eqzoo.quantize_onnx(source, images, target)
    with pytest.raises(Exception, match="Got: 3 Expected: 1"):  # ONNX Runtime's own
        eqzoo.quantize_onnx(source, noise(4, 3, 28), target)
    with pytest.raises(ValueError, match=r"ends in \.onnx"):
        eqzoo.quantize_onnx(source, noise(4, 1, 28), tmp_path / "int8.pt2")
    with pytest.raises(FileNotFoundError, match="no file at"):
        eqzoo.quantize_onnx(tmp_path / "none.onnx", noise(4, 1, 28), target)
    eqzoo.quantize_onnx(source, noise(4, 1, 28), target)
    with pytest.raises(ValueError, match="has been quantized already; give the float32 file"):
        eqzoo.quantize_onnx(target, noise(4, 1, 28), tmp_path / "again.onnx")
    model = onnx.load(source)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    with pytest.raises(ValueError, match="was not written by eqzoo; give the float32 file"):
        eqzoo.quantize_onnx(tmp_path / "foreign.onnx", noise(4, 1, 28), tmp_path / "again.onnx")


def test_images_that_are_not_square_are_checked_with_the_rotations_that_keep_them(tmp_path):
    eqzoo.export_onnx(eqzoo.create_model("p4_cnn", pretrained=True).eval(), tmp_path / "wide.onnx", size=(28, 32))
    images = torch.randn(4, 1, 28, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    report = eqzoo.quantize_onnx(tmp_path / "wide.onnx", images, tmp_path / "int8.onnx")
    assert (report.group, report.equivariance) == ("r2", {0: 0.0, 1: 0.0})
    assert "0, bit for bit, over the 2 elements of r2" in str(report)


def test_a_network_of_one_output_has_no_share_of_classes(tmp_path):
    model = eqzoo.create_model("z2_cnn", num_classes=1).eval()
    eqzoo.export_onnx(model, tmp_path / "one.onnx", opset=23)
    report = eqzoo.quantize_onnx(tmp_path / "one.onnx", noise(4, 1, 28), tmp_path / "int8.onnx")
    assert report.same_class is None
    assert "same class" not in str(report)
    assert "equivariance" not in str(report)  # z2 has no element to check


def constants(path):
    model = onnx.load(path)
    expand_filters(model)
    return {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


def test_the_ranges_are_those_of_the_images_but_for_single_values(exported, tmp_path):
    source, steps = exported("p4_cnn", 28), []
    images = noise(16, 1, 28)
    spot = images.clone()
    spot[0, 0, 0, 0] = 20  # one of 12,544 pixels
    for i, given in enumerate((images, 2 * images, spot)):
        eqzoo.quantize_onnx(source, given, tmp_path / f"{i}.onnx")
        steps.append(float(constants(tmp_path / f"{i}.onnx")["image_scale"]))
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.05)
    assert steps[2] == pytest.approx(steps[0], rel=0.1)


def test_weights_have_a_step_for_each_channel_and_seven_bits(exported, tmp_path):
    eqzoo.quantize_onnx(exported("p4_cnn", 28), noise(4, 1, 28), tmp_path / "int8.onnx")
    found = constants(tmp_path / "int8.onnx")
    filters = [name for name, values in found.items() if values.ndim == 4]
    assert len(filters) == 7
    for name in filters:
        assert found[name].dtype == np.int8
        assert 60 < np.abs(found[name].astype(int)).max() <= 64
        assert found[name.replace("_quantized", "_scale")].shape == found[name].shape[:1]
