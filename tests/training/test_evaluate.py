"""Evaluating runs: several seeds, half precision, rotations, and the folder of a checkpoint."""

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

import eqzoo
from eqzoo.cards import run_evaluation
from eqzoo.cards.results import _of_epochs as of_epochs
from eqzoo.cards.run_evaluation import _check_accuracy, _rounded, _started_from
from eqzoo.cli import main as command_line
from eqzoo.data import Split
from eqzoo.engine import FinishedRun, Recipe
from eqzoo.evaluation.metrics import predict_split
from tests.conftest import ROOT
from tests.training.in_process import run_script as script


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
    return folder


def results(folder, seed):
    return json.loads((folder / "runs" / "p4_cnn.blobs" / f"seed{seed}" / "results.json").read_text())


def test_the_machine_is_that_of_the_training():
    rows = [{"machine": "one"}, {"machine": "another"}, {"machine": "one"}, {}]
    assert of_epochs(rows, "machine") == "one and another"
    assert not of_epochs(rows, "torch")  # a record of before


def evaluate(runs, *arguments):
    return script("evaluate", "--data-dir", ".", "--curve", "20", "--device", "cpu", *arguments, cwd=runs)


def test_seeds_have_a_mean_and_the_best_on_validation_images_is_evaluated(runs):
    folders = [f"runs/p4_cnn.blobs/seed{seed}" for seed in (0, 1)]
    for folder in folders:  # as if the first epoch had been trained with another version
        record = runs / folder / "log.jsonl"
        record.write_text(record.read_text().replace(f'"timm": "{timm.__version__}"', '"timm": "0.9"', 1))
    ran = evaluate(runs, *folders)
    assert ran.returncode == 0, ran.stderr
    (written,) = (runs / "runs" / "p4_cnn.blobs").glob("*/results.json")
    r = json.loads(written.read_text())
    records = [
        [json.loads(line) for line in (runs / folder / "log.jsonl").read_text().splitlines()] for folder in folders
    ]
    best = [max(row["valid_accuracy"] for row in rows) for rows in records]
    assert written.parent.name == f"seed{best.index(max(best))}"
    assert r["seeds"] == 2
    assert "base_model" not in r
    assert {row["machine"] for rows in records for row in rows} == {r["machine"]}
    assert r["versions"] == {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": f"0.9 and {timm.__version__}",
        "eqzoo": eqzoo.__version__,
    }
    assert len(r["test_errors"]) == 2
    assert r["test_error"] in r["test_errors"]
    assert r["test_error_std"] == pytest.approx(np.std(r["test_errors"], ddof=1), abs=1e-3)
    assert r["test_error_of_rotated_copies"] == [r["test_error"]] * 4
    assert r["rotation_curve"]["angles"] == list(range(0, 360, 15))
    assert r["rotation_curve"]["accuracy"][:6] == r["rotation_curve"]["accuracy"][6:12]
    assert (r["rotation_curve"]["images"], r["rotation_curve"]["sample"]) == (20, "drawn with seed 0")
    assert r["same_class_at_all_quarter_rotations"] == 100
    assert r["equivariance_error"] < 1e-12
    assert r["multiply_adds"] == eqzoo.multiply_adds(eqzoo.create_model("p4_cnn", num_classes=2))
    assert r["throughput"]["images_per_second"] > 0
    assert r["dataset"]["name"] == "blobs.npz"
    assert "training/train.py p4_" in r["command"]
    assert f"--dataset blobs.npz --seed {folders[best.index(max(best))][-1]} --set" in r["command"]
    assert {"epochs=2", "batch_size=16"} <= set(r["command"].split())


def test_rotated_copies_of_some_images_and_the_error_of_all(runs):
    folder = runs / "runs" / "p4_cnn.blobs" / "seed1"
    ran = evaluate(runs, folder)
    assert ran.returncode == 0, ran.stderr
    whole = results(runs, 1)
    ran = evaluate(runs, folder, "--rotated", "7")
    assert ran.returncode == 0, ran.stderr
    r = results(runs, 1)
    assert (r["rotated_images"], whole["rotated_images"]) == (7, 40)
    assert r["test_error"] == whole["test_error"]
    assert len(set(r["test_error_of_rotated_copies"])) == 1
    assert (7 * r["test_error_of_rotated_copies"][0] / 100) == pytest.approx(
        round(7 * r["test_error_of_rotated_copies"][0] / 100), abs=1e-3
    )
    assert "at least 1" in evaluate(runs, folder, "--rotated", "0").stderr


def test_half_precision_is_what_is_evaluated_and_published(runs):
    folder = runs / "runs" / "p4_cnn.blobs" / "seed0"
    ran = evaluate(runs, folder, "--half")
    assert ran.returncode == 0, ran.stderr
    r = results(runs, 0)
    half, full = (load_file(folder / f"model{kind}.safetensors") for kind in (".half", ""))
    assert r["weights_dtype"] == "float16"
    floats = {name: value for name, value in half.items() if value.is_floating_point()}
    kept = {name for name, value in floats.items() if value.dtype == torch.float32}
    assert kept == {name for name in floats if "running_" in name} != set()
    assert {value.dtype for name, value in floats.items() if name not in kept} == {torch.float16}
    assert torch.equal(half["stem.conv.weight"], full["stem.conv.weight"].half())
    output = runs / "published"
    words = ["publish", folder, "--output", output, "--label-names", "dark", "light"]
    assert command_line.main(list(map(str, words))) == 0
    assert json.loads((output / "config.json").read_text())["label_names"] == ["dark", "light"]
    model = eqzoo.create_model("p4_cnn", num_classes=2, checkpoint_path=output / "model.safetensors")
    assert torch.equal(model.state_dict()["stem.conv.weight"].half(), half["stem.conv.weight"])
    assert "Weights" in (output / "README.md").read_text()


def test_parameters_beyond_the_range_of_half_precision_keep_theirs():
    """A variance of 1e5 in float16 is infinite, and the network useless."""
    small, large = torch.tensor([1e-3, 6e4]), torch.tensor([1.0, 1e5])
    assert _rounded(small).dtype == torch.float16
    assert torch.equal(_rounded(large), large)


def test_a_network_that_has_lost_its_accuracy_is_not_tested():
    torch.manual_seed(0)
    model, run = eqzoo.create_model("p4_cnn").eval(), SimpleNamespace(best={"valid_accuracy": 90.0}, folder="runs/a")
    images = torch.randint(0, 256, (200, 1, 28, 28), dtype=torch.uint8)
    labels = predict_split(model, Split(images, torch.zeros(200, dtype=torch.long)), 0)
    _check_accuracy(run, model, {"valid": Split(images, labels)}, 0)
    shifted = {"valid": Split(images, (labels + 1) % 10)}
    with pytest.raises(
        ValueError, match=r"runs/a recognizes 0.0 % of 200 validation images, and its record says 90.0 %; it was not"
    ):
        _check_accuracy(run, model, shifted, 0)
    run.best["valid_accuracy"] = None  # there were no validation images
    _check_accuracy(run, model, shifted, 0)


@pytest.mark.parametrize("check", ["_check_accuracy", "_check_rounding"])
def test_test_images_are_not_evaluated_before_the_checks(runs, monkeypatch, check):
    def fails(*_):
        raise ValueError("the check failed")

    monkeypatch.setattr(run_evaluation, check, fails)
    monkeypatch.setattr(
        run_evaluation, "predict_quarter_rotations", lambda *_: pytest.fail("test images were evaluated")
    )
    ran = evaluate(runs, runs / "runs" / "p4_cnn.blobs" / "seed0", "--half")
    assert ran.returncode == 1
    assert "the check failed" in ran.stderr


def test_rounding_that_changes_predictions_is_an_error(runs, monkeypatch):
    folder = runs / "runs" / "p4_cnn.blobs" / "seed0"
    monkeypatch.setattr(run_evaluation, "_rounded", lambda value: (16 * value).round().half() / 16)
    monkeypatch.setattr(run_evaluation, "_check_accuracy", lambda *_: None)
    ran = evaluate(runs, folder, "--half")
    assert ran.returncode == 1
    assert "to float16 changes the class of" in ran.stderr
    assert "evaluate it without --half" in ran.stderr


def test_a_run_is_evaluated_with_the_images_that_it_was_trained_on(runs):
    (runs / "other").mkdir()
    arrays = dict(np.load(runs / "blobs.npz"))
    np.savez(runs / "other" / "blobs.npz", **arrays | {"x_train": arrays["x_train"][::-1]})
    seeds = [f"runs/p4_cnn.blobs/seed{seed}" for seed in (0, 1)]
    ran = script("evaluate", *seeds, "--data-dir", "other", "--device", "cpu", cwd=runs)
    assert ran.returncode != 0
    assert "was trained on other images than these (the training images differ; the valid" in ran.stderr


def test_results_name_the_checkpoint_that_was_started_from(runs):
    options = ["--dataset", "blobs.npz", "--data-dir", ".", "--epochs", "1", "--output", "started"]
    options += ["--set", "batch_size=16", "start=p4_cnn.rotmnist"]
    ran = script("train", "p4_cnn.rotmnist", *options, "--device", "cpu", cwd=runs)
    assert ran.returncode == 0, ran.stderr
    ran = evaluate(runs, "started")
    assert ran.returncode == 0, ran.stderr
    r = json.loads((runs / "started" / "results.json").read_text())
    assert (r["base_model"], r.get("distilled")) == ("eqzoo/p4_cnn.rotmnist", None)
    before = runs / "started" / "training.json"
    values = json.loads(before.read_text())
    values["recipe"]["teachers"] = ["p4_cnn_w19.rotmnist"]
    before.write_text(json.dumps(values))
    options = [*options[:-5], "--output", "further", "--set", "batch_size=16", "start=run:started"]
    ran = script("train", "p4_cnn.rotmnist", *options, "--device", "cpu", cwd=runs)
    assert ran.returncode == 0, ran.stderr
    ran = evaluate(runs, "further")
    assert ran.returncode == 0, ran.stderr
    r = json.loads((runs / "further" / "results.json").read_text())
    assert (r["base_model"], r["distilled"]) == ("eqzoo/p4_cnn.rotmnist", True)
    before.unlink()
    ran = evaluate(runs, "further")
    assert ran.returncode != 0
    assert "started/training.json of the run before is not here; restore it" in ran.stderr


@pytest.mark.slow
def test_results_name_the_processes_of_the_training(runs):
    options = ["--dataset", "blobs.npz", "--data-dir", ".", "--epochs", "1", "--output", "shared"]
    options += ["--set", "batch_size=16", "--device", "cpu"]
    train = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "training" / "train.py"]
    command = [sys.executable, *train, "p4_cnn.rotmnist", *options]
    ran = subprocess.run(list(map(str, command)), cwd=runs, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert evaluate(runs, "shared").returncode == 0
    assert evaluate(runs, "runs/p4_cnn.blobs/seed1").returncode == 0
    commands = [json.loads((runs / "shared" / "results.json").read_text())["command"], results(runs, 1)["command"]]
    started = [command.partition(" training/train.py ")[0] for command in commands]
    assert started == ["torchrun --nproc_per_node=2", "python"]


@pytest.mark.parametrize(
    ("processes", "started"),
    [
        ([None, None], "python"),
        ([1, 1], "python"),
        ([None, 2], "torchrun --nproc_per_node=2"),
        ([1, 4, 4], "torchrun --nproc_per_node=4"),
        ([2, 1, 1], "python"),
    ],
)
def test_a_run_was_started_as_most_of_its_epochs_say(processes, started):
    """Older records lack the number, and a run may be resumed with another."""
    rows = [{} if count is None else {"processes": count} for count in processes]
    assert FinishedRun(Path("run"), Recipe("p4_cnn", "rotmnist", epochs=len(rows)), rows).launcher == started


def test_what_is_not_a_set_of_seeds_is_refused(runs, tmp_path):
    folder = "runs/p4_cnn.blobs/seed0"
    for arguments, message in (
        ([folder, folder], "have the same seed"),
        ([tmp_path], "No such file"),
        ([folder, "--curve", "0"], "at least 1"),
    ):
        ran = evaluate(runs, *arguments)
        assert ran.returncode != 0
        assert message in ran.stderr
        assert "Traceback" not in ran.stderr


def test_a_start_without_a_tag_is_named_by_the_checkpoint_that_it_loads():
    started = {start: _started_from(Recipe("p4_cnn", "rotmnist", epochs=1, start=start)) for start in ("p4_cnn", None)}
    assert started == {"p4_cnn": None, None: None}  # an earlier one of the same name, none
    recipe = Recipe("p4_allcnn", "own", epochs=1, start="p4_allcnn")
    assert _started_from(recipe) == "eqzoo/p4_allcnn.cifar10_aug"
    assert _started_from(replace(recipe, start="p4_allcnn.cifar10_aug")) == "eqzoo/p4_allcnn.cifar10_aug"
