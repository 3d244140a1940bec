"""`eqzoo evaluate` and `eqzoo.evaluate` on labeled images."""

import csv
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import eqzoo
from eqzoo.cli._metrics import confusion_rows
from eqzoo.data import Split, files_left_out
from eqzoo.data.folder import images_below
from eqzoo.evaluation.metrics import scores
from eqzoo.hub import shipped_folder
from tests.cli.commands import IMAGE, run
from tests.finetuning.shapes import save_shapes

OTHER = IMAGE.with_name("four.png")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """No table is wrapped: pytest's workers have COLUMNS=80."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def digits(tmp_path):
    """Four images of sevens, one of them named four, and two of fours."""
    for name, image, count in (("7", IMAGE, 3), ("4", IMAGE, 1), ("4", OTHER, 2)):
        (tmp_path / "digits" / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.open(image).save(tmp_path / "digits" / name / f"{image.stem}{i}.png")
    return tmp_path / "digits"


def card(tmp_path, label_names):
    """A copy of the checkpoint of p4_cnn with other names of its classes."""
    folder = shutil.copytree(shipped_folder() / "p4_cnn.rotmnist", tmp_path / "card")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"label_names": label_names}))
    return folder


def test_a_network_without_finite_outputs_has_no_accuracy(digits):
    """Its predictions would be the first class for all images, the same at all rotations."""
    model = eqzoo.create_model("p4_cnn", pretrained=True).eval()
    with torch.no_grad():
        model.stem.conv.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"not finite for 1 of 1 images; its weights or the images hold NaN"):
        eqzoo.evaluate(model, digits)
    x = torch.randn(3, 1, 28, 28)
    with pytest.raises(ValueError, match="not finite for 3 of 3 images"):
        eqzoo.rotation_curve(model, x, torch.zeros(3, dtype=torch.long))

    def masked(x):  # a class that is left out
        return torch.tensor([[0.5, -torch.inf]]).expand(len(x), 2)

    network = torch.nn.Module()
    network.forward = masked
    assert eqzoo.rotation_curve(network, x, torch.zeros(3, dtype=torch.long), [0]) == [100.0]


def test_metrics_are_those_counted_by_hand(capsys, digits):
    code, out, _ = run(capsys, "evaluate", "p4_cnn", digits)
    assert code == 0
    totals, classes, confusion = out.strip().split("\n\n")
    rows = dict(re.split(r"  +", line) for line in totals.splitlines())
    assert rows["network"] == "p4_cnn"
    assert rows["images"] == f"6 of {digits}"
    assert rows["accuracy"] == "83.33 % (95 % interval 43.6 to 97.0 %)"  # of 6 images
    assert rows["mean recall of the classes that have images"] == "83.33 %"  # 100 % of the sevens, 2 of 3 fours
    assert rows["same prediction at all 90° rotations"] == "100.00 %, of 6 images"
    found = [re.split(r"  +", line.strip()) for line in classes.splitlines()]
    assert found[1:] == [
        ["4", "100.00 %", "66.67 %", "80.00 %", "83.33 %", "3"],  # of 9 pairs with a 7, 6 are right and 3 equal
        ["7", "75.00 %", "100.00 %", "85.71 %", "83.33 %", "3"],
    ]
    counts = {line.split()[0]: line.split()[1:] for line in confusion.splitlines()[1:]}
    assert counts == {"4": ["0", "0", "0", "0", "2", "0", "0", "1", "0", "0"], "7": ["0"] * 7 + ["3", "0", "0"]}
    data = json.loads(run(capsys, "evaluate", "p4_cnn", digits, "--json", "--rotated", 4)[1])
    assert (data["network"], data["accuracy"], data["rotated_images"]) == ("p4_cnn", 83.333333, 4)
    plain = json.loads(run(capsys, "evaluate", "z2_cnn", digits, "--json")[1])
    assert plain["same_class_at_all_quarter_rotations"] < 100 == data["same_class_at_all_quarter_rotations"]


def test_classes_are_matched_by_their_names(capsys, digits, tmp_path):
    """A network whose digits have other places: 4 and 7 are exchanged, in the names and in the weights."""
    folder = card(tmp_path, label_names=list("0123756489"))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    order = [0, 1, 2, 3, 7, 5, 6, 4, 8, 9]
    (folder / "model.safetensors").write_bytes(
        safetensors.torch.save({key: x[order] if key.startswith("head.") else x for key, x in weights.items()})
    )
    assert eqzoo.create_model(f"local-dir:{folder}", pretrained=True).pretrained_cfg["label_names"][4] == "7"
    data = json.loads(run(capsys, "evaluate", folder, digits, "--json")[1])
    assert (data["accuracy"], data["classes"][4]["name"], data["classes"][4]["recall"]) == (83.333333, "7", 100)


def test_the_test_images_are_taken_where_there_are_some(capsys, digits, tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / "all" / name / "7").mkdir(parents=True)
        (tmp_path / "all" / name / "4").mkdir()
        for number in range({"train": 1, "val": 2, "test": 3}[name]):
            for label, image in (("7", IMAGE), ("4", OTHER)):
                Image.open(image).save(tmp_path / "all" / name / label / f"{number}.png")
    (tmp_path / "all" / "train" / "7" / "0.png").write_text("broken, and not read")
    for options, count in (((), "6 test images"), (("--split", "val"), "4 validation images")):
        assert f"{count} of {tmp_path / 'all'}" in run(capsys, "evaluate", "p4_cnn", tmp_path / "all", *options)[1]
    shutil.rmtree(tmp_path / "all" / "train")
    assert json.loads(run(capsys, "evaluate", "p4_cnn", tmp_path / "all", "--json")[1])["split"] == "test"
    images = np.stack([np.asarray(Image.open(image).convert("L")) for image in (OTHER, IMAGE)])
    numbers = {"x_train": images, "y_train": np.arange(2), "x_test": images[[0, 1, 1]], "y_test": np.array([0, 1, 1])}
    np.savez(tmp_path / "some.npz", **numbers)
    assert "3 test images of" in run(capsys, "evaluate", "p4_cnn", tmp_path / "some.npz")[1]
    for data, said in ((digits, "they are not divided"), (tmp_path / "some.npz", "only test and train")):
        code, _, err = run(capsys, "evaluate", "p4_cnn", data, "--split", "val")
        assert code == 2
        assert f"{data} has no val images, {said}" in err
    np.savez(tmp_path / "train.npz", x_train=images, y_train=np.arange(2))
    for split in (None, "train"):
        assert eqzoo.evaluate("p4_cnn", tmp_path / "train.npz", split=split, rotated=0)["split"] == split


def test_images_that_the_network_was_trained_on_are_counted(capsys, tmp_path):
    save_shapes(tmp_path / "shapes", (8, 8, 8))
    out = tmp_path / "out"
    code, text, _ = run(capsys, "finetune", "p4_cnn", tmp_path / "shapes", "--output", out, "--epochs", 1)
    assert code == 0
    classes = json.loads((out / "results.json").read_text())["classes"]
    assert f"recall of each class{' ' * 19}bar {classes[0]['recall']:.2f} %, blob " in text
    _, text, _ = run(capsys, "evaluate", out, tmp_path / "shapes")
    assert text.endswith(f"{out} was trained on 18 of these 24 images, so the metrics are too good\n")
    save_shapes(tmp_path / "new", (9, 9, 9))
    for name in ("bar", "blob", "cross"):
        for path in sorted((tmp_path / "new" / name).iterdir())[:8]:
            path.unlink()
    assert json.loads(run(capsys, "evaluate", out, tmp_path / "new", "--json")[1])["notes"] == []


def test_labels_without_names_are_numbers_of_the_network(capsys, tmp_path):
    images = np.zeros((12, 28, 28), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=np.arange(12))
    code, _, err = run(capsys, "evaluate", "p4_cnn", tmp_path / "a.npz")
    assert code == 2
    assert "has labels up to 11, and p4_cnn has 10 classes" in err
    np.savez(tmp_path / "b.npz", x_train=images[:10], y_train=np.arange(10))
    _, out, _ = run(capsys, "evaluate", "p4_cnn", tmp_path / "b.npz")
    assert f"10 of {tmp_path / 'b.npz'}" in out
    assert "mean F1 of the classes  " in out  # all have images
    assert "have no names: 0 is taken for '0', and so on in the network's order" in out


def test_a_file_needs_no_training_images_and_not_all_classes(capsys, tmp_path):
    images = np.stack([np.asarray(Image.open(image).convert("L")) for image in (OTHER, IMAGE)])
    names = np.array(["4", "5", "7"])
    np.savez(tmp_path / "a.npz", x_test=images, y_test=np.array([0, 2]), label_names=names)
    data = json.loads(run(capsys, "evaluate", "p4_cnn", tmp_path / "a.npz", "--json")[1])
    assert (data["split"], data["images"], data["accuracy"]) == ("test", 2, 100)
    np.savez(tmp_path / "b.npz", x_test=images, y_test=np.array([0, 3]), label_names=names)
    code, _, err = run(capsys, "evaluate", "p4_cnn", tmp_path / "b.npz")
    assert (code, "got 0 to 3" in err) == (2, True)
    np.savez(tmp_path / "c.npz", images=images)
    assert "c.npz has images; images and labels are x_train" in run(capsys, "evaluate", "p4_cnn", tmp_path / "c.npz")[2]


def test_what_cannot_be_evaluated_is_an_error(capsys, digits, tmp_path):
    (digits / "4").rename(digits / "four")
    (tmp_path / "tiles" / "HIGHWAY").mkdir(parents=True)
    shutil.copy(IMAGE.with_name("tile.jpg"), tmp_path / "tiles" / "HIGHWAY")
    letters = "or leave their images out; names are case-sensitive: rename 'HIGHWAY' to 'Highway'"
    for args, said in (
        (("z2_resnet29.eurosat", tmp_path / "tiles"), letters),
        (("p4_cnn", digits), "has images of 'four', which p4_cnn does not predict: its classes are '0', '1', '2'"),
        (("p4_cnn", digits, "--rotated", -1), "0 or more, got -1"),
        (("p4_cnn", tmp_path / "none"), "no images at"),
    ):
        code, out, err = run(capsys, "evaluate", *args)
        assert (code, out) == (2, "")
        assert said in err


def test_a_line_for_each_image(capsys, digits, tmp_path):
    code, out, err = run(capsys, "evaluate", "p4_cnn", digits, "--csv")
    assert code == 0
    assert "eqzoo:" not in err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [*rows[0]] == ["file", "class", "prediction", *map(str, range(10))]
    assert [row["file"] for row in rows] == sorted(
        path.relative_to(digits).as_posix() for path in digits.rglob("*.png")
    )
    wrong = [row for row in rows if row["class"] != row["prediction"]]
    assert [(Path(row["file"]).name, row["prediction"]) for row in wrong] == [("seven0.png", "7")]
    assert float(wrong[0]["7"]) > 0.5
    each = eqzoo.evaluate("p4_cnn", digits, predictions=True)["predictions"]
    assert [row["file"] for row in each] == [row["file"] for row in rows]
    np.savez(tmp_path / "x.npz", x_test=np.zeros((2, 28, 28), np.uint8), y_test=np.array([3, 3]))
    code, out, err = run(capsys, "evaluate", "p4_cnn", tmp_path / "x.npz", "--csv")
    assert [row["file"] for row in csv.DictReader(io.StringIO(out))] == ["0", "1"]
    assert "eqzoo: the labels of" in err


def test_image_files_of_other_kinds_are_told(capsys, digits):
    (digits / "7" / "x.GIF").write_bytes(b"")
    (digits / "4" / "y.dcm").write_bytes(b"")
    (digits / "4" / ".z.gif").write_bytes(b"")
    (digits / "notes.txt").write_text("")
    (digits / "7" / "folder.gif").mkdir()
    said = f"files of other image formats in {digits.name} are not read (2, such as '"
    assert run(capsys, "evaluate", "p4_cnn", digits, "--rotated", 0)[1].splitlines()[-1].startswith(said)
    assert f"eqzoo: {said}" in run(capsys, "predict", digits, "--model", "p4_cnn")[2]
    (digits / "7" / "x.GIF").unlink()
    assert "(1, such as 'y.dcm')" in eqzoo.evaluate("p4_cnn", digits, rotated=0)["notes"][-1]
    (digits / "test").mkdir()
    shutil.move(digits / "7", digits / "test" / "7")
    (digits / "train").mkdir()
    shutil.move(digits / "4", digits / "train" / "4")  # which is not evaluated
    found = eqzoo.evaluate("p4_cnn", digits, rotated=0, predictions=True)
    assert found["notes"] == []
    assert found["predictions"][0]["file"] == "test/7/seven0.png"


def test_images_that_are_in_no_class_are_told(capsys, digits, tmp_path):
    shutil.copy(digits / "7" / "seven0.png", digits / "loose.png")
    (digits / "empty").mkdir()
    said = f"images in {digits.name} that are in no class folder are not read (1, such as 'loose.png')"
    assert [note[: len(said)] for note in eqzoo.evaluate("p4_cnn", digits, rotated=0)["notes"]] == [said]
    assert "class folder" not in run(capsys, "predict", digits, "--model", "p4_cnn")[2]
    (digits / "loose.png").unlink()
    splits = tmp_path / "splits"
    for part in ("train", "test"):
        shutil.copytree(digits, splits / part)
    shutil.copytree(digits, splits / "unlabeled")
    shutil.copy(digits / "7" / "seven0.png", splits / "train" / "loose.png")
    assert eqzoo.evaluate("p4_cnn", splits, rotated=0)["notes"] == []  # of images that are not evaluated
    beside, loose = files_left_out(splits)
    assert f"({len(images_below(digits))}, such as 'unlabeled/4/" in beside
    assert "(1, such as 'train/loose.png')" in loose


def test_no_image_is_rotated_if_none_is_to_be(capsys, digits):
    code, out, _ = run(capsys, "evaluate", "p4_cnn", digits, "--rotated", 0)
    assert code == 0
    assert "83.33 %" in out
    assert "same prediction at" not in out
    assert "rotation_curve" not in eqzoo.evaluate("p4_cnn", digits, rotated=0)


def test_a_wide_matrix_has_numbered_columns():
    labels, names = torch.arange(9), [f"class {letter}" * 2 for letter in "abcdefghi"]
    heading, first, *_ = confusion_rows(scores(labels, labels, names))
    assert heading == ["true \\ predicted", *map(str, range(9))]
    assert first == ["0 class aclass a", "1", *["0"] * 8]
    assert confusion_rows(scores(labels, labels, "abcdefghi"))[0][1:] == [*"abcdefghi"]
    assert confusion_rows(scores(torch.arange(13), torch.arange(13), [*map(str, range(13))])) == []


def test_a_network_and_images_in_memory(capsys, digits):
    """As of the command; the network keeps its modes and its device."""
    images = torch.stack([torch.from_numpy(np.array(Image.open(path).convert("L")))[None] for path in (OTHER, IMAGE)])
    model = eqzoo.create_model("p4_cnn", pretrained=True).train()
    model.head.eval()
    found = eqzoo.evaluate(model, Split(images, torch.tensor([0, 1]), ("4", "7")))
    assert model.training
    assert not model.head.training
    assert (found["network"], found["data"], found["split"]) == ("p4_cnn", "the images", None)
    assert (found["accuracy"], found["images"], found["notes"]) == (100, 2, [])
    assert found["confusion"][4][4] == found["confusion"][7][7] == 1
    numbered = eqzoo.evaluate(model, Split(images, torch.tensor([4, 6])))
    assert numbered["accuracy"] == 50
    assert "0 is taken for '0'" in numbered["notes"][0]
    data = json.loads(run(capsys, "evaluate", "p4_cnn", digits, "--json")[1])
    assert eqzoo.evaluate("p4_cnn", digits) == data
    of_network = eqzoo.evaluate(model, digits)
    assert of_network == data
    stretched = Split(images.repeat(1, 1, 1, 2), torch.tensor([4, 7]))
    assert "their central squares" in eqzoo.evaluate(model, stretched)["notes"][-1]


def test_what_cannot_be_evaluated_in_memory_is_an_error(digits):
    model = eqzoo.create_model("p4_cnn")
    images, labels = torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([4, 7])
    for data, options, said in (
        (Split(images.float(), labels), {}, r"the split: images are uint8 .*, got images torch\.float32"),
        (Split(images, labels.float()), {}, r"labels torch\.float32 \(2,\)"),
        (Split(images, labels[:1]), {}, r"labels torch\.int64 \(1,\)"),
        (Split(images, labels, ("a", "b")), {}, "with a different name each or none, got 4 to 7"),
        (Split(images.repeat(1, 3, 1, 1), labels), {}, "2 images of 3 x 28 x 28, .* the network takes 1 channels"),
        (Split(images, labels), {"split": "test"}, "a split has no parts to choose from, got 'test'"),
        (digits, {"device": "gpu"}, "device is 'cpu' or 'cuda', got 'gpu'"),
    ):
        with pytest.raises(ValueError, match=said):
            eqzoo.evaluate(model, data, **options)
    with pytest.raises(ValueError, match="has a single output, a number and not a class"):
        eqzoo.evaluate(eqzoo.create_model("p4_cnn", num_classes=1), digits)


def test_images_of_another_scale_than_those_of_the_training_are_noticed(tmp_path, capsys):
    """In an image of twice the side things are half as large to the network, whose input has one size."""
    torch.set_default_dtype(torch.float32)
    save_shapes(tmp_path / "shapes", (4, 4, 4))  # 32 x 32
    tuned = eqzoo.finetune("p4_cnn", tmp_path / "shapes", tmp_path / "tuned", epochs=1, pretrained=False)
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["eqzoo"]["image_side"] == 32
    for side, noticed in ((40, False), (64, True), (16, True)):
        folder, said = tmp_path / f"of{side}", f"about {side} pixels"
        (folder / "bar").mkdir(parents=True)
        for i in range(3):
            Image.open(tmp_path / "shapes" / "bar" / "00.png").resize((side, side)).save(folder / "bar" / f"{i}.png")
        notes = eqzoo.evaluate(tmp_path / "tuned", folder, rotated=0)["notes"]
        assert [said in note for note in notes] == [True] * noticed
        capsys.readouterr()
        for images in (folder, folder / "bar" / "0.png"):
            code, _, err = run(capsys, "predict", images, "--model", tuned.folder)
            assert (code, said in err) == (0, noticed)
    assert run(capsys, "predict", tmp_path / "of64", "--model", "p4_cnn")[2] == ""  # digits are of any size
    err = run(capsys, "predict", tmp_path / "of16", "--model", "z2_resnet29.eurosat")[2]
    assert "have about 16 pixels a side, those that the network was trained on 64" in err


def test_an_evaluation_that_would_take_long_rotates_fewer_images(digits, monkeypatch):
    monkeypatch.setattr("eqzoo.evaluation.results.MAX_SECONDS", 0)
    monkeypatch.setattr("eqzoo.evaluation.results._LEAST_IMAGES", 3)
    found = eqzoo.evaluate("p4_cnn", digits)
    assert (found["rotated_images"], len(found["notes"])) == (3, 1)
    found = eqzoo.evaluate("p4_cnn", digits, rotated=6)
    assert (found["rotated_images"], found["notes"]) == (6, [])
