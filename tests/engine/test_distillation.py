"""Distillation: what the teachers' part of the loss is, that a network learns it, and which teachers are refused."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eqzoo
from eqzoo.data import Split
from eqzoo.engine import Recipe, distillation, train
from eqzoo.engine.loop import accelerator_of
from eqzoo.engine.state import TrainingState
from eqzoo.evaluation.metrics import top1
from eqzoo.finetuning.rules import with_rules
from tests.engine.bars import bars, predictions

ARGS = {"width": 2, "num_classes": 2}
RECIPE = Recipe(
    "p4_cnn", "bars", epochs=3, batch_size=16, lr=1e-2, model_args=ARGS, label_smoothing=0.1, teachers=("a", "b")
)


class Seer(eqzoo.models.EquivariantNet):
    """A teacher that knows the class of `bars` by the center of the image."""

    def __init__(self, size=28, names=()):
        super().__init__(eqzoo.P4, 2, 1, num_features=1)
        self.size, self.seen = size, []
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.pretrained_cfg = {"mean": (0.5,), "std": (0.25,), "label_names": list(names)}

    def forward(self, x):
        assert x.shape[-2:] == (self.size, self.size)
        self.seen.append((x, self.training, torch.is_grad_enabled()))
        score = 4 * x[:, :, 10:18, 10:18].mean((1, 2, 3)).double() + 2
        return torch.stack([-score, score], 1) * self.weight.double()


@pytest.fixture
def teach(monkeypatch):
    """Puts networks in the place of checkpoints."""

    def put(**networks):
        monkeypatch.setattr(distillation, "create_model", lambda name, pretrained: networks[name])

    return put


def state_of(recipe, splits):
    return TrainingState(
        recipe, lambda: eqzoo.create_model(recipe.model, **recipe.model_args), splits, accelerator_of("cpu"), 0
    )


def test_the_loss_is_that_of_labels_and_of_the_mean_of_the_teachers(teach):
    first, second = Seer(), Seer()
    second.weight.data *= 0.1
    teach(a=first, b=second)
    split = bars(16, 0)
    numbers = torch.zeros(16, 7)
    for weight, smoothing in ((0.25, 0.1), (1.0, 0.0)):
        args = {"teacher_weight": weight, "label_smoothing": smoothing, "model_args": ARGS | {"drop_rate": 0.0}}
        state = state_of(replace(RECIPE, **args), {"train": split})
        state.begin_epoch(0)
        loss = state.backward(split.images, split.labels, numbers)
        with torch.no_grad():
            logits = state.model.train()(state.as_input(split.images))
        x = (split.images.double() / 255 - 0.5) / 0.25
        p = (first(x).softmax(1) + second(x).softmax(1)) / 2
        of_labels = F.cross_entropy(logits, split.labels, label_smoothing=smoothing)
        expected = (1 - weight) * of_labels + weight * F.cross_entropy(logits, p)
        torch.testing.assert_close(loss, expected.to(loss.dtype), atol=1e-6, rtol=1e-6)
        assert abs(loss - of_labels) > 1e-3  # the teachers count
        assert all(parameter.grad is not None for parameter in state.model.parameters())


def test_teachers_are_in_evaluation_mode_and_see_the_augmented_images_at_full_size(teach):
    teacher = Seer(32)
    teach(a=teacher)
    split = bars(16, 0)
    split = Split(F.pad(split.images, (2, 2, 2, 2)), split.labels)
    recipe = replace(RECIPE, model="p4_resnet29", model_args={"num_classes": 2, "in_chans": 1, "depth": 11},
                     teachers=("a",), half_size_epochs=1, augment="flips")  # fmt: skip
    state = state_of(recipe, {"train": split})
    state.begin_epoch(0)
    state.backward(split.images, split.labels, torch.full((16, 7), 0.5))  # all are flipped
    ((x, training, grad),) = teacher.seen
    torch.testing.assert_close(x.double(), (split.images.flip(3).double() / 255 - 0.5) / 0.25, atol=1e-5, rtol=1e-5)
    assert not training
    assert not grad
    assert teacher.weight.grad is None


def test_a_network_learns_from_its_teachers_where_labels_say_nothing(teach, tmp_path):
    torch.set_default_dtype(torch.float32)
    train_split, valid = bars(96, 0), bars(32, 1)
    wrong = Split(train_split.images, train_split.labels[torch.randperm(96)])
    accuracy = {}
    for weight in (0.01, 1.0):
        teach(a=Seer())
        recipe = replace(RECIPE, epochs=6, teachers=("a",), teacher_weight=weight, valid_size=0, label_smoothing=0.0)
        model = train(
            recipe, lambda: eqzoo.create_model("p4_cnn", **ARGS), {"train": wrong}, tmp_path / str(weight), "cpu", 0
        )
        images = (valid.images.float() / 255 - 0.1314) / 0.3025
        accuracy[weight] = top1(predictions(model, images), valid.labels)
    assert accuracy[1.0] > 90 > accuracy[0.01] + 15


def test_a_network_learns_the_soft_labels_of_its_images(tmp_path):
    torch.set_default_dtype(torch.float32)
    train_split, valid = bars(96, 0), bars(32, 1)
    blank = Split(train_split.images, torch.zeros_like(train_split.labels))
    soft = F.one_hot(train_split.labels, 2).half().numpy()
    accuracy = {}
    for name, rows in (("own", soft), ("others", np.roll(soft, 1, 0))):
        np.save(tmp_path / f"{name}.npy", rows)
        taught = {"soft_labels": f"{tmp_path}/{name}.npy", "teachers": (), "teacher_weight": 1.0}
        recipe = replace(RECIPE, epochs=6, valid_size=0, label_smoothing=0.0, **taught)
        model = train(recipe, lambda: eqzoo.create_model("p4_cnn", **ARGS), {"train": blank}, tmp_path / name, "cpu", 0)
        images = (valid.images.float() / 255 - 0.1314) / 0.3025
        accuracy[name] = top1(predictions(model, images), valid.labels)
    assert accuracy["own"] > 90 > accuracy["others"] + 15
    with pytest.raises(ValueError, match=r"has the shape \(96, 2\); 32 training images of 2 classes need \(32, 2\)"):
        state_of(recipe, {"train": valid})


def test_a_resumed_run_has_its_teachers_again(teach, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)

    def run(folder, epochs=3):
        teach(a=Seer(), b=Seer())
        recipe = replace(RECIPE, epochs=epochs)
        return train(
            recipe, lambda: eqzoo.create_model("p4_cnn", **ARGS), {"train": bars(48, 0), "valid": bars(16, 1)}, folder
        ).state_dict()

    whole = run(tmp_path / "whole")
    original, calls = TrainingState.begin_epoch, []

    def stop(self, epoch):
        calls.append(epoch)
        if epoch == 2 and len(calls) == 3:
            raise KeyboardInterrupt
        original(self, epoch)

    monkeypatch.setattr(TrainingState, "begin_epoch", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped")
    resumed = run(tmp_path / "stopped")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_teacher_of_other_classes_is_refused(teach):
    teach(a=Seer(names=("flat", "round")))
    split = bars(16, 0)
    for classes, fails in ((("round", "flat"), True), (("flat", "round"), False), ((), False)):
        named = Split(split.images, split.labels, classes)
        with pytest.raises(ValueError, match="a has flat, round") if fails else nullcontext():
            state_of(replace(RECIPE, teachers=("a",)), {"train": named})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"teacher_weight": 0.7}, r"teacher_weight should be 0\.5 without teachers or soft_labels, got 0\.7"),
        ({"teachers": ("a",), "teacher_weight": 0}, "teacher_weight should be above 0 and at most 1, got 0"),
        ({"teachers": ("a",), "teacher_weight": 1, "label_smoothing": 0.1}, "label_smoothing should be 0 where"),
        ({"teachers": ("a",), "teacher_weight": 1, "class_weights": (1.0, 2.0)}, "class_weights should be empty where"),
        ({"teachers": ("a",), "soft_labels": "a.npy"}, "teachers should be empty beside soft_labels"),
    ],
)
def test_a_recipe_refuses_teachers_that_have_no_effect(values, said):
    with pytest.raises(ValueError, match=said):
        Recipe("p4_cnn", "bars", 1, **values)


def test_labels_without_a_part_in_the_loss_are_not_smoothed():
    assert "label_smoothing" not in with_rules({"teachers": ["a"], "teacher_weight": 1})
    assert with_rules({"teachers": ["a"], "teacher_weight": 0.9})["label_smoothing"] == 0.1
