"""Recipes: typed, complete, and what they say they are."""

import fnmatch
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eqzoo
from eqzoo.engine import Recipe, build_network
from tests.conftest import NETWORKS, ROOT

sys.path.insert(0, str(ROOT / "training"))
from common import input_size, load_recipe, recipe_names, recipe_text
from recipes import asc, e4

BASE = {"model": "p4_cnn", "dataset": "bars", "epochs": 3}


def test_every_row_of_the_papers_that_names_a_data_set_has_a_recipe():
    names = set(recipe_names())
    rows = [row for row in NETWORKS if row["paper"]]
    assert len(rows) >= 73
    for row in rows:
        name = f"{row['name']}.{row['dataset']}"
        assert name in names
        if row["augmented_in_paper"]:
            assert f"{name}_aug" in names
        if (row["dataset"] == "rotmnist" and row["paper"] == "attentive") or name in asc.OURS:
            assert f"{name}_paper" in names


def test_names_say_network_and_data_set_and_texts_are_sentences():
    for name in recipe_names():
        recipe, text = load_recipe(name), recipe_text(name)
        base, variant = f"{recipe.model}.{recipe.dataset}", name.removeprefix(f"{recipe.model}.{recipe.dataset}")
        assert name.startswith(base)
        assert not variant or variant.startswith("_")
        assert recipe.model in eqzoo.list_models()
        assert text.endswith(".")
        assert "  " not in text
        assert "\n" not in text
        assert len(text) > 80, (
            f"the text of {name} says in a few sentences what is done and what differs from the paper"
        )


def test_rates_of_parts_are_those_of_parameters():
    found = 0
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.lr_factors:
            with torch.device("meta"):
                names = [name for name, _ in build_network(recipe).named_parameters()]
            assert all(fnmatch.filter(names, pattern) for pattern in recipe.lr_factors)
            found += 1
    assert found == 3


def test_the_papers_numbers():
    """A few of them, read off the papers again."""
    allcnn = load_recipe("p4m_alpha_f_allcnn.cifar10_aug")
    assert (allcnn.epochs, allcnn.milestones, allcnn.weight_decay) == (350, (200, 250, 300), 1e-3)
    assert [allcnn.rate(epoch) for epoch in (0, 199.9, 200, 250, 350)] == pytest.approx([5e-2, 5e-2, 5e-3, 5e-4, 5e-5])
    assert allcnn == replace(load_recipe("p4m_alpha_f_allcnn.cifar10"), augment="standard")
    cifar = load_recipe("p4_asc_resnet29.cifar100")
    assert [cifar.rate(epoch) for epoch in (0, 5, 10, 49.9, 50, 75)] == pytest.approx([0, 0.05, 0.1, 0.1, 0.01, 0.001])
    deep = replace(cifar, epochs=200, milestones=(100, 150))
    for name in asc.OURS:
        model, _, dataset = name.partition(".")
        assert load_recipe(f"{name}_paper") == replace(deep if "83" in model else cifar, model=model, dataset=dataset)
    assert load_recipe("p4_allcnn.cifar10_aug_paper") == replace(allcnn, model="p4_allcnn")
    for model in e4.TRAINED:
        assert load_recipe(f"{model}.cifar10_paper") == replace(load_recipe("p4m_resnet18.cifar10"), model=model)
    assert load_recipe("p4m_resnet18.cifar10").rate(61) == pytest.approx(0.02)
    pcam = load_recipe("p4m_densenet.pcam")
    assert (pcam.epochs, pcam.lr, pcam.decay_rate, pcam.batch_size) == (100, 1e-3, 0.5, 64)
    assert Recipe(**BASE, lr=1.0, schedule="constant").rate(2.9) == 1
    gsa = load_recipe("r4m_gsanet_s.pcam")
    assert [gsa.rate(epoch) for epoch in (0, 5, 10, 55, 100)] == pytest.approx([0, 0.005, 0.01, 0.005, 0])


def test_networks_are_built_for_their_data_set():
    model = build_network(load_recipe("z2_resnet29.cifar100"))
    assert model.num_classes == 100
    assert model.pretrained_cfg["mean"] == (0.5071, 0.4865, 0.4409)
    assert input_size("z2m_gsanet_b", {}) == (3, 32, 32)
    assert input_size("z2m_gsanet_b", {"in_chans": 1}) == (1, 32, 32)


BAD = {
    "epochs": (0, 1.5, True),
    "lr": ("high", float("nan"), float("inf")),
    "schedule": ("step", "multistep"),
    "milestones": ([2],),
    "warmup_epochs": (3,),
    "optimizer": ("adamm",),
    "augment": ("shift",),
    "precision": ("float16",),
    "label_smoothing": (1.0,),
    "ema_decay": (1.0,),
    "decay_rate": (0.0,),
    "valid_size": (-1,),
    "half_size_epochs": (3,),
    "samples_per_class": (0,),
    "patience": (0,),
    "layer_decay": (2.0,),
    "lr_factors": ({"head.*": 0}, {"head.*": float("nan")}, {"head.*": "half"}, ["head.*"]),
    "class_weights": ([1.0, -1.0],),
    "freeze": ("stem",),
}
TOGETHER = [
    {"schedule": "multistep", "milestones": [2, 1]},
    {"schedule": "multistep", "milestones": [1, 3]},
    {"patience": 3, "valid_size": 0},
    {"cuda_graphs": True, "freeze": ["stem"]},
    {"teacher_weight": 0.7},  # without teachers
    {"teachers": ["a"], "teacher_weight": 0},
    {"teachers": ["a"], "teacher_weight": 1, "label_smoothing": 0.1},  # no share of the labels is left
    {"teachers": ["a"], "teacher_weight": 1, "class_weights": [1.0, 2.0]},
    {"teachers": ["a"], "soft_labels": "a.npy"},
    {"lr": 0.0, "start": "a"},  # for more than one epoch
    {"lr": 0.0, "start": "a", "epochs": 1, "teachers": ["a"]},
    {"lr": 0.0, "start": "a", "epochs": 1, "soft_labels": "a.npy"},
    {"lr": 0.0, "epochs": 1},  # of no start
]


@pytest.mark.parametrize("bad", [{key: value} for key in BAD for value in BAD[key]] + TOGETHER, ids=str)
def test_bad_values_are_refused(bad):
    with pytest.raises(ValueError, match="got"):
        Recipe(**(BASE | bad))


def test_arguments_are_kept_as_json():
    assert Recipe(**BASE, model_args={"depths": (1, 2)}).model_args == {"depths": [1, 2]}
    with pytest.raises(TypeError, match="Group"):
        Recipe(**BASE, model_args={"group": eqzoo.P4})


def test_recipes_start_from_published_checkpoints_and_from_runs_of_other_recipes():
    recipes = {name: load_recipe(name) for name in recipe_names()}
    starts = {recipe.start for recipe in recipes.values() if not recipe.start_run} - {None}
    assert "r4_gsanet_t.rotmnist" in starts
    assert starts <= set(eqzoo.list_pretrained())
    runs = {name: replace(recipe, seed=3).start_run for name, recipe in recipes.items() if recipe.start_run}
    assert runs["p4_e4net.rotmnist"] == Path("runs/p4_e4net.rotmnist_first/seed3")
    for name, folder in runs.items():
        first = recipes[folder.parent.name]
        assert (first.model, first.dataset, first.start) == (recipes[name].model, recipes[name].dataset, None)
