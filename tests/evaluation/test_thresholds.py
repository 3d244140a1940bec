"""Thresholds of probabilities: in the metrics and in predictions."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.data import Split
from eqzoo.evaluation.thresholds import check_thresholds, chosen_classes, threshold_scores
from tests.cli.commands import IMAGE, run

CLASSES = ("a", "b", "c")
P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.35, 0.45], [0.8, 0.15, 0.05]])


@pytest.mark.parametrize(
    ("thresholds", "expected"),
    [
        ({}, [0, 1, 2, 0]),
        ({"b": 0.3}, [1, 1, 1, 0]),  # reached by 0.3 itself
        ({"b": 0.7}, [0, 2, 2, 0]),  # nowhere else
        ({"b": 0.3, "c": 0.3}, [1, 1, 2, 0]),  # of two that are reached the most probable
        ({"b": 0.9, "c": 0.9}, [0, 0, 0, 0]),
    ],
)
def test_a_class_is_chosen_where_its_probability_reaches_its_threshold(thresholds, expected):
    assert chosen_classes(P, CLASSES, thresholds).tolist() == expected


def test_scores_are_counts():
    labels = torch.tensor([1, 1, 2, 0])
    (row,) = threshold_scores(P, labels, CLASSES, {"b": 0.3})
    assert row == {"name": "b", "threshold": 0.3, "found": 3, "recall": 100, "specificity": 50, "precision": 66.666667}
    (none,) = threshold_scores(P, labels, CLASSES, {"c": 0.9})
    assert (none["found"], none["recall"], none["specificity"], none["precision"]) == (0, 0, 100, None)
    (absent,) = threshold_scores(P[:2], labels[:2], CLASSES, {"a": 0.4})
    assert (absent["recall"], absent["specificity"], absent["precision"]) == (None, 50, 0)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Sevens, of which one is half covered, and their probabilities of being one."""
    folder = tmp_path_factory.mktemp("digits")
    seven = np.asarray(Image.open(IMAGE).convert("L").resize((28, 28))).copy()
    covered = seven.copy()
    covered[:, 15:] = 0
    np.savez(folder / "digits.npz", x_test=np.stack([seven, covered]), y_test=np.array([7, 1]))
    return folder / "digits.npz"


def test_predict_and_evaluate_use_them(capsys, digits):
    command = ("predict", digits, "--model", "p4_cnn", "--csv")
    rows = list(csv.DictReader(run(capsys, *command)[1].splitlines()))
    first, second = (float(row["7"]) for row in rows)
    assert rows[0]["prediction"] == "7" != rows[1]["prediction"]
    _, out, err = run(capsys, *command, "--threshold", f"7={second * 0.99}")
    assert err == "eqzoo: p4_cnn.rotmnist: thresholds give 1 of 2 another class than the most probable one\n"
    low = list(csv.DictReader(out.splitlines()))
    assert [row["prediction"] for row in low] == ["7", "7"]
    assert [row["7"] for row in low] == [row["7"] for row in rows]
    high = json.loads(run(capsys, *command[:-1], "--json", "--threshold", f"7={first + (1 - first) / 2}")[1])
    assert "7" not in [entry["networks"][0]["label"] for entry in high]
    assert high[0]["networks"][0]["probability"] < 0.5  # that of the class that was chosen
    alone = json.loads(run(capsys, "predict", IMAGE, "--model", "p4_cnn", "--json", "--threshold", "7=0.999999")[1])
    assert {copy["label"] for copy in alone["networks"][0]["copies"]} != {"7"}

    for threshold, found in ((second * 0.99, 2), ((first + second) / 2, 1)):
        args = ("evaluate", "p4_cnn", digits, "--rotated", 0, "--threshold", f"7={threshold}")
        data = json.loads(run(capsys, *args, "--json")[1])
        (row,) = data["thresholds"]
        assert sum(counts[7] for counts in data["by_thresholds"]["confusion"]) == found
        assert sum(counts[7] for counts in data["confusion"]) == 1
        assert (row["found"], row["recall"], row["specificity"]) == (found, 100, 100 * (2 - found))
        out = run(capsys, *args)[1]
        assert "found where the probability is at least" in out
        assert "of the most probable class; with the thresholds they are:" in out
        assert f"{threshold:g}" in out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["7"], "a threshold is given for ''"),
        (["7=much"], "invalid threshold value"),
        (["=0.5"], "a threshold is given for ''"),
        (["7=0.5", "7=0.6"], "--threshold takes each class once"),
        (["seven=0.5"], "a threshold is given for 'seven', and the classes of p4_cnn"),
        (["7=1"], "a threshold is a probability above 0 and below 1, got 1.0 of '7'"),
        (["7=nan"], "above 0 and below 1, got nan"),
    ],
)
def test_other_thresholds_are_errors(capsys, digits, given, message):
    for command in (["predict", digits, "--model", "p4_cnn"], ["evaluate", "p4_cnn", digits]):
        code, out, err = run(capsys, *command, *(word for item in given for word in ("--threshold", item)))
        assert (code, out) == (2, "")
        assert message in err


def test_names_in_another_unicode_form_are_the_same_class():
    classes, thresholds = ("mu\u0308de", "wach"), {"m\u00fcde": 0.2}
    check_thresholds(thresholds, classes, "a network")
    p = torch.tensor([[0.3, 0.7], [0.1, 0.9]])
    assert chosen_classes(p, classes, thresholds).tolist() == [0, 1]
    (row,) = threshold_scores(p, torch.tensor([0, 1]), classes, thresholds)
    assert (row["name"], row["found"], row["recall"]) == (classes[0], 1, 100)


def test_all_classes_with_thresholds_leave_none(capsys, digits):
    every = [f"--threshold={i}=0.5" for i in range(10)]
    assert "leave one out" in run(capsys, "predict", digits, "--model", "p4_cnn", *every)[2]
    found = eqzoo.evaluate(
        eqzoo.create_model("p4_cnn", pretrained=True),
        Split(torch.zeros(1, 1, 28, 28, dtype=torch.uint8), torch.tensor([0])),
        rotated=0,
        thresholds=dict.fromkeys("0123456789", 0.5),
    )
    assert len(found["thresholds"]) == 10
    assert "by_thresholds" not in found
    assert "--threshold out" in run(capsys, "evaluate", "p4_cnn", digits, "--csv", "--threshold", "7=0.5")[2]
