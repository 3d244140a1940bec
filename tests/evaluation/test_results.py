"""Predictors and what is measured of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import eqzoo
from eqzoo.analysis.sizes import weightless
from eqzoo.evaluation import Predictor, measure, results
from eqzoo.layers._layout import is_channels_last
from tests.finetuning.shapes import shapes


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def test_a_predictor_gives_the_probabilities_of_the_logits():
    model = eqzoo.create_model("p4_cnn", pretrained=True).eval()
    split = shapes(7)["train"]
    predictor = Predictor.of(model)
    assert (predictor.input_size, predictor.group, predictor.classes) == ((1, 28, 28), eqzoo.P4, tuple("0123456789"))
    found = predictor(split.images)
    assert found.sum(1).tolist() == pytest.approx([1] * 7)
    torch.testing.assert_close(found, predictor.logits(split).double().softmax(1))
    broken = eqzoo.create_model("p4_cnn")
    torch.nn.init.constant_(broken.head.weight, torch.nan)
    with pytest.raises(ValueError, match="not finite for 7 of 7 images"):
        Predictor.of(broken.eval()).logits(split)


def test_the_mean_over_copies_is_the_same_for_each_copy():
    model = eqzoo.create_model("z2_cnn", pretrained=True, num_classes=3).double().eval()
    split = shapes(20)["train"]
    rotated = replace(split, images=split.images.rot90(1, (2, 3)).flip(3))
    found, again = (Predictor.of(model).copies_logits(part, eqzoo.P4M).softmax(2) for part in (split, rotated))
    assert found.shape == (8, 20, 3)
    torch.testing.assert_close(found[0], Predictor.of(model).logits(split).softmax(1))
    torch.testing.assert_close(found.mean(0), again.mean(0))
    assert (found[0] - again[0]).abs().max() > 1e-3  # a single prediction is not


def test_images_have_the_layout_in_which_a_network_predicts_faster():
    images = torch.randn(2, 3, 8, 8, dtype=torch.float32)

    def last(model, x):
        return is_channels_last(Predictor.of(model).in_layout(x))

    for name in ("p4m_resnet29", "z2_resnet29", "p4_allcnn", "p4_cnn"):
        assert last(weightless(name), images), name
    assert last(weightless("p4_cnn"), images[:, :1])
    assert not last(weightless("p4_cnn"), images.double())
    assert not last(weightless("p4_cnn"), images.to("meta"))
    for other in (*map(weightless, ("p4_e4net", "p4_alpha_f_cnn", "p4m_convnext_atto")), torch.nn.Flatten()):
        assert not last(other, images)


def test_an_evaluation_takes_the_time_that_it_is_given(monkeypatch):
    split = replace(shapes(120)["train"], classes=tuple("abc"))
    model = eqzoo.create_model("p4_cnn", pretrained=True, num_classes=3).eval()
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    for seconds, count in ((0.0, 25), (1.2 + 0.28 * 40.5, 40), (1.2 + 0.28 * 500, 120), (None, 120)):
        clock = iter((0.0, 1.2))  # 0.01 s an image, of which 28 copies are rotated
        monkeypatch.setattr(results, "time", SimpleNamespace(perf_counter=clock.__next__))
        seen.clear()
        found = measure(Predictor.of(model), split, seconds=seconds)
        assert sum(seen) == (seconds is not None) + 120 + 28 * count  # one to warm up
        assert (found.metrics["rotated_images"], found.metrics["rotation_curve"]["images"]) == (count, count)
        assert found.logits.shape == (120, 3)
        assert len(found.notes) == (count < 120)
    assert sum(map(sum, found.metrics["confusion"])) == 120
    monkeypatch.undo()
    assert "rotation_curve" not in measure(Predictor.of(model), split, rotated=0).metrics
