"""The commands of training/: what they write is what they read, and their errors are of one line."""

import argparse
import dataclasses
import itertools
import shlex
import sys
from pathlib import Path

import pytest

from eqzoo.data import DATASETS
from eqzoo.engine import FinishedRun
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import evaluate
import publish
import train
from common import is_own, load_recipe, recipe_names, run_name


def parsed(words):
    """The recipe of a command, with the classes and channels of a data set of one's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--set", nargs="+", default=[])
    for name, kind in (("seed", int), ("epochs", int), ("dataset", str)):
        parser.add_argument(f"--{name}", type=kind)
    args = parser.parse_args(words)
    recipe = train.changed(load_recipe(args.recipe), args)
    sizes = {"num_classes": 3, "in_chans": 1} if is_own(recipe.dataset) else {}
    return dataclasses.replace(recipe, model_args=sizes | recipe.model_args)


def test_the_command_of_a_run_gives_its_recipe():
    others = itertools.cycle(DATASETS)
    for name in recipe_names():
        other = next(dataset for dataset in others if dataset != load_recipe(name).dataset)
        for words in ([], ["--dataset", "cells.npz", "--set", "lr=0.5"], ["--seed", "3", "--set", f"dataset={other}"]):
            recipe = parsed([name, *words])
            command = shlex.split(evaluate.arguments_of(FinishedRun(Path("runs") / name / "seed0", recipe, [])))
            assert parsed(command) == recipe, (name, words, command)


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
    run = FinishedRun(Path("runs") / folder / "seed0", parsed(words), [])
    assert evaluate.name_of(run) == name
    assert parsed(shlex.split(evaluate.arguments_of(run))) == run.recipe
    assert run_name(words[0], run.recipe) == name


def test_a_checkpoint_of_another_data_set_is_not_published_under_a_longer_name(tmp_path):
    recipe = dataclasses.asdict(parsed(["p4_resnet18.cifar100", "--dataset", "cifar10"]))
    results = {"checkpoint": "p4_resnet18.cifar100", "dataset": {"name": "cifar10"}, "recipe": recipe}
    with pytest.raises(SystemExit, match="is of the data set cifar10"):
        publish._check_ours(results, tmp_path)
