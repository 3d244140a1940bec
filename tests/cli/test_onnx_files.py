"""ONNX files that predict and are evaluated, as checkpoints are."""

import copy
import csv
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.export.onnx_file import OnnxFile
from eqzoo.export.onnx_network import OnnxNetwork
from tests.cli.commands import IMAGE, run


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A file of a trained network, one of 8-bit numbers, and digits with labels."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("onnx")
    model = eqzoo.create_model("p4_cnn", pretrained=True)
    seven = np.asarray(Image.open(IMAGE).convert("L").resize((28, 28)))
    digits = np.stack([np.roll(seven, shift, 1) for shift in (-1, 0, 1, 2)])
    np.savez(folder / "digits.npz", x_test=digits, y_test=np.array([7, 7, 7, 0]))
    x = eqzoo.data.normalize(
        torch.from_numpy(digits)[:, None], model.pretrained_cfg["mean"], model.pretrained_cfg["std"], torch.float32
    )
    eqzoo.quantize_onnx(eqzoo.export_onnx(model, folder / "net.onnx").path, x, folder / "net8.onnx")
    return folder


def test_a_file_predicts_as_its_checkpoint(capsys, exported):
    values = {}
    for model in ("p4_cnn", exported / "net.onnx"):
        code, out, err = run(capsys, "predict", exported / "digits.npz", "--model", model, "--csv")
        assert (code, err) == (0, "")
        heading, *rows = csv.reader(out.splitlines())
        assert heading == ["file", "prediction", *"0123456789"]
        values[model] = np.array([row[2:] for row in rows], float)
        assert {row[1] for row in rows} == {"7"}
    assert values["p4_cnn"] == pytest.approx(values[exported / "net.onnx"], rel=1e-3, abs=1e-6)
    _, out, _ = run(capsys, "predict", IMAGE, "--model", exported / "net8.onnx", "z2_cnn", "--json")
    ours, plain = json.loads(out)["networks"]
    assert ours["name"] == str(exported / "net8.onnx")
    assert ours["largest_change"] < 1e-5 < plain["largest_change"]
    assert len(ours["copies"]) == 4


def test_a_file_is_evaluated_as_its_checkpoint(capsys, exported):
    expected = json.loads(run(capsys, "evaluate", "p4_cnn", exported / "digits.npz", "--json")[1])
    for name in ("net.onnx", "net8.onnx"):
        found = json.loads(run(capsys, "evaluate", exported / name, exported / "digits.npz", "--json")[1])
        assert found["accuracy"] == expected["accuracy"] == 75
        assert found["same_class_at_all_quarter_rotations"] == 100
        assert [row["name"] for row in found["classes"]] == [row["name"] for row in expected["classes"]]
        assert found["network"] == str(exported / name)
        assert any("does not tell which images it was trained on" in note for note in found["notes"])
        found = eqzoo.evaluate(exported / name, exported / "digits.npz", tta="p4m")
        assert found["network"] == f"{exported / name} (mean of 2)"
        assert any("does not tell which images it was trained on" in note for note in found["notes"])
    found = eqzoo.evaluate(exported / "net.onnx", exported / "digits.npz", rotated=0)
    again = eqzoo.evaluate(OnnxNetwork(exported / "net.onnx"), exported / "digits.npz", rotated=0)
    assert (again["accuracy"], again["images"], again["network"]) == (found["accuracy"], 4, found["network"])
    network = OnnxNetwork(exported / "net.onnx")
    x = torch.randn(2, *network.input_size, requires_grad=True)
    for copied in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(copied(x), network(x))
    network.pretrained_cfg["label_names"] = None
    again = copy.deepcopy(network.train())
    assert again.training
    assert again.pretrained_cfg["label_names"] is None
    assert torch.equal(OnnxFile(exported / "net.onnx")(x), network(x))
    assert eqzoo.equivariance_error(network) < 1e-4  # it computes in float32


def test_what_a_file_cannot_do_is_an_error(capsys, exported, tmp_path):
    import onnx

    code, _, err = run(capsys, "evaluate", exported / "none.onnx", exported / "digits.npz")
    assert (code, err.count("\n")) == (2, 1)
    assert "no file at" in err
    file = onnx.load(exported / "net.onnx")
    other = onnx.ModelProto.FromString(file.SerializeToString())
    kept = [entry for entry in file.metadata_props if entry.key != "mean"]
    del other.metadata_props[:]
    other.metadata_props.extend(kept)
    onnx.save(other, tmp_path / "other.onnx")
    code, _, err = run(capsys, "predict", IMAGE, "--model", tmp_path / "other.onnx")
    assert (code, err.count("\n")) == (2, 1)
    assert "lack mean, so its images" in err
    for key, wrong in (
        *(("mean", wrong) for wrong in ("[0.1", "0.1", "[NaN]")),
        *(("std", wrong) for wrong in ("[1.0, 1.0]", "[0]")),
        *(("classes", wrong) for wrong in ('["a", "a"]', '{"0": "a"}')),
        ("input_size", "[1, 28.5, 28]"),
        ("group", "p5x"),
    ):
        other = onnx.ModelProto.FromString(file.SerializeToString())
        next(entry for entry in other.metadata_props if entry.key == key).value = wrong
        onnx.save(other, tmp_path / "other.onnx")
        with pytest.raises(ValueError, match=r"metadata of .*other\.onnx are damaged: "):
            OnnxNetwork(tmp_path / "other.onnx")
    next(entry for entry in file.metadata_props if entry.key == "input_size").value = "[1, 30, 30]"
    onnx.save(file, tmp_path / "other.onnx")
    with pytest.raises(ValueError, match=r"takes \(None, 1, 28, 28\), and its metadata say \(1, 30, 30\)"):
        OnnxNetwork(tmp_path / "other.onnx")
    (tmp_path / "text.onnx").write_text("no network")
    assert "not an ONNX file that" in run(capsys, "predict", IMAGE, "--model", tmp_path / "text.onnx")[2]
    for command in (["info"], ["export"]):
        more = [tmp_path / "x.pt2"] if command == ["export"] else []
        assert "nothing is called" in run(capsys, *command, exported / "net.onnx", *more)[2]


def test_a_gpu_that_is_missing_is_told(capsys, exported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for args in (("predict", IMAGE), ("evaluate", "p4_cnn", exported / "digits.npz")):
        code, _, err = run(capsys, *args, "--device", "cuda")
        assert code == 2
        assert "torch finds no GPU here" in err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    code, _, err = run(capsys, "predict", IMAGE, "--model", exported / "net.onnx", "--device", "cuda")
    assert code == 2
    assert "is an ONNX file, which runs on the CPU, and the device is 'cuda'" in err
