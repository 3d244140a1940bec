"""Validation and test images that are drawn by whole sources: patients, slides, scenes."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.data import Split, Streamed, complete_splits, image_sources, labeled_images, source_counts
from tests.cli.commands import run


def split_of(labels, classes=("a", "b", "c")):
    labels = torch.as_tensor(labels)
    return Split(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels, classes)


def sources_in(splits, sources):
    return {part: {sources[int(file)] for file in split.files} for part, split in splits.items()}


@pytest.mark.parametrize(("count", "number"), [(900, 30), (400, 9), (5000, 700)])
def test_each_source_is_whole_in_one_split_and_classes_keep_their_shares(count, number):
    random = np.random.default_rng(number)
    sources = [f"slide {i}" for i in random.integers(0, number, count)]
    train = split_of(random.choice(3, count, p=[0.1, 0.3, 0.6]))
    splits = complete_splits({"train": train}, 0.15, 0.2, sources)
    found = sources_in(splits, sources)
    assert not any(found[a] & found[b] for a, b in (("train", "valid"), ("train", "test"), ("valid", "test")))
    assert sorted(int(file) for split in splits.values() for file in split.files) == list(range(count))
    counted = source_counts(splits, {"train": train}, {"train": sources})
    assert counted == {part: len(names) for part, names in found.items()}
    shares = {part: split.labels.bincount(minlength=3) / train.labels.bincount() for part, split in splits.items()}
    for part, wanted in (("train", 0.65), ("valid", 0.15), ("test", 0.2)):
        assert torch.allclose(shares[part], torch.tensor(wanted), atol=0.12 if number < 30 else 0.06), part
    for part, split in splits.items():  # each image has its label
        assert torch.equal(split.labels, train.labels[[int(file) for file in split.files]]), part
    again = complete_splits({"train": train}, 0.15, 0.2, sources)
    assert all(splits[part].files == again[part].files for part in splits)
    mixed = sources_in(complete_splits({"train": train}, 0.15, 0.2), sources)
    assert mixed["train"] & mixed["test"]  # control: without sources images of one are in several


def test_a_rare_class_has_a_source_in_each_split():
    """Three of 40 sources have the class; it is in all parts, at any numbering of the sources."""
    for first in range(0, 40, 7):
        sources, labels = [], []
        for source in range(40):
            rare = (source - first) % 40 in (0, 13, 25)
            sources += [f"{source:02}"] * 10
            labels += [0] * 9 + [int(rare)]
        splits = complete_splits({"train": split_of(labels, ("often", "rare"))}, 0.15, 0.15, sources)
        assert [int(split.labels.sum()) for split in splits.values()] == [1, 1, 1]


def test_images_that_the_data_has_for_the_test_are_of_no_source():
    """Both are known by their numbers, as those of a .npz file are."""
    sources = [f"patient {i // 6}" for i in range(60)]
    train, own = split_of([i % 2 for i in range(60)]), split_of([0, 1] * 10)
    splits = complete_splits({"train": train, "test": own}, sources=sources)
    counts = source_counts(splits, {"train": train, "test": own}, {"train": sources})
    assert counts.keys() == {"train", "valid"}
    assert sum(counts.values()) == 10


def test_thousands_of_sources_are_divided():
    """As of a pattern that is nearly a file's name: the work for each pair of them would take minutes."""
    train = split_of([i % 3 for i in range(30_000)])
    sources = [str(i // 2) for i in range(30_000)]
    splits = complete_splits({"train": train}, sources=sources)
    assert [len(split) for split in splits.values()] == pytest.approx([21_000, 4_500, 4_500], rel=0.02)


def test_a_division_is_looked_for_in_several_orders():
    """Small cases in which the first order of the sources leads to none, although there is one."""
    counts = np.array([[0, 0, 1], [0, 2, 3], [3, 0, 0], [1, 8, 0], [0, 6, 0], [4, 0, 8]])
    labels, sources = [], []
    for source, row in enumerate(counts):
        for label, count in enumerate(row):
            labels += [label] * count
            sources += [str(source)] * count
    splits = complete_splits({"train": split_of(labels)}, sources=sources)
    assert all(split.labels.unique().tolist() == [0, 1, 2] for split in splits.values())


def test_what_cannot_be_divided_is_said():
    train = split_of([0, 0, 1, 1, 1])
    # Each class has two sources, and every choice of some leaves one class without: a, b, c share p, q, r in a ring.
    ring = split_of([0, 1, 1, 2, 2, 0])
    cases = ((train, "ppppq", 0.15), (train, "pqpqp", 0.15), (train, "ppppp", 0), (ring, "ppqqrr", 0))
    for split, sources, test in cases:
        with pytest.raises(ValueError, match=r"no division of the \d sources into train, .* was found"):
            complete_splits({"train": split}, 0.3, test, list(sources))
    assert complete_splits({"train": train}, 0.4, 0, list("pqpqq")).keys() == {"train", "valid"}
    for shares in ({"valid": 0, "test": 0}, {}):
        whole = {"train": train} if shares else {"train": train, "valid": train, "test": train}
        with pytest.raises(ValueError, match="split_by divides training images into parts, and none is drawn"):
            complete_splits(whole, **shares, sources=list("pqpqp"))


@pytest.fixture
def folder(tmp_path):
    """Patients' folders inside of two classes; the names of files hold a slide."""
    random = np.random.default_rng(0)
    for kind, bright in (("benign", 60), ("tumor", 200)):
        for patient in range(8):
            place = tmp_path / "images" / kind / f"patient{patient}"
            place.mkdir(parents=True)
            for i in range(3):
                pixels = random.integers(bright - 20, bright + 20, (28, 28)).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"slide{patient // 2}_{i}.png")
    return tmp_path / "images"


def test_sources_of_files(folder):
    train = eqzoo.data.read_images(folder, 28)["train"]
    patients = image_sources("folder", folder, train)
    assert patients == [file.split("/")[1] for file in train.files]
    assert len(set(patients)) == 8  # those of both classes are one
    assert set(image_sources(r"slide\d+", folder, train)) == {f"slide{i}" for i in range(4)}
    assert set(image_sources(r"slide(\d+)", folder, train)) == set("0123")
    assert set(image_sources(r"patient\d/slide", folder, train)) == {f"patient{i}/slide" for i in range(8)}
    assert image_sources(r"patient(\d)/slide(\d)", folder, train) == [name[-1] for name in patients]
    assert image_sources(r"patient([0-3])|nt(\d)", folder, train) == [name[-1] for name in patients]
    listed = dict(zip(reversed(train.files), reversed(patients), strict=True))  # in any order
    assert image_sources(listed, folder, train) == patients
    with pytest.raises(ValueError, match=r"source of 1 images, such as 'benign/patient0/slide0_1\.png'"):
        image_sources(listed | {"benign/patient0/slide0_1.png": None}, folder, train)
    with pytest.raises(ValueError, match=r"a dictionary .* got list"):  # whose order would have to be known
        image_sources(patients, folder, train)
    with pytest.raises(ValueError, match=r"split_by .*\*_1"):  # a shell's pattern
        image_sources("*_1", folder, train)
    for pattern in ("benign", "slide3"):
        with pytest.raises(ValueError, match=rf"(48|36) of 48 images have no source .*'{pattern}' finds nothing"):
            image_sources(pattern, folder, train)
    (folder / "tumor" / "alone.png").write_bytes((folder / "tumor" / "patient0" / "slide0_0.png").read_bytes())
    with pytest.raises(ValueError, match=r"1 of 49 images have no source .* tumor/alone"):
        image_sources("folder", folder, eqzoo.data.read_images(folder, 28)["train"])
    (folder / "tumor" / "alone.png").unlink()
    inner = folder.parent / "divided"
    inner.mkdir()
    folder.rename(inner / "train")
    assert image_sources("folder", inner, eqzoo.data.read_images(inner, 28)["train"]) == patients


def test_sources_are_equal_in_either_form_of_unicode(folder):
    """Copies from macOS have u and dots for ü."""
    composed, decomposed = "M\u00fcller", "Mu\u0308ller"
    (folder / "benign" / "patient0").rename(folder / "benign" / composed)
    (folder / "tumor" / "patient0").rename(folder / "tumor" / decomposed)
    train = eqzoo.data.read_images(folder, 28)["train"]
    sources = image_sources("folder", folder, train)
    assert set(sources) == {composed, *(f"patient{i}" for i in range(1, 8))}
    assert image_sources(rf"({decomposed}|patient\d)/", folder, train) == sources
    listed = {file.replace(decomposed, composed): source for file, source in zip(train.files, sources, strict=True)}
    assert image_sources(listed, folder, train) == sources


def test_sources_of_arrays(tmp_path):
    images, labels = np.zeros((12, 28, 28), np.uint8), np.arange(12) % 2
    slides = np.repeat(np.arange(4), 3)
    file = tmp_path / "a.npz"
    np.savez(file, x_train=images, y_train=labels, slide=slides, of_two=slides[:2], objects=slides.astype(object))
    train = eqzoo.data.read_images(file, 28)["train"]
    assert image_sources("slide", file, train) == [str(slide) for slide in slides]
    assert image_sources(slides, {"train": train}, train) == [str(slide) for slide in slides]
    with pytest.raises(ValueError, match=r"no array 'patient' .* has x_train, y_train, slide"):
        image_sources("patient", file, train)
    assert image_sources(list("aabbccddeeff"), {"train": train}, train) == list("aabbccddeeff")
    streamed = Streamed(lambda i: train.images[i], torch.arange(12), train.labels, train.shape)
    parts = complete_splits({"train": streamed}, 0.25, 0, image_sources(slides, {}, streamed))
    assert len({str(slides[int(number)]) for number in parts["valid"].files}) == 1
    for by, data in (
        ("of_two", file),
        ("objects", file),
        ("slide", {"train": train}),
        ("folder", "cifar10"),
        ([1, 2], {"train": train}),
        (set("abcdefghijkl"), {"train": train}),
        ({}, {"train": train}),
        (["a", None] * 6, {"train": train}),
        (np.array([1.0, np.nan] * 6), {"train": train}),
    ):
        with pytest.raises(
            ValueError, match=r"for each of the 12 training images, got|Object arrays|a folder of images alone"
        ):
            image_sources(by, data, train)


def test_fine_tuning_keeps_patients_apart(folder, tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    args = ["finetune", "p4_cnn", folder, "--output", tmp_path / "out", "--epochs", "1", "--split-by", "folder"]
    code, _, said = run(capsys, *args)
    assert code == 0
    line = "he images come from 8 sources (folder), each whole in one split: "
    assert "eqzoo: t" + line in said
    assert "patient or a slide" not in said  # the advice to do so
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (note,) = (note for note in results["notes"] if note.startswith("T" + line))
    assert f"- {note}\n" in (tmp_path / "out" / "README.md").read_text()
    assert "--split-by folder" in results["command"]
    counts = results["sources"]
    assert (sum(counts.values()), sorted(counts)) == (8, ["test", "train", "valid"])
    rows = [row.split(",")[:2] for row in (tmp_path / "out" / "predictions.csv").read_text().splitlines()[1:]]
    patients = {part: {file.split("/")[1] for name, file in rows if name == part} for part, _ in rows}
    assert len(patients) == 2
    assert not set.intersection(*patients.values())
    assert eqzoo.finetune("p4_cnn", folder, tmp_path / "out", epochs=1, split_by="folder").results["images"]
    with pytest.raises(ValueError, match="other"):  # the same run on other images
        eqzoo.finetune("p4_cnn", folder, tmp_path / "out", epochs=1)


def test_sources_in_several_folders_of_ones_own_are_an_error(folder, tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    for part, patients in (("train", "0123"), ("val", "45"), ("test", "67")):
        for kind in ("benign", "tumor"):
            (tmp_path / "own" / part / kind).mkdir(parents=True)
            for patient in patients:
                (folder / kind / f"patient{patient}").rename(tmp_path / "own" / part / kind / f"patient{patient}")
    args = ["finetune", "p4_cnn", tmp_path / "own", "--output", tmp_path / "out", "--epochs", 1, "--split-by", "folder"]
    assert "4 to train, 2 to validate, 2 to test" in run(capsys, *args)[2]
    (tmp_path / "own" / "val" / "tumor" / "patient4").rename(tmp_path / "own" / "val" / "tumor" / "patient1")
    code, _, err = run(capsys, *args)
    assert (code, "'patient1' in train and val" in err) == (2, True)
    shutil.rmtree(tmp_path / "own" / "test")
    without = [*args, "--test", 0]
    assert "'patient1' in train and val" in run(capsys, *without)[2]
    shutil.rmtree(tmp_path / "own" / "val" / "tumor" / "patient1")
    without[4] = tmp_path / "two"
    assert "4 to train, 2 to validate" in run(capsys, *without)[2]


def test_sources_of_a_folder_that_has_test_images_alone(tmp_path):
    for name in ("test/a/p1", "test/a/p2", "test/b/p1"):
        (tmp_path / name).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name / "1.png")
    split, _ = labeled_images(tmp_path, 4, 1)
    assert image_sources("folder", tmp_path, split) == ["p1", "p2", "p1"]
