"""Images of .npz and .npy files, which the commands take in place of image files."""

import csv
import json
import re

import numpy as np
import pytest
import timm
from PIL import Image

import eqzoo
from tests.cli.commands import IMAGE, run


@pytest.fixture
def digits(tmp_path):
    """Three images in a file of arrays, and the same as image files."""
    seven = np.asarray(Image.open(IMAGE).convert("L").resize((28, 28)))
    images = np.stack([np.rot90(seven, k) for k in range(3)])
    np.savez(tmp_path / "new.npz", x_test=images, x_train=np.zeros((1, 28, 28), np.uint8), sizes=np.arange(3))
    (tmp_path / "files").mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "files" / f"{i}.png")
    return tmp_path


def test_predict_gives_images_of_an_array_what_it_gives_their_files(capsys, digits):
    np.save(digits / "new.npy", np.load(digits / "new.npz")["x_test"])
    models = ("--model", "p4_cnn", "z2_cnn")
    code, expected, _ = run(capsys, "predict", digits / "files", *models, "--csv")
    assert code == 0
    values = [row[1:] for row in csv.reader(expected.splitlines())]
    for name in ("new.npz", "new.npy"):
        code, out, err = run(capsys, "predict", digits / name, *models, "--csv")
        assert (code, err) == (0, "")
        rows = list(csv.reader(out.splitlines()))
        assert [row[0] for row in rows[1:]] == [f"{digits / name}[{i}]" for i in range(3)]
        assert [row[1:] for row in rows] == values
    assert run(capsys, "predict", digits / "new.npz", *models)[1].splitlines()[1].startswith(f"{digits}/new.npz[0] ")
    both = json.loads(run(capsys, "predict", digits / "files", digits / "new.npz", digits / "new.npz", "--json")[1])
    assert len(both) == 6
    assert both[0]["networks"][1]["probabilities"] != both[1]["networks"][1]["probabilities"]  # z2_cnn sees rotations


def test_predict_gives_scaled_images_what_evaluate_gives_them(capsys, tmp_path):
    random = np.random.default_rng(0)
    for label in "37":
        (tmp_path / label).mkdir()
        for i in range(3):
            Image.fromarray(random.integers(0, 256, (9, 10), np.uint8)).resize((50, 45)).save(
                tmp_path / label / f"{i}.png"
            )
    found = []
    for command in (("predict", tmp_path, "--model", "z2_cnn"), ("evaluate", "z2_cnn", tmp_path)):
        rows = list(csv.DictReader(run(capsys, *command, "--csv")[1].splitlines()))
        found.append([[float(row[label]) for label in "0123456789"] for row in rows])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-9)


def test_predict_takes_images_of_five_channels(capsys, tmp_path):
    model = eqzoo.create_model("p4_cnn", in_chans=5, num_classes=3)
    timm.models.save_for_hf(model, tmp_path / "five", safe_serialization=True)
    images = np.random.default_rng(0).integers(0, 256, (2, 40, 30, 5), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", images)
    code, out, err = run(capsys, "predict", tmp_path / "new.npz", "--model", tmp_path / "five")
    assert (code, err, len(out.splitlines())) == (0, "", 3)
    inverted = run(capsys, "predict", tmp_path / "new.npz", "--model", tmp_path / "five", "--invert", "--csv")[1]
    np.save(tmp_path / "inverted.npy", 255 - images)
    expected = run(capsys, "predict", tmp_path / "inverted.npy", "--model", tmp_path / "five", "--csv")[1]
    assert re.sub(r".*\[", "", inverted) == re.sub(r".*\[", "", expected)
    code, _, err = run(capsys, "predict", tmp_path / "new.npz", "--model", "p4_cnn")
    assert (code, err.count("\n")) == (2, 1)
    assert "new.npz have 5 channels, and the network takes 1" in err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros((2, 28, 28), np.uint8), "b": np.zeros(2)}, "has a (2, 28, 28), b (2,): images are"),
        ({"x": np.zeros((28, 28, 3), np.uint8)}, "has x (28, 28, 3): images are named x_test"),
        ({"x": np.zeros((0, 28, 28), np.uint8)}, "has no images, its array is (0, 1, 28, 28)"),
    ],
)
def test_arrays_that_are_no_images_are_errors(capsys, tmp_path, arrays, message):
    np.savez(tmp_path / "new.npz", **arrays)
    code, out, err = run(capsys, "predict", tmp_path / "new.npz", "--model", "p4_cnn")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_arrays_of_other_channels_among_images_are_told_once(capsys, digits):
    np.savez(digits / "color.npz", np.zeros((20, 28, 28, 3), np.uint8))
    code, out, err = run(capsys, "predict", digits / "files", digits / "color.npz", "--model", "p4_cnn")
    assert (code, len(out.splitlines())) == (2, 4)
    assert "20 of 23 images cannot be read and have no prediction" in err
    assert err.count("color.npz have 3 channels, and the network takes 1") == 1
    (digits / "new.npz").rename(digits / "NEW.NPZ")
    assert run(capsys, "predict", digits / "NEW.NPZ", "--model", "p4_cnn")[0] == 0


def test_ranges_of_8_bits_come_from_arrays_and_from_the_files_that_can_be_read(capsys, digits):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    args = ("export", "p4_cnn", digits / "small.onnx", "--json", "--int8")
    code, out, err = run(capsys, *args, digits / "new.npz")
    assert (code, json.loads(out)["images"]) == (0, 3)
    assert "left out" not in err
    (digits / "files" / "broken.png").write_text("no image")
    code, out, err = run(capsys, *args, digits / "files")
    assert (code, json.loads(out)["images"]) == (0, 3)
    assert "1 of 4 images cannot be read and are left out: " in err
    assert "broken.png is not an image" in err
    code, _, err = run(capsys, *args, digits / "files" / "broken.png")
    assert code == 2
    assert "broken.png is not an image" in err
