"""`eqzoo evaluate` on labeled images."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_cli import IMAGE, run

OTHER = IMAGE.with_name("four.png")


@pytest.fixture
def digits(tmp_path):
    """Four images of sevens, one of them named four, and two of fours."""
    for name, image, count in (("7", IMAGE, 3), ("4", IMAGE, 1), ("4", OTHER, 2)):
        (tmp_path / "digits" / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.open(image).save(tmp_path / "digits" / name / f"{image.stem}{i}.png")
    return tmp_path / "digits"


def test_metrics_are_those_counted_by_hand(capsys, digits):
    code, out, _ = run(capsys, "evaluate", "p4_cnn", digits)
    assert code == 0
    totals, classes, confusion = out.strip().split("\n\n")
    rows = dict(re.split(r"  +", line) for line in totals.splitlines())
    assert rows["network"] == "p4_cnn"
    assert rows["images"] == f"6 of {digits}"
    assert rows["accuracy"] == "83.33 %"
    assert rows["mean recall of the classes"] == "83.33 %"  # 100 % of the sevens, 2 of 3 fours
    assert rows["same prediction at all 90° rotations"] == "100.00 %, of 6 images"
    found = [re.split(r"  +", line.strip()) for line in classes.splitlines()]
    assert found[1:] == [["4", "100.00 %", "66.67 %", "80.00 %", "3"], ["7", "75.00 %", "100.00 %", "85.71 %", "3"]]
    counts = {line.split()[0]: line.split()[1:] for line in confusion.splitlines()[1:]}
    assert counts == {"4": ["0", "0", "0", "0", "2", "0", "0", "1", "0", "0"], "7": ["0"] * 7 + ["3", "0", "0"]}
    data = json.loads(run(capsys, "evaluate", "p4_cnn", digits, "--json")[1])
    assert data["accuracy"] == 83.333333
    assert data["network"] == "p4_cnn"
    plain = json.loads(run(capsys, "evaluate", "z2_cnn", digits, "--json")[1])
    assert plain["same_class_at_all_quarter_rotations"] < 100 == data["same_class_at_all_quarter_rotations"]


def test_the_test_images_are_taken_where_there_are_some(capsys, digits, tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / "all" / name / "7").mkdir(parents=True)
        (tmp_path / "all" / name / "4").mkdir()
        for number in range({"train": 1, "val": 2, "test": 3}[name]):
            for label, image in (("7", IMAGE), ("4", OTHER)):
                Image.open(image).save(tmp_path / "all" / name / label / f"{number}.png")
    for options, count in (((), "6 test images"), (("--split", "valid"), "4 valid images")):
        assert f"{count} of {tmp_path / 'all'}" in run(capsys, "evaluate", "p4_cnn", tmp_path / "all", *options)[1]
    code, _, err = run(capsys, "evaluate", "p4_cnn", digits, "--split", "test")
    assert code == 2
    assert f"{digits} has no test images, only train; leave --split out" in err


def test_classes_that_the_network_does_not_predict_are_an_error(capsys, digits, tmp_path):
    (digits / "4").rename(digits / "four")
    code, _, err = run(capsys, "evaluate", "p4_cnn", digits)
    assert code == 2
    assert "has images of 'four', which p4_cnn does not predict: its classes are '0', '1', '2'" in err
    images = np.zeros((12, 28, 28), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=np.arange(12))
    code, _, err = run(capsys, "evaluate", "p4_cnn", tmp_path / "a.npz")
    assert code == 2
    assert "has labels up to 11, and p4_cnn 10 classes" in err
    np.savez(tmp_path / "b.npz", x_train=images[:10], y_train=np.arange(10))
    assert f"10 of {tmp_path / 'b.npz'}" in run(capsys, "evaluate", "p4_cnn", tmp_path / "b.npz")[1]
    code, _, err = run(capsys, "evaluate", "p4_cnn_w7", digits)
    assert code == 2
