"""Comparison of fine-tuned networks: differences, their intervals, and folders that do not go together."""

import json
import math
import shutil

import pytest
import torch

import eqzoo
from eqzoo.cli import main as command_line
from eqzoo.finetuning.compare import _difference, _mcnemar, _Predictions, compare
from tests.finetuning.shapes import save_shapes


def predictions(labels, predicted):
    return _Predictions([str(i) for i in range(len(labels))], ["a", "b"], torch.tensor(labels), torch.tensor(predicted))


def test_differences_are_counted_by_hand_and_lie_in_their_intervals():
    labels = [0, 1] * 50
    first = predictions(labels, [0] * 100)
    better = predictions(labels, [0, 1] * 40 + [0] * 20)
    found = _difference(first, better)
    assert found["accuracy_difference"] == 40
    low, high = found["accuracy_difference_interval"]
    deviation = 100 * (0.4 * 0.6 / 100) ** 0.5  # of the share of images that the second alone classifies correctly
    assert (low, high) == pytest.approx((40 - 1.96 * deviation, 40 + 1.96 * deviation), abs=1)
    assert found["p_value"] == pytest.approx(2 * 0.5**40)
    assert found["macro_f1_difference_interval"][0] > 0
    same = _difference(first, first)
    assert (same["accuracy_difference"], same["accuracy_difference_interval"], same["p_value"]) == (0, [0, 0], 1)


def test_mcnemar_is_the_binomial_test():
    assert _mcnemar(0, 5) == 2 * 0.5**5
    assert _mcnemar(3, 7) == 2 * sum(math.comb(10, k) for k in range(4)) / 2**10
    assert _mcnemar(4, 4) == 1


def test_folders_are_compared_on_the_same_images(tmp_path, capsys):
    images = save_shapes(tmp_path / "images", (8, 8, 8))
    call = {"epochs": 1, "device": "cpu", "pretrained": False}
    for name in ("p4_cnn", "z2_cnn"):
        eqzoo.finetune(name, images, tmp_path / name, **call)
    assert command_line.main(["compare", str(tmp_path / "p4_cnn"), str(tmp_path / "z2_cnn"), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["networks"]
    assert first["same_class_at_all_quarter_rotations"] == 100
    assert first["rotated_images"] >= first["images_over_angles"] > 0
    assert second["accuracy_difference"] == pytest.approx(second["accuracy"] - first["accuracy"], abs=0.01)
    assert command_line.main(["compare", str(tmp_path / "p4_cnn"), str(tmp_path / "z2_cnn")]) == 0
    assert f"{second['accuracy_difference']:+.2f}" in capsys.readouterr().out
    assert not second["other_pixels"]
    brighter = save_shapes(tmp_path / "brighter", (8, 8, 8), first=100)
    eqzoo.finetune("z2_cnn", brighter, tmp_path / "of_others", **call)
    for file in brighter.rglob("*.png"):
        assert (images / file.relative_to(brighter)).is_file()  # the same names
    assert compare(tmp_path / "p4_cnn", tmp_path / "of_others")[1]["other_pixels"]
    with pytest.raises(ValueError, match="two or more folders"):
        compare(tmp_path / "p4_cnn")
    other = shutil.copytree(tmp_path / "z2_cnn", tmp_path / "other")
    text = (other / "predictions.csv").read_text()
    (other / "predictions.csv").write_text(text.replace("test,bar/", "test,new/"))
    with pytest.raises(ValueError, match="other images or classes"):
        compare(tmp_path / "p4_cnn", other)
    (other / "predictions.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"other has no predictions\.csv"):
        compare(tmp_path / "p4_cnn", other)
