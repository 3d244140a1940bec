"""Metrics of predictions, against counting by hand, and the table of predictions."""

import os

import pytest
import torch

from eqzoo.data import Split
from eqzoo.evaluation.metrics import scores, wilson_interval
from eqzoo.evaluation.predictions_file import each_prediction, write_predictions


def test_scores_are_those_counted_by_hand():
    labels, answers = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 0, 0])
    found = scores(labels, answers, ("a", "b", "c", "d"))
    assert found["confusion"] == [[2, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert found["accuracy"] == 50
    a, b, c, d = found["classes"]
    assert (a["precision"], a["recall"], a["f1"]) == (50, 66.666667, 57.142857)
    assert (b["precision"], b["recall"]) == (50, 50)
    assert (c["precision"], c["recall"], c["f1"]) == (None, 0, 0)
    assert (d["precision"], d["recall"], d["f1"], d["images"]) == (None, None, None, 0)
    assert found["balanced_accuracy"] == pytest.approx((200 / 3 + 50 + 0) / 3, abs=1e-6)
    shown = scores(torch.zeros(82, dtype=torch.long), torch.tensor([0] * 72 + [1] * 10), "ab")["accuracy"]
    assert f"{shown:.2f}" == "87.80"  # 72 of 82 are 87.8049 %; of 87.805 it would be 87.81


def test_the_interval_of_an_accuracy_is_wilson_s():
    """By its equation: the shares from which the one found is z standard deviations away."""
    for hits, count in ((83, 100), (5, 6), (1, 30)):
        low, high = (value / 100 for value in wilson_interval(hits, count))
        for share in (low, high):
            assert abs(hits / count - share) == pytest.approx(1.96 * (share * (1 - share) / count) ** 0.5, abs=2e-3)
    assert wilson_interval(24, 24) == [86.2, 100.0]
    assert wilson_interval(0, 24) == [0.0, 13.8]
    assert wilson_interval(0, 0) is None


def test_the_area_under_the_curve_is_that_of_all_pairs():
    """Also of equal scores, of probabilities that round to 1, and of classes without images or without others."""
    logits = torch.randn(60, 4, dtype=torch.double)
    logits[:30] = logits[:30].round()  # many are equal
    logits[50:] += torch.tensor([60.0, 0, 0, 0])  # in float32 all of these have probability 1, also of the next
    logits[40:50] += torch.tensor([0, 60.0, 0, 0])
    labels = torch.randint(0, 3, (60,))
    found = scores(labels, logits.argmax(1), "abcd", logits)
    with_odds = (logits.softmax(1) / (1 - logits.softmax(1))).log()
    for label, row in enumerate(found["classes"][:3]):
        score = logits[:, label] - logits[:, [other for other in range(4) if other != label]].logsumexp(1)
        torch.testing.assert_close(score[:40], with_odds[:40, label])
        own, other = score[labels == label], score[labels != label]
        better = (own[:, None] > other).double() + (own[:, None] == other).double() / 2
        assert row["auc"] == pytest.approx(100 * better.mean().item(), abs=1e-6)
        rounded = logits.float().softmax(1)[:, label]
        own, other = rounded[labels == label], rounded[labels != label]
        naive = (own[:, None] > other).double() + (own[:, None] == other).double() / 2
        assert label or 100 * naive.mean().item() != pytest.approx(row["auc"], abs=1e-3)  # control
    assert found["classes"][3]["auc"] is None
    lost = torch.where(torch.arange(60)[:, None] == 7, torch.nan, logits)
    assert scores(labels, logits.argmax(1), "abcd", lost)["macro_auc"] is None
    assert found["macro_auc"] == pytest.approx(sum(row["auc"] for row in found["classes"][:3]) / 3, abs=1e-5)
    alone = scores(torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long), "ab", torch.randn(3, 2))
    assert alone["macro_auc"] is None
    perfect = scores(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0]), "ab", torch.tensor([[9.0, 0], [9, 1], [9, 2]]))
    assert perfect["macro_auc"] == 100  # although the accuracy is a third
    assert "macro_auc" not in scores(labels, labels, "abcd")


def test_predictions_of_files_whose_names_are_no_text(tmp_path):
    names, logits = ("a, b", "c"), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    file = os.fsdecode(b"a/Pr\xe4parat.png")
    split = Split(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0]), names, (file, "c/1.png"))
    with (tmp_path / "x.csv").open("w", encoding="utf-8", errors="surrogateescape") as to:
        write_predictions(to, names, {"test": each_prediction(split, logits, names)})
    assert (tmp_path / "x.csv").read_bytes().splitlines() == [
        b'split,file,class,prediction,"a, b",c',
        b'test,a/Pr\xe4parat.png,"a, b","a, b",0.880797,0.119203',
        b'test,c/1.png,"a, b",c,0.268941,0.731059',
    ]
