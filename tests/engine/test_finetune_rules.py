"""Fine-tuning where the user leaves things open: rules, measured speed, time, advice, the length of the report."""

import json
import re
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import eqzoo
from eqzoo import _common
from eqzoo.analysis.sizes import weightless
from eqzoo.cli import main as command_line
from eqzoo.data import Split, Streamed, native_sides
from eqzoo.data.brightness import dark_images
from eqzoo.data.hashes import duplicates
from eqzoo.engine import best_row, loop, processor, speed
from eqzoo.engine.epochs import rank
from eqzoo.engine.recipe import Recipe
from eqzoo.engine.run import RunDirectory
from eqzoo.engine.speed import Speed
from eqzoo.engine.state import TrainingState
from eqzoo.evaluation import metrics
from eqzoo.finetuning import images as finetuning_images
from eqzoo.finetuning import report_files
from eqzoo.finetuning import run as finetuning
from eqzoo.finetuning.advice import advice_after, advice_before, advice_on_time
from eqzoo.finetuning.comparison import baseline_recipe
from eqzoo.finetuning.rules import fine_tuning_recipe, least_epochs, with_rules
from eqzoo.layers._layout import is_channels_last
from eqzoo.models.load import resolve
from tests.conftest import ROOT
from tests.engine.test_finetune import arrays, save_shapes, shape


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def shapes(count=30):
    images, labels = arrays(count)
    return {"train": Split(torch.from_numpy(images)[:, None], torch.from_numpy(labels))}


def tune(folder, **changes):
    call = {"epochs": 1, "device": "cpu", "valid_fraction": 0.2, "test_fraction": 0.2}
    return eqzoo.finetune("p4_cnn", shapes(), folder, **call | changes)


def test_the_number_of_epochs_follows_from_the_number_of_steps():
    assert least_epochs(793, 32, True) == 30
    assert least_epochs(793, 32, False) == 59
    assert least_epochs(100_000, 32, True) == 10
    assert least_epochs(40, 8, True) == 100
    assert least_epochs(7, 8, True) == 100  # no whole batch is no division by zero


def test_what_the_user_gives_comes_before_the_rules():
    rules = with_rules({"epochs": 20})
    assert (rules["optimizer"], rules["lr"], rules["weight_decay"]) == ("adamw", 0.01, 0.01)
    assert rules["warmup_epochs"] == 3
    assert with_rules({"epochs": 20, "optimizer": "sgd"})["lr"] > rules["lr"]
    given = {"epochs": 20, "lr": 0.3, "warmup_epochs": 0, "label_smoothing": 0.0, "augment": "none"}
    assert with_rules(given).items() >= given.items()
    assert "warmup_epochs" not in with_rules({"epochs": 20, "schedule": "constant"})
    assert "label_smoothing" not in with_rules({"loss": "bce"})
    assert Recipe("p4_cnn", "own", **rules).rate(3) == pytest.approx(0.01)
    assert Recipe("p4_cnn", "own", **rules).rate(20) == pytest.approx(0)


@pytest.mark.parametrize(
    ("name", "expected"), [("z2_cnn", "shifts"), ("p4_cnn", "rotations_shifts"), ("p4m_cnn", "affine")]
)
def test_augmentation_follows_the_group(name, expected):
    blank = weightless(resolve(name))
    settings = {"start": None, "label_names": ["a", "b", "c"]}

    def planned(**given):
        return fine_tuning_recipe(
            blank, "own", shapes(), given, model_args={}, freeze=(), balance=False, settings=settings
        )

    assert planned().augment == expected
    assert planned(augment="none").augment == "none"
    # Another network sees what suits the group of the fine-tuned one, whatever its own group is.
    assert {baseline_recipe(other, planned(), epochs=1).augment for other in ("test_resnet", "p4m_cnn")} == {expected}


@pytest.mark.parametrize(("name", "rates"), [("p4_cnn", (0.01, 0.01)), ("p4m_convnext_atto", (0.001, 0.0001))])
def test_networks_without_batch_norm_have_lower_rates(name, rates):
    blank = weightless(resolve(name))

    def planned(start, **given):
        settings = {"start": start, "label_names": ["a", "b", "c"]}
        return fine_tuning_recipe(
            blank, "own", shapes(), given, model_args={}, freeze=(), balance=False, settings=settings
        )

    assert (planned(None).lr, planned("weights").lr) == rates
    assert planned(None, optimizer="sgd").lr == pytest.approx(5 * rates[0])
    assert planned("weights", lr=0.5).lr == 0.5
    own = planned(None)
    assert baseline_recipe("test_resnet", own, epochs=1).lr == 4e-3
    # What does not fit into the memory at once does not in the other network either; but a part has two images or more.
    for passes, kept in ((2, 2), (4, 4), (own.batch_size, own.batch_size // 2)):
        assert baseline_recipe("test_resnet", replace(own, accumulate=passes), epochs=1).accumulate == kept
    # A network of the zoo has the rate that its own fine-tuning has, with other optimizers or losses of the fine-tuning
    # too; what of these is not of equivariant networks alone is of both.
    assert (
        baseline_recipe("z2_resnet29.cifar10", own, epochs=1).lr == baseline_recipe("z2_cnn", own, epochs=1).lr == 1e-2
    )
    assert baseline_recipe("z2_gsanet_t", own, epochs=1).lr == 1e-3
    both = planned(None, optimizer="sgd", ema_decay=0.9, label_smoothing=0.2, clip_grad=1.0)
    found = baseline_recipe("test_resnet", both, epochs=1)
    assert (found.optimizer, found.ema_decay, found.label_smoothing, found.clip_grad) == ("adamw", 0.9, 0.2, 1.0)
    assert baseline_recipe("test_resnet", replace(own, loss="bce"), epochs=1).loss == "bce"
    taught = replace(own, teachers=("p4_cnn.rotmnist",), teacher_weight=1, label_smoothing=0)
    assert baseline_recipe("test_resnet", taught, epochs=1).label_smoothing == 0.1  # it learns from the labels
    assert baseline_recipe("test_convnext", own, epochs=1).lr == 1e-3
    assert baseline_recipe("test_convnext.r160_in1k", own, epochs=1).lr == 1e-4


def test_numbers_of_numpy_are_numbers():
    recipe = Recipe("p4_cnn", "own", epochs=np.int64(4), lr=np.float32(0.5), seed=np.arange(3)[1])
    assert [type(value) for value in (recipe.epochs, recipe.lr, recipe.seed)] == [int, float, int]


def test_a_warm_up_may_end_within_an_epoch():
    recipe = Recipe("p4_cnn", "own", epochs=4, lr=1.0, warmup_epochs=0.6)
    assert recipe.rate(0.3) == pytest.approx(0.5)
    assert recipe.rate(0.6) == pytest.approx(1)
    assert recipe.rate(2.3) == pytest.approx(0.5)  # half of the cosine
    short = Recipe("p4_cnn", "own", epochs=1, lr=1.0, warmup_epochs=0.2)
    assert [short.rate(t) for t in (0.1, 0.6, 1)] == pytest.approx([0.5, 0.5, 0])
    with pytest.raises(ValueError, match="warmup_epochs"):
        Recipe("p4_cnn", "own", epochs=4, warmup_epochs=4.5)


def test_settings_are_printed_and_stand_in_the_report(tmp_path, capsys):
    result = tune(tmp_path / "out")
    images, settings = [line for line in capsys.readouterr().err.splitlines() if re.match("eqzoo: (images|opt)", line)]
    assert "18 training, 6 test, 6 validation; 3 classes of 6 training images; 1 epoch of 2 steps" in images
    assert re.search(r"about [\d.]+ s at [\d.]+ images/s", images)
    found = result.report["settings"]
    assert all(f"{key} {value:g}" in settings for key, value in found.items() if isinstance(value, float))
    recipe = json.loads((tmp_path / "out" / "training.json").read_text())["recipe"]
    assert found.items() >= {key: recipe[key] for key in ("optimizer", "lr", "augment", "precision")}.items()
    assert found["precision"] == "float32"  # a short run is not worth a measurement
    assert f"| lr | {recipe['lr']} |" in (tmp_path / "out" / "report.md").read_text()


def test_images_have_their_own_statistics_unless_batch_norms_are_frozen(tmp_path):
    card = ((0.1314,), (0.3025,))
    for freeze, name in ((False, "own"), (True, "card")):
        cfg = tune(tmp_path / name, freeze=freeze).model.pretrained_cfg
        assert ((tuple(cfg["mean"]), tuple(cfg["std"])) == card) is freeze
    values = shapes()["train"].images.double() / 255
    own = json.loads((tmp_path / "own" / "finetune.json").read_text())
    assert own["mean"][0] == pytest.approx(values.mean().item(), abs=0.02)


@pytest.mark.parametrize("streamed", [False, True])
def test_statistics_are_those_of_all_pixels(streamed):
    images = torch.randint(0, 256, (130, 3, 5, 7), dtype=torch.uint8)
    images[:, 2] = 9
    split = Split(images, torch.zeros(130, dtype=torch.long))
    if streamed:
        split = Streamed(images.__getitem__, torch.arange(130), split.labels, (3, 5, 7))
    values = images.double().transpose(0, 1).flatten(1) / 255
    mean, std = finetuning_images._statistics(split, 0)
    assert mean == [round(v, 4) for v in values.mean(1).tolist()]
    assert std == [*(round(v, 4) for v in values.std(1).tolist()[:2]), 0.01]


def test_ties_of_accuracy_are_decided_by_the_loss(tmp_path, monkeypatch):
    row = {"epoch": 1, "valid_accuracy": 90.0, "valid_loss": 0.5}
    assert rank(row | {"valid_loss": 0.4}) > rank(row | {"epoch": 2})
    assert rank(row | {"epoch": 2}) > rank(row)
    assert rank(row | {"valid_accuracy": 91.0, "valid_loss": 9.0}) > rank(row)
    assert rank(row) > rank(row | {"half_size": True, "valid_accuracy": 99.0})
    assert loop._postfix(1, 0.5, row) == {"epoch": "2", "loss": "0.5000", "best": f"{row['valid_accuracy']:.2f}"}
    assert loop._postfix(1, 0.5, row | {"valid_recall": 90.0}) == {
        "epoch": "2",
        "loss": "0.5000",
        "best recall": "90.00",
    }
    assert loop._postfix(1, 0.5, row | {"valid_accuracy": None}) == {"epoch": "2", "loss": "0.5000"}
    assert rank(row | {"valid_recall": 90.0}) > rank(row | {"valid_recall": 50.0, "valid_accuracy": 95.0})
    found = [(50.0, 0.9), (60.0, 0.3), (60.0, 0.4), (60.0, 0.3)]
    measured = iter([{"valid_accuracy": accuracy, "valid_loss": loss} for accuracy, loss in found])
    kept = []
    monkeypatch.setattr(TrainingState, "validate", lambda self: next(measured))
    monkeypatch.setattr(RunDirectory, "save_weights", lambda self, state: kept.append(len(self.rows()) + 1))
    monkeypatch.setattr(
        RunDirectory, "load_weights", lambda self: eqzoo.create_model("p4_cnn", num_classes=3).state_dict()
    )
    monkeypatch.setattr(finetuning, "write_report", lambda *_, **__: {})
    tune(tmp_path / "out", epochs=4)
    assert kept == [1, 2, 4]
    assert best_row(RunDirectory(tmp_path / "out").rows())["epoch"] == 4


def measured(monkeypatch, seconds, same_loss=True):
    """The formats that are chosen where a step takes these seconds, by precision and memory format."""
    monkeypatch.setattr(speed._Trial, "seconds", lambda _, r, times: seconds[r.precision, r.channels_last])
    monkeypatch.setattr(speed._Trial, "takes_bfloat16", lambda _, recipe: same_loss)

    def choose(given, wanted=3600.0):
        recipe = Recipe("p4_cnn", "own", epochs=1, batch_size=8, model_args={"num_classes": 3})
        found = speed.measure(
            recipe, lambda: eqzoo.create_model("p4_cnn", num_classes=3), shapes(), given, "cpu", wanted
        )
        return found.precision, found.channels_last

    return choose


def test_the_fastest_formats_are_chosen(monkeypatch):
    fast = {("float32", False): 4.0, ("float32", True): 2.0, ("bfloat16", False): 3.0, ("bfloat16", True): 1.0}
    choose = measured(monkeypatch, fast)
    assert choose({}) == ("bfloat16", True)
    assert choose({}, wanted=30.0) == ("float32", False)  # not worth it
    assert choose({"precision": "float32"}) == ("float32", True)
    assert choose({"channels_last": False}) == ("bfloat16", False)
    assert measured(monkeypatch, fast, same_loss=False)({}) == ("float32", True)
    slow = {("float32", False): 2.0, ("float32", True): 2.0, ("bfloat16", False): 1.95, ("bfloat16", True): 1.0}
    assert measured(monkeypatch, slow)({}) == ("float32", False)  # 2.5 % are no gain


def build_three():
    return eqzoo.create_model("p4_cnn", num_classes=3)


def test_where_the_epochs_follow_from_the_time_whole_batches_are_timed(monkeypatch):
    """Small parts of a batch are slower for each image, so a short comparison would get too few epochs."""
    timed = []

    def seconds(trial, recipe, times):
        timed.append(len(trial.batch[1]))
        return 1e-3

    monkeypatch.setattr(speed._Trial, "seconds", seconds)
    recipe = Recipe("p4_cnn", "own", epochs=1, batch_size=8, model_args={"num_classes": 3})
    for wanted, last in ((None, 2), (5.0, 8), (3600.0, 8)):
        speed.measure(recipe, build_three, shapes(), {}, "cpu", wanted)
        assert timed[-1] == last
    timed.clear()
    speed.measure(replace(recipe, compile=True), build_three, shapes(), {}, "cpu", 5.0)
    assert timed == [8]  # one size of a batch, for which it is compiled


def test_a_comparison_has_the_nearest_number_of_epochs():
    found = speed.Speed("float32", False, 10.0)
    split = {"train": Split(torch.zeros(30, 1, 28, 28, dtype=torch.uint8), torch.arange(30) % 3)}  # 3 s an epoch
    assert [found.epochs_nearest(seconds, split) for seconds in (0.1, 7.4, 7.6)] == [1, 2, 3]
    assert found.epochs_within(7.6, split) == 2
    saved = replace(found, saving_seconds=1.0)  # large networks take long to write
    assert [saved.epochs_within(7.6, split), saved.epochs_within(8.0, split)] == [1, 2]
    assert saved.whole_epoch_seconds(split) == 4
    assert saved.epochs_nearest(7.6, split) == 3  # as long as the seconds of the fine-tuning, which are without it


def test_a_measurement_is_of_the_steps_of_the_run(tmp_path):
    """The time of a step is that of the network: one that sleeps is as slow as it sleeps."""

    def build():
        model = eqzoo.create_model("p4_cnn", num_classes=3)
        model.register_forward_pre_hook(lambda *_: time.sleep(0.2))
        return model

    recipe = Recipe("p4_cnn", "own", epochs=1, batch_size=8, model_args={"num_classes": 3})
    assert speed.measure(recipe, build, shapes(), {}, "cpu").images_per_second < 2 / 0.2
    plain = speed.measure(recipe, lambda: eqzoo.create_model("p4_cnn", num_classes=3), shapes(), {}, "cpu")
    assert plain.images_per_second > 2 / 0.2
    assert plain.saving_seconds == 0  # the number of epochs does not follow from it
    options = {"seconds": 60.0, "folder": tmp_path}
    timed = speed.measure(recipe, lambda: eqzoo.create_model("p4_cnn", num_classes=3), shapes(), {}, "cpu", **options)
    assert 0 < timed.saving_seconds < 5
    assert list(tmp_path.iterdir()) == []


def test_the_time_of_reading_counts_where_it_is_the_longer_one():
    def read(i):
        time.sleep(0.05)
        return torch.zeros(1, 28, 28, dtype=torch.uint8)

    def build():
        return eqzoo.create_model("p4_cnn", num_classes=3)

    recipe = Recipe("p4_cnn", "own", epochs=1, batch_size=8, model_args={"num_classes": 3})
    splits = {"train": Streamed(read, torch.arange(40), torch.arange(40) % 3, (1, 28, 28))}
    found = [speed.measure(recipe, build, splits, {}, "cpu", workers=workers) for workers in (0, 1, 2)]
    assert found[0].images_per_second < found[1].images_per_second <= 20 < found[2].images_per_second <= 40


def test_a_process_trains_on_one_device(monkeypatch):
    loop.accelerator_of("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="this process has trained on cpu before and keeps to it; start another one"):
        loop.accelerator_of(None)


def test_small_batches_are_measured_with_networks_that_reduce_images_to_a_pixel():
    def build():
        model = timm.create_model("test_resnet", num_classes=3, in_chans=1)
        model.pretrained_cfg = model.pretrained_cfg | {"mean": (0.5,), "std": (0.5,)}
        return model

    recipe = Recipe("test_resnet", "own", epochs=1, batch_size=4)
    assert speed.measure(recipe, build, shapes(), {}, "cpu").images_per_second > 0


def test_epochs_by_time_stay_when_the_run_is_resumed(tmp_path, monkeypatch, capsys):
    rate = [Speed("float32", False, 20.0)]  # of the 18 + 6 / 3 images of an epoch in a second
    monkeypatch.setattr(speed, "measure", lambda *_, **__: rate[0])
    call = {"epochs": None, "minutes": 0.05}
    first = tune(tmp_path / "a", **call)
    assert first.report["epochs"] == first.report["settings"]["epochs"] == 3
    assert first.report["settings"]["warmup_epochs"] == pytest.approx(0.45)
    rate[0] = Speed("float32", False, 40.0)
    assert tune(tmp_path / "a", **call).report["epochs"] == 3
    assert tune(tmp_path / "b", **call).report["epochs"] == 6
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    assert "--epochs 3" in results["command"]
    assert "and --minutes is" not in capsys.readouterr().err
    rate[0] = Speed("float32", False, 0.05)
    assert tune(tmp_path / "late", **call).report["epochs"] == 1
    assert "an epoch takes about 6.7 minutes, and --minutes is 0.05" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"minutes was 0.05 and is 0.1"):
        tune(tmp_path / "a", epochs=None, minutes=0.1)
    for wrong in ({"minutes": 1.0}, {"epochs": None, "minutes": 0.0}, {"epochs": None, "minutes": float("nan")}):
        with pytest.raises(ValueError, match="minutes is a time above 0, instead of a number of epochs"):
            tune(tmp_path / "c", **wrong)


def test_a_report_counts_the_epochs_until_patience_ended_the_run(tmp_path, monkeypatch):
    accuracies = iter([60.0, 50.0, 40.0])
    monkeypatch.setattr(TrainingState, "validate", lambda self: {"valid_accuracy": next(accuracies), "valid_loss": 1.0})
    report = tune(tmp_path, epochs=9, patience=2).report
    assert (report["selected_epoch"], report["epochs"], report["settings"]["epochs"]) == (1, 3, 9)
    assert "Epoch 1 of 3 was kept." in (tmp_path / "report.md").read_text()
    assert tune(tmp_path, epochs=9, patience=2).report["epochs"] == 3  # as it is read again


def test_the_mean_over_copies_is_the_same_for_each_copy():
    model = eqzoo.create_model("z2_cnn", pretrained=True, num_classes=3).double().eval()
    split = shapes(20)["train"]
    rotated = replace(split, images=split.images.rot90(1, (2, 3)).flip(3))
    found, again = (metrics.copy_probabilities(model, part, eqzoo.P4M) for part in (split, rotated))
    assert found.shape == (8, 20, 3)
    torch.testing.assert_close(found[0], metrics.split_logits(model, split).softmax(1))
    torch.testing.assert_close(found.mean(0), again.mean(0))
    assert (found[0] - again[0]).abs().max() > 1e-3  # a single prediction is not


def test_images_have_the_layout_in_which_a_network_predicts_faster():
    images = torch.randn(2, 3, 8, 8, dtype=torch.float32)
    for name in ("p4m_resnet29", "z2_resnet29", "p4_allcnn", "p4_resnet18", "p4m_resnet44", "p4_cnn"):
        assert is_channels_last(metrics.in_faster_layout(weightless(name), images)), name
    assert is_channels_last(metrics.in_faster_layout(weightless("p4_cnn"), images[:, :1]))
    assert not is_channels_last(metrics.in_faster_layout(weightless("p4_cnn"), images.double()))
    assert not is_channels_last(metrics.in_faster_layout(weightless("p4_cnn"), images.to("meta")))
    slower = ("p4_e4net", "p4m_densenet", "p4_alpha_f_cnn", "p4_e4_resnet18", "p4m_convnext_atto")
    for other in (*map(weightless, slower), torch.nn.Flatten()):
        assert not is_channels_last(metrics.in_faster_layout(other, images))


def test_a_report_takes_the_time_that_it_is_given(tmp_path, monkeypatch):
    plan = metrics._Rotations.plan
    assert plan(1000, 1000, None) == plan(1000, 1000, 28_000) == (1000, 1000, 15)
    for affordable in (20_000, 5_000, 2_000):
        found = plan(1000, 1000, affordable)
        assert found.cost <= affordable
        assert found.cost > 0.5 * affordable
    assert plan(1000, 1000, -5) == (50, 50, 45)
    assert plan(20, 1000, 0) == (20, 20, 45)
    split = shapes(120)["train"]
    model = eqzoo.create_model("p4_cnn", pretrained=True, num_classes=3).eval()
    seen, layouts = [], []
    with torch.no_grad():
        model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        model.stem.register_forward_pre_hook(lambda _, args: layouts.append(is_channels_last(args[0])))
        short, logits = metrics.classifier_metrics(model, split, "abc", seconds=0.0, channels_last=True)
    assert sum(seen) == 1 + 120 + 4 * 50 + 8 * 50  # one to warm up
    assert layouts == [False] + [True] * (len(seen) - 1)  # of gray images too
    layouts.clear()
    metrics.classifier_metrics(model, split, "abc", channels_last=False)
    assert not any(layouts)
    assert (short["rotated_images"], short["rotation_curve"]["images"]) == (50, 50)
    assert sum(map(sum, short["confusion"])) == 120
    assert logits.shape == (120, 3)
    layouts.clear()
    assert len(metrics.classifier_metrics(model, split, "abc")[0]["rotation_curve"]["angles"]) == 24
    assert all(layouts)  # as the network is faster
    monkeypatch.setattr(report_files, "_REPORT_SECONDS", 0.0)
    x = shapes(600)
    notes = eqzoo.finetune("p4_cnn", x, tmp_path / "out", epochs=1, device="cpu", test_fraction=0.5).report["notes"]
    assert notes == [
        "To save time, 50 of the 300 images were rotated by 90°, 180° and 270°, and the curve has 8 angles, of 50 of "
        "the 300 images."
    ]


def split_of(*counts):
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    images = torch.randint(0, 256, (len(labels), 1, 28, 28), dtype=torch.uint8)
    return Split(images, labels, tuple("abcdef"[: len(counts)]))


def test_advice_on_images():
    model = weightless("p4_cnn")
    fine = {"train": split_of(40, 60), "valid": split_of(9, 9)}
    assert advice_before(fine, model, (28, 28), 28, balance=False) == []
    (few,) = advice_before(fine | {"train": split_of(19, 60)}, model, None, 28, balance=False)
    assert few == "fewer than 20 training images of 'a' (19): add images"
    (few,) = advice_before(fine | {"train": split_of(19, 60)}, model, None, 28, balance=False, drawn=["test"])
    assert few.endswith("add images")  # there are no images to hold out fewer of
    drawn = {"train": split_of(19, 60), "valid": split_of(3, 15), "test": split_of(1, 1)}
    (few,) = advice_before(drawn, model, None, 28, balance=False, drawn=["valid", "test"])
    assert few.endswith("add images, or hold out fewer with --valid 0.1")
    drawn |= {"valid": split_of(2, 6)}  # what a tenth gives: the same advice again would change nothing
    (few,) = advice_before(drawn, model, None, 28, balance=False, drawn=["valid", "test"])
    assert few.endswith("add images")
    (nested,) = advice_before(fine, model, None, 28, balance=False, inner=["p1", "p2", "p3", "p4"])
    assert nested == (
        "class folders hold folders of images ('p1', 'p2', 'p3', ...): the classes are the outer folders ('a', 'b')"
    )
    (nested,) = advice_before(fine, model, None, 28, balance=False, drawn=["valid"], inner=["p1"])
    assert nested.endswith("if one is a patient or a slide, keep it in one: --split-by folder (split_by='folder')")
    for name, lines in (("z2_cnn", 1), ("z2m_gsanet_b", 1), ("p4_cnn", 0)):
        network = weightless(name)
        assert len(advice_before(fine, network, None, 28, balance=False, augment="shifts")) == lines
        assert advice_before(fine, network, None, 28, balance=False) == []  # as the user has chosen it
    rare = {"train": split_of(20, 200)}
    (imbalance,) = advice_before(rare, model, None, 28, balance=False)
    assert "'b' has 10 times the images of 'a'" in imbalance
    assert "--balance" in imbalance
    assert advice_before(rare, model, None, 28, balance=True) == []
    (larger,) = advice_before(fine, model, (300, 300), 28, balance=False)
    assert "300 pixels a side and are scaled to 28" in larger
    assert "--size 56, which takes about 4.0 times as long" in larger
    assert advice_before(fine, model, (41, 41), 28, balance=False) == []  # 41 x 41 is refused
    (slightly,) = advice_before(fine, model, (40, 40), 28, balance=False)
    assert "40 pixels a side and are scaled to 28: if details matter, try --size 40" in slightly
    assert advice_before(fine, model, (28, 28), 28, balance=False) == []
    dark = {"train": replace(fine["train"], images=fine["train"].images // 16)}  # 12-bit numbers in files of 16 bits
    assert advice_before(dark, model, (28, 28), 28, balance=False) == [
        "99.9 % of the pixels of the training images are at most 15 of 255, as with 12-bit numbers in files of 16 "
        "bits: if the files hold more shades, stretch the images first, all by the same factor, or, where "
        "single bright pixels matter, by np.arcsinh"
    ]
    dark["train"].images[0, 0, :5, :5] = 255  # a few that are saturated
    dark["test"] = dark["train"][torch.arange(1, 3)]
    stretch, equal = advice_before(dark, model, (28, 28), 28, balance=False)
    assert "are at most 15 of 255" in stretch
    assert equal.endswith("; if they differ in the files, the lost shades are what makes them equal")
    del dark["test"]
    lighter = {"train": replace(dark["train"], images=dark["train"].images + 17)}
    assert advice_before(lighter, model, (28, 28), 28, balance=False) == []


def test_advice_that_would_change_nothing_is_not_given():
    fine, model = {"train": split_of(40, 60), "valid": split_of(9, 9)}, weightless("p4_cnn")
    assert "try --size 56" in advice_before(fine, model, (56, 56), 28, balance=False)[0]
    assert advice_before(fine, model, (56, 56), 28, balance=False, trained_side=56) == []  # as the weights were trained
    assert advice_before(fine, model, None, 28, balance=False, drawn=["test"], inner=["p1"], by_source="folder") == []
    assert advice_before(fine, model, None, 28, balance=False, drawn=["test"], inner=["p1"], by_source=r"p\\d")


def test_advice_on_images_of_which_some_are_dark():
    model, split = weightless("p4_cnn"), split_of(100, 100)
    assert not dark_images(split.images).any()
    split.images[1] = 0  # black, not dark
    split.images[3] //= 16
    assert dark_images(split.images).nonzero().flatten().tolist() == [3]
    assert advice_before({"train": split}, model, None, 28, balance=False) == []  # one of 200
    split.images[8] //= 16
    (mixed,) = advice_before({"train": split}, model, None, 28, balance=False)
    assert mixed.startswith("2 of the 200 training images are darker than the others: 99.9 % of their pixels are below")
    assert "12-bit numbers in files of 16 bits: if the files hold more shades, stretch them first" in mixed


def test_advice_on_images_whose_ends_are_cut_off():
    model, fine = weightless("p4_cnn"), {"train": split_of(40, 60)}
    (cut,) = advice_before(fine, model, (28, 34), 28, balance=False)
    assert cut.startswith(
        "most images have about 28 x 34 pixels, and the network sees their central squares: about 18 % of each"
    )
    assert "PIL.ImageOps.pad" in cut
    assert advice_before(fine, model, (28, 29), 28, balance=False) == []
    _, larger = advice_before(fine, model, (180, 220), 28, balance=False)
    assert larger.startswith("the images have 180 pixels a side")
    (cut,) = advice_before(fine, model, (180, 220), 28, balance=False, sized=True)
    assert "central squares" in cut


def test_a_fine_tuning_tells_of_ends_and_sizes_and_shows_settings_as_json(tmp_path, capsys):
    for number, name in enumerate(("a", "b") * 8):
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(shape(number % 2, number, 60)).resize((60, 80)).save(
            tmp_path / "images" / name / f"{number}.png"
        )
    call = {"epochs": 1, "device": "cpu", "valid_fraction": 0.2, "test_fraction": 0.2}
    eqzoo.finetune("p4_cnn", tmp_path / "images", tmp_path / "out", lr_factors={"head.*": 3.0}, **call)
    said = capsys.readouterr().err
    assert "most images have about 60 x 80 pixels" in said
    assert "60 pixels a side and are scaled to 28: if details matter, try --size 56" in said
    assert 'channels_last false, lr_factors {"head.*": 3.0}' in said
    page = (tmp_path / "out" / "report.md").read_text()
    assert '| lr_factors | {"head.*": 3.0} |' in page
    assert "| patience | null |" in page
    eqzoo.finetune("p4_cnn", tmp_path / "images", tmp_path / "sized", size=32, **call)
    said = capsys.readouterr().err
    assert "most images have about 60 x 80 pixels" in said
    assert "if details matter" not in said


def test_advice_on_an_epoch_that_takes_longer_than_the_time():
    splits, speed = {"train": split_of(300, 300)}, Speed("float32", False, 2.0)
    (late,) = advice_on_time(2.0, speed, splits)
    assert late.startswith("an epoch takes about 5.0 minutes, and --minutes is 2: one epoch is trained")
    assert advice_on_time(5.0, speed, splits) == advice_on_time(None, speed, splits) == []
    (slow,) = advice_on_time(5.0, replace(speed, saving_seconds=600.0), splits)  # to a drive on a network, say
    assert slow.startswith("an epoch takes about 15.0 minutes, and --minutes is 5")


def test_the_side_of_images_before_they_are_resized(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((3, 40, 50, 3), np.uint8), y_train=np.zeros(3, int))
    assert native_sides(tmp_path / "a.npz") == (40, 50)
    assert native_sides({"train": split_of(9, 9)}) == (28, 28)
    assert native_sides("PCAM") == (96, 96)
    assert native_sides("Flowers102") is None
    assert native_sides(tmp_path) is None
    (tmp_path / "a class").mkdir()
    for i, size in enumerate([(30, 20), (22, 33), (40, 21)]):
        Image.new("L", size).save(tmp_path / "a class" / f"{i}.png")
    assert native_sides(tmp_path) == (21, 33)
    for part, side in (("train", 50), ("val", 70)):  # of the part that is evaluated, as from another scanner
        (tmp_path / "parts" / part / "a class").mkdir(parents=True)
        for i in range(2):
            Image.new("L", (side, side + i)).save(tmp_path / "parts" / part / "a class" / f"{i}.png")
    assert native_sides(tmp_path / "parts", "val")[0] == 70
    assert native_sides(tmp_path / "parts", "train")[0] == 50
    (tmp_path / "a.npz").rename(tmp_path / "cifar10.npz")
    assert native_sides("CIFAR10", data_dir=tmp_path) == (40, 50)  # it takes the place of the data set
    assert native_sides("cifar10") == (32, 32)


def test_names_of_files_may_tell_their_sources():
    def said(names, **options):
        labels = torch.tensor(["abc".index(name[0]) for name in names])
        images = torch.arange(len(names)).expand(1, 28, 28, -1).permute(3, 0, 1, 2).byte()
        train = Split(images, labels, ("a", "b", "c"))
        splits = {"train": replace(train, files=tuple(names))}
        found = advice_before(splits, weightless("p4_cnn"), None, 28, balance=False, **({"drawn": ["test"]} | options))
        return [line for line in found if "names of files" in line]

    slides = [f"{kind}/slide{n}_{i:03d}.png" for kind in "ab" for n in range(3) for i in range(10)]
    (line,) = said(slides)
    assert "(slide0, slide1, ...: 3 sources of 60 images)" in line
    pattern = re.search(r"--split-by '(.*)'$", line)[1]
    assert {re.search(pattern, name)[1] for name in slides} == {"slide0", "slide1", "slide2"}
    assert said(slides, by_source=pattern) == []
    assert said(slides, drawn=[]) == []
    assert said(slides, inner=["slide0"]) == []
    assert said([*slides, "a/other.png"]) == []
    for names in (
        [f"{kind}/{i}.png" for kind in "ab" for i in range(30)],
        [f"{kind}/Highway_{i}.jpg" for kind in "ab" for i in range(30)],
        [f"{kind}/{'abc'.index(kind)}_{i}.png" for kind in "abc" for i in range(30)],  # the number of the class
        [f"{kind}/slide{kind}{n}_1.png" for kind in "ab" for n in range(30)],  # an image of each
        [f"{kind}/slide{n}_{i}.png" for kind in "ab" for n in range(2) for i in range(10)],  # two
    ):
        assert said(names) == [], names[0]


def test_duplicates_across_splits_are_found_however_they_are_rotated():
    splits = {"train": split_of(30, 30), "valid": split_of(9, 9), "test": split_of(9, 9)}
    assert duplicates(splits) == []
    image = splits["train"].images[7]
    splits["valid"].images[3] = image.rot90(1, (1, 2))
    splits["test"].images[5] = image.flip(2)
    assert duplicates(splits) == [("valid", 3), ("test", 5)]
    splits["test"].images[5, 0, 0, 0] ^= 1
    assert duplicates(splits) == [("valid", 3)]
    assert "1 validation or test images are also" in advice_before(splits, weightless("p4_cnn"), None, 28, False)[0]


def test_advice_on_the_result():
    recipe = Recipe("p4_cnn", "own", epochs=5, augment="shifts")
    fine = {"classes": [{"name": "a", "images": 2}, {"name": "b", "images": 2}], "confusion": [[1, 1], [0, 2]]}
    assert advice_after(fine, 95.0, 93.0, recipe) == []
    (missed,) = advice_after(fine | {"confusion": [[2, 0], [2, 0]]}, 95.0, 93.0, recipe)
    assert missed == "'b' is never predicted: try --balance, or train for longer with --epochs 10 and another --output"
    (collapsed,) = advice_after(fine | {"confusion": [[2, 0], [2, 0]]}, 55.0, 50.0, recipe)
    other = "try a lower learning rate such as --lr 0.0001, --balance or more --epochs, with another --output"
    assert collapsed == f"'a' is the only class ever predicted: {other}"
    weighted = replace(recipe, class_weights=(1.0, 1.0))
    (collapsed,) = advice_after(fine | {"confusion": [[2, 0], [2, 0]]}, 55.0, 50.0, weighted)
    assert "--balance" not in collapsed
    (over,) = advice_after(fine, 99.0, 85.0, recipe)
    assert "99.0 % on training and 85.0 % on validation images" in over
    assert over.endswith("or, if they mean the same rotated and reflected, augment them more with --augment affine")
    (over,) = advice_after(fine, 99.0, 85.0, replace(recipe, augment="rotations_shifts"))
    assert over.endswith("or, if they mean the same reflected, augment them more with --augment affine")
    (over,) = advice_after(fine, 99.0, 85.0, replace(recipe, augment="affine"))
    assert over.endswith("add images, or augment them more with --augment affine_color")
    (over,) = advice_after(fine, 99.0, 85.0, replace(recipe, augment="affine_color"))
    assert over.endswith("add images")
    (under,) = advice_after(fine, 70.0, 72.0, recipe, minutes=2.5)
    assert "longer with --minutes 5 and" in under
    (under,) = advice_after(fine, 70.0, 72.0, recipe)
    assert "train for longer with --epochs 10" in under
    names = {"p4m_cnn": "p4_cnn", "p4m_resnet44": "p4_resnet29", "z2m_gsanet_b": "z2_gsanet_b", "cells": "p4_resnet29"}
    for name, other in names.items():
        *_, reflected = advice_after(fine, 70.0, 72.0, replace(recipe, model=name), True)
        assert reflected.startswith(f"{name} gives an image and its reflection the same prediction")
        assert reflected.endswith(f"has no reflections, such as {other}")
        one = fine | {"confusion": [[2, 0], [2, 0]]}
        assert len(advice_after(one, 55.0, 50.0, replace(recipe, model=name), True)) == 2
        assert len(advice_after(one, 55.0, 50.0, replace(recipe, model=name))) == 1
        assert advice_after(fine, 95.0, 93.0, replace(recipe, model=name), True) == []
    assert advice_after(fine, 99.0, None, recipe) == []
    assert advice_after(fine, 94.9, 100.0, recipe) == []


def test_advice_is_printed_and_stands_in_the_report(tmp_path, capsys):
    images = save_shapes(tmp_path / "images", (6, 6, 60))
    args = ["finetune", "p4_cnn", images, "--output", tmp_path / "out", "--epochs", 1, "--device", "cpu"]
    assert command_line.main([str(arg) for arg in args]) == 0
    out, err = capsys.readouterr()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any("--balance" in line for line in report["advice"])
    assert all(f"advice: {line}" in out for line in report["advice"])
    assert "eqzoo: fewer than 20 training images of 'bar' (4), 'blob' (4)" in err
    assert all(line in (tmp_path / "out" / "report.md").read_text() for line in report["advice"])


def test_options_come_before_what_is_measured(tmp_path, capsys):
    images = save_shapes(tmp_path / "images", (6, 6, 6))
    args = ["finetune", "p4_cnn", images, "--output", tmp_path / "out", "--epochs", 1, "--device", "cpu", "--json"]
    assert command_line.main([str(a) for a in [*args, "--precision", "bfloat16", "--channels-last"]]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["settings"]["precision"], report["settings"]["channels_last"]) == ("bfloat16", True)
    command = json.loads((tmp_path / "out" / "results.json").read_text())["command"]
    assert "--precision bfloat16 --channels-last" in command


def test_subnormal_numbers_are_zero_while_training_alone():
    small = torch.tensor([1e-39])
    with processor.flushed_subnormals():
        assert not torch.any(small * 1)
        with processor.flushed_subnormals():
            pass
        assert not torch.any(small * 1)
        torch.set_default_dtype(torch.float64)
        with processor.flushed_subnormals():
            pass
        assert not torch.any(small * 1)
    assert torch.all(small * 1 > 0)


def test_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(_common, "_CPU_LIMIT", tmp_path / "cpu.max")
    cpu = torch.device("cpu")
    assert not processor.has_bfloat16(cpu)  # no such file
    assert not processor.emulates_bfloat16(cpu)
    for line, expected in (
        ("flags\t\t: fpu avx2 avx512f", False),
        ("flags\t\t: fpu avx512_bf16 avx512f", True),
        ("flags\t\t: amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
        assert (processor.has_bfloat16(cpu), processor.emulates_bfloat16(cpu)) == (expected, not expected), line
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert _common.usable_cores() == 16
    for text, expected in (
        ("max 100000\n", 16),
        ("250000 100000\n", 3),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 16),
    ):
        (tmp_path / "cpu.max").write_text(text)
        assert _common.usable_cores() == expected
    before = torch.get_num_threads()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with processor.limited_threads():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_numbered_classes_do_not_take_the_classifier_of_the_digits(tmp_path):
    settings = {"start": "p4_cnn.rotmnist", "input_size": [1, 28, 28], "mean": [0.5], "std": [0.5]}
    sizes = {"num_classes": 10, "in_chans": 1}
    digits = eqzoo.create_model("p4_cnn", pretrained=True)

    def head(name, names):
        source = resolve(name)
        return finetuning.initial_network(source, source.model_args | sizes, settings | {"label_names": names}).head

    numbers = list(digits.pretrained_cfg["label_names"])
    assert numbers == [str(digit) for digit in range(10)]
    assert not torch.equal(head("p4_cnn", numbers).weight, digits.head.weight)
    own = shutil.copytree(ROOT / "model_cards" / "p4_cnn.rotmnist", tmp_path / "own")
    assert torch.equal(head(own, numbers).weight, digits.head.weight)
    assert not torch.equal(head(own, [*"abcdefghij"]).weight, digits.head.weight)


def test_images_without_contents_are_told():
    splits = {"train": split_of(30, 30)}
    splits["train"].images.fill_(7)
    said = advice_before(splits, weightless("p4_cnn"), None, 28, False)
    assert any(line.startswith("all pixels of all training images are 7, so there is nothing to") for line in said)
    splits["train"].images[0, 0, 0, 0] = 8
    said = advice_before(splits, weightless("p4_cnn"), None, 28, False)
    assert not any("nothing to learn" in line for line in said)


def test_a_network_with_reflections_that_does_not_fit_is_told_of_them(tmp_path):
    """The whole way: the group of the network decides, here of one of which the name does not tell it."""
    splits = {"train": split_of(12, 12), "valid": split_of(6, 6), "test": split_of(6, 6)}  # noise, in one step
    for group, told in (("p4m", True), ("p4", False)):
        call = {"epochs": 1, "lr": 1e-6, "batch_size": 24, "device": "cpu", "pretrained": False}
        found = eqzoo.finetune("p4_cnn", splits, tmp_path / group, model_args={"group": group}, **call)
        assert any("an image and its reflection" in line for line in found.report["advice"]) is told


def test_the_rules_are_those_of_the_network_with_its_arguments(tmp_path, capsys):
    """Not of the one that has its name: another group has another augmentation, other patches other sides."""
    tune(tmp_path / "a", model_args={"group": "p4m"}, pretrained=False)
    recipe = json.loads((tmp_path / "a" / "training.json").read_text())["recipe"]
    assert (recipe["augment"], recipe["model_args"]["group"]) == ("affine", "p4m")
    own = Recipe("p4m_cnn", "own", epochs=1, model_args={"group": "p4"})
    assert baseline_recipe("resnet18", own, epochs=1).augment == "rotations_shifts"
    for augment, of_other in (
        ("affine_color", "affine_color"),
        ("affine", "affine"),
        ("shifts", "rotations_shifts"),
        ("none", "rotations_shifts"),
        ("quarter_rotations_flips", "rotations_shifts"),
    ):
        assert baseline_recipe("resnet18", replace(own, augment=augment), epochs=1).augment == of_other, augment
    small = {"patch_size": 2, "planes": [16, 32], "depths": [1, 1]}
    call = {"epochs": 1, "device": "cpu", "valid_fraction": 0.2, "test_fraction": 0.2, "pretrained": False}
    result = eqzoo.finetune("p4m_convnext_atto", shapes(), tmp_path / "b", size=28, model_args=small, **call)
    assert result.report["input_size"] == [1, 28, 28]
    with pytest.raises(ValueError, match="does not accept images of 30 x 30"):
        eqzoo.finetune("p4m_convnext_atto", shapes(), tmp_path / "c", size=30, model_args=small, **call)


def test_a_plain_network_is_advised_to_see_rotated_images_unless_the_user_has_chosen(tmp_path):
    call = {"epochs": 1, "device": "cpu", "valid_fraction": 0.2, "test_fraction": 0.2, "pretrained": False}
    plain = eqzoo.finetune("z2_cnn", shapes(), tmp_path / "a", **call)
    assert any("sees no rotated images" in line for line in plain.report["advice"])
    chosen = eqzoo.finetune("z2_cnn", shapes(), tmp_path / "b", augment="shifts", **call)
    assert not any("sees no rotated images" in line for line in chosen.report["advice"])


def test_one_module_may_be_frozen_by_its_name(tmp_path):
    result = tune(tmp_path / "out", freeze="stem")
    assert json.loads((tmp_path / "out" / "training.json").read_text())["recipe"]["freeze"] == ["stem"]
    trained = eqzoo.create_model("p4_cnn", pretrained=True).state_dict()["stem.conv.weight"]
    assert torch.equal(result.model.state_dict()["stem.conv.weight"].cpu(), trained)
