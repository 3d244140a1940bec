"""EuroSAT and Chula RBC-12: their layouts, splits and crops."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from eqzoo.data import chula_rbc12_cells, load_splits, read_images
from eqzoo.data.chula_rbc12 import CELL_CLASSES
from eqzoo.data.eurosat import EUROSAT_CLASSES, SIZES
from tests.conftest import SHARED


@pytest.fixture
def smears(tmp_path):
    """Forty smears of noise, with a cell of every class at the corners and inside."""
    folder = tmp_path / "chula_rbc12"
    rng = np.random.RandomState(0)
    for name in ("Dataset", "Label"):
        (folder / name).mkdir(parents=True)
    for n in range(1, 41):
        Image.fromarray(rng.randint(0, 255, (120, 160, 3), np.uint8)).save(folder / "Dataset" / f"{n}.jpg")
        lines = [f"{3 * k} {2 * k} {k}" for k in range(13)] + ["159 119 0", ""]
        (folder / "Label" / f"{n}.txt").write_text("\n".join(lines))
    return tmp_path


def test_cells_are_crops_around_their_centers_with_reflected_edges(smears):
    cells = chula_rbc12_cells(smears)
    assert cells.images.shape == (40 * 12, 3, 80, 80)  # of 14 lines those of classes 10 and 12 are left out
    assert cells.classes == CELL_CLASSES
    assert cells.labels[:12].tolist() == [*range(11), 0]
    with Image.open(smears / "chula_rbc12" / "Dataset" / "1.jpg") as file:
        smear = torch.from_numpy(np.array(file)).permute(2, 0, 1)
    center = cells.images[5][:, 40, 40]  # class 5 stands at x = 15, y = 10
    assert torch.equal(center, smear[:, 10, 15])
    corner = cells.images[0]  # at x = y = 0: three quarters of it are reflections
    assert torch.equal(corner[:, 40:, 40:], smear[:, :40, :40])
    assert torch.equal(corner[:, 40:, 1:40], smear[:, :40, 1:40].flip(2))
    assert torch.equal(corner[:, 1:40, 40:], smear[:, 1:40, :40].flip(1))


def test_smears_are_divided_in_runs_of_ten_whatever_others_there_are(smears):
    folder = smears / "chula_rbc12"
    for n in range(41, 201):  # enough runs that every part has some
        shutil.copy(folder / "Dataset" / "1.jpg", folder / "Dataset" / f"{n}.jpg")
        with (folder / "Dataset" / f"{n}.jpg").open("ab") as file:
            file.write(n.to_bytes(2, "big"))  # bytes behind the end, so that no two smears are the same
        (folder / "Label" / f"{n}.txt").write_text("".join(f"{n % 160} 60 {k}\n" for k in range(12)))
    whole = load_splits("chula_rbc12", smears)
    assert sum(map(len, whole.values())) == len(chula_rbc12_cells(smears))
    assert {name: len(split) for name, split in whole.items()} == {"train": 1340, "valid": 330, "test": 570}
    for n in range(1, 201, 3):
        (folder / "Dataset" / f"{n}.jpg").unlink()
        (folder / "Label" / f"{n}.txt").unlink()
    fewer = load_splits("chula_rbc12", smears / "chula_rbc12")  # the folder itself goes too
    for name, split in fewer.items():
        known = {image.numpy().tobytes() for image in whole[name].images}
        assert all(image.numpy().tobytes() in known for image in split.images)


def test_smears_that_are_the_same_byte_for_byte_count_once(smears):
    folder = smears / "chula_rbc12"
    shutil.copy(folder / "Dataset" / "1.jpg", folder / "Dataset" / "500.jpg")
    shutil.copy(folder / "Label" / "1.txt", folder / "Label" / "500.txt")
    assert len(chula_rbc12_cells(smears)) == 40 * 12


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda f: (f / "Label" / "7.txt").unlink(), FileNotFoundError, "lacks Label/7.txt"),
        (lambda f: (f / "Dataset" / "7.jpg").unlink(), FileNotFoundError, "lacks Dataset/7.jpg"),
        (lambda f: (f / "Dataset" / "7.jpg").write_bytes(b"no image"), ValueError, "7.jpg is not an image"),
        (lambda f: (f / "Label" / "7.txt").write_text("1 2\n"), ValueError, r"7.txt, line 1: .*got '1 2'"),
        (lambda f: (f / "Label" / "7.txt").write_text("1 2 0\n1 2 13\n"), ValueError, "line 2: classes are 0 to 12"),
        (lambda f: (f / "Label" / "7.txt").write_text("160 2 0\n"), ValueError, "outside of the 160 x 120"),
        (lambda f: shutil.rmtree(f / "Label"), FileNotFoundError, "Dataset and Label belong into"),
    ],
)
def test_what_is_missing_or_malformed_is_named(smears, change, error, said):
    change(smears / "chula_rbc12")
    with pytest.raises(error, match=said) as caught:
        load_splits("chula_rbc12", smears)
    assert "\n" not in str(caught.value)


@pytest.fixture
def tiles(tmp_path, monkeypatch):
    """Ten tiles of each class, each of one color that is its number."""
    monkeypatch.setattr("eqzoo.data.eurosat.SIZES", dict.fromkeys(EUROSAT_CLASSES, 10))
    for label, name in enumerate(EUROSAT_CLASSES):
        folder = tmp_path / "eurosat" / "2750" / name
        folder.mkdir(parents=True)
        for n in range(1, 11):
            Image.new("RGB", (64, 64), (20 * label, 20 * n, 0)).save(folder / f"{name}_{n}.jpg", quality=100)
    return tmp_path


def test_tiles_are_divided_class_by_class(tiles):
    splits = load_splits("eurosat", tiles)
    assert {name: split.images.shape for name, split in splits.items()} == {
        "train": (60, 3, 64, 64),
        "valid": (20, 3, 64, 64),
        "test": (20, 3, 64, 64),
    }
    assert all(split.classes == EUROSAT_CLASSES for split in splits.values())
    assert splits["test"].labels.bincount().tolist() == [2] * 10
    # In the order of file names as text, 1, 10, 2 ...; the permutation of ten is pinned.
    names = [1, 10, *range(2, 10)]
    order = np.random.RandomState(2016).permutation(10)
    expected = [names[place] for place in sorted(order[8:])]
    assert [round(v / 20) for v in splits["test"].images[:2, 1, 32, 32].tolist()] == expected == [3, 7]
    assert read_images("EuroSAT", 32, data_dir=tiles)["train"].images.shape == (60, 3, 32, 32)


def test_tiles_that_are_not_there(tiles, tmp_path):
    with pytest.raises(FileNotFoundError, match="put its class folders there"):
        load_splits("eurosat", tmp_path / "nowhere")
    (tiles / "eurosat" / "2750" / "Pasture" / "Pasture_7.jpg").unlink()
    with pytest.raises(ValueError, match="Pasture holds 9 images, and EuroSAT has 10 of this class"):
        load_splits("eurosat", tiles)
    shutil.rmtree(tiles / "eurosat" / "2750" / "River")
    with pytest.raises(ValueError, match="EuroSAT's are AnnualCrop"):
        load_splits("eurosat", tiles)


def test_the_published_tiles_are_counted():
    assert sum(SIZES.values()) == 27_000
    assert tuple(sorted(SIZES)) == EUROSAT_CLASSES


@pytest.mark.skipif(not (SHARED / "data" / "chula_rbc12").is_dir(), reason="the data set is not here")
def test_the_cells_themselves():
    splits = load_splits("chula_rbc12", SHARED / "data")
    assert {name: len(split) for name, split in splits.items()} == {"train": 10_184, "valid": 3_028, "test": 3_202}
    assert splits["test"].labels.bincount().min() > 30
