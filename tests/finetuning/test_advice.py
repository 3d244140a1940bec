"""The advice of a fine-tuning: what the images, the time and the results call for."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.data import Split, native_sides
from eqzoo.data.brightness import dark_images
from eqzoo.engine.recipe import Recipe
from eqzoo.engine.speed import Speed
from eqzoo.finetuning import advice
from eqzoo.finetuning.advice import advice_after, advice_before, advice_on_time
from tests.cli.commands import run
from tests.finetuning.plans import plan_of
from tests.finetuning.shapes import shape, shapes


def before(splits, name="p4_cnn", inner=(), trained_side=None, augment="user's", **more):
    """The advice before training; the augmentation is the user's, unless it is given as None."""
    given = {} if augment is None else {"augment": "shifts"}
    recipe = Recipe(name, "own", epochs=1, augment="shifts")
    start = "weights" if trained_side else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "folders_in_classes", lambda _: list(inner))
        return advice_before(
            plan_of(splits, name, start=start, image_side=trained_side, recipe=recipe, given=given, **more)
        )


def after(metrics, training_accuracy, valid_accuracy, recipe, reflections=False, minutes=None):
    plan = plan_of(shapes(), "p4m_cnn" if reflections else "p4_cnn", recipe=recipe, minutes=minutes)
    return advice_after(plan, metrics, training_accuracy, valid_accuracy)


def split_of(*counts):
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    images = torch.randint(0, 256, (len(labels), 1, 28, 28), dtype=torch.uint8)
    return Split(images, labels, tuple("abcdef"[: len(counts)]))


def test_advice_on_images():
    fine = {"train": split_of(40, 60), "valid": split_of(9, 9)}
    assert before(fine, native=(28, 28)) == []
    (few,) = before(fine | {"train": split_of(19, 60)})
    assert few == "fewer than 20 training images of 'a' (19): add images"
    few_drawn = {"train": split_of(19, 60), "valid": split_of(3, 15), "test": split_of(1, 1)}
    (few,) = before(few_drawn, drawn=["valid", "test"], test_fraction=0.1)
    assert few.endswith("add images, or hold out fewer with --valid 0.1")
    (nested,) = before(fine, inner=["p1", "p2", "p3", "p4"])
    assert nested == (
        "class folders hold folders of images ('p1', 'p2', 'p3', ...): the classes are the outer folders ('a', 'b')"
    )
    (nested,) = before(fine, drawn=["valid"], inner=["p1"])
    assert nested.endswith("if one is a patient or a slide, keep it in one: --split-by folder (split_by='folder')")
    for name, lines in (("z2_cnn", 1), ("z2m_gsanet_b", 1), ("p4_cnn", 0)):
        assert len(before(fine, name=name, augment=None)) == lines
        assert before(fine, name=name) == []  # as the user has chosen it
    rare = {"train": split_of(20, 200)}
    (imbalance,) = before(rare)
    assert "'b' has 10 times the images of 'a'" in imbalance
    assert "--balance" in imbalance
    assert before(rare, balance=True) == []
    (larger,) = before(fine, native=(300, 300))
    assert "300 pixels a side and are scaled to 28" in larger
    assert "--size 56, which takes about 4.0 times as long" in larger
    assert before(fine, native=(41, 41)) == []  # 41 x 41 is refused
    (slightly,) = before(fine, native=(40, 40))
    assert "40 pixels a side and are scaled to 28: if details matter, try --size 40" in slightly


def test_advice_that_would_change_nothing_is_not_given():
    fine = {"train": split_of(40, 60), "valid": split_of(9, 9)}
    assert "try --size 56" in before(fine, native=(56, 56))[0]
    assert before(fine, native=(56, 56), trained_side=56) == []  # as the weights were trained
    assert before(fine, drawn=["test"], inner=["p1"], split_by="folder") == []
    assert before(fine, drawn=["test"], inner=["p1"], split_by=r"p\\d")


def test_advice_on_images_of_which_some_are_dark():
    split = split_of(100, 100)
    assert not dark_images(split.images).any()
    split.images[1] = 0  # black, not dark
    split.images[3] //= 16  # 12-bit numbers in files of 16 bits
    assert dark_images(split.images).nonzero().flatten().tolist() == [3]
    assert before({"train": split}) == []  # one of 200
    split.images[8] //= 16
    (mixed,) = before({"train": split})
    assert mixed.startswith("2 of the 200 training images are dark: 99.9 % of their pixels are below 32 of 255")
    split.images[8] += 31
    assert before({"train": split}) == []


def test_advice_on_images_whose_ends_are_cut_off():
    fine = {"train": split_of(40, 60)}
    (cut,) = before(fine, native=(28, 34))
    assert cut.startswith(
        "most images have about 28 x 34 pixels, and the network sees their central squares: about 18 % of each"
    )
    assert "PIL.ImageOps.pad" in cut
    assert before(fine, native=(28, 29)) == []
    _, larger = before(fine, native=(180, 220))
    assert larger.startswith("the images have 180 pixels a side")
    (cut,) = before(fine, native=(180, 220), size=28)
    assert "central squares" in cut


def test_names_of_files_may_tell_their_sources():
    def said(names, **options):
        labels = torch.tensor(["abc".index(name[0]) for name in names])
        images = torch.arange(len(names)).expand(1, 28, 28, -1).permute(3, 0, 1, 2).byte()
        train = Split(images, labels, ("a", "b", "c"))
        splits = {"train": replace(train, files=tuple(names))}
        found = before(splits, **({"drawn": ["test"]} | options))
        return [line for line in found if "names of files" in line]

    slides = [f"{kind}/slide{n}_{i:03d}.png" for kind in "ab" for n in range(3) for i in range(10)]
    (line,) = said(slides)
    assert "(3 sources of 60 images: " in line
    assert "the sources are slide0, slide1, ..." in line
    (pattern,) = re.findall(r"--split-by '(.*?)'", line)
    assert {re.search(pattern, name.partition("/")[2])[1] for name in slides} == {"slide0", "slide1", "slide2"}
    assert said(slides, split_by=pattern) == []
    assert said(slides, drawn=[]) == []
    assert said(slides, inner=["slide0"]) == []
    assert pattern in said([*slides, "a/other.png"])[0]
    # The slide is the second number, the magnification the third, and one of them may be meant.
    both = [
        f"{k}/SOB_{k}-14-{n}AB-{m}-{i:03d}.png" for k in "ab" for n in (22, 23, 24) for m in (40, 100) for i in range(5)
    ]
    assert re.findall(r"(\d+) sources", said(both)[0]) == ["6", "12"]
    for form in ("{p}_idx5_x{x}_y51_class0", "case{p}_x{x}_y{x}", "case{p} [x={x},y=0,w=256]", "UID_{p}_{p}_{i}_all",
                 "IMG_{p}_jpg.rf.{i}a1b2c3", "clip{p}_frame{x:04d}", "P{p:03d}_2021-03-0{i}_L", "slide{p}.{x:04d}",
                 "cell{p}_rot{x}", "IMG_{p:04d} ({i})"):  # fmt: skip
        names = [f"{'ab'[(p + i) % 2]}/{form.format(p=p, i=i, x=50 * i)}.png" for p in range(12) for i in range(1, 7)]
        assert "12 sources of 72 images" in said(names)[0], form
    for names in (
        [f"{kind}/{i}.png" for kind in "ab" for i in range(30)],
        [f"{kind}/Highway_{i}.jpg" for kind in "ab" for i in range(30)],
        [f"{kind}/{'abc'.index(kind)}_{i}.png" for kind in "abc" for i in range(30)],  # the number of the class
        [f"{kind}/slide{kind}{n}_1.png" for kind in "ab" for n in range(30)],  # an image of each
        [f"{kind}/slide{n}_{i}.png" for kind in "ab" for n in range(2) for i in range(10)],  # two
    ):
        assert said(names) == [], names[0]


def test_sources_in_several_splits_of_ones_own_are_told():
    def said(names, inner=()):
        labels = torch.tensor(["abc".index(name[0]) for name in names])
        images = torch.arange(len(names)).expand(1, 28, 28, -1).permute(3, 0, 1, 2).byte()
        half = Split(images, labels, ("a", "b", "c"))
        splits = {
            "train": replace(half, files=tuple(f"train/{name}" for name in names)),
            "test": replace(half, files=tuple(f"test/{name}" for name in names), images=images + 100),
        }
        return [line for line in before(splits, inner=inner) if "in several splits" in line]

    patients = [f"{kind}/patient{n}_{i}.png" for kind in "ab" for n in range(4) for i in range(10)]
    (line,) = said(patients)
    assert "images of 4 of 4 sources are in several splits" in line
    assert "patient0" in line
    assert "patient0" not in line.published
    for numbered in (
        [f"{kind}/{i}.png" for kind in "ab" for i in range(40)],  # the same numbers in each folder
        [f"{kind}/{'abc'.index(kind)}_{i}.png" for kind in "abc" for i in range(40)],  # the class in each name
    ):
        assert said(numbered) == [], numbered[0]
    folders = [name.replace("_", "/") for name in patients]
    (line,) = said(folders, inner=["patient0", "patient1"])
    assert "images of 4 inner folders are in several splits" in line
    assert said([name.replace("/", "/images/") for name in patients], inner=["images"]) == []


def test_a_classifier_that_is_fitted_is_not_told_to_augment():
    plain = {"name": "z2_resnet29", "augment": None}
    splits = {"train": split_of(40, 60), "valid": split_of(9, 9)}
    assert any("--augment" in line for line in before(splits, **plain))
    assert before(splits, freeze=True, **plain) == []


def test_copies_across_splits_and_classes_are_told():
    splits = {"train": split_of(30, 30), "valid": split_of(9, 9), "test": split_of(9, 9)}
    assert before(splits) == []
    image = splits["train"].images[7]
    splits["valid"].images[3] = image.rot90(1, (1, 2))
    splits["test"].images[15] = image.flip(2)
    splits["test"].images[2] = splits["valid"].images[5].rot90(2, (1, 2))
    leaked, classes = before(splits)
    assert leaked.startswith("at least 3 validation or test images are copies of images in another split")
    assert "test image 2" in leaked
    assert "validation image 3" in leaked
    assert classes.startswith("at least 2 pairs of copies are in two classes, such as training image 7 and test")


def test_advice_on_the_result():
    recipe = Recipe("p4_cnn", "own", epochs=5, augment="shifts")
    fine = {"classes": [{"name": "a", "images": 2}, {"name": "b", "images": 2}], "confusion": [[1, 1], [0, 2]]}
    assert after(fine, 95.0, 93.0, recipe) == []
    (missed,) = after(fine | {"confusion": [[2, 0], [2, 0]]}, 95.0, 93.0, recipe)
    assert missed == "never predicted: 'b': try --balance, or train for longer with --epochs 10 and another --output"
    (collapsed,) = after(fine | {"confusion": [[2, 0], [2, 0]]}, 55.0, 50.0, recipe)
    other = "try a lower learning rate such as --lr 0.0001, --balance or more --epochs, with another --output"
    assert collapsed == f"'a' is the only class ever predicted: {other}"
    weighted = replace(recipe, class_weights=(1.0, 1.0))
    (collapsed,) = after(fine | {"confusion": [[2, 0], [2, 0]]}, 55.0, 50.0, weighted)
    assert "--balance" not in collapsed
    (over,) = after(fine, 99.0, 85.0, recipe)
    assert "99.0 % on training and 85.0 % on validation images" in over
    for augment, way in (
        ("shifts", ", or, if that keeps their classes, augment them more with --augment affine"),
        ("affine", ", or, if that keeps their classes, augment them more with --augment affine_color"),
        ("affine_color", ""),
    ):
        (over,) = after(fine, 99.0, 85.0, replace(recipe, augment=augment))
        assert over.endswith(f"add images{way}")
    (under,) = after(fine, 70.0, 72.0, recipe, minutes=2.5)
    assert "longer with --minutes 5 and" in under
    (under,) = after(fine, 70.0, 45.0, recipe)
    assert "--epochs 10" in under
    (under,) = after(fine, 70.0, 72.0, recipe)
    assert "train for longer with --epochs 10" in under
    names = {"p4m_cnn": "p4_cnn", "p4m_resnet44": "p4_resnet_m", "z2m_gsanet_b": "z2_gsanet_b", "cells": "p4_resnet_m"}
    names["orbitnet"] = "--invariant p4"
    for name, other in names.items():
        *_, reflected = after(fine, 70.0, 72.0, replace(recipe, model=name), True)
        assert reflected.startswith(f"{name} gives an image and its reflection the same prediction")
        assert reflected.endswith(f" {other}")
        one = fine | {"confusion": [[2, 0], [2, 0]]}
        assert len(after(one, 55.0, 50.0, replace(recipe, model=name), True)) == 2
        assert len(after(one, 55.0, 50.0, replace(recipe, model=name))) == 1
        assert after(fine, 95.0, 93.0, replace(recipe, model=name), True) == []
    assert after(fine, 99.0, None, recipe) == []
    assert after(fine, 94.9, 100.0, recipe) == []


def test_advice_and_settings_are_printed_and_stand_in_the_report(tmp_path, capsys):
    for number, name in enumerate("abbbbb" * 12):
        (folder := tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(shape("ab".index(name), number, 60)).resize((60, 80)).save(folder / f"{number}.png")
    args = ["finetune", "p4_cnn", tmp_path / "images", "--output", tmp_path / "out", "--epochs", 1, "--device", "cpu"]
    code, out, err = run(capsys, *args, "--set", 'lr_factors={"head.*": 3.0}')
    card, advice = ((tmp_path / "out" / name).read_text() for name in ("README.md", "results.json"))
    advice = json.loads(advice)["advice"]
    assert code == 0
    for text in ("--balance", "about 60 x 80 pixels", "60 pixels a side and are scaled to 28", "images of 'a' (8)"):
        assert any(text in line for line in advice), text
    assert all(f"advice: {line}" in out and f"eqzoo: {line}" in err and line in card for line in advice[:4])
    assert 'channels_last false, lr_factors {"head.*": 3.0}' in err
    assert '| lr_factors | {"head.*": 3.0} |' in card


def test_images_without_contents_are_told():
    splits = {"train": split_of(30, 30)}
    splits["train"].images.fill_(7)
    said = before(splits)
    assert any(line.startswith("all pixels of all training images are 7, so there is nothing to") for line in said)
    splits["train"].images[0, 0, 0, 0] = 8
    said = before(splits)
    assert not any("nothing to learn" in line for line in said)


def test_a_network_with_reflections_that_does_not_fit_is_told_of_them(tmp_path):
    """The whole way: the group of the network decides, here of one of which the name does not tell it."""
    splits = {"train": split_of(12, 12), "valid": split_of(6, 6), "test": split_of(6, 6)}  # noise, in one step
    for group, told in (("p4m", True), ("p4", False)):
        call = {"epochs": 1, "lr": 1e-6, "batch_size": 24, "device": "cpu", "pretrained": False}
        found = eqzoo.finetune("p4_cnn", splits, tmp_path / group, model_args={"group": group}, **call)
        assert any("an image and its reflection" in line for line in found.results["advice"]) is told


def test_advice_on_a_time_in_which_few_epochs_fit():
    splits = {"train": Split(torch.zeros(600, 3, 64, 64, dtype=torch.uint8), torch.arange(600) % 3)}
    slow = Speed("float32", False, 2.0)  # 300 s an epoch
    assert advice_on_time(plan_of(splits, "p4m_resnet29.eurosat", speed=slow)) == []
    assert advice_on_time(plan_of(splits, "p4m_resnet29.eurosat", speed=slow, minutes=25.0)) == []
    (line,) = advice_on_time(plan_of(splits, "p4m_resnet29.eurosat", speed=slow, minutes=5.0))
    name, side, allowed = re.search(r"; (\S+) --size (\d+) allows about (\d+)", line).groups()
    pairs = ((name, int(side)), ("p4m_resnet29", 64))
    cost = [eqzoo.multiply_adds(eqzoo.create_model(n, in_chans=3), (3, s, s)) for n, s in pairs]
    assert int(allowed) == int(cost[1] / cost[0]) > 2
    (line,) = advice_on_time(plan_of(splits, "p4m_resnet29.eurosat", speed=slow, minutes=1e-6))
    assert "--size) take less time" in line


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
