"""Data sets, image files, preprocessing and augmentation."""

import hashlib
import math
import multiprocessing
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.data import (
    AUGMENTATIONS,
    Split,
    Streamed,
    augment,
    batches,
    channels_found,
    check,
    draw,
    folders_in_classes,
    hold_out,
    labeled_images,
    load_splits,
    native_sides,
    per_class,
    preprocess,
    read_images,
    resized,
    rotmnist,
    rotmnist_from_amat,
)
from eqzoo.data import folder as image_folders
from eqzoo.data.external import _labels, _names
from eqzoo.data.folder import image_folder
from eqzoo.groups import P4M, transform
from tests.digits import rotating


@pytest.mark.parametrize(
    ("every", "sha256"),
    [
        pytest.param(20, "beaf5858227985df98ed33e559e712c2f48632e8bd42a525ac05ea631ead8bbd", id="every twentieth"),
        pytest.param(
            1, "cf98867dc4fc97a824ac439989d7636f3c774c406db73107e9f2ac0aa000be47", marks=pytest.mark.slow, id="all"
        ),
    ],
)
def test_rotmnist_is_the_same_everywhere(mnist_dir, every, sha256):
    with rotating(range(0, 62_000, every)):
        splits = rotmnist(mnist_dir)
    assert {name: len(split) for name, split in splits.items()} == {"train": 10_000, "valid": 2_000, "test": 50_000}
    digest = hashlib.sha256()
    for split in splits.values():
        assert split.images.shape[1:] == (1, 28, 28)
        assert split.images.dtype == torch.uint8
        digest.update(split.images.numpy().tobytes() + split.labels.numpy().tobytes())
    assert digest.hexdigest() == sha256
    pixels = splits["train"].images.double() / 255
    assert every > 1 or (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (0.1314, 0.3025)


def test_rotmnist_uses_no_digit_twice(mnist_dir):
    """Without the rotation, the 62,000 images are distinct MNIST digits, among them all test digits."""
    from torchvision import datasets

    with rotating(()):
        splits = rotmnist(mnist_dir)
    used = torch.cat([split.images for split in splits.values()])[:, 0].numpy()
    train, test = (datasets.MNIST(mnist_dir, train=train).data.numpy() for train in (True, False))
    assert np.array_equal(used[-10_000:], test)
    left = Counter(digit.tobytes() for digit in train)
    left.subtract(digit.tobytes() for digit in used[:-10_000])
    assert min(left.values()) >= 0
    assert left.total() == 8_000


def test_missing_mnist_is_an_error_that_says_where(tmp_path):
    with pytest.raises(FileNotFoundError, match="--data-dir"):
        rotmnist(tmp_path)


def write_amat(path, rows):
    path.write_text("\n".join(" ".join(f"{value:.8g}" for value in row) for row in rows) + "\n")


def test_amat_files_are_transposed(tmp_path, monkeypatch):
    monkeypatch.setattr("eqzoo.data.rotated_mnist.ROTMNIST_SIZES", {"train": 3, "valid": 2, "test": 4})
    monkeypatch.setattr("eqzoo.data.rotated_mnist.AMAT_ROWS", {"train_valid": 5, "test": 4})
    digits = np.random.RandomState(0).randint(0, 256, (9, 28, 28))
    rows = [[*(digit.T.ravel() / 256), i % 10] for i, digit in enumerate(digits)]
    write_amat(tmp_path / "mnist_all_rotation_normalized_float_train_valid.amat", rows[:5])
    with pytest.raises(FileNotFoundError, match=r"float_test\.amat is missing"):
        rotmnist_from_amat(tmp_path)
    write_amat(tmp_path / "mnist_all_rotation_normalized_float_test.amat", rows[5:])
    splits = rotmnist_from_amat(tmp_path)
    read = torch.cat([split.images for split in splits.values()])[:, 0]
    assert np.array_equal(read.numpy(), digits)
    assert [split.labels.tolist() for split in splits.values()] == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    write_amat(tmp_path / "mnist_all_rotation_normalized_float_test.amat", rows[5:8])
    with pytest.raises(ValueError, match="not 4 rows of 784 pixels"):
        rotmnist_from_amat(tmp_path)
    rows[5][0] = 7.0
    write_amat(tmp_path / "mnist_all_rotation_normalized_float_test.amat", rows[5:])
    with pytest.raises(ValueError, match=r"pixels must be in \[0, 1\]"):
        rotmnist_from_amat(tmp_path)


def labeled(count, classes=3, side=8, seed=0):
    random = np.random.RandomState(seed)
    y = np.arange(count) % classes
    return random.randint(0, 256, (count, side, side, 3)).astype(np.uint8), y


def save_npz(path, **changes):
    x, y = labeled(24)
    np.savez(path, **({"x_train": x[:18], "y_train": y[:18], "x_test": x[18:], "y_test": y[18:]} | changes))


def test_npz_files(tmp_path):
    x, _ = labeled(24)
    save_npz(tmp_path / "mine.npz")
    splits = load_splits("mine.npz", tmp_path, valid_size=4)
    assert {name: len(split) for name, split in splits.items()} == {"train": 14, "valid": 4, "test": 6}
    assert splits["train"].shape == (3, 8, 8)
    assert np.array_equal(splits["test"].images.permute(0, 2, 3, 1).numpy(), x[18:])
    save_npz(
        tmp_path / "gray.npz", x_train=x[:18, ..., 0], x_test=x[18:, ..., 0], x_valid=x[:3, ..., 0], y_valid=[0, 1, 2]
    )
    splits = load_splits("gray.npz", tmp_path)
    assert {name: split.images.shape for name, split in splits.items()} == {
        "train": (18, 1, 8, 8),
        "valid": (3, 1, 8, 8),
        "test": (6, 1, 8, 8),
    }
    with pytest.raises(ValueError, match="3 validation images of its own"):
        load_splits("gray.npz", tmp_path, valid_size=2)
    # Arrays of other names are not read, such as of Python objects, and names may be bytes.
    save_npz(tmp_path / "more.npz", notes=np.array([{}], dtype=object), label_names=np.array([b"cat", b"dog", b"cow"]))
    assert load_splits("more.npz", tmp_path)["test"].classes == ("cat", "dog", "cow")
    assert native_sides(tmp_path / "more.npz") == (8, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": np.arange(18) % 3 + 1}, "without gaps; .* from 1 to 3, and 0 is not among them"),
        ({"y_train": np.arange(18) % 3 - 1}, "without gaps"),
        ({"y_train": np.arange(18) % 2 * 2}, "1 is not among them"),
        ({"y_test": np.full(6, 7)}, "labels of test go from 7 to 7"),
        ({"y_test": np.full(5, 1)}, "6 images and 5 labels"),
        ({"y_train": np.arange(18) / 3}, "labels are integers"),
        ({"y_train": np.array(3)}, r"labels are integers, one per image, got int64 \(\)"),
        ({"y_train": np.full((18, 3), 1 / 3)}, r"got float64 \(18, 3\); y\.argmax\(1\) .*docs/own_training\.md"),
        ({"y_train": np.arange(18) % 2 == 0}, r"got bool \(18,\); y\.astype\(np\.int64\) makes"),
        ({"label_names": np.arange(3) / 2}, r"label_names are strings, np\.array\(names, dtype=str\), got float64"),
        ({"label_names": np.array([b"\xe9", b"b", b"c"])}, "label_names are bytes that are no UTF-8"),
        ({"y_train": np.array(["a", "b"] * 9)}, r"np\.unique\(y, return_inverse=True\) makes names and integers"),
        ({"y_train": np.array(["a", 1] * 9, dtype=object)}, "an array of Python objects, which is not read"),
        ({"label_names": ["cat", "dog", "cow", "pig"]}, "4 names for 3 classes, and no images of 'pig'; give"),
        ({"label_names": ["cat", "dog", "cat"]}, "2 of them are named 'cat'; rename them"),
        ({"label_names": ["", "", ""]}, "3 of them are named ''"),
        ({"label_names": ["cat", "dog"]}, "there are 2 names for 3 classes"),
        ({"x_valid": np.zeros((3, 8, 8, 3), np.uint8)}, "has x_valid without y_valid: images and labels belong"),
        ({"y_valid": np.zeros(3, int)}, "has y_valid without x_valid"),
        (
            {"x_val": np.zeros((3, 8, 8, 3), np.uint8), "y_val": np.zeros(3, int)},
            "has x_val, y_val, which would not be",
        ),
        ({"label_names": np.array("cat")}, r"label_names is a list with a name for each class, got <U3 \(\)"),
        ({"x_train": np.zeros((18, 8, 8, 3))}, "images are uint8"),
        ({"x_train": np.zeros((18, 3, 8, 8), np.uint8)}, "channels come last"),
        ({"x_train": np.zeros((18, 9, 9, 3), np.uint8)}, "images have to be of one size"),
        ({"x_test": np.zeros((0, 8, 8, 3), np.uint8), "y_test": np.zeros(0, int)}, "test split has no images"),
    ],
)
def test_npz_files_with_other_contents_are_errors(tmp_path, changes, message):
    save_npz(tmp_path / "mine.npz", **changes)
    with pytest.raises(ValueError, match=message):
        load_splits("mine.npz", tmp_path)


def test_corrupt_npz_files_are_errors(tmp_path):
    save_npz(tmp_path / "mine.npz")
    whole = (tmp_path / "mine.npz").read_bytes()
    for data in (whole[:300], whole[:-40], b"no archive"):
        (tmp_path / "mine.npz").write_bytes(data)
        with pytest.raises(ValueError, match=r"mine\.npz"):
            load_splits("mine.npz", tmp_path)
    np.save(tmp_path / "one.npy", np.zeros((18, 8, 8), np.uint8))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    with pytest.raises(ValueError, match=r"holds a single array, uint8 \(18, 8, 8\), .* numpy\.savez writes x_train"):
        load_splits("one.npz", tmp_path)
    np.savez(tmp_path / "mine.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="x_train, y_train"):
        load_splits("mine.npz", tmp_path)
    with pytest.raises(FileNotFoundError, match="--data-dir"):
        load_splits("yours.npz", tmp_path)


def save_folder(root, parts=(("train", 18), ("val", 6), ("test", 6))):
    x, y = labeled(30)
    for part, count in parts:
        for i in range(count):
            folder = root / part / f"class {y[i]}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[i]).save(folder / f"{i:03}.png")


@pytest.mark.parametrize("limit", [2**31, 0], ids=["memory", "streamed"])
def test_folders_of_images(tmp_path, monkeypatch, limit):
    monkeypatch.setattr("eqzoo.data.folder.MEMORY_LIMIT", limit)
    save_folder(tmp_path / "mine")
    splits = load_splits("mine", tmp_path, input_size=(3, 8, 8))
    assert {name: len(split) for name, split in splits.items()} == {"train": 18, "valid": 6, "test": 6}
    train = splits["train"]
    assert isinstance(train, Split if limit else Streamed)
    assert train.classes == ("class 0", "class 1", "class 2")
    x, y = labeled(30)
    order = np.argsort(y[:18], kind="stable")
    (images,) = batches(train, [torch.arange(18)], workers=2)
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), x[order])
    assert train.labels.tolist() == y[order].tolist()
    (some,) = batches(train[torch.tensor([5, 3, 7])], [torch.tensor([2, 0])])
    assert torch.equal(some, images[[7, 5]])
    assert load_splits("mine", tmp_path, input_size=(1, 12, 6))["test"].shape == (1, 12, 6)


def test_incomplete_folders_are_errors(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileNotFoundError, match="no folder train"):
        load_splits("mine", tmp_path, input_size=(3, 8, 8))
    Image.new("L", (8, 8)).save(tmp_path / "mine" / "a.png")
    with pytest.raises(ValueError, match=r"mine holds images \(a\.png \.\.\.\) without a folder for each class"):
        load_splits("mine", tmp_path, input_size=(3, 8, 8))
    (tmp_path / "mine" / "a.png").unlink()
    save_folder(tmp_path / "mine", [("train", 18), ("test", 6)])
    splits = load_splits("mine", tmp_path, input_size=(3, 8, 8), valid_size=3)
    assert {name: len(split) for name, split in splits.items()} == {"train": 15, "valid": 3, "test": 6}
    with pytest.raises(ValueError, match="pass input_size"):
        load_splits("mine", tmp_path)
    for part in ("train", "test"):  # an empty class folder is none
        (tmp_path / "mine" / part / "class 9").mkdir()
        assert load_splits("mine", tmp_path, input_size=(3, 8, 8))["train"].classes == splits["train"].classes
    Image.new("L", (8, 8)).save(tmp_path / "mine" / "test" / "class 9" / "a.png")
    with pytest.raises(ValueError, match="test has the additional folders 'class 9'; the class folders have to be the"):
        load_splits("mine", tmp_path, input_size=(3, 8, 8))
    shutil.rmtree(tmp_path / "mine" / "test" / "class 9")
    (tmp_path / "mine" / "test" / "class 1").rename(tmp_path / "mine" / "test" / "class one")
    with pytest.raises(ValueError, match="test lacks images of 'class 1' and has the additional folders 'class one'"):
        load_splits("mine", tmp_path, input_size=(3, 8, 8))


def test_folders_inside_of_class_folders_are_found(tmp_path):
    save_folder(tmp_path / "mine", [("train", 18), ("test", 6)])
    assert folders_in_classes(tmp_path / "mine") == []
    (tmp_path / "mine" / "train" / "class 1" / "notes").mkdir()
    (tmp_path / "mine" / "train" / "class 1" / ".hidden").mkdir()
    assert folders_in_classes(tmp_path / "mine") == []  # without images
    for part in ("train", "test"):
        (tmp_path / "mine" / part / "class 0").rename(tmp_path / "mine" / part / "moved")
        (tmp_path / "mine" / part / "class 0").mkdir()
        (tmp_path / "mine" / part / "moved").rename(tmp_path / "mine" / part / "class 0" / f"patient {part}")
    assert folders_in_classes(str(tmp_path / "mine")) == ["patient test", "patient train"]
    assert folders_in_classes(tmp_path / "mine" / "train") == ["patient train"]
    assert folders_in_classes("cifar10") == []


def test_split_folders_by_other_names(tmp_path):
    save_folder(tmp_path / "mine", [("Training", 18), ("VALIDATION", 6), ("Testing", 6)])
    splits = read_images(tmp_path / "mine", 8)
    assert {name: len(split) for name, split in splits.items()} == {"train": 18, "valid": 6, "test": 6}
    assert splits["train"].classes == ("class 0", "class 1", "class 2")
    (tmp_path / "mine" / "Training").rename(tmp_path / "mine" / "development")
    with pytest.raises(ValueError, match="has VALIDATION and Testing beside development; the layout"):
        read_images(tmp_path / "mine", 8)


def test_splits_inside_of_class_folders_are_an_error(tmp_path):
    """They would be read as sources of one class, and test images be trained on."""
    for name in ("cat", "dog"):
        for part in ("train", "Test"):
            (tmp_path / "pets" / name / part).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / "pets" / name / part / "0.png")
    message = r"has folders Test, train inside of cat, dog; the layout is train/<class>/<image>, .* other way"
    with pytest.raises(ValueError, match=message):
        read_images(tmp_path / "pets", 8)
    (tmp_path / "pets" / "bird").mkdir()  # a class without them, or masks
    Image.new("L", (8, 8)).save(tmp_path / "pets" / "bird" / "0.png")
    with pytest.raises(ValueError, match="has folders Test, train inside of cat, dog;"):
        read_images(tmp_path / "pets", 8)
    shutil.rmtree(tmp_path / "pets" / "bird")
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name / "Test").rename(tmp_path / "pets" / name / "patient1")
    assert len(read_images(tmp_path / "pets", 8)["train"]) == 4  # folders of other names too may be patients
    for folder in (tmp_path / "pets" / "cat").iterdir():  # in one of the classes alone
        shutil.move(folder / "0.png", tmp_path / "pets" / "cat" / f"{folder.name}.png")
        folder.rmdir()
    (tmp_path / "pets" / "dog" / "patient1").rename(tmp_path / "pets" / "dog" / "test")
    assert len(read_images(tmp_path / "pets", 8)["train"]) == 4
    for folder in list((tmp_path / "pets" / "dog").iterdir()):  # or without images
        shutil.move(folder / "0.png", tmp_path / "pets" / "dog" / f"{folder.name}.png")
        (tmp_path / "pets" / "cat" / folder.name).mkdir()
    assert len(read_images(tmp_path / "pets", 8)["train"]) == 4


def test_a_folder_too_high_is_an_error_that_names_the_one_below(tmp_path):
    save_folder(tmp_path / "above" / "mine", [("train", 18), ("test", 6)])
    with pytest.raises(ValueError, match=r"above has folders test, train inside of mine;"):
        read_images(tmp_path / "above", 8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"classes": (3, 7)},
            r"classes are names, classes=tuple\(map\(str, names\)\) makes them, \(\) is none; got",
        ),
        ({"classes": np.array(["a", "b"])}, "classes are names"),
        ({"classes": ("a", "a")}, "classes have different names, and several are named 'a'; rename them"),
        ({"files": tuple(map(Path, "abcd"))}, "files are names"),
    ],
)
def test_names_of_a_split_are_names(given, said):
    images = torch.zeros(4, 1, 28, 28, dtype=torch.uint8)
    split = replace(Split(images, torch.arange(4) % 2), **given)
    with pytest.raises(ValueError, match=said):
        check({"train": split}, "mine")
    with pytest.raises(ValueError, match=said):
        eqzoo.evaluate(eqzoo.create_model("z2_cnn", num_classes=2), split)


def test_classes_with_one_synonym_in_common_have_all_of_them():
    assert _names([("crane", "bird"), ("crane",), ("heron", "egret")]) == ["crane, bird", "crane", "heron"]
    assert _names(["a", "b"]) == ["a", "b"]
    assert _names([("crane",), ("heron",), ("crane",)]) == ["crane (0)", "heron", "crane (2)"]


def test_labels_that_are_no_classes_are_refused():
    pairs = [(Image.new("L", (8, 8)), 0)]
    for values in (["a.xml"], [{"boxes": 1}], [Image.new("L", (8, 8))]):
        with pytest.raises(ValueError, match="does not give pairs of one image and one class"):
            _labels(pairs, values, "VOC")


def test_images_without_labels_beside_others_with_labels(tmp_path):
    save_folder(tmp_path / "mine", [("train", 18)])
    (tmp_path / "mine" / "test").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "mine" / "test" / "0.png")
    message = r"test holds images \(0\.png \.\.\.\) without a folder for each class"
    with pytest.raises(ValueError, match=message):
        read_images(tmp_path / "mine", 8)


def test_a_class_that_is_named_as_the_folder_of_training_images(tmp_path):
    for name in ("bus", "car", "train"):  # a train is a vehicle too
        (tmp_path / "vehicles" / name / "north").mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "vehicles" / name / "north" / "0.png")
    with pytest.raises(ValueError, match=r"has train beside bus; the layout"):
        read_images(tmp_path / "vehicles", 8)
    (tmp_path / "vehicles" / "train").rename(tmp_path / "vehicles" / "trains")
    assert read_images(tmp_path / "vehicles", 8)["train"].classes == ("bus", "car", "trains")
    save_folder(tmp_path / "mine", [("train", 18), ("val", 6)])
    shutil.copytree(tmp_path / "vehicles" / "bus", tmp_path / "mine" / "previews")
    assert set(read_images(tmp_path / "mine", 8)) == {"train", "valid"}


@pytest.mark.parametrize(
    ("name", "theirs"), [("cifar10", "CIFAR10"), ("pcam", "PCAM"), ("rotmnist", "MNIST"), ("eurosat", "EuroSAT")]
)
def test_a_download_that_fails_says_why(tmp_path, monkeypatch, name, theirs):
    from torchvision import datasets

    if name == "pcam":
        pytest.importorskip("h5py")

    def failing(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(getattr(datasets, theirs), "__init__", failing)
    with pytest.raises(OSError, match=r"cannot be downloaded .*no route to host.*; try again, or put its"):
        load_splits(name, tmp_path, download=True)


def test_splits_in_python_are_checked():
    split = Split(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.arange(3))
    check({"train": split, "valid": split}, "mine")
    cases = {
        "splits are train and possibly valid and test, got train, val": {"train": split, "val": split},
        "got test": {"test": split},
        r"uint8, 0 to 255; those of train are torch\.float32": {"train": replace(split, images=split.images.float())},
        r"labels are int64 \(n,\); those of train are torch\.int32": {
            "train": replace(split, labels=split.labels.int())
        },
    }
    for message, splits in cases.items():
        with pytest.raises(ValueError, match=message):
            check(splits, "mine")
    for message, wrong in {
        r"those of train are an eqzoo\.data\.Split\(images, labels\), got tuple": (split.images, split.labels),
        r"those of train are of type ndarray; torch\.from_numpy": replace(split, images=split.images.numpy()),
    }.items():
        with pytest.raises(TypeError, match=message):
            check({"train": wrong}, "mine")


def test_classes_have_one_order_in_all_splits():
    """Labels of a test split in another order were counted as wrong."""
    split = Split(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.arange(3), ("a", "b", "c"))
    check({"train": split, "valid": replace(split, classes=()), "test": split}, "mine")
    with pytest.raises(
        ValueError, match="the classes of test are b, a, c, those of train a, b, c; label 0 is the first"
    ):
        check({"train": split, "test": replace(split, classes=("b", "a", "c"))}, "mine")


def test_images_beside_the_class_folders_count_for_nothing(tmp_path):
    x, _ = labeled(20)
    for i in range(18):
        (folder := tmp_path / "mine" / f"class {i % 3}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i, ..., 0]).save(folder / f"{i}.png")
    Image.fromarray(x[18]).resize((50, 60)).save(tmp_path / "mine" / "overview.png")
    assert channels_found(tmp_path / "mine") == (1, [])
    assert native_sides(tmp_path / "mine") == (8, 8)
    (tmp_path / "mine" / "test").mkdir()
    (tmp_path / "mine").rename(tmp_path / "train")
    (tmp_path / "train" / "test").rmdir()
    (tmp_path / "masks").mkdir()
    Image.fromarray(x[19]).save(tmp_path / "masks" / "0.png")
    assert channels_found(tmp_path) == (1, [])
    assert channels_found(tmp_path / "no folder") == (None, [])


def test_a_name_that_is_no_text(tmp_path):
    save_folder(tmp_path / "mine", [("train", 18)])
    (tmp_path / "mine" / "train" / "class 0").rename(tmp_path / "mine" / "train" / os.fsdecode(b"caf\xe9"))
    with pytest.raises(ValueError, match=r"the class folder caf\\udce9 in .* is not UTF-8; rename it"):
        read_images(tmp_path / "mine", 8)


def test_a_link_that_leads_nowhere_is_a_broken_file(tmp_path):
    save_folder(tmp_path / "mine", [("train", 18)])
    (tmp_path / "mine" / "train" / "class 0" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"1 of 19 files cannot be read.*gone\.png"):
        read_images(tmp_path / "mine", 8)


def test_too_little_memory_is_no_fault_of_the_files(tmp_path, monkeypatch):
    """The files were named as unreadable, with the advice to remove them."""
    save_folder(tmp_path / "mine", [("train", 18)])

    def full(*_):
        raise MemoryError("cannot allocate 9 GiB")

    monkeypatch.setattr("eqzoo.data.images.pixels", full)
    with pytest.raises(MemoryError, match="9 GiB"):
        read_images(tmp_path / "mine", 8)


def test_hidden_folders_are_ignored(tmp_path):
    save_folder(tmp_path / "mine", [("train", 18)])
    image = tmp_path / "mine" / "train" / "class 0" / "000.png"
    for place in ("class 0/.ipynb_checkpoints", "class 0/__MACOSX/deeper", "__MACOSX/class 0", ".trash"):
        (folder := tmp_path / "mine" / "train" / place).mkdir(parents=True)
        shutil.copy(image, folder)
    (named := tmp_path / ".hidden").mkdir()
    (tmp_path / "mine").rename(named / "mine")  # hidden folders above the data set do not matter
    train = load_splits("mine", named, input_size=(3, 8, 8), valid_size=0)["train"]
    assert len(train) == 18
    assert train.classes == ("class 0", "class 1", "class 2")


@pytest.mark.parametrize("limit", [2**31, 0], ids=["memory", "streamed"])
def test_folders_with_a_corrupt_image(tmp_path, monkeypatch, limit):
    monkeypatch.setattr("eqzoo.data.folder.MEMORY_LIMIT", limit)
    save_folder(tmp_path / "mine")
    (tmp_path / "mine" / "val" / "class 1" / "001.png").write_text("no image")
    with pytest.raises(ValueError, match=r"1 of 30 files .*001\.png"):
        load_splits("mine", tmp_path, input_size=(3, 8, 8))
    (tmp_path / "mine" / "train" / "class 0" / "000.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 of 30 files cannot be read; .*000\.png \(the file is empty\), .*001\.png"):
        load_splits("mine", tmp_path, input_size=(3, 8, 8))
    (tmp_path / "mine" / "val" / "class 1" / "001.png").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"read \(each: the file is empty\); remove or replace them: [^()]*000\.png, [^()]*001\.png$"
    ):
        load_splits("mine", tmp_path, input_size=(3, 8, 8))


def save_cifar(root, name):
    """Writes files in the format of CIFAR, with ten images each."""
    import pickle

    x, _ = labeled(10, side=32)
    planes = x.transpose(0, 3, 1, 2).reshape(10, -1)
    if name == "CIFAR10":
        folder, key, parts = (
            root / "cifar-10-batches-py",
            "labels",
            [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"],
        )
        meta = ("batches.meta", {"label_names": [str(i) for i in range(10)]})
    else:
        folder, key, parts = root / "cifar-100-python", "fine_labels", ["train", "test"]
        meta = ("meta", {"fine_label_names": [str(i) for i in range(10)]})
    folder.mkdir()
    for part in parts:
        (folder / part).write_bytes(pickle.dumps({"data": planes, key: list(range(10))}))
    (folder / meta[0]).write_bytes(pickle.dumps(meta[1]))
    return x


@pytest.mark.parametrize(("name", "count"), [("CIFAR10", 50), ("CIFAR100", 10)])
def test_cifar(tmp_path, monkeypatch, name, count):
    from torchvision import datasets

    x = save_cifar(tmp_path, name)
    with pytest.raises(ValueError, match="corrupt"):  # their checksums are those of the real files
        load_splits(name.lower(), tmp_path)
    cls = getattr(datasets, name)
    for parts in ("train_list", "test_list"):
        monkeypatch.setattr(cls, parts, [[file, None] for file, _ in getattr(cls, parts)])
    monkeypatch.setattr(cls, "meta", cls.meta | {"md5": None})
    splits = load_splits(name.lower(), tmp_path, valid_size=0)
    assert {part: len(split) for part, split in splits.items()} == {"train": count, "test": 10}
    assert np.array_equal(splits["test"].images.permute(0, 2, 3, 1).numpy(), x)
    assert splits["test"].classes == tuple(map(str, range(10)))
    with pytest.raises(FileNotFoundError, match=f"no {name} in"):
        load_splits(name.lower(), tmp_path / "elsewhere")


def test_an_npz_file_takes_precedence_over_a_data_set(tmp_path):
    save_npz(tmp_path / "cifar10.npz")
    assert len(load_splits("cifar10", tmp_path)["test"]) == 6
    assert len(read_images("CIFAR10", 8, data_dir=tmp_path)["test"]) == 6


def test_suffixes_of_arrays_may_be_in_upper_case(tmp_path):
    save_npz(tmp_path / "mine.npz")
    (tmp_path / "mine.npz").rename(tmp_path / "mine.NPZ")
    assert len(read_images(tmp_path / "mine.NPZ", 8)["train"]) == len(load_splits("mine.NPZ", tmp_path)["train"]) + 1
    assert len(labeled_images(tmp_path / "mine.NPZ", 8, 3)[0]) == 6
    for name, part in (("cifar10", None), ("eurosat", "test")):  # in place of a data set too
        images, labels = np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 2
        np.savez(tmp_path / f"{name}.npz", **{f"x_{part or 'train'}": images, f"y_{part or 'train'}": labels})
        assert labeled_images(name, 8, 3, data_dir=tmp_path)[1] == part
    assert {*read_images("cifar10", 8, data_dir=tmp_path)} == {"train"}
    assert native_sides(tmp_path / "mine.NPZ") == (8, 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streamed_image_that_breaks_is_named_in_one_line(tmp_path, monkeypatch, workers):
    monkeypatch.setattr("eqzoo.data.folder.MEMORY_LIMIT", 0)
    save_folder(tmp_path)
    split = read_images(tmp_path, 8)["train"]
    file = tmp_path / "train" / "class 1" / "004.png"
    place = split.read.files.index(file)

    def message():
        with pytest.raises(ValueError, match="004") as caught:
            list(batches(split, [torch.tensor([0]), torch.tensor([place])], workers))
        return str(caught.value)

    said = "; repair the file, or replace it under the same name: a run on other images starts anew"
    file.write_bytes(file.read_bytes()[:70])
    broken = message()
    assert broken.startswith(f"{file} is not an image that Pillow can read: ")
    assert broken.endswith(said)
    assert "\n" not in broken
    assert multiprocessing.active_children() == []
    file.unlink()
    assert message() == f"[Errno 2] No such file or directory: {str(file)!r}{said}"


def test_a_split_is_told_in_one_line():
    named = Split(torch.zeros(1200, 3, 8, 6, dtype=torch.uint8), torch.zeros(1200, dtype=torch.long), ("a", "b"))
    assert repr(named) == "Split(1,200 images of 3 x 8 x 6, 2 named classes)"
    assert repr({"test": named[:1]}) == "{'test': Split(1 image of 3 x 8 x 6, 2 named classes)}"
    for files in (("a",), ("a",) * 1201):
        with pytest.raises(ValueError, match=r"test has 1,200 images and (1|1,201) files; each image has one"):
            check({"train": named, "test": replace(named, files=files)}, "x")
    some = replace(named, files=tuple(map(str, range(1200))))[torch.tensor([3, 1])]
    assert some.files == ("3", "1")
    streamed = Streamed(lambda place: named.images[place], torch.arange(3), torch.zeros(3), (3, 8, 6))
    assert repr(streamed) == "Streamed(3 images of 3 x 8 x 6, classes without names)"


@pytest.mark.parametrize("workers", [0, 1])
def test_other_errors_while_images_are_read_are_not_those_of_a_file(workers):
    def read(index):
        raise RuntimeError("a bug")

    split = Streamed(read, torch.arange(2), torch.arange(2), (1, 8, 8))
    with pytest.raises(ValueError if workers else RuntimeError, match=r"^a bug$"):
        list(batches(split, [torch.arange(2)], workers))


def the_file_is_opened_anew_in_a_forked_process(reader, x):
    """HDF5 shares the place in a file that is open, with the process that it was inherited from."""
    reader(3)
    inherited = reader.pixels
    child = os.fork()
    if not child:
        try:
            right = torch.equal(reader(5), torch.from_numpy(x[5]).permute(2, 0, 1))
            os._exit(0 if right and not inherited.id.valid and reader.pixels.id.valid else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert reader.pixels is inherited
    assert torch.equal(reader(3), torch.from_numpy(x[3]).permute(2, 0, 1))


@pytest.mark.parametrize("limit", [2**31, 0], ids=["memory", "streamed"])
def test_pcam(tmp_path, monkeypatch, limit):
    h5py = pytest.importorskip("h5py")
    monkeypatch.setattr("eqzoo.data.pcam.MEMORY_LIMIT", limit)
    with pytest.raises(FileNotFoundError, match="no PatchCamelyon"):
        load_splits("pcam", tmp_path)
    (tmp_path / "pcam").mkdir()
    x, y = labeled(8, classes=2)
    for part in ("train", "valid", "test"):
        stem = tmp_path / "pcam" / f"camelyonpatch_level_2_split_{part}"
        with h5py.File(f"{stem}_x.h5", "w") as file:
            file["x"] = x
        with h5py.File(f"{stem}_y.h5", "w") as file:
            file["y"] = y.reshape(-1, 1, 1, 1)
    splits = load_splits("pcam", tmp_path)
    assert list(splits) == ["train", "valid", "test"]
    assert isinstance(splits["train"], Split if limit else Streamed)
    (images,) = batches(splits["train"], [torch.tensor([3, 1])], workers=1)
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), x[[3, 1]])
    if not limit and hasattr(os, "fork"):
        the_file_is_opened_anew_in_a_forked_process(splits["train"].read, x)
    assert splits["valid"].labels.tolist() == y.tolist()
    assert splits["valid"].classes == ("normal", "tumor")
    path = tmp_path / "pcam" / "camelyonpatch_level_2_split_test_x.h5"
    whole = path.read_bytes()
    for array, said in (
        (x.transpose(0, 3, 1, 2), r"test_x.h5: x has images in red, .* got uint8 \(8, 3, \d+, \d+\)"),
        (np.concatenate([x, x], 3), r"uint8 \(n, height, width, 3\); got uint8 \(8, \d+, \d+, 6\)"),
        (x[..., 0], "x has images in red"),
        (x.astype(np.float32), "got float32"),
        (x[:5], "test_x.h5 has 5 images, and camelyonpatch_level_2_split_test_y.h5 8 labels"),
    ):
        with h5py.File(path, "w") as file:
            file["x"] = array
        with pytest.raises(ValueError, match=said):
            load_splits("pcam", tmp_path)
    with h5py.File(path, "w") as file:
        file["images"] = x
    with pytest.raises(ValueError, match=r"test_x.h5 has no array 'x', only 'images'"):
        load_splits("pcam", tmp_path)
    path.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"test_x.h5 is corrupt or has other contents"):
        load_splits("pcam", tmp_path)
    path.write_bytes(whole)
    labels = tmp_path / "pcam" / "camelyonpatch_level_2_split_valid_y.h5"
    for array in (y * 0.9, np.array([b"tumor"] * 8), np.stack([y, y], 1), np.array(1), y + 1):
        with h5py.File(labels, "w") as file:
            file["y"] = array
        with pytest.raises(ValueError, match=r"valid_y.h5: y has the class of each image, integers 0"):
            load_splits("pcam", tmp_path)
    labels.rename(f"{labels}.gz")
    with pytest.raises(FileNotFoundError, match=r"\(camelyonpatch_level_2_split_valid_y.h5 missing; unpack .*_y.h5.gz"):
        load_splits("pcam", tmp_path)


def test_corrupt_mnist(tmp_path):
    from torchvision.datasets import MNIST

    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for url, _ in MNIST.resources:
        (raw / url.removesuffix(".gz")).write_bytes(b"no digits here")
    with pytest.raises(ValueError, match="corrupt"):
        load_splits("rotmnist", tmp_path)


def test_draws_are_reproducible():
    split = Split(torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1), torch.arange(60) % 3)
    splits = hold_out({"train": split}, 12)
    assert torch.equal(splits["valid"].images, hold_out({"train": split}, 12)["valid"].images)
    together = torch.cat([splits["train"].images, splits["valid"].images]).flatten()
    assert together.sort().values.tolist() == list(range(60))
    assert splits["valid"].images[:4].flatten().tolist() == [
        3,
        1,
        48,
        37,
    ]  # frozen: published runs were trained on this draw
    assert len(hold_out({"train": split})["valid"]) == 6
    with pytest.raises(ValueError, match="less than the 60"):
        hold_out({"train": split}, 60)
    few, more = (per_class(split, count) for count in (3, 5))
    assert few.labels.bincount().tolist() == [3, 3, 3]
    assert set(few.images.flatten().tolist()) < set(more.images.flatten().tolist())
    with pytest.raises(ValueError, match="at most 20"):
        per_class(split, 21)


def test_quarter_rotations_are_the_action_of_p4m():
    images = torch.randint(0, 256, (64, 3, 6, 6), dtype=torch.uint8)
    numbers = draw(64, torch.Generator().manual_seed(0))
    changed = augment("quarter_rotations_flips", images, numbers)
    seen = set()
    for old, new, row in zip(images, changed, numbers, strict=True):
        g = int(row[3] * 8)
        assert torch.equal(new, transform(old, P4M, g, "trivial"))
        seen.add(g)
    assert len(seen) == 8
    assert torch.equal(
        augment("quarter_rotations", images, numbers)[0], images[0].rot90(int(numbers[0, 3] * 4), (1, 2))
    )


@pytest.mark.parametrize(("name", "pad"), [("standard", 4), ("standard_pad2", 2)])
def test_reflections_and_shifts(name, pad):
    images = torch.randint(1, 256, (256, 2, 9, 12), dtype=torch.uint8)
    numbers = draw(256, torch.Generator().manual_seed(0))
    changed = augment(name, images, numbers)
    padded = torch.nn.functional.pad(images, (pad,) * 4)
    seen = set()
    for i, (flip, down, right, *_) in enumerate(numbers.tolist()):
        top, left = int(down * (2 * pad + 1)), int(right * (2 * pad + 1))
        window = padded[i, :, top : top + 9, left : left + 12]
        assert torch.equal(changed[i], window.flip(2) if flip < 0.5 else window)
        seen |= {(top, left)}
    assert {top for top, _ in seen} == {left for _, left in seen} == set(range(2 * pad + 1))


@pytest.mark.parametrize("size", [(48, 32), (9, 12)])
def test_shifts_continue_the_image_as_its_reflection(size):
    images = torch.randint(1, 256, (256, 2, *size), dtype=torch.uint8)
    numbers = draw(256, torch.Generator().manual_seed(0))
    changed = augment("shifts", images, numbers)
    most = [max(1, round(side / 16)) for side in size]
    seen = set()
    for i, (_, down, right, *_) in enumerate(numbers.tolist()):
        top, left = int(down * (2 * most[0] + 1)), int(right * (2 * most[1] + 1))
        padded = np.pad(images[i].numpy(), ((0, 0), (most[0],) * 2, (most[1],) * 2), mode="symmetric")
        assert np.array_equal(changed[i], padded[:, top : top + size[0], left : left + size[1]])
        seen |= {(top, left)}
    assert len(seen) == (2 * most[0] + 1) * (2 * most[1] + 1)


def test_cutout_replaces_one_square_by_the_mean_color():
    images = torch.randint(0, 200, (512, 3, 16, 24), dtype=torch.uint8)
    numbers = draw(512, torch.Generator().manual_seed(0))
    before, changed = (augment(name, images, numbers) for name in ("standard", "standard_cutout"))
    rows, columns = torch.arange(16)[None], torch.arange(24)[None]
    tops, lefts = ((numbers[:, 3] * 16).long() - 2)[:, None], ((numbers[:, 4] * 24).long() - 2)[:, None]
    square = ((rows - tops).clamp(0, 3) == rows - tops)[:, :, None] & (
        (columns - lefts).clamp(0, 3) == columns - lefts
    )[:, None]
    square = square[:, None].expand_as(images)
    assert torch.equal(changed[~square], before[~square])
    mean = before.double().mean((2, 3), keepdim=True).expand(before.shape).floor()
    assert (changed[square].double() - mean[square]).abs().max() <= 1
    sizes = square[:, 0].sum((1, 2))
    assert sizes.max() == 16  # a quarter of the shorter side, squared
    assert (sizes < 16).any()  # cut off at an edge
    centers = square[:, 0].float().mean(0)
    assert centers.min() > 0  # anywhere
    assert changed.dtype == torch.uint8


def test_a_rotation_by_90_degrees_after_cutout():
    images = torch.randint(0, 200, (64, 3, 16, 16), dtype=torch.uint8)
    numbers = draw(64, torch.Generator().manual_seed(0))
    before, changed = (augment(f"standard_cutout{more}", images, numbers) for more in ("", "_rotations"))
    turns = (numbers[:, 5] * 4).long()
    assert turns.unique().tolist() == [0, 1, 2, 3]
    for image, rotated, turn in zip(before, changed, turns.tolist(), strict=True):
        assert torch.equal(rotated, image.rot90(turn, (1, 2)))
    with pytest.raises(ValueError, match="only square images"):
        augment("standard_cutout_rotations", images[..., 1:], numbers)


def test_rotations_by_any_angle():
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    numbers = torch.tensor([[0, 0, 0, angle] for angle in (0.0, 0.25, 0.5, 0.1)], dtype=torch.float32)
    changed = augment("rotations", images, numbers)
    torch.testing.assert_close(changed[0], images[0].float(), atol=1e-2, rtol=0)
    quarter = min((changed[1] - images[1].rot90(k, (1, 2))).abs().max() for k in (1, 3))
    assert quarter < 1e-1
    torch.testing.assert_close(changed[2], images[2].rot90(2, (1, 2)).float(), atol=1e-1, rtol=0)
    assert changed.min() >= 0
    assert changed.max() <= 255
    with pytest.raises(ValueError, match="square"):
        augment("rotations", images[:, :, :4], numbers)


def test_affine_maps_flip_rotate_and_shift_and_reflect_at_the_edges():
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    center, half = 0.5, 0.75  # no shift; a shift by half of the largest: one pixel of 32
    rows = [[0.9, center, center, 0.0], [0.3, center, center, 0.0], [0.9, center, center, 0.25], [0.9, half, center, 0]]
    changed = augment("affine", images, torch.tensor([[*row, 0.5, 0.5, 0.5] for row in rows], dtype=torch.float32))
    wanted = images.float()
    torch.testing.assert_close(changed[0], wanted[0], atol=1e-2, rtol=0)
    torch.testing.assert_close(changed[1], wanted[1].flip(2), atol=1e-2, rtol=0)
    assert min((changed[2] - wanted[2].rot90(k, (1, 2))).abs().max() for k in (1, 3)) < 1e-1
    torch.testing.assert_close(changed[3, :, :, :-1], wanted[3, :, :, 1:], atol=1e-2, rtol=0)
    torch.testing.assert_close(changed[3, :, :, -1], wanted[3, :, :, -1], atol=1e-2, rtol=0)  # the edge, reflected
    numbers = draw(64, torch.Generator().manual_seed(0))
    bright = augment("affine", torch.full((64, 1, 32, 32), 255, dtype=torch.uint8), numbers)
    assert bright.min() > 254.9  # no black corners, as "rotations" has
    assert augment("rotations", torch.full((64, 1, 32, 32), 255, dtype=torch.uint8), numbers).min() == 0


def test_rotations_and_shifts_are_the_affine_maps_without_flips():
    images = torch.randint(0, 256, (64, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    numbers = draw(64, torch.Generator().manual_seed(0))
    without, affine = (augment(name, images, numbers) for name in ("rotations_shifts", "affine"))
    flipped = numbers[:, 0] < 0.5
    assert torch.equal(without[~flipped], affine[~flipped])
    assert not any(torch.equal(a, b) for a, b in zip(without[flipped], affine[flipped], strict=True))


def test_half_of_the_affine_maps_move_whole_pixels():
    images = torch.randint(0, 256, (400, 1, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    numbers = draw(400, torch.Generator().manual_seed(0))
    changed = augment("affine", images, numbers)
    whole = (changed - changed.round()).abs().amax((1, 2, 3)) < 1e-2
    assert torch.equal(whole, (2 * numbers[:, 0]) % 1 < 0.5)
    flipped = numbers[:, 0] < 0.5
    assert 60 < (whole & flipped).sum() < 140
    assert 60 < (whole & ~flipped).sum() < 140


def test_colors_change_by_contrast_brightness_and_tint():
    images = torch.randint(60, 160, (1, 3, 8, 8), dtype=torch.uint8)
    same = [0.9, 0.5, 0.5, 0.0]
    # A tint of 0.25: the channels' factors are cosines at a quarter of the period and thirds more.
    tint = 1 + 0.05 * torch.tensor([[[math.cos(2 * math.pi * (0.25 + k / 3))]] for k in range(3)])
    numbers = torch.tensor([[*same, 1.0, 0.0, 0.25]], dtype=torch.float32)
    values = images[0].float()
    wanted = (0.8 * tint * (values.mean() + 1.2 * (values - values.mean()))).float()
    torch.testing.assert_close(augment("affine_color", images, numbers)[0], wanted, atol=2e-2, rtol=0)
    numbers = draw(200, torch.Generator().manual_seed(0))
    changed = augment("affine_color", images.expand(200, -1, -1, -1) // 60 * 127, numbers)
    assert changed.min() >= 0
    assert changed.max() == 255  # clipped


def test_the_first_numbers_of_a_draw_are_those_of_runs_without_color():
    numbers = draw(5, torch.Generator().manual_seed(3))
    assert torch.equal(
        numbers[:, :4], torch.rand(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    )


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_image_is_augmented_by_its_own_numbers_alone(name):
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    numbers = draw(6, torch.Generator().manual_seed(1))
    whole = augment(name, images, numbers)
    assert torch.equal(whole[2:4], augment(name, images[2:4], numbers[2:4]))
    assert torch.equal(whole, images) == (name == "none")


def test_images_of_a_data_set_are_scaled_to_an_input_size(tmp_path):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 8, 8, 3), generator=generator, dtype=torch.uint8).numpy()
    labels = np.array([0, 1, 0, 1])
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    kept, scaled = (load_splits("own.npz", tmp_path, input_size=(3, side, side), valid_size=0) for side in (8, 4))
    assert kept["train"].shape == (3, 8, 8)
    wanted = preprocess(kept["test"].images.float(), (4, 4)).round().to(torch.uint8)
    assert torch.equal(scaled["test"].images, wanted)
    rotated = resized(Split(kept["test"].images.rot90(1, (2, 3)), kept["test"].labels), (4, 4))
    assert torch.equal(rotated.images, wanted.rot90(1, (2, 3)))


def test_no_class_loses_all_its_images_to_validation():
    labels = torch.arange(40) % 2
    order = np.random.RandomState(2016).permutation(40)
    labels[order[0]] = 2  # one of the four that are held out
    split = Split(torch.zeros(40, 1, 4, 4, dtype=torch.uint8), labels)
    with pytest.raises(ValueError, match=r"class 2 has too few images: all 1 would be held out .* valid_size=0"):
        hold_out({"train": split})
    with pytest.raises(ValueError, match="class 'torn' has too few images"):
        hold_out({"train": replace(split, classes=("round", "long", "torn"))})
    assert len(hold_out({"train": split}, 0)["train"]) == 40
    labels[order[-1]] = 2
    assert len(hold_out({"train": split})["train"]) == 36


def test_values_that_are_not_finite_are_counted(tmp_path):
    images = np.ones((4, 9, 9), np.float32)
    for count in (0, 2):
        images[0, 0, :count] = (np.nan, np.inf)[:count]
        np.savez(tmp_path / "a.npz", x_train=images, y_train=np.arange(4))
        with pytest.raises(ValueError, match=r"scale the values: .*\.clip\(0, 255\).* of np\.arcsinh\(x\)") as error:
            read_images(tmp_path / "a.npz", 9)
        assert ("with 2 values that are infinite or not a number" in str(error.value)) is bool(count)


def test_augmentation_of_numbers_of_any_range():
    images, numbers = torch.randn(4, 5, 9, 9) * 1e4, draw(4, torch.Generator().manual_seed(0))
    quarter = numbers.clone()
    quarter[:, 3] = 0.25
    assert torch.allclose(augment("rotations", images, quarter), images.rot90(1, (2, 3)), rtol=0, atol=1e-8)
    assert augment("affine", images, numbers).abs().max() > 1e4
    augment("affine_color", images.clamp(-9, 260), numbers)
    for name, x, rows, said in (
        ("affine_color", images, numbers, "changes of color take values in 0 to 255, got -"),
        (
            "affine",
            images[0],
            numbers[:1],
            r"are \(n, channels, height, width\), .* got \(5, 9, 9\) and \(1, 7\)",
        ),
        ("affine", images, numbers[:3], r"got \(4, 5, 9, 9\) and \(3, 7\)"),
        ("afine", images, numbers, "augmentations are none, standard, .*; got 'afine'"),
    ):
        with pytest.raises(ValueError, match=said):
            augment(name, x, rows)


def test_two_folders_for_one_split_are_an_error(tmp_path):
    save_folder(tmp_path)
    (tmp_path / "training" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="has the folders train and training for the same images; join them"):
        image_folder(tmp_path, (1, 28, 28))


def test_numbers_of_images_that_are_none():
    splits = {"train": Split(torch.zeros(20, 1, 4, 4, dtype=torch.uint8), torch.arange(20) % 2)}
    for size in (-5, 20):
        with pytest.raises(ValueError, match=f"valid_size is at least 0 and less than the 20 .*, got {size}"):
            hold_out(splits, size)
    for count in (-1, 0, 11):
        with pytest.raises(ValueError, match=f"samples_per_class is at least 1 and at most 10, .* got {count}"):
            per_class(splits["train"], count)


def test_a_stack_is_refused_before_the_training_where_images_are_streamed(tmp_path, monkeypatch):
    save_folder(tmp_path)
    pages = [Image.fromarray(np.full((28, 28), 9 * i, np.uint8)) for i in range(3)]
    first = next((tmp_path / "train").rglob("*.png")).with_suffix(".tif")
    pages[0].save(first, save_all=True, append_images=pages[1:])
    monkeypatch.setattr(image_folders, "MEMORY_LIMIT", 0)
    with pytest.raises(ValueError, match="it holds several images"):
        image_folder(tmp_path, (1, 28, 28))
