"""A fine-tuned timm network, made invariant, as the teacher of a network of this package."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import eqzoo
from eqzoo.data import Split, complete_splits, read_images
from eqzoo.data.hashes import image_codes
from eqzoo.engine import RunDirectory
from eqzoo.finetuning.advice import _seen
from eqzoo.finetuning.plan import Request, make_plan
from tests.finetuning.plans import plan_of

SETTINGS = {"epochs": 1, "precision": "float32", "channels_last": False, "workers": 0}


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """Images of 40 x 40 pixels, and a teacher that was trained on them at 32 x 32."""
    folder = tmp_path_factory.mktemp("teachers")
    generator = np.random.default_rng(0)
    for number, name in enumerate(("red", "green")):
        (folder / "images" / name).mkdir(parents=True)
        for index in range(20):
            pixels = generator.integers(0, 60, (40, 40, 3), dtype=np.uint8)
            pixels[5 : 15 + index, 10:25, number] += 150
            Image.fromarray(pixels).save(folder / "images" / name / f"{index}.png")
    torch.set_default_dtype(torch.float32)
    torch.save(timm.create_model("test_efficientnet").state_dict(), folder / "weights.pth")
    eqzoo.finetune(
        "test_efficientnet",
        folder / "images",
        folder / "teacher",
        invariant="p4m",
        weights=folder / "weights.pth",
        size=32,
        test_fraction=0.2,
        **SETTINGS,
    )
    return folder


def student(taught, output, images="images", **options):
    settings = {"size": 28, "test_fraction": 0.2} | SETTINGS | options
    return eqzoo.finetune("p4_cnn", taught / images, output, pretrained=False, **settings)


def test_a_student_learns_what_the_teacher_predicts_at_its_own_size(taught, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(RunDirectory, "save_array", lambda self, path, found: kept.append(torch.from_numpy(found)))
    options = {"teachers": [str(taught / "teacher")], "teacher_weight": 0.7}
    result = student(taught, tmp_path / "student", **options)
    _, found = kept  # behind the codes of the training images
    teacher = eqzoo.evaluation.load_predictor(taught / "teacher", "cpu")
    expected = {
        side: teacher.logits(complete_splits(read_images(taught / "images", side), None, 0.2)["train"]).softmax(1)
        for side in (32, 28)
    }
    torch.testing.assert_close(found, expected[32], rtol=0, atol=1e-5)
    assert (found - expected[28]).abs().max() > 1e-4  # negative control
    assert result.results["distilled"]
    assert not any("teacher" in line for line in result.results["advice"])
    recipe = json.loads((tmp_path / "student" / "training.json").read_text())["recipe"]
    assert recipe["teachers"] == options["teachers"]


def test_a_teacher_that_was_trained_on_held_out_images_is_told(taught, tmp_path):
    result = student(taught, tmp_path / "student", test_fraction=0.3, teachers=[str(taught / "teacher")])
    (line,) = (line for line in result.results["advice"] if line.startswith("the teacher"))
    assert "of the 18 validation and test images" in line


def test_a_frozen_network_that_is_taught_is_trained_in_epochs():
    splits = {"train": Split(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4) % 2)}
    for given, fits in ({}, True), ({"teachers": ["teacher"]}, False):
        assert plan_of(splits, "z2_resnet29", freeze=True, given=given).fits_classifier is fits


def test_copies_of_training_images_are_not_counted_as_those_of_a_teacher():
    """They are in the images themselves, and told as such; the other held-out image counts."""
    images = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 1, 4, 4).contiguous()
    labels = torch.zeros(3, dtype=torch.int64)
    splits = {"train": Split(images[:2], labels[:2]), "test": Split(images[1:], labels[1:])}
    assert _seen(lambda: splits, image_codes(splits["train"])) == ""
    assert _seen(lambda: splits, image_codes(Split(images, labels))).startswith("1 of the 2 ")


def test_a_teacher_sees_the_images_that_were_given(tmp_path):
    """Not those that were scaled down for the student, enlarged again."""
    images = torch.randint(256, (8, 1, 56, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plan = make_plan(Request("p4_cnn", {"train": Split(images, torch.arange(8) % 2)}, tmp_path, size=28))
    assert plan.splits["train"].shape == (1, 28, 28)
    seen = plan.images_at(56)
    parts = [part.images for part in seen.values()]
    assert torch.equal(torch.cat(parts).sort(0)[0], images.sort(0)[0])
