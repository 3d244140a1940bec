"""Rotated MNIST and picture files."""

import hashlib
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from eqzoo.data import load_picture, normalise, preprocess, rotmnist, rotmnist_from_amat
from eqzoo.groups import P4M, transform
from tests.conftest import ROOT, SHARED

MNIST = SHARED / "data" / "MNIST"


@pytest.fixture(scope="module")
def mnist_dir(tmp_path_factory):
    if not MNIST.is_dir():
        pytest.skip("no MNIST beside the checkout")
    import gzip

    raw = tmp_path_factory.mktemp("data") / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in (MNIST / "raw").glob("*.gz"):
        (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return raw.parents[1]


def test_rotmnist_is_the_same_everywhere(mnist_dir):
    splits = rotmnist(mnist_dir)
    assert {name: len(split) for name, split in splits.items()} == {"train": 10_000, "valid": 2_000, "test": 50_000}
    digest = hashlib.sha256()
    for split in splits.values():
        assert split.images.shape[1:] == (1, 28, 28)
        assert split.images.dtype == torch.uint8
        digest.update(split.images.numpy().tobytes() + split.labels.numpy().tobytes())
    assert digest.hexdigest() == "cf98867dc4fc97a824ac439989d7636f3c774c406db73107e9f2ac0aa000be47"
    pixels = splits["train"].images.double() / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (0.1314, 0.3025)


def test_rotmnist_uses_every_digit_once(mnist_dir, monkeypatch):
    """Without turns, the 62,000 pictures are as many MNIST digits without repetition, all test digits among them."""
    from torchvision import datasets

    monkeypatch.setattr("eqzoo.data._turn", lambda image, angle: image)
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


def test_amat_files_are_read_upright(tmp_path, monkeypatch):
    monkeypatch.setattr("eqzoo.data.ROTMNIST_SIZES", {"train": 3, "valid": 2, "test": 4})
    monkeypatch.setattr("eqzoo.data.AMAT_ROWS", {"train_valid": 5, "test": 4})
    upright = np.random.RandomState(0).randint(0, 256, (9, 28, 28))
    rows = [[*(digit.T.ravel() / 256), i % 10] for i, digit in enumerate(upright)]
    write_amat(tmp_path / "mnist_all_rotation_normalized_float_train_valid.amat", rows[:5])
    with pytest.raises(FileNotFoundError, match=r"float_test\.amat is missing"):
        rotmnist_from_amat(tmp_path)
    write_amat(tmp_path / "mnist_all_rotation_normalized_float_test.amat", rows[5:])
    splits = rotmnist_from_amat(tmp_path)
    read = torch.cat([split.images for split in splits.values()])[:, 0]
    assert np.array_equal(read.numpy(), upright)
    assert [split.labels.tolist() for split in splits.values()] == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    write_amat(tmp_path / "mnist_all_rotation_normalized_float_test.amat", rows[5:8])
    with pytest.raises(ValueError, match="not 4 rows of 784 pixels"):
        rotmnist_from_amat(tmp_path)
    rows[5][0] = 7.0
    write_amat(tmp_path / "mnist_all_rotation_normalized_float_test.amat", rows[5:])
    with pytest.raises(ValueError, match=r"pixels must be in \[0, 1\]"):
        rotmnist_from_amat(tmp_path)


@pytest.mark.parametrize("shape", [(28, 28), (280, 280), (61, 40), (40, 61), (100, 333), (20, 21)])
def test_preprocessing_a_turned_picture_gives_the_turned_result(shape):
    picture = torch.rand(3, *shape) * 255
    straight = preprocess(picture, (28, 28))
    assert straight.shape == (3, 28, 28)
    for g in P4M.elements:
        turned = preprocess(transform(picture, P4M, g, "trivial"), (28, 28))
        torch.testing.assert_close(turned, transform(straight, P4M, g, "trivial"), rtol=0, atol=1e-9)


def test_normalise():
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(3, 1, 1, 1)
    assert normalise(images, (0.2,), (0.4,), torch.float64).flatten().tolist() == pytest.approx([-0.5, 2, 0])


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1"])
def test_pictures_of_any_mode(tmp_path, mode):
    Image.new("L", (5, 4), 255).convert(mode).save(tmp_path / "white.png")
    for channels in (1, 3):
        picture = load_picture(tmp_path / "white.png", channels)
        assert picture.shape == (channels, 4, 5)
        assert picture.unique().tolist() == [255]


def test_pictures_that_are_none(tmp_path):
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes((ROOT / "examples" / "seven.png").read_bytes()[:500])
    for name in ("empty.png", "text.png", "cut.png"):
        with pytest.raises(ValueError, match=f"{name} is not a picture"):
            load_picture(tmp_path / name, 1)
    with pytest.raises(FileNotFoundError, match="no picture at"):
        load_picture(tmp_path / "none.png", 1)
    with pytest.raises(ValueError, match="1 or 3 channels"):
        load_picture(tmp_path / "empty.png", 5)
