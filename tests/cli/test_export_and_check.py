"""`eqzoo export` and `eqzoo check`: what they print, and their exit codes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.analysis import check_equivariance
from eqzoo.cli import export
from eqzoo.cli._images import NamedImage
from eqzoo.cli.predict import _predict
from eqzoo.evaluation.predictor import Predictor
from tests.cli.commands import IMAGE, run
from tests.conftest import ROOT


def test_the_commands_codes_and_json(capsys, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "net.onnx"
    code, out, _ = run(capsys, "export", "p4_cnn", file)
    assert (code, "Conv 7" in out) == (0, True)
    assert run(capsys, "check", file)[0] == run(capsys, "check", "p4_cnn")[0] == 0
    code, out, _ = run(capsys, "check", file, "--json", "--group", "p4m")
    assert (code, json.loads(out)["exact"]) == (1, False)
    code, out, _ = run(capsys, "export", "p4_cnn", tmp_path / "net.pt2", "--json")
    assert (code, json.loads(out)["metadata"]["group"]) == (0, "p4")
    for args, message in (
        (("check", "test_vit", "--size", "100"), "3 x 100 x 100"),
        (("check", "test_vit.nonesuch"), "test_vit.nonesuch"),
        (("export", "z2m_gsanet_b", file), "--untrained"),
        (("export", "p4_cnn", "net.txt"), ".pt2"),
    ):
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "")
        assert message in err


def test_export_of_8_bit_numbers(capsys, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file, images = tmp_path / "net.onnx", tmp_path / "images"
    images.mkdir()
    for number in range(3):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (40, 30), dtype=np.uint8)).save(
            images / f"{number}.png"
        )
    export_of = ("export", "p4_cnn")
    code, out, _ = run(capsys, *export_of, file, "--int8", images, IMAGE)
    assert (code, "of the 4 images, as in float32" in out, "0, bit for bit," in out) == (0, True, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "net.onnx"]
    assert onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map["quantized"] == "int8"
    code, out, _ = run(capsys, *export_of, file, "--int8", images, "--size", "32", "--json")
    assert (code, json.loads(out)["images"]) == (0, 3)
    assert onnxruntime.InferenceSession(file).get_inputs()[0].shape[1:] == [1, 32, 32]
    for args, message in (
        ((tmp_path / "net.pt2", "--int8", images), "--int8"),
        ((tmp_path / "net.pt2", "--no-irreps"), "--no-irreps"),
        ((tmp_path / "none" / "net.onnx", "--int8", file), "no folder"),  # before all reading
        ((file, "--int8", tmp_path / "none"), "none"),
        ((file, "--int8", file), "net.onnx"),
    ):
        code, out, err = run(capsys, *export_of, *args)
        assert (code, out) == (2, "")
        assert message in err


def test_many_images_are_drawn_evenly(monkeypatch):
    read = []

    def image(i):
        return NamedImage(str(i), lambda channels: read.append(i) or torch.zeros(channels, 28, 28))

    monkeypatch.setattr(export, "named_images", lambda images: [image(i) for i in range(300)])
    assert export._read(eqzoo.create_model("p4_cnn"), ["folder"], None).shape == (128, 1, 28, 28)
    assert read == [i * 300 // 128 for i in range(128)]
    assert len(set(read)) == 128


def test_a_network_without_a_classifier_predicts_nothing():
    model = eqzoo.create_model("p4_cnn", num_classes=0).eval()
    with pytest.raises(ValueError, match="p4_cnn has no classifier"):
        _predict(Predictor(model, "p4_cnn", "p4_cnn"), torch.zeros(1, 1, 28, 28), {})


def test_files_of_images_that_are_not_square_are_checked_without_rotations_by_90(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = eqzoo.create_model("p4_cnn", pretrained=True).eval()
    eqzoo.export_onnx(model, tmp_path / "net.onnx", size=(28, 32))
    report = check_equivariance(tmp_path / "net.onnx")
    assert (report.exact, report.group) == (True, "r2")
    assert any("not square" in note for note in report.notes)
    with pytest.raises(ValueError, match=r"takes images of .*28, 32"):
        check_equivariance(tmp_path / "net.onnx", size=30)


def test_an_untrained_export_has_random_weights(monkeypatch, capsys, tmp_path):
    exported = []
    report = SimpleNamespace(as_dict=dict)
    monkeypatch.setattr(export, "export_pt2", lambda network, *_: exported.append(network) or report)
    trained = eqzoo.create_model("p4_cnn", pretrained=True).stem.conv.weight
    for options in ([], ["--untrained"]):
        assert run(capsys, "export", "p4_cnn", "a.pt2", *options)[0] == 0
    first, second = (network.stem.conv.weight for network in exported)
    assert torch.equal(first, trained)
    assert not torch.equal(second, trained)
    card = ROOT / "model_cards" / "p4_cnn.rotmnist"
    for args in ([card], [card / "model.safetensors"], [card / "model.safetensors", "--model", "p4_cnn"]):
        source, *options = args
        code, _, err = run(capsys, "export", source, "a.pt2", "--untrained", *options)
        assert (code, "--untrained" in err) == (2, True)
