"""Evaluating runs: several seeds, half precision, and the folder of a checkpoint that comes of it."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import eqzoo
from eqzoo.cards import read_checkpoint, render_card
from eqzoo.data import Split
from eqzoo.engine import Recipe
from eqzoo.evaluation import Predictor
from tests.conftest import ROOT
from tests.training.in_process import run_script as script

sys.path.insert(0, str(ROOT / "training"))
import evaluate as evaluation
from common import load_recipe


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of a short run on blobs, which lie in one quarter of the image or in another."""
    folder = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 64), ("test", 40)):
        labels = np.arange(count) % 2
        images = draw.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[9:19, 9:19] += np.uint8(150) * np.uint8(label)
        arrays |= {f"x_{split}": images, f"y_{split}": labels}
    np.savez(folder / "blobs.npz", **arrays)
    for seed in (0, 1):
        options = ["--dataset", "blobs.npz", "--data-dir", ".", "--epochs", "2", "--set", "batch_size=16"]
        ran = script("train", "p4_cnn.rotmnist", *options, "--seed", seed, "--device", "cpu", cwd=folder)
        assert ran.returncode == 0, ran.stderr
        assert "next: python training/evaluate.py" in ran.stdout
    return folder


def evaluate(runs, *arguments):
    return script("evaluate", "--data-dir", ".", "--device", "cpu", *arguments, cwd=runs)


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_seeds_have_their_accuracies_and_the_best_on_validation_images_is_a_checkpoint(runs):
    folders = [runs / "runs" / "p4_cnn.blobs" / f"seed{seed}" for seed in (0, 1)]
    ran = evaluate(runs, *folders, "--rotated", "20")
    assert ran.returncode == 0, ran.stderr
    (written,) = (runs / "runs" / "p4_cnn.blobs").glob("*/results.json")
    logs = [[json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] for folder in folders]
    best = [max(row["valid_accuracy"] for row in rows) for rows in logs]
    assert written.parent.name == f"seed{best.index(max(best))}"
    r = results(written.parent)
    assert len(r["accuracies"]) == 2
    assert r["accuracy"] in r["accuracies"]
    assert sum(map(sum, r["confusion"])) == r["images"]["test"] == 40
    assert r["accuracy_of_rotated_copies"] == [r["accuracy_of_rotated_copies"][0]] * 4
    assert r["same_class_at_all_quarter_rotations"] == 100
    assert r["rotated_images"] == 20
    assert r["equivariance_error"] < 1e-12
    assert r["multiply_adds"] == eqzoo.multiply_adds(eqzoo.create_model("p4_cnn", num_classes=2))
    assert {"epochs=2", "batch_size=16"} <= set(r["command"].split())
    model = eqzoo.create_model(f"local-dir:{written.parent}", pretrained=True)
    assert torch.equal(model.head.weight, load_file(written.parent / "model.safetensors")["head.weight"])
    assert (written.parent / "README.md").read_text() == render_card(read_checkpoint(written.parent))


def test_half_precision_is_what_is_evaluated(runs):
    folder = runs / "runs" / "p4_cnn.blobs" / "seed1"
    assert "--images is 1 or more, got 0" in evaluate(runs, folder, "--images", "0").stderr
    ran = evaluate(runs, folder, "--half", "--images", "12", "--rotated", "5")
    assert ran.returncode == 0, ran.stderr
    rounded = folder.with_name("seed1-half")
    assert results(rounded)["weights_dtype"] == "float16"
    assert sum(map(sum, results(rounded)["confusion"])) == results(rounded)["images"]["test"] == 12
    assert results(rounded)["notes"] == ["12 of the 40 test images were evaluated, drawn with seed 0."]
    half, full = (load_file(place / "model.safetensors") for place in (rounded, folder))
    kept = {name for name, value in half.items() if value.dtype == torch.float32}
    assert kept == {name for name in half if "running_" in name} != set()
    assert torch.equal(half["stem.conv.weight"], full["stem.conv.weight"].half())
    assert eqzoo.create_model(f"local-dir:{rounded}", pretrained=True).head.weight.dtype == torch.get_default_dtype()


def test_a_network_that_has_lost_its_accuracy_is_not_tested():
    torch.manual_seed(0)
    predictor = Predictor.of(eqzoo.create_model("p4_cnn").eval())
    run = SimpleNamespace(rows=lambda: [{"epoch": 1, "valid_accuracy": 90.0}], path="runs/a")
    images = torch.randint(0, 256, (200, 1, 28, 28), dtype=torch.uint8)
    labels = predictor.logits(Split(images, torch.zeros(200, dtype=torch.long))).argmax(1)
    evaluation._check_accuracy(run, predictor, {"valid": Split(images, labels)}, 0, 1.0)
    shifted = {"valid": Split(images, (labels + 1) % 10)}
    with pytest.raises(ValueError, match=r"runs/a recognizes 0.0 % of 200 validation images"):
        evaluation._check_accuracy(run, predictor, shifted, 0, 1.0)


def test_a_run_is_evaluated_with_the_images_that_it_was_trained_on(runs):
    (runs / "other").mkdir()
    arrays = dict(np.load(runs / "blobs.npz"))
    np.savez(runs / "other" / "blobs.npz", **arrays | {"x_train": arrays["x_train"][::-1]})
    ran = script("evaluate", "runs/p4_cnn.blobs/seed0", "--data-dir", "other", "--device", "cpu", cwd=runs)
    assert ran.returncode != 0
    assert "was trained on other images than these" in ran.stderr


def test_results_name_the_checkpoint_that_was_started_from(runs):
    options = ["--dataset", "blobs.npz", "--data-dir", ".", "--epochs", "1", "--output", "started"]
    options += ["--set", "batch_size=16", "start=p4_cnn.rotmnist"]
    assert script("train", "p4_cnn.rotmnist", *options, "--device", "cpu", cwd=runs).returncode == 0
    assert evaluate(runs, "started", "--rotated", "5").returncode == 0
    r = results(runs / "started")
    assert (r["start"], r["base_model"], r.get("distilled")) == ("p4_cnn.rotmnist", "eqzoo/p4_cnn.rotmnist", None)
    training = runs / "started" / "training.json"
    values = json.loads(training.read_text())
    training.write_text(json.dumps(values | {"recipe": values["recipe"] | {"teachers": ["p4_cnn_w19.rotmnist"]}}))
    options = [*options[:-5], "--output", "further", "--set", "batch_size=16", "start=run:started"]
    assert script("train", "p4_cnn.rotmnist", *options, "--device", "cpu", cwd=runs).returncode == 0
    assert evaluate(runs, "further", "--rotated", "5").returncode == 0
    r = results(runs / "further")
    assert (r["base_model"], r["distilled"]) == ("eqzoo/p4_cnn.rotmnist", True)


def test_a_network_that_starts_from_a_distilled_one_of_its_images_is_distilled():
    recipe = load_recipe("p4_asc_resnet83.cifar10")
    assert not recipe.teachers
    assert evaluation._is_distilled(recipe)
    assert not evaluation._is_distilled(dataclasses.replace(recipe, dataset="cifar100"))
    assert not evaluation._is_distilled(load_recipe("z2_resnet83.cifar10"))


def test_what_is_not_a_set_of_seeds_is_refused(runs, tmp_path):
    folder = "runs/p4_cnn.blobs/seed0"
    for arguments in ([tmp_path], ["started", folder]):
        ran = evaluate(runs, *arguments)
        assert ran.returncode != 0
        assert "Traceback" not in ran.stderr


def test_a_start_without_a_tag_is_named_by_the_checkpoint_that_it_loads():
    for start, found in (("p4_cnn", None), (None, None)):  # an earlier one of the same name, none
        assert evaluation._started_from(Recipe("p4_cnn", "rotmnist", epochs=1, start=start)) == found
    recipe = Recipe("p4_allcnn", "own", epochs=1, start="p4_allcnn")
    assert evaluation._started_from(recipe) == "eqzoo/p4_allcnn.cifar10_aug"
    # Weights that are kept learned from other networks if those of the start did.
    for start, distilled in (("r8_gsanet_t", True), ("p4_cnn.rotmnist", False), ("local-dir:mine", False)):
        kept = Recipe("r12_gsanet_t", "rotmnist", epochs=1, lr=0.0, start=start)
        assert evaluation._is_distilled(kept) == distilled


@pytest.mark.parametrize(("name", "expected"), [("p4m_resnet_m.eurosat", "cc-by-nc-4.0"), ("p4_cnn.rotmnist", "mit")])
def test_weights_have_the_license_of_the_registered_checkpoint(name, expected):
    model, _, dataset = name.partition(".")
    assert evaluation.license_of(Recipe(model, dataset, epochs=1)) == expected
