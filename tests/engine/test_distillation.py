"""Distillation: what the teachers' part of the loss is, that a network learns it, and which teachers are refused."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eqzoo
from eqzoo.data import Split, augment, draw
from eqzoo.data.images import preprocess
from eqzoo.data.splits import resized
from eqzoo.engine import Recipe, RunDirectory, distillation, train
from eqzoo.engine.loop import accelerator_of
from eqzoo.engine.state import TrainingState
from eqzoo.evaluation.metrics import top1
from eqzoo.finetuning.rules import with_rules
from eqzoo.models import OrbitNet
from tests.engine.bars import bars, go, kill_after, predictions, same

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
        known = {"mean": (0.5,), "std": (0.25,), "label_names": list(names), "input_size": (1, size, size)}
        self.pretrained_cfg = known

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


def test_teachers_see_the_augmented_images_at_full_size_and_then_their_own(teach):
    teacher = Seer(40)
    teach(a=teacher)
    split = bars(16, 0)
    split = Split(F.pad(split.images, (2, 2, 2, 2)), split.labels)
    recipe = replace(RECIPE, model="p4_resnet29", model_args={"num_classes": 2, "in_chans": 1, "depth": 11},
                     teachers=("a",), half_size_epochs=1, augment="flips")  # fmt: skip
    state = state_of(recipe, {"train": split})
    state.begin_epoch(0)
    state.backward(split.images, split.labels, torch.full((16, 7), 0.5))  # all are flipped
    ((x, training, grad),) = teacher.seen
    expected = (preprocess(split.images.flip(3), (40, 40)).double() / 255 - 0.5) / 0.25
    torch.testing.assert_close(x.double(), expected, atol=1e-5, rtol=1e-5)
    assert (expected - expected.flip(3)).abs().max() > 0.1  # negative control
    assert not training
    assert not grad
    assert teacher.weight.grad is None


def test_classes_are_matched_by_their_names(teach):
    split = bars(16, 0)
    found = {}
    for names in (("edge", "middle"), ("middle", "edge"), ()):
        teach(a=Seer(names=names))
        named = Split(split.images, split.labels, ("middle", "edge"))
        state = state_of(replace(RECIPE, teachers=("a",)), {"train": named})
        images = split.images.double()
        found[names] = state.teachers.probabilities(images, None, state.autocast(), False)
    assert torch.equal(found["edge", "middle"], found["middle", "edge"].flip(1))
    assert torch.equal(found[()], found["middle", "edge"])
    assert not torch.equal(found[()], found[()].flip(1))  # negative control


class Pixels(torch.nn.Module):
    """A linear classifier of pixels, which no rotation leaves as it is."""

    def __init__(self, side):
        super().__init__()
        self.num_classes, self.in_chans = 2, 1
        self.pretrained_cfg = {"mean": (0.4,), "std": (0.3,), "input_size": (1, side, side)}
        self.linear = torch.nn.Linear(side**2, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x.flatten(1))


@pytest.mark.parametrize("group", ["p4m", "z2"])
def test_an_orbit_network_predicts_each_training_image_once(teach, group):
    """What it predicts for the augmented images is the same, if it is invariant under the augmentation."""
    split, numbers = bars(16, 0), draw(16, torch.Generator().manual_seed(0))
    network = OrbitNet(Pixels(32), group)
    teach(a=network)
    recipe = replace(RECIPE, teachers=("a",), teacher_weight=1.0, label_smoothing=0.0)
    recipe = replace(recipe, augment="quarter_rotations_flips", model_args=ARGS | {"drop_rate": 0.0})
    state = state_of(recipe, {"train": split})
    soft = state.teachers.of_training_images(lambda side: resized(split, (side, side)), 0)
    calls = network.network.calls
    state.begin_epoch(0)
    loss = state.backward(split.images, split.labels, numbers, soft)
    assert network.network.calls == calls > 0
    images = augment(recipe.augment, split.images, numbers)
    with torch.no_grad():
        logits = state.model.train()(state.as_input(images))
        p = network((preprocess(images, (32, 32)).round().double() / 255 - 0.4) / 0.3).softmax(1)
    difference = abs(loss - F.cross_entropy(logits, p))
    assert difference < 1e-6 if group == "p4m" else difference > 1e-4  # the second one is the negative control


def test_soft_labels_count_as_the_teachers_that_made_them(teach):
    teach(a=OrbitNet(Pixels(28), "p4"), b=OrbitNet(Pixels(28), "p4"), c=Seer())
    split = bars(16, 0)
    state = state_of(replace(RECIPE, teachers=("a", "b", "c")), {"train": split})
    soft = state.teachers.of_training_images(lambda _: split, 0)
    images = split.images.double()
    other = state.teachers.probabilities(images, None, state.autocast(), False)
    found = state.teachers.probabilities(images, soft, state.autocast(), False)
    torch.testing.assert_close(found, (2 * soft + other) / 3)
    assert (soft - other).abs().max() > 1e-3


def test_a_run_keeps_what_orbit_networks_predict_until_it_has_ended(teach, tmp_path):
    torch.set_default_dtype(torch.float32)
    network = OrbitNet(Pixels(28), "p4")
    teach(a=network)
    splits = {"train": bars(48, 0), "valid": bars(16, 1)}
    recipe = replace(RECIPE, teachers=("a",))
    whole = go(tmp_path / "whole", recipe, splits=splits)
    kill_after(1, go, tmp_path / "killed", recipe, splits=splits)
    assert np.load(tmp_path / "killed" / "teachers.npy").shape == (48, 2)
    calls = network.network.calls
    resumed = go(tmp_path / "killed", recipe, splits=splits)
    assert network.network.calls == calls
    assert same(whole, resumed)
    assert not list(tmp_path.glob("*/teachers.npy"))
    untaught = go(tmp_path / "untaught", replace(recipe, teachers=()), splits=splits)
    assert not same(whole, untaught)  # negative control


def test_predictions_of_other_teachers_are_not_kept(teach, tmp_path, monkeypatch):
    """Those of a run that was killed before its first epoch, in the folder of a new one."""
    torch.set_default_dtype(torch.float32)
    splits = {"train": bars(48, 0), "valid": bars(16, 1)}
    recipe = replace(RECIPE, teachers=("a",))
    found = {}
    for folder, first in (("new", False), ("used", True)):
        if first:
            teach(a=OrbitNet(Pixels(28), "p4"))
            with monkeypatch.context() as patch:
                patch.setattr(RunDirectory, "release", lambda self: None)
                kill_after(0, go, tmp_path / folder, recipe, splits=splits)
            assert (tmp_path / folder / "teachers.npy").exists()
        torch.manual_seed(1)
        teach(a=OrbitNet(Pixels(28), "p4"))
        found[folder] = go(tmp_path / folder, recipe, splits=splits)
    assert same(found["new"], found["used"])


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
    np.save(tmp_path / "others.npy", soft * 5 - 2)  # logits
    with pytest.raises(ValueError, match="rows that are no probabilities"):
        state_of(recipe, {"train": train_split})


def test_a_teacher_of_other_classes_is_refused(teach):
    teach(a=Seer(names=("flat", "square")))
    split = bars(16, 0)
    for classes, fails in ((("round", "flat"), True), (("square", "flat"), False), ((), False)):
        named = Split(split.images, split.labels, classes)
        with pytest.raises(ValueError, match="a has flat, square") if fails else nullcontext():
            state_of(replace(RECIPE, teachers=("a",)), {"train": named})


def test_labels_without_a_part_in_the_loss_are_not_smoothed():
    assert "label_smoothing" not in with_rules({"teachers": ["a"], "teacher_weight": 1})
    assert with_rules({"teachers": ["a"], "teacher_weight": 0.9})["label_smoothing"] == 0.1
