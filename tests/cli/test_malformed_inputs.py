"""Malformed and hostile inputs of the commands: one line on stderr, exit code 2, and no code of theirs is run."""

import io
import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from tests.cli.commands import IMAGE, run
from tests.conftest import ROOT

CARD = ROOT / "model_cards" / "p4_cnn.rotmnist"


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def png(width, height):
    """The header of a PNG of this size, without pixels."""
    whole = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(whole, "png")
    data = bytearray(whole.getvalue())
    data[16:24] = struct.pack(">II", width, height)
    return bytes(data)


IMAGES = {
    "empty": lambda _: b"",
    "cut": lambda _: IMAGE.read_bytes()[:100],
    "of 2^31 - 1 pixels a side": lambda _: png(2**31 - 1, 2**31 - 1),
    "of another size than its pixels": lambda _: png(64, 64),
    "a pickle": lambda flag: pickle.dumps(Hostile(flag)),
}
_WHOLE = (CARD / "model.safetensors").read_bytes()


def safetensors(header, body):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def torch_pickle(flag):
    file = io.BytesIO()
    torch.save({"head.weight": Hostile(flag)}, file)
    return file.getvalue()


WEIGHTS = {
    "empty": lambda _: b"",
    "cut": lambda _: _WHOLE[: len(_WHOLE) // 2],
    "a header of 2^64 - 1 bytes": lambda _: b"\xff" * 8 + _WHOLE[8:],
    "other names": lambda _: safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
    "a pickle": lambda flag: pickle.dumps(Hostile(flag)),
    "a file of torch.save": torch_pickle,
}


def config(**changes):
    values = json.loads((CARD / "config.json").read_text())
    for key, value in changes.items():
        place, _, inner = key.partition("__")
        if inner:
            values[place][inner] = value
        else:
            values[place] = value
    return json.dumps(values)


CONFIGS = {
    "cut": config()[:200],
    "nested 100,000 times": "[" * 100_000,
    "not UTF-8": b"\xff\xfe\x00",
    "an architecture that is a list": config(architecture=["p4_cnn"]),
    "7 classes everywhere beside weights of 10": config(
        num_classes=7, model_args__num_classes=7, pretrained_cfg__num_classes=7, label_names=list("abcdefg")
    ),
}


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npz_of_a_header(_):
    """An .npz whose images have a header of 2^62 images, and no data."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**62, 2**62)})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x_train.npy", header.getvalue())
        archive.writestr("y_train.npy", header.getvalue())
    return file.getvalue()


_X, _Y = np.zeros((40, 28, 28), np.uint8), np.arange(40) % 2
ARRAYS = {
    "cut": lambda _: npz(x_train=_X, y_train=_Y)[:2000],
    "without labels": lambda _: npz(x_train=_X),
    "of objects": lambda flag: npz(x_train=np.array([Hostile(flag)]), y_train=np.arange(1)),
    "a pickle": lambda flag: pickle.dumps(Hostile(flag)),
    "a header of 2^62 images": npz_of_a_header,
    "images without pixels": lambda _: npz(x_train=_X[:, :0], y_train=_Y),
}
SETTINGS = {"a list": "[]", "cut": '{"name": "p4_', "a speed": '{"speed": [1]}'}


def refused(capsys, *args):
    """Runs a command; returns the line that it ends with."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, ""), err
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"eqzoo {args[0]}: "), err
    assert all(line.startswith("eqzoo") for line in err.strip().splitlines()), err  # no traceback
    assert len(last) < 1500
    return last


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def flag(tmp_path):
    """The file that a pickle would create if it were run."""
    yield tmp_path / "flag"
    assert not (tmp_path / "flag").exists()


@pytest.mark.parametrize("name", IMAGES)
def test_images(capsys, tmp_path, flag, name):
    (tmp_path / "a.png").write_bytes(IMAGES[name](flag))
    assert "a.png" in refused(capsys, "predict", tmp_path / "a.png")


@pytest.mark.parametrize(
    ("name", "command"),
    [*((name, "predict") for name in WEIGHTS), *(("a pickle", c) for c in ("evaluate", "check", "export", "finetune"))],
)
def test_weights(capsys, tmp_path, flag, name, command):
    folder = shutil.copytree(CARD, tmp_path / "card")
    (folder / "model.safetensors").write_bytes(WEIGHTS[name](flag))
    assert "card" in refused(capsys, *arguments(command, folder, tmp_path))


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_for_a_network_of_timm(capsys, tmp_path, flag, name, suffix):
    (tmp_path / f"mine.{suffix}").write_bytes(WEIGHTS[name](flag))
    command = arguments("finetune", "test_resnet", tmp_path)
    assert f"mine.{suffix}" in refused(capsys, *command, "--size", 32, "--weights", tmp_path / f"mine.{suffix}")


@pytest.mark.parametrize("command", ["predict", "check", "export", "finetune", "info"])
@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(capsys, tmp_path, name, command):
    if "everywhere" in name and command in ("info", "finetune"):
        pytest.skip("info reads no weights, and of other classes finetune takes all but the classifier")
    folder = shutil.copytree(CARD, tmp_path / "card")
    text = CONFIGS[name]
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "card" in refused(capsys, *arguments(command, folder, tmp_path))


@pytest.mark.parametrize("file", ["../../../etc/passwd", "/etc/passwd", "../other/model.safetensors"])
def test_weights_that_a_configuration_names_elsewhere_are_not_read(capsys, tmp_path, file):
    folder = shutil.copytree(CARD, tmp_path / "card")
    other = shutil.copytree(ROOT / "model_cards" / "z2_cnn.rotmnist", tmp_path / "other")
    expected = run(capsys, "predict", IMAGE, "--model", folder, "--json")
    (folder / "config.json").write_text(config(pretrained_cfg__file=file))
    assert run(capsys, "predict", IMAGE, "--model", folder, "--json") == expected
    assert run(capsys, "predict", IMAGE, "--model", other, "--json") != expected


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(capsys, tmp_path, flag, name):
    (tmp_path / "a.npz").write_bytes(ARRAYS[name](flag))
    assert "a.npz" in refused(capsys, "finetune", "p4_cnn", tmp_path / "a.npz", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SETTINGS)
def test_runs(capsys, tmp_path, name):
    np.savez(tmp_path / "a.npz", x_train=_X, y_train=_Y)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "training.json").write_text(SETTINGS[name])
    (tmp_path / "out" / "log.jsonl").write_text("{}\n")
    assert "out" in refused(capsys, "finetune", "p4_cnn", tmp_path / "a.npz", "--output", tmp_path / "out")


def test_what_is_well_formed_is_accepted(capsys, tmp_path):
    """Negative control of the tests above: the same files, unchanged, are no errors."""
    folder = shutil.copytree(CARD, tmp_path / "card")
    for command in ("predict", "check", "info"):
        assert run(capsys, *arguments(command, folder, tmp_path))[0] == 0
    (tmp_path / "a.png").write_bytes(png(8, 8))
    assert run(capsys, "predict", tmp_path / "a.png")[0] == 0
    (tmp_path / "a.npz").write_bytes(npz(x_train=_X, y_train=_Y))
    result = eqzoo.finetune("p4_cnn", tmp_path / "a.npz", tmp_path / "out", epochs=1, device="cpu")
    assert len(result.results["classes"]) == 2
    pickle.loads(pickle.dumps(Hostile(tmp_path / "run")))
    assert (tmp_path / "run").exists()


def arguments(command, folder, tmp_path):
    """A command on the folder of a checkpoint."""
    if command == "predict":
        return ["predict", IMAGE, "--model", folder]
    if command == "export":
        return ["export", folder, tmp_path / "a.onnx"]
    if command == "evaluate":
        np.savez(tmp_path / "a.npz", x_train=_X, y_train=_Y)
        return ["evaluate", folder, tmp_path / "a.npz"]
    if command == "finetune":
        np.savez(tmp_path / "a.npz", x_train=_X, y_train=_Y)
        return ["finetune", folder, tmp_path / "a.npz", "--output", tmp_path / "out", "--epochs", "1"]
    return [command, folder]
