"""The data sets of the catalog: their layouts, splits and crops."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from eqzoo.data import CATALOG, load_splits
from eqzoo.data.chula_rbc12 import CELL_CLASSES, _read
from eqzoo.data.class_folders import ClassFolders, radio_galaxies, tiny_imagenet
from tests.conftest import SHARED
from tests.smears import save_smears


@pytest.fixture
def smears(tmp_path):
    save_smears(tmp_path / "chula_rbc12", range(1, 41))
    return tmp_path


def test_cells_are_crops_around_their_centers_with_reflected_edges(smears):
    cells, _ = _read(smears)
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
    assert sum(map(len, whole.values())) == len(_read(smears)[0])
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
    assert len(_read(smears)[0]) == 40 * 12


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("Label/7.txt", None, "7.txt"),
        ("Dataset/7.jpg", b"no image", "7.jpg"),
        ("Label/7.txt", b"1 2\n", "unpack"),
        ("Label/7.txt", b"1 2 0\n1 2 13\n", "13"),
        ("Label/7.txt", b"190 2 0\n", "match"),  # beyond the edge
    ],
)
def test_what_is_missing_or_malformed_is_an_error(smears, file, content, message):
    path = smears / "chula_rbc12" / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises((OSError, ValueError), match=message):
        load_splits("chula_rbc12", smears)


@pytest.fixture
def tiles(tmp_path):
    """Ten tiles in each of two classes, each of one color that is its number."""
    for label, name in enumerate("ab"):
        folder = tmp_path / "places" / name
        folder.mkdir(parents=True)
        for n in range(1, 11):
            Image.new("RGB", (64, 64), (20 * label, 20 * n, 0)).save(folder / f"group{n}_{name}.png")
    return ClassFolders(("places",), {"a": 10, "b": 10}, "https://example.org", group=r"group\d+")


def test_tiles_are_split_class_by_class(tiles, tmp_path):
    splits = tiles(tmp_path, False, (64, 64))
    assert {name: split.images.shape for name, split in splits.items()} == {
        "train": (12, 3, 64, 64),
        "valid": (4, 3, 64, 64),
        "test": (4, 3, 64, 64),
    }
    # In the order of file names as text, 1, 10, 2 ...; the permutation of ten is pinned.
    names = [1, 10, *range(2, 10)]
    order = np.random.RandomState(2016).permutation(10)
    expected = [names[place] for place in sorted(order[8:])]
    assert [round(v / 20) for v in splits["test"].images[:2, 1, 32, 32].tolist()] == expected == [3, 7]
    scaled = tiles(tmp_path / "places", False, (32, 32))  # the class folders themselves are found too
    assert scaled["train"].images.shape == (12, 3, 32, 32)
    assert scaled["test"].files == splits["test"].files


def test_images_of_one_group_stay_in_one_part(tiles, tmp_path):
    before = tiles(tmp_path, False, (64, 64))
    for file in sorted((tmp_path / "places").glob("*/*_*.png")):
        shutil.copy(file, file.with_name(f"{file.stem}_rotated.png"))
    after = tiles(tmp_path, False, (64, 64))
    for part, split in before.items():
        assert set(split.files) == {file for file in after[part].files if "rotated" not in file}
        assert len(after[part]) == 2 * len(split)
    with pytest.raises(ValueError, match="20 images"):  # without the group each would be an image of its own
        replace(tiles, group=None)(tmp_path, False, (64, 64))


def test_tiles_that_are_missing(tiles, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folders a, b"):
        tiles(tmp_path / "nowhere", False, (64, 64))
    (tmp_path / "places" / "b" / "group7_b.png").unlink()
    with pytest.raises(ValueError, match="9 groups"):
        tiles(tmp_path, False, (64, 64))
    (tmp_path / "places" / "b" / "group7_b.png").touch()
    (tmp_path / "places" / "b" / "group8_b.png").rename(tmp_path / "places" / "b" / "overview.png")
    (tmp_path / "places" / "b" / "group7_b.png").write_bytes((tmp_path / "places" / "b" / "overview.png").read_bytes())
    with pytest.raises(ValueError, match="10 groups"):  # a name without a group
        tiles(tmp_path, False, (64, 64))


def test_tiny_imagenet_as_published_and_in_class_folders(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    for n in range(40):
        path = folder / "train" / f"n{n % 2}" / "images" / f"n{n % 2}_{n}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (5 * n, 0, 0)).save(path)
    (folder / "val" / "images").mkdir(parents=True)
    for n in range(4):
        Image.new("L", (64, 64), 60 * n).save(folder / "val" / "images" / f"val_{n}.JPEG")
    rows = "".join(f"val_{n}.JPEG\tn{n % 2}\t0\t0\t9\t9\n" for n in range(4))
    (folder / "val" / "val_annotations.txt").write_text(rows)
    counts = {"train": 40, "val": 4}
    splits = tiny_imagenet(tmp_path, ("fish", "frog"), (64, 64), counts)
    assert {part: split.labels.bincount().tolist() for part, split in splits.items()} == {
        "train": [19, 19],
        "valid": [1, 1],
        "test": [2, 2],
    }
    assert splits["test"].images[:, 0, 0, 0].tolist() == [0, 120, 60, 180]
    for n in range(4):
        path = folder / "val" / f"n{n % 2}" / f"val_{n}.JPEG"
        path.parent.mkdir(exist_ok=True)
        (folder / "val" / "images" / path.name).rename(path)
    (folder / "val" / "val_annotations.txt").unlink()
    (folder / "val" / "images").rmdir()
    again = tiny_imagenet(folder, ("fish", "frog"), (32, 32), counts)
    assert again["test"].images[:, 0, 0, 0].tolist() == [0, 120, 60, 180]
    assert again["train"].shape == (3, 32, 32)
    with pytest.raises(ValueError, match="the data set"):
        tiny_imagenet(folder, ("fish", "frog"), (64, 64), {"train": 41, "val": 4})


def test_radio_galaxies_as_published_and_in_folders(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "galaxy_data_h5.h5", "w") as file:
        for n, part in enumerate(["train", "train", "valid", "test"]):
            row = file.create_group(f"data_{n}")
            row["Img"] = np.full((8, 8), 10.0 * n)
            row["Label_literature"], row["Split_literature"] = n, part
    counts = {"train": 2, "valid": 1, "test": 1}
    published = radio_galaxies(tmp_path, (8, 8), counts)
    classes = ("FRI", "FRII", "bent", "compact")
    assert {part: [classes[i] for i in split.labels] for part, split in published.items()} == {
        "train": ["FRI", "FRII"],
        "valid": ["compact"],
        "test": ["bent"],
    }
    assert published["test"].images.unique().tolist() == [30]
    for part, folder in (("train", "train"), ("valid", "val"), ("test", "test")):
        for label, name in enumerate(classes):
            (tmp_path / "radio" / folder / name).mkdir(parents=True)
            image = Image.new("L", (8, 8), 60 * label)
            image.save(tmp_path / "radio" / folder / name / f"{part}.png")
    exported = radio_galaxies(tmp_path, (4, 4), dict.fromkeys(counts, 4))
    assert all(split.classes == classes and split.shape == (1, 4, 4) for split in exported.values())
    with pytest.raises(ValueError, match="the data set"):
        radio_galaxies(tmp_path, (8, 8), counts)


def test_the_catalog():
    counts = {"eurosat": 27_000, "pbc": 17_092, "ucmerced": 2_100, "lc25000": 740}
    assert {name: sum(CATALOG[name].read.counts.values()) for name in counts} == counts
    for name, known in CATALOG.items():
        assert len(set(known.classes)) == len(known.classes), name
        assert len(known.mean) == len(known.std) == known.input_size[0], name
        if isinstance(known.read, ClassFolders):  # its folders are listed in the order of their names
            assert tuple(sorted(known.read.counts)) == known.classes
    assert len(CATALOG["tiny_imagenet"].classes) == 200


@pytest.mark.skipif(not (SHARED / "data" / "chula_rbc12").is_dir(), reason="the data set is not here")
def test_the_cells_themselves():
    splits = load_splits("chula_rbc12", SHARED / "data")
    assert {name: len(split) for name, split in splits.items()} == {"train": 10_184, "valid": 3_028, "test": 3_202}
    assert splits["test"].labels.bincount().min() > 30
