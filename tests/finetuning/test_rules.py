"""The rules of fine-tuning for what the user leaves open."""

import json
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_model

import eqzoo
from eqzoo.cli import main as command_line
from eqzoo.data import Split, Streamed
from eqzoo.engine.recipe import Recipe
from eqzoo.engine.speed import Speed
from eqzoo.engine.state import TrainingState
from eqzoo.finetuning.images import _statistics
from eqzoo.finetuning.plan import Request, make_plan
from eqzoo.finetuning.rules import fine_tuning_recipe, frozen_modules, least_epochs, with_rules
from eqzoo.models import OrbitNet
from tests.finetuning.plans import plan_of
from tests.finetuning.shapes import save_shapes, shapes


def tune(folder, **changes):
    call = {"epochs": 1, "device": "cpu", "valid_fraction": 0.2, "test_fraction": 0.2}
    return eqzoo.finetune("p4_cnn", shapes(), folder, **call | changes)


def planned(name, start=None, **given):
    return fine_tuning_recipe(plan_of(shapes(), name, start=start, given=given), {})


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
    assert Recipe("p4_cnn", "own", **rules).rate(3) == pytest.approx(0.01)
    assert Recipe("p4_cnn", "own", **rules).rate(20) == pytest.approx(0)


@pytest.mark.parametrize(
    ("name", "expected"), [("z2_cnn", "shifts"), ("p4_cnn", "rotations_shifts"), ("p4m_cnn", "affine")]
)
def test_augmentation_follows_the_group(name, expected):
    assert planned(name).augment == expected
    assert planned(name, augment="none").augment == "none"


@pytest.mark.parametrize(("name", "rates"), [("p4_cnn", (0.01, 0.01)), ("p4m_convnext_atto", (0.001, 0.0001))])
def test_networks_without_batch_norm_have_lower_rates(name, rates):
    assert (planned(name).lr, planned(name, start="weights").lr) == rates
    assert planned(name, optimizer="sgd").lr == pytest.approx(5 * rates[0])
    assert planned(name, start="weights", lr=0.5).lr == 0.5


def test_images_have_their_own_statistics_unless_batch_norms_are_frozen(tmp_path):
    card = ((0.1314,), (0.3025,))
    for freeze, name in ((False, "own"), (True, "card")):
        cfg = tune(tmp_path / name, freeze=freeze).model.pretrained_cfg
        assert ((tuple(cfg["mean"]), tuple(cfg["std"])) == card) is freeze
    values = shapes()["train"].images.double() / 255
    own = json.loads((tmp_path / "own" / "training.json").read_text())
    assert own["mean"][0] == pytest.approx(values.mean().item(), abs=0.02)


@pytest.mark.parametrize("streamed", [False, True])
def test_statistics_are_those_of_all_pixels(streamed):
    images = torch.randint(0, 256, (130, 3, 5, 7), dtype=torch.uint8)
    images[:, 2] = 9
    split = Split(images, torch.zeros(130, dtype=torch.long))
    if streamed:
        split = Streamed(images.__getitem__, torch.arange(130), split.labels, (3, 5, 7))
    values = images.double().transpose(0, 1).flatten(1) / 255
    mean, std = _statistics(split, 0)
    assert mean == [round(v, 4) for v in values.mean(1).tolist()]
    assert std == [*(round(v, 4) for v in values.std(1).tolist()[:2]), 0.01]


def test_epochs_by_time_stay_when_the_run_is_resumed(tmp_path, monkeypatch):
    rate = [Speed("float32", False, 20.0)]  # of the 18 + 6 / 3 images of an epoch in a second
    monkeypatch.setattr("eqzoo.finetuning.plan.measure", lambda *_, **__: rate[0])
    call = {"epochs": None, "minutes": 0.05}
    assert tune(tmp_path / "a", **call).results["epochs"] == 3
    recipe = json.loads((tmp_path / "a" / "training.json").read_text())["recipe"]
    assert recipe["warmup_epochs"] == pytest.approx(0.45)
    rate[0] = Speed("float32", False, 40.0)
    again = tune(tmp_path / "a", **call)
    assert again.results["epochs"] == 3
    assert "epochs=3" in again.results["command"]
    with pytest.raises(ValueError, match=r"minutes was 0.05 and is 0.1"):
        tune(tmp_path / "a", epochs=None, minutes=0.1)
    for wrong in ({"minutes": 1.0}, {"epochs": None, "minutes": 0.0}, {"epochs": None, "minutes": float("nan")}):
        with pytest.raises(ValueError, match="minutes is a time above 0, instead of a number of epochs"):
            tune(tmp_path / "c", **wrong)


def test_results_count_the_epochs_until_patience_ended_the_run(tmp_path, monkeypatch):
    accuracies = iter([60.0, 50.0, 40.0])
    monkeypatch.setattr(TrainingState, "validate", lambda self: {"valid_accuracy": next(accuracies), "valid_loss": 1.0})
    found = tune(tmp_path, epochs=9, patience=2).results
    assert (found["selected_epoch"], found["epochs"]) == (1, 3)
    assert tune(tmp_path, epochs=9, patience=2).results["epochs"] == 3  # as it is read again


def test_options_come_before_what_is_measured(tmp_path, capsys):
    images = save_shapes(tmp_path / "images", (6, 6, 6))
    args = ["finetune", "p4_cnn", images, "--output", tmp_path / "out", "--epochs", 1, "--device", "cpu", "--json"]
    assert command_line.main([str(a) for a in [*args, "--precision", "bfloat16", "--channels-last"]]) == 0
    recipe = json.loads((tmp_path / "out" / "training.json").read_text())["recipe"]
    assert (recipe["precision"], recipe["channels_last"]) == ("bfloat16", True)
    assert "precision=bfloat16 channels_last=true" in json.loads(capsys.readouterr().out)["command"]


def test_the_rules_are_those_of_the_network_with_its_arguments(tmp_path):
    """Not of the one that has its name: another group has another augmentation, other patches other sides."""
    tune(tmp_path / "a", model_args={"group": "p4m"}, pretrained=False)
    recipe = json.loads((tmp_path / "a" / "training.json").read_text())["recipe"]
    assert (recipe["augment"], recipe["model_args"]["group"]) == ("affine", "p4m")
    small = {"model_args": {"patch_size": 2, "planes": [16, 32], "depths": [1, 1]}}
    assert make_plan(Request("p4m_convnext_atto", shapes(), tmp_path / "b", size=28, recipe=small)).side == 28
    with pytest.raises(ValueError, match="does not accept images of 30 x 30"):
        make_plan(Request("p4m_convnext_atto", shapes(), tmp_path / "c", size=30, recipe=small))


@pytest.mark.parametrize(
    ("given", "trained", "rate", "decay"),
    [({}, True, 3e-3, 0.75), ({"optimizer": "nmuon"}, True, 2e-2, None), ({}, False, 1e-2, None)],
    ids=str,
)
def test_the_rates_of_trained_networks_of_timm_are_those_of_adamw(given, trained, rate, decay, tmp_path):
    request = Request("test_resnet", shapes(), tmp_path, size=32, invariant="p4", pretrained=False, recipe=given)
    plan = make_plan(request)
    recipe = fine_tuning_recipe(replace(plan, settings={**plan.settings, "start": "a" if trained else None}), {})
    assert (recipe.lr, recipe.layer_decay) == (rate, decay)


def test_weights_of_our_networks_make_no_other_network(tmp_path):
    weights = tmp_path / "digits.safetensors"
    save_model(eqzoo.create_model("p4_cnn", pretrained=True), weights)
    plan = make_plan(Request("p4_cnn", shapes(), tmp_path / "run", weights=weights))
    assert (plan.recipe.model, plan.recipe.augment) == ("p4_cnn", "rotations_shifts")
    ours = eqzoo.create_model("p4_cnn.rotmnist", pretrained=True).state_dict()["stem.conv.weight"]
    assert torch.equal(plan.build().state_dict()["stem.conv.weight"], ours)


def test_an_added_group_keeps_that_of_the_network(tmp_path):
    plan = make_plan(Request("p4_cnn", shapes(), tmp_path / "run", invariant="z2m"))
    assert (plan.blank.group.name, plan.recipe.augment) == ("p4m", "affine")
    images = torch.randint(0, 256, (60, 1, 28, 28), dtype=torch.uint8)
    numbered = {"train": Split(images, torch.arange(60) % 10, ())}
    digits = eqzoo.create_model("p4_cnn", pretrained=True).head.weight
    for invariant in (None, "z2m"):
        built = make_plan(Request("p4_cnn", numbered, tmp_path / "numbered", invariant=invariant)).build()
        assert not torch.equal(built.get_classifier().weight, digits)


@pytest.mark.parametrize("given", [{"lr": 0.5}, {"augment": "none"}, {"ema_decay": 0.9}])
def test_a_classifier_that_is_fitted_at_once_has_no_such_setting(given, tmp_path):
    with pytest.raises(ValueError, match=f"{next(iter(given))} would not change"):
        make_plan(Request("p4_resnet29", _colored(), tmp_path, freeze=True, recipe=given))
    assert make_plan(Request("p4_resnet29", _colored(), tmp_path, freeze=True, recipe=given | {"epochs": 2})).recipe


@pytest.mark.parametrize(("name", "trained"), [("dla46x_c", {"fc"}), ("levit_128s", {"head", "head_dist"})])
def test_classifiers_of_timm_that_are_not_linear_are_not_frozen(name, trained):
    model = timm.create_model(name, num_classes=3)
    frozen = frozen_modules(OrbitNet(model, "z2"), True)
    inside = {child for child, module in model.named_children() if list(module.parameters())}
    assert {child.removeprefix("network.") for child in frozen} == inside - trained


def _colored():
    images = torch.randint(0, 256, (24, 3, 32, 32), dtype=torch.uint8)
    return {"train": Split(images, torch.arange(24) % 2)}
