"""Data sets, image files, preprocessing and augmentation."""

import hashlib
import math
import multiprocessing
import os
import pickle
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from eqzoo.data import (
    AUGMENTATIONS,
    Split,
    Streamed,
    augment,
    batches,
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
from eqzoo.data.arrays import hdf5
from eqzoo.data.external import _names, _read, hub_set
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


def test_amat_files_are_transposed(tmp_path, monkeypatch):
    monkeypatch.setattr("eqzoo.data.rotated_mnist.ROTMNIST_SIZES", {"train": 3, "valid": 2, "test": 4})
    monkeypatch.setattr("eqzoo.data.rotated_mnist.AMAT_ROWS", {"train_valid": 5, "test": 4})
    digits = np.random.RandomState(0).randint(0, 256, (9, 28, 28))
    rows = np.array([[*(digit.T.ravel() / 256), i % 10] for i, digit in enumerate(digits)])
    for part, some in (("train_valid", rows[:5]), ("test", rows[5:])):
        np.savetxt(tmp_path / f"mnist_all_rotation_normalized_float_{part}.amat", some, "%.8g")
    splits = rotmnist_from_amat(tmp_path)
    read = torch.cat([split.images for split in splits.values()])[:, 0]
    assert np.array_equal(read.numpy(), digits)
    assert [split.labels.tolist() for split in splits.values()] == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    np.savetxt(tmp_path / "mnist_all_rotation_normalized_float_test.amat", rows[5:8])
    with pytest.raises(ValueError, match=r"\(3, 785\)"):
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
    with pytest.raises(ValueError, match="3 validation images"):
        load_splits("gray.npz", tmp_path, valid_size=2)
    # Arrays of other names are not read, such as of Python objects, and names may be bytes.
    save_npz(tmp_path / "more.npz", notes=np.array([{}], dtype=object), label_names=np.array([b"cat", b"dog", b"cow"]))
    assert load_splits("more.npz", tmp_path)["test"].classes == ("cat", "dog", "cow")
    assert native_sides(tmp_path / "more.npz") == (8, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": np.arange(18) % 3 + 1}, "those of train go from 1 to 3"),
        ({"y_train": np.arange(18) % 3 - 1}, "from -1 to 1"),
        ({"y_test": np.full(6, 7)}, "those of test go from 7 to 7"),
        ({"y_test": np.full(5, 1)}, r"each of 6 images, got int64 \(5,\)"),
        ({"y_train": np.arange(18) / 3}, "labels are integers"),
        ({"y_train": np.full((18, 3), 1)}, r"got int64 \(18, 3\)"),
        ({"y_train": np.array(["a", 1] * 9, dtype=object)}, "mine.npz cannot be read"),
        ({"label_names": ["cat", "dog", "cow", "pig"]}, "3 classes have different names.* 'pig'"),
        ({"label_names": ["cat", "dog", "cat"]}, "different names"),
        ({"label_names": np.array("cat")}, "different names"),
        ({"x_valid": np.zeros((3, 8, 8, 3), np.uint8)}, "x_valid"),
        ({"x_val": np.zeros((3, 8, 8, 3), np.uint8), "y_val": np.zeros(3, int)}, "x_val, y_val"),
        ({"x_train": np.zeros((18, 8, 8, 3))}, "uint8.* got float64"),
        ({"x_train": np.zeros((18, 3, 8, 8), np.uint8)}, "if channels come first"),
        ({"x_train": np.zeros((18, 12, 8, 8), np.uint8)}, "if channels come first"),
        ({"x_train": np.zeros((18, 8), np.uint8)}, "uint8.* got uint8"),
        ({"x_train": np.zeros((18, 9, 9, 3), np.uint8)}, "images of one size"),
        ({"x_test": np.zeros((0, 8, 8, 3), np.uint8), "y_test": np.zeros(0, int)}, "images of one size"),
    ],
)
def test_npz_files_with_other_contents_are_errors(tmp_path, changes, message):
    save_npz(tmp_path / "mine.npz", **changes)
    with pytest.raises(ValueError, match=message):
        load_splits("mine.npz", tmp_path)


@pytest.mark.parametrize("name", ["yours.npz", "cifar10", "rotmnist"])
def test_a_data_set_that_is_missing(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="--data-dir"):
        load_splits(name, tmp_path)


def test_a_file_in_place_of_a_data_set_and_suffixes_in_upper_case(tmp_path):
    save_npz(tmp_path / "mine.npz")
    (tmp_path / "mine.npz").rename(tmp_path / "mine.NPZ")
    assert len(read_images(tmp_path / "mine.NPZ", 8)["train"]) == len(load_splits("mine.NPZ", tmp_path)["train"]) + 1
    assert len(labeled_images(tmp_path / "mine.NPZ", 8, 3)[0]) == 6
    assert native_sides(tmp_path / "mine.NPZ") == (8, 8)
    save_npz(tmp_path / "cifar10.npz")
    assert len(load_splits("cifar10", tmp_path)["test"]) == 6
    for name, part in (("cifar10", None), ("eurosat", "test")):
        images, labels = np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 2
        np.savez(tmp_path / f"{name}.npz", **{f"x_{part or 'train'}": images, f"y_{part or 'train'}": labels})
        assert labeled_images(name, 8, 3, data_dir=tmp_path)[1] == part
    assert {*read_images("CIFAR10", 8, data_dir=tmp_path)} == {"train"}


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


def save_images(root, *names, side=8):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (side, side)).save(root / name)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.png"], "the layout of .* has the folders: none"),
        (["train/a/0.png", "test/b/0.png"], "test has images of the classes: 'b'; train has: 'a'"),
        (["train/a/0.png", "test/a/0.png", "test/b/0.png"], "classes: 'a', 'b'; train has: 'a'"),
        (["train/a/0.png", "test/0.png"], "test has images of the classes: none"),
        (["train/a/0.png", "training/a/0.png"], "has the folders train and training for the same images"),
        (["val/a/0.png", "development/a/0.png"], "has the folders: 'development', 'val'"),
        (["valid/0.png", "invalid/0.png"], "'valid' is the name of a part of the images"),  # of good and bad parts
        (["train/a/0.png", "valid/0.png"], "'valid' is the name of a part of the images"),
        (["bus/north/0.png", "train/north/0.png"], "has the folders: 'bus', 'train'"),  # a train is a vehicle too
        (["cat/train/0.png", "cat/Test/0.png", "dog/train/0.png"], "has the folders: 'cat', 'dog'"),
        (["cat/train/0.png", "dog/test/0.png", "bird/0.png"], "has the folders: 'bird', 'cat', 'dog'"),
        (["mine/train/a/0.png", "mine/test/a/0.png"], "has the folders: 'mine'"),  # one folder too high
    ],
)
def test_folders_whose_layout_is_not_clear_are_errors(tmp_path, names, message):
    save_images(tmp_path / "mine", *names)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_images(tmp_path / "mine", 8)


@pytest.mark.parametrize(
    ("names", "classes", "count"),
    [
        (["a/0.png", "b/0.png", "c/.0.png", "overview.png"], ("a", "b"), 2),  # an empty class folder is none
        (["cat/patient1/0.png", "cat/Test/0.png", "dog/train/0.png"], ("cat", "dog"), 3),  # all may be patients
        (["cat/0.png", "dog/train/0.png", "dog/test/0.png"], ("cat", "dog"), 3),  # in one of the classes alone
        (["train/a/0.png", "val/a/0.png", "previews/north/0.png"], ("a",), 2),
        (["Training/a/0.png", "VALIDATION/a/0.png", "Testing/a/0.png"], ("a",), 3),
        (["a/0.png", "a/.ipynb_checkpoints/0.png", "a/__MACOSX/0.png", ".trash/0.png"], ("a",), 1),
        (["a/0.png", "@eaDir/0.png", "#recycle/0.png", "lost+found/0.png", "$RECYCLE.BIN/0.png"], ("a",), 1),
        (["a/0.png", "a/@eaDir/0.png/thumbnail.png", "System Volume Information/0.png"], ("a",), 1),
    ],
)
def test_layouts_of_folders(tmp_path, names, classes, count):
    root = tmp_path / ".hidden" / "mine"  # hidden folders above the data set do not matter
    save_images(root, *names)
    splits = read_images(root, 8)
    assert (splits["train"].classes, sum(map(len, splits.values()))) == (classes, count)


def test_a_class_may_be_called_as_a_split(tmp_path):
    """A train is a vehicle."""
    save_images(tmp_path, "train/car/0.png", "train/train/0.png", "Test/car/0.png", "Test/train/0.png", side=9)
    assert read_images(tmp_path, 8)["test"].classes == ("car", "train")
    images, part = labeled_images(tmp_path, 8, 1)
    assert (part, images.classes, images.labels.tolist()) == ("test", ("car", "train"), [0, 1])
    assert images.files == ("Test/car/0.png", "Test/train/0.png")
    assert native_sides(tmp_path, "test") == (9, 9)


def test_names_of_classes_are_equal_in_either_form_of_unicode(tmp_path):
    """Archives of macOS have e and an accent for é."""
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    save_images(tmp_path, f"train/{composed}/0.png", "train/cafz/0.png", "test/cafz/0.png", "test/cafz/1.png")
    save_images(tmp_path, *(f"test/{name}/{i}.png" for i, name in enumerate((composed, decomposed))))
    splits = read_images(tmp_path, 8)
    for split, labels in ((splits["train"], [0, 1]), (splits["test"], [0, 0, 1, 1])):
        assert (split.classes, split.labels.tolist()) == (("cafz", composed), labels)
    assert [file.split("/")[1] for file in splits["test"].files] == ["cafz", "cafz", decomposed, composed]


def test_numbered_classes_have_the_order_of_their_numbers(tmp_path):
    names = ["0", "1", "2", "10", "a"]
    save_images(tmp_path, *(f"{name}/0.png" for name in names))
    assert read_images(tmp_path, 8)["train"].classes == tuple(names)


def test_a_folder_whose_name_is_no_text_is_named(tmp_path):
    save_images(tmp_path, "a/0.png", "b/0.png")
    latin = os.fsdecode(b"Pl\xe4ttchen")
    (tmp_path / latin).mkdir()
    assert read_images(tmp_path, 8)["train"].classes == ("a", "b")  # it is empty
    save_images(tmp_path, f"{latin}/0.png")
    with pytest.raises(ValueError, match=r"the class folder 'Pl\\udce4ttchen' .* not UTF-8: rename it"):
        read_images(tmp_path, 8)


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


def test_too_little_memory_is_no_fault_of_the_files(tmp_path, monkeypatch):
    """The files were named as unreadable, with the advice to remove them."""
    save_folder(tmp_path / "mine", [("train", 18)])

    def full(*_):
        raise MemoryError("cannot allocate 9 GiB")

    monkeypatch.setattr("eqzoo.data.images.pixels", full)
    with pytest.raises(MemoryError, match="9 GiB"):
        read_images(tmp_path / "mine", 8)


def test_links_to_a_folder_around_them_add_no_images(tmp_path):
    save_folder(tmp_path / "mine")
    other = (tmp_path / "mine" / "train").rename(tmp_path / "elsewhere")
    (tmp_path / "mine" / "train").symlink_to(other)  # one that leads elsewhere is read
    (other / "class 0" / "all").symlink_to(tmp_path)
    (other / "class 0" / "own").symlink_to(other / "class 0")
    (other / "class 0" / "around").symlink_to(tmp_path / "mine")  # around its link, not around itself
    splits = read_images(tmp_path / "mine", 8)
    assert {name: len(split) for name, split in splits.items()} == {"train": 18, "valid": 6, "test": 6}


@pytest.mark.parametrize("limit", [2**31, 0], ids=["memory", "streamed"])
def test_files_that_cannot_be_read_are_named(tmp_path, monkeypatch, limit):
    monkeypatch.setattr("eqzoo.data.folder.MEMORY_LIMIT", limit)
    save_folder(tmp_path)
    (tmp_path / "val" / "class 1" / "001.png").write_text("no image")
    (tmp_path / "train" / "class 0" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    pages = [Image.fromarray(np.full((28, 28), 9 * i, np.uint8)) for i in range(3)]
    pages[0].save(tmp_path / "test" / "class 0" / "stack.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match=r"3 of 32 files .*gone\.png.*001\.png.*stack\.tif: it holds several images"):
        read_images(tmp_path, 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streamed_image_that_breaks_is_named_in_one_line(tmp_path, monkeypatch, workers):
    monkeypatch.setattr("eqzoo.data.folder.MEMORY_LIMIT", 0)
    save_folder(tmp_path)
    split = read_images(tmp_path, 8)["train"]
    file = tmp_path / "train" / "class 1" / "004.png"
    file.write_bytes(file.read_bytes()[:70])
    with pytest.raises(ValueError, match=r"^[^\n]*004\.png is not an image that Pillow can read: [^\n]*$"):
        list(batches(split, [torch.tensor([0]), torch.tensor([split.read.files.index(file)])], workers))
    assert multiprocessing.active_children() == []


def test_splits_are_checked():
    split = Split(torch.zeros(3, 1, 8, 6, dtype=torch.uint8), torch.arange(3), ("a", "b", "c"))
    check({"train": split, "valid": replace(split, classes=()), "test": split}, "mine")
    for message, splits in {
        "splits are train and possibly valid and test, got train, val": {"train": split, "val": split},
        "got test": {"test": split},
        r"got images torch\.float32 \(3, 1, 8, 6\)": {"train": replace(split, images=split.images.float())},
        r"labels torch\.int32 \(3,\)": {"train": replace(split, labels=split.labels.int())},
        r"images torch\.uint8 \(2, 1, 8, 6\), labels torch\.int64 \(3,\)": {
            "train": replace(split, images=split.images[1:])
        },
        "and 1 files": {"train": replace(split, files=("a",))},
        "those of test are 'b', 'a', 'c', those of train 'a'": {
            "train": split,
            "test": replace(split, classes=("b", "a", "c")),
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            check(splits, "mine")
    assert repr({"test": split[:1]}) == "{'test': Split(1 image of 1 x 8 x 6, 3 named classes)}"
    assert replace(split, files=("x", "y", "z"))[torch.tensor([2, 0])].files == ("z", "x")


def test_labels_and_names_of_torchvision_and_the_hub(capsys):
    assert _names([("crane", "bird"), ("crane",), ("heron", "egret")]) == ("crane, bird", "crane", "heron")
    assert _names(["a", "b"]) == ("a", "b")
    assert _names([("crane",), ("heron",), ("crane",)]) == ("crane (0)", "heron", "crane (2)")
    images = [(Image.new("L", (8, 8)),)] * 2
    read = _read("mine", {"train": (images, np.arange(2)), "test": (images, [-1, -1])}, 0, ("a", "b"), 8, None)
    assert (read.keys(), read["train"].shape, read["train"].labels.tolist()) == ({"train"}, (1, 8, 8), [0, 1])
    assert "mine, test: its images have no labels" in capsys.readouterr().err
    for values in (["a.xml", "b.xml"], [{"boxes": 1}] * 2, [0.5, 1.0]):  # no classes
        with pytest.raises(TypeError, match="integer"):
            _read("mine", {"train": (images, values)}, 0, (), 8, None)


def test_cifar(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    x, _ = labeled(10, side=32)
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        content = {"data": x.transpose(0, 3, 1, 2).reshape(10, -1), "labels": list(range(10))}
        (folder / part).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({CIFAR10.meta["key"]: [str(i) for i in range(10)]}))
    with pytest.raises(FileNotFoundError, match="corrupt"):  # their checksums are those of the real files
        load_splits("cifar10", tmp_path)
    for of in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, of, [[file, None] for file, _ in getattr(CIFAR10, of)])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": None})
    splits = load_splits("cifar10", tmp_path, valid_size=0)
    assert {part: len(split) for part, split in splits.items()} == {"train": 50, "test": 10}
    assert np.array_equal(splits["test"].images.permute(0, 2, 3, 1).numpy(), x)
    assert splits["test"].classes == tuple(map(str, range(10)))


@pytest.mark.parametrize("workers", [0, 1])
def test_other_errors_while_images_are_read_are_not_those_of_a_file(workers):
    def read(index):
        raise RuntimeError("a bug")

    split = Streamed(read, torch.arange(2), torch.arange(2), (1, 8, 8))
    with pytest.raises(ValueError if workers else RuntimeError, match=r"^a bug$"):
        list(batches(split, [torch.arange(2)], workers))


@pytest.mark.parametrize(
    ("module", "read"), [("h5py", lambda: hdf5("x.h5")), ("datasets", lambda: hub_set("me/x", "data", 8))]
)
def test_a_missing_package_is_named_with_its_command(module, read, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install"):
        read()


@pytest.mark.parametrize("limit", [2**31, 0], ids=["memory", "streamed"])
def test_pcam(tmp_path, monkeypatch, limit):
    h5py = pytest.importorskip("h5py")
    monkeypatch.setattr("eqzoo.data.pcam.MEMORY_LIMIT", limit)
    with pytest.raises(FileNotFoundError, match=r"split_train_x\.h5"):
        load_splits("pcam", tmp_path)
    (tmp_path / "pcam").mkdir()
    x, y = labeled(8, classes=2)
    for part in ("train", "valid", "test"):
        stem = tmp_path / "pcam" / f"camelyonpatch_level_2_split_{part}"
        with h5py.File(f"{stem}_x.h5", "w") as of_images, h5py.File(f"{stem}_y.h5", "w") as of_labels:
            of_images["x"], of_labels["y"] = x, y.reshape(-1, 1, 1, 1)
    splits = load_splits("pcam", tmp_path)
    assert list(splits) == ["train", "valid", "test"]
    assert isinstance(splits["train"], Split if limit else Streamed)
    for workers in (0, 1, 2):  # processes that are forked from one that has read the file
        for images in batches(splits["train"], [torch.tensor([3, 1])] * 4, workers):
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), x[[3, 1]])
    assert splits["valid"].labels.tolist() == y.tolist()
    assert splits["valid"].classes == ("normal", "tumor")
    (tmp_path / "pcam" / "camelyonpatch_level_2_split_test_x.h5").write_bytes(b"none")
    with pytest.raises(FileNotFoundError, match=r"pcam cannot be read from .*signature"):
        load_splits("pcam", tmp_path)


def test_draws_are_reproducible():
    split = Split(torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1), torch.arange(60) % 3)
    splits = hold_out({"train": split}, 12)
    assert torch.equal(splits["valid"].images, hold_out({"train": split}, 12)["valid"].images)
    together = torch.cat([splits["train"].images, splits["valid"].images]).flatten()
    assert together.sort().values.tolist() == list(range(60))
    frozen = [3, 1, 48, 37]  # published runs were trained on this draw
    assert splits["valid"].images[:4].flatten().tolist() == frozen
    assert len(hold_out({"train": split})["valid"]) == 6
    for size in (-5, 60):
        with pytest.raises(ValueError, match=f"less than the 60 .* got {size}"):
            hold_out({"train": split}, size)
    few, more = (per_class(split, count) for count in (3, 5))
    assert few.labels.bincount().tolist() == [3, 3, 3]
    assert set(few.images.flatten().tolist()) < set(more.images.flatten().tolist())
    for count in (0, 21):
        with pytest.raises(ValueError, match="at most 20"):
            per_class(split, count)


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


@pytest.mark.parametrize(
    ("name", "size", "most", "mode"),
    [
        ("standard", (9, 12), (4, 4), "constant"),
        ("standard_pad2", (9, 12), (2, 2), "constant"),
        ("shifts", (48, 32), (3, 2), "symmetric"),  # a sixteenth of a side; the image goes on as its reflection
        ("shifts", (9, 12), (1, 1), "symmetric"),
    ],
)
def test_shifts(name, size, most, mode):
    images = torch.randint(1, 256, (256, 2, *size), dtype=torch.uint8)
    numbers = draw(256, torch.Generator().manual_seed(0))
    changed, seen = augment(name, images, numbers), set()
    for i, (flip, down, right, *_) in enumerate(numbers.tolist()):
        top, left = int(down * (2 * most[0] + 1)), int(right * (2 * most[1] + 1))
        padded = np.pad(images[i].numpy(), ((0, 0), (most[0],) * 2, (most[1],) * 2), mode=mode)
        window = padded[:, top : top + size[0], left : left + size[1]]
        assert np.array_equal(changed[i], window[..., ::-1] if mode == "constant" and flip < 0.5 else window)
        seen.add((top, left))
    assert [len(set(each)) for each in zip(*seen, strict=True)] == [2 * m + 1 for m in most]


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
    for name in ("rotations", "quarter_rotations"):
        with pytest.raises(ValueError, match="only square images"):
            augment(name, images[:, :, :4], numbers)


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


def test_augmentation_of_numbers_of_any_range():
    images, numbers = torch.randn(4, 5, 9, 9) * 1e4, draw(4, torch.Generator().manual_seed(0))
    quarter = numbers.clone()
    quarter[:, 3] = 0.25
    assert torch.allclose(augment("rotations", images, quarter), images.rot90(1, (2, 3)), rtol=0, atol=1e-8)
    assert augment("affine", images, numbers).abs().max() > 1e4
    augment("affine_color", images.clamp(-9, 260), numbers)
    with pytest.raises(ValueError, match="changes of color take values in 0 to 255, got -"):
        augment("affine_color", images, numbers)
