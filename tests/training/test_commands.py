"""The commands of training/: what they write is what they read, and their errors are of one line."""

import argparse
import dataclasses
import hashlib
import itertools
import json
import shlex
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.data import CATALOG
from eqzoo.engine import Recipe
from eqzoo.engine.recipe import build_network
from eqzoo.engine.run import RunDirectory
from eqzoo.models.load import weights_file
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import evaluate
import train
from common import is_configured, load_recipe, recipe_names, run_name, splits_of


def parsed(words):
    """The recipe of a command, with the classes and channels of a data set of one's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--set", nargs="+", default=[])
    for name, kind in (("seed", int), ("epochs", int), ("dataset", str)):
        parser.add_argument(f"--{name}", type=kind)
    args = parser.parse_args(words)
    recipe = train.changed(load_recipe(args.recipe), args)
    sizes = {} if is_configured(recipe) else {"num_classes": 3, "in_chans": 1}
    return dataclasses.replace(recipe, model_args=sizes | recipe.model_args)


def test_the_command_line_changes_recipes():
    name, started = "z2_se_resnet29.cifar10", ["r8_gsanet_t.rotmnist", "--dataset", "mine.npz"]
    new = parsed([name, "--seed", "3", "--set", "lr=0.5", "optimizer=adam", 'model_args={"width": 8}'])
    assert (new.lr, new.optimizer, new.model_args, new.seed, new.valid_size) == (0.5, "adam", {"width": 8}, 3, 5_000)
    other = parsed([name, "--dataset", "mine.npz"])
    assert (other.dataset, other.valid_size) == ("mine.npz", None)
    assert load_recipe(started[0]).start == "r4_gsanet_t.rotmnist"
    assert [parsed([*started, *more]).start for more in ([], ["--set", "start=r4_gsanet_t"])] == [None, "r4_gsanet_t"]
    with pytest.raises(ValueError, match="a key of a recipe"):
        parsed([name, "--set", "speed=9"])


def test_the_command_of_a_run_gives_its_recipe():
    others = itertools.cycle(CATALOG)
    for name in recipe_names():
        other = next(dataset for dataset in others if dataset != load_recipe(name).dataset)
        fresh = ["start=null"] if load_recipe(name).start_run else []
        rate = [] if load_recipe(name).lr else ["lr=0.5"]  # instead of the weights of the start as they are
        elsewhere = ["--dataset", "cells.npz", "--set", "lr=0.5", *fresh]
        for words in ([], elsewhere, ["--seed", "3", "--set", f"dataset={other}", *fresh, *rate]):
            recipe = parsed([name, *words])
            command = shlex.split(evaluate.arguments_of(recipe, run_name(name, recipe)))
            assert parsed(command) == recipe, (name, words, command)


@pytest.mark.parametrize(
    ("words", "milestones"),
    [
        ([], (200, 250, 300)),
        (["--epochs", "700"], (400, 500, 600)),
        (["--epochs", "7"], (4, 5, 6)),
        (["--epochs", "1"], ()),
        (["--epochs", "7", "--set", "milestones=[2]"], (2,)),
        (["--epochs", "7", "--set", "schedule=cosine", "milestones=[]"], ()),
    ],
    ids=str,
)
def test_milestones_keep_their_shares_of_another_length(words, milestones):
    assert parsed(["p4_allcnn.cifar10", *words]).milestones == milestones


def test_images_of_a_folder_keep_their_channels(tmp_path):
    for mode, name in (("RGB", "stained"), ("L", "gray")):
        for place in ("train/a", "train/b", "test/a", "test/b"):
            (tmp_path / name / place).mkdir(parents=True)
            for number in range(2):
                Image.new(mode, (30, 30)).save(tmp_path / name / place / f"{number}.png")
    args = argparse.Namespace(data_dir=tmp_path, download=False)
    for name, channels in (("stained", 3), ("gray", 1)):
        for network in ("p4_cnn.rotmnist", "p4_resnet29.eurosat"):
            recipe = dataclasses.replace(load_recipe(network), dataset=name, valid_size=0)
            splits = splits_of(recipe, args)
            assert splits["train"].shape[0] == train.fitted(recipe, splits).model_args["in_chans"] == channels
        recipe = dataclasses.replace(recipe, model_args={"in_chans": 4 - channels})
        assert splits_of(recipe, args)["train"].shape[0] == 4 - channels


def test_images_of_another_data_set_say_the_classes(tmp_path):
    """Those of the network's own data set would name them otherwise."""
    labels = np.arange(8) % 4
    images = {f"x_{part}": np.zeros((8, 40, 40, 1), np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "radio.npz", **images, y_train=labels, y_test=labels)
    recipe = dataclasses.replace(load_recipe("z2_cnn.rotmnist"), dataset="radio", valid_size=0)
    splits = splits_of(recipe, argparse.Namespace(data_dir=tmp_path, download=False))
    assert splits["train"].shape == (1, 28, 28)
    assert not is_configured(recipe)
    model = build_network(train.fitted(recipe, splits))
    assert model.num_classes == 4
    assert not model.pretrained_cfg.get("label_names")


def test_a_run_shorter_than_its_epochs_at_half_size_has_fewer_of_them():
    name = "p4_asc_resnet29.cifar10"
    assert [parsed([name, "--epochs", str(epochs)]).half_size_epochs for epochs in (42, 6, 5, 1)] == [5, 5, 0, 0]


def test_a_recipe_without_its_teachers():
    name = "p4_asc_resnet29.cifar10"
    assert (parsed([name]).teachers, parsed([name]).teacher_weight) != ((), 0.5)
    assert (parsed([name, "--set", "teachers=[]"]).teachers) == ()
    with pytest.raises(ValueError, match=r"teacher_weight should be 0\.5 without teachers"):
        parsed([name, "--set", "teachers=[]", "teacher_weight=0.7"])


@pytest.mark.parametrize(
    ("words", "folder", "name"),
    [
        (["p4_resnet18.cifar100", "--dataset", "cifar10"], "p4_resnet18.cifar100", "p4_resnet18.cifar10"),
        (["p4_cnn.rotmnist", "--dataset", "rotmnist_original"], "p4_cnn.rotmnist", "p4_cnn.rotmnist_original"),
        (["p4_cnn.rotmnist_paper", "--seed", "1"], "p4_cnn.rotmnist_paper", "p4_cnn.rotmnist_paper"),
        (["p4_cnn.rotmnist", "--dataset", "cells.npz"], "p4_cnn.cells", "p4_cnn.cells"),
        (["p4_cnn.rotmnist", "--set", "model=p4_convnext_atto"], "p4_cnn.rotmnist", "p4_convnext_atto.rotmnist"),
    ],
)
def test_a_run_is_named_after_its_own_network_and_data_set(words, folder, name):
    recipe = parsed(words)
    assert run_name(folder, recipe) == run_name(words[0], recipe) == name
    assert parsed(shlex.split(evaluate.arguments_of(recipe, name))) == recipe


@pytest.fixture
def images(tmp_path):
    """A folder of images without any for the test."""
    for label in "ab":
        (tmp_path / "cells" / "train" / label).mkdir(parents=True)
        for n in range(8):
            pixels = np.full((28, 28), 20 * n, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "cells" / "train" / label / f"{n}.png")
    return tmp_path


@pytest.fixture
def run(tmp_path):
    """A finished run, whose weights are the initial ones."""
    torch.set_default_dtype(torch.float32)
    recipe = Recipe("p4_cnn", "cells", 1, model_args={"width": 2, "num_classes": 2, "in_chans": 1})
    run = RunDirectory(tmp_path / "run")
    run.start(recipe, {}, {"architecture": "p4_cnn"}, {})
    weights = weights_file(eqzoo.create_model("p4_cnn", **recipe.model_args).state_dict())
    run.save_weights(weights)
    digest = hashlib.sha256(weights).hexdigest()
    run.append_row({"epoch": 1, "valid_accuracy": 50.0, "seconds": 1.0, "weights_sha256": digest})
    return run


def test_without_test_images_there_is_nothing_to_evaluate(images, run, capsys):
    torch.set_default_dtype(torch.float32)
    words = ["p4_cnn.rotmnist", "--dataset", "cells", "--data-dir", str(images), "--output", str(images / "trained")]
    train.main([*words, "--device", "cpu", "--workers", "0", "--epochs", "1", "--set", "batch_size=4"])
    assert capsys.readouterr().out == "trained; there are no test images\n"
    (images / "notes").mkdir()
    (images / "notes" / "plan.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"notes holds other files \(plan\.txt\); name a new folder"):
        train.main([*words[:-1], str(images / "notes"), "--set", "batch_size=4"])
    shutil.rmtree(images / "cells" / "train" / "b")
    with pytest.raises(SystemExit, match="cells has images of one class; two or more are needed"):
        train.main([*words[:-1], str(images / "other"), "--set", "batch_size=4"])
    shutil.copytree(images / "cells" / "train" / "a", images / "cells" / "train" / "b")
    with pytest.raises(SystemExit, match="cells has no test images to evaluate on"):
        evaluate.main([str(run.path), "--data-dir", str(images)])


def test_a_fine_tuning_keeps_the_results_of_its_own_images(run):
    values = json.loads(run.training.read_text())
    run.training.write_text(json.dumps(values | {"data": "cells", "input_size": [1, 14, 14]}))
    (run.path / "results.json").write_text("{")
    with pytest.raises(SystemExit, match="run is a fine-tuning"):
        evaluate.main([str(run.path), "--device", "cpu"])
    assert (run.path / "results.json").read_text() == "{"


def test_what_is_wrong_with_a_run_is_said_in_one_line(run):
    run.weights.unlink()
    with pytest.raises(SystemExit, match=r"No such file.*model\.safetensors"):
        evaluate.main([str(run.path), "--device", "cpu"])
