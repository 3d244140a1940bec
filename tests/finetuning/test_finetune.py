"""Fine-tuning: from images of any kind to a checkpoint that everything else accepts."""

import csv
import json
import os
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps

import eqzoo
from eqzoo import equivariance
from eqzoo._common import parse_settings, write_json
from eqzoo.cards import REPO_FILES, read_checkpoint, render_card, write_card
from eqzoo.cli import main as command_line
from eqzoo.data import (
    Split,
    Streamed,
    channels_found,
    complete_splits,
    load_image,
    normalize,
    preprocess,
    read_images,
    stratified,
)
from eqzoo.data.hashes import image_codes, settings_differences, trained_images
from eqzoo.engine.run import RunDirectory
from eqzoo.export.onnx_file import OnnxFile
from eqzoo.finetuning import frozen, write
from eqzoo.finetuning import run as finetuning
from eqzoo.finetuning.images import data_argument, data_label
from eqzoo.finetuning.plan import Plan
from eqzoo.finetuning.rules import frozen_modules
from eqzoo.hub import WeightsNotFoundError, shipped_folder
from tests.cli.commands import run
from tests.data.tiffs import tiff
from tests.finetuning.shapes import NAMES, arrays, save_shapes, shape, shapes


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A checkpoint made by the command, from a folder of class folders."""
    torch.set_default_dtype(torch.float32)
    root = tmp_path_factory.mktemp("finetune")
    images = save_shapes(root / "my Shapes", (16, 14, 12))
    args = ["finetune", "p4_cnn", images, "--output", root / "out", "--epochs", 8, "--lr", 0.01, "--json"]
    args += ["--layer-decay", 0.8, "--ema", 0.9, "--balance", "--augment", "missing", "--device", "cpu"]
    assert command_line.main([str(arg) for arg in args]) == 0
    return SimpleNamespace(folder=root / "out", images=images, args=[str(arg) for arg in args])


def test_a_folder_becomes_a_checkpoint_with_its_results(tuned):
    results = json.loads((tuned.folder / "results.json").read_text())
    assert (results["checkpoint"], results["start"], results["data"]) == (
        "p4_cnn.my-shapes",
        "p4_cnn.rotmnist",
        "my-shapes",
    )
    assert (results["images"], results["evaluated_on"]) == ({"train": 30, "valid": 6, "test": 6}, "test")
    assert results["accuracy"] > 60
    assert results["same_class_at_all_quarter_rotations"] == 100
    assert results["equivariance_error"] < 1e-12
    assert [row["name"] for row in results["classes"]] == list(NAMES)
    assert sum(map(sum, results["confusion"])) == 6
    curve = results["rotation_curve"]
    assert len(curve["angles"]) == len(curve["accuracy"]) == 24
    assert curve["accuracy"][0] == curve["accuracy"][6] == pytest.approx(results["accuracy"], abs=0.01)
    low, high = results["accuracy_interval"]
    assert low < results["accuracy"] <= high
    training = json.loads((tuned.folder / "training.json").read_text())
    assert training["recipe"]["augment"] == "flips"
    assert training["recipe"]["class_weights"][0] < 1 < training["recipe"]["class_weights"][2]
    assert results["multiply_adds"] == eqzoo.multiply_adds(eqzoo.create_model("p4_cnn", num_classes=3))
    written = {path.name for path in tuned.folder.iterdir() if not path.name.startswith(".")}
    assert written == {
        "model.safetensors", "config.json", "results.json", "training.json", "log.jsonl", "README.md",
        "predictions.csv", "trained_on.npy", "confusion.png", "rotation_curve.png", "training_curve.png",
    }  # fmt: skip
    assert (tuned.folder / "README.md").read_text() == render_card(read_checkpoint(tuned.folder))


def test_the_lines_of_a_card_run_in_its_folder(tuned, monkeypatch):
    monkeypatch.chdir(tuned.folder)
    code = Path("README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace("image.png", str(next(tuned.images.rglob("*.png")))), namespace := {})
    assert namespace["model"].pretrained_cfg["label_names"] == list(NAMES)


def test_publishing_checks_and_changes_what_the_folder_says(tuned, tmp_path, capsys):
    folder = shutil.copytree(tuned.folder, tmp_path / "out")
    assert run(capsys, "publish", folder, "--license", "cc-by-4.0", "--checkpoint", "p4_cnn.mine", "--onnx")[0] == 0
    assert OnnxFile(folder / "model.onnx").metadata["weights_sha256"]
    card = (folder / "README.md").read_text()
    assert "# p4_cnn.mine" in card
    assert "license: cc-by-4.0" in card
    assert "base_model: eqzoo/p4_cnn.rotmnist" in card
    assert json.loads((folder / "config.json").read_text())["eqzoo"]["image_side"] == 32
    (folder / "README.md").write_text(card + "\nStained by hand.\n")
    assert run(capsys, "publish", folder, "--license", "mit")[0] == 0
    assert (folder / "README.md").read_text().endswith("by hand.\n")
    for words in (
        (folder, "--private"),
        (folder, "--replace"),
        (folder, "--label-names", "cross", "blob", "bar"),  # another order would mislabel predictions
        (folder, "--checkpoint", "../x"),
        (tmp_path / "nowhere",),
        (shipped_folder() / "p4_cnn.rotmnist",),
    ):
        assert run(capsys, "publish", *words)[0] == 2, words
    results = json.loads((folder / "results.json").read_text())
    write_json(folder / "results.json", results | {"start": "hf-hub:own/p4_cnn.first"})
    write_card(folder)
    assert "hf-hub:own/p4_cnn.first" in (folder / "README.md").read_text()
    assert run(capsys, "publish", folder, "--checkpoint", "p4_cnn.rotmnist")[0] == 0
    card = (folder / "README.md").read_text()
    assert "# p4_cnn.rotmnist" in card  # which is not another edit
    assert "paper's number" not in card  # for other images
    training = json.loads((folder / "training.json").read_text())
    for pattern, named in ((r"Ann|Bob", True), ("folder", False)):
        write_json(folder / "training.json", training | {"split_by": pattern})
        assert ("--split-by" in run(capsys, "publish", folder)[1]) == named
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b"0")
    assert run(capsys, "publish", folder)[0] == 2


def test_numbered_classes_are_given_names(tmp_path, capsys):
    splits = {name: replace(split, classes=("1", "10", "2")) for name, split in shapes(24).items()}
    folder = eqzoo.finetune("z2_cnn", splits, tmp_path / "o", epochs=1, pretrained=False, device="cpu").folder
    before = json.loads(run(capsys, "compare", folder, folder, "--json")[1])["networks"]
    assert run(capsys, "publish", folder, "--label-names", "a", "b")[0] == 2
    assert run(capsys, "publish", folder, "--label-names", "a", "b", "b")[0] == 2
    names = NAMES[::-1]  # in another order than sorted, of 1, 2 and 10
    plain, axes = shutil.copytree(folder, tmp_path / "plain"), (folder / "confusion.png").read_bytes()
    assert run(capsys, "publish", folder, "--label-names", *names)[0] == 0
    assert (folder / "confusion.png").read_bytes() != axes
    named = eqzoo.create_model(str(folder), pretrained=True).pretrained_cfg["label_names"]
    assert named == [names[0], names[2], names[1]]
    assert json.loads(run(capsys, "compare", folder, folder, "--json")[1])["networks"] == before
    for pair in ((folder, plain), (plain, folder)):
        found = json.loads(run(capsys, "compare", *pair, "--json")[1])["networks"]
        assert (found[1]["accuracy_difference"], found[1]["macro_f1_difference_interval"]) == (0, [0, 0])
    # Predictions that were deleted are written again, and nothing else.
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "predictions.csv").unlink()
    eqzoo.finetune("z2_cnn", splits, folder, epochs=1, pretrained=False, device="cpu")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
    # Figures of another name are not kept where they cannot be drawn anew.
    with pytest.MonkeyPatch.context() as without_matplotlib:
        without_matplotlib.setattr("eqzoo.cards.figures.plot_rotation_curve", Mock(side_effect=ImportError))
        assert run(capsys, "publish", folder, "--checkpoint", "z2_cnn.other")[0] == 0
    assert not (folder / "rotation_curve.png").exists()
    assert "confusion.png" not in (folder / "README.md").read_text()


def test_a_start_that_failed_leaves_the_folder_free(tmp_path):
    splits = shapes(24)
    call = {"name": "p4_cnn", "data": splits, "output": tmp_path / "out", "device": "cpu", "epochs": 1}
    with pytest.raises(TypeError, match="nonesuch"):
        eqzoo.finetune(**call, pretrained=False, optimizer_args={"nonesuch": 1})
    result = eqzoo.finetune(**call, test_fraction=0)
    assert result.results["start"] == "p4_cnn.rotmnist"  # not the random weights of before
    with pytest.raises(ValueError, match="the test images differ"):
        eqzoo.finetune(**call)


def test_without_held_out_images_the_results_say_so(tmp_path):
    splits = shapes(18)
    result = eqzoo.finetune(
        "z2_cnn", splits, tmp_path / "o", epochs=1, pretrained=False, valid_fraction=0, test_fraction=0, device="cpu"
    )
    assert result.results["evaluated_on"] == "train"
    assert any("better than on new images" in note for note in result.results["notes"])
    assert (result.folder / "predictions.csv").read_text().count("\ntrain,") == 18
    assert "model-index" not in (result.folder / "README.md").read_text()  # the Hub's field of test results


def test_classes_in_another_order_keep_their_rows_of_the_classifier(tuned, tmp_path):
    data = read_images(tuned.images, 28)["train"]
    order = [2, 0, 1]
    labels = torch.tensor([order.index(int(label)) for label in data.labels])
    splits = {"train": Split(data.images, labels, tuple(NAMES[i] for i in order))}
    same = eqzoo.finetune(tuned.folder, splits, tmp_path / "o", epochs=1, lr=1e-9, device="cpu", augment="none")
    first = eqzoo.create_model(f"local-dir:{tuned.folder}", pretrained=True)
    torch.testing.assert_close(same.model.head.weight, first.head.weight[order], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(same.model.head.weight, first.head.weight, atol=1e-3)


def test_each_held_out_image_has_its_file_and_prediction(tuned):
    report = json.loads((tuned.folder / "results.json").read_text())
    with (tuned.folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == ["split", "file", "class", "prediction", *NAMES]
    test = [row for row in rows if row["split"] == "test"]
    assert (len(rows), len(test)) == (12, 6)
    assert {row["split"] for row in rows} == {"val", "test"}
    confusion = [[0] * 3 for _ in NAMES]
    for row in test:
        confusion[NAMES.index(row["class"])][NAMES.index(row["prediction"])] += 1
    assert confusion == report["confusion"]
    model = eqzoo.create_model(f"local-dir:{tuned.folder}", pretrained=True).eval()
    mean, std = (model.pretrained_cfg[key] for key in ("mean", "std"))
    assert len({row["file"] for row in rows}) == 12
    for row in rows:
        assert Path(row["file"]).parent == Path(row["class"])  # below the folder of images
        image = torch.from_numpy(np.array(Image.open(tuned.images / row["file"])))[None, None]
        scaled = preprocess(image.float(), (28, 28)).round()  # as images of a folder are kept
        probabilities = model(normalize(scaled, mean, std, torch.float32)).softmax(1)[0]
        assert [float(row[name]) for name in NAMES] == pytest.approx(probabilities.tolist(), abs=1e-5)
        assert row["prediction"] == NAMES[probabilities.argmax()]


def test_images_without_files_are_known_by_their_numbers(tmp_path):
    x, y = arrays(30)
    splits = {"train": Split(torch.from_numpy(x)[:, None], torch.from_numpy(y), ("file", "b", "c"))}
    folder = eqzoo.finetune("p4_cnn", splits, tmp_path / "o", epochs=1, valid_fraction=0, device="cpu").folder
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == ["split", "file", "class", "prediction", "probability file", "probability b", "probability c"]
    assert {row["split"] for row in rows} == {"test"}
    held_out = stratified(replace(splits["train"], files=tuple(map(str, range(30)))), 0.15)[1]
    assert [row["file"] for row in rows] == list(held_out.files)
    assert [row["class"] for row in rows] == [("file", "b", "c")[y[int(row["file"])]] for row in rows]


def test_the_checkpoint_has_the_classes_and_statistics_of_the_images(tuned, capsys):
    folder = tuned.folder
    own = json.loads((folder / "training.json").read_text())  # of the images, and not those of the first weights
    for model in (
        eqzoo.create_model("p4_cnn", checkpoint_path=folder / "model.safetensors", num_classes=3),
        eqzoo.create_model("p4_cnn.rotmnist", checkpoint_path=folder / "model.safetensors"),
        timm.create_model(f"local-dir:{folder}", pretrained=True),
    ):
        cfg = model.pretrained_cfg
        assert (tuple(cfg["label_names"]), cfg["num_classes"], tuple(cfg["input_size"])) == (NAMES, 3, (1, 28, 28))
        assert (tuple(cfg["mean"]), tuple(cfg["std"])) == (tuple(own["mean"]), tuple(own["std"]))
    assert own["mean"] != list(timm.get_pretrained_cfg("p4_cnn").mean)
    code, out, _ = run(capsys, "predict", tuned.images / "cross" / "00.png", "--model", folder, "--json")
    assert code == 0
    (found,) = json.loads(out)["networks"]
    assert (found["labels"], found["name"]) == (list(NAMES), str(folder))  # and not that of all runs on these images
    assert found["largest_change"] < 1e-12


def test_what_config_json_says_yields_to_what_is_asked_and_is_of_one_network(tuned):
    assert eqzoo.create_model("p4_cnn", checkpoint_path=tuned.folder, in_chans=1).num_classes == 3
    with pytest.raises(ValueError, match="does not fit p4_cnn"):
        eqzoo.create_model("p4_cnn", checkpoint_path=tuned.folder, num_classes=4)
    with pytest.raises(ValueError, match="does not fit p4_cnn_w11"):
        eqzoo.create_model("p4_cnn_w11", checkpoint_path=tuned.folder)
    other = eqzoo.create_model(str(tuned.folder), pretrained=True, num_classes=5)
    assert (other.num_classes, other.pretrained_cfg["label_names"]) == (5, None)


def test_info_of_a_checkpoint_has_its_own_results(tuned, capsys, tmp_path):
    results = json.loads((tuned.folder / "results.json").read_text())
    for name in (tuned.folder, f"local-dir:{tuned.folder}"):
        (entry,) = json.loads(run(capsys, "info", name, "--json")[1])["checkpoints"]
        assert (entry["name"], entry["classes"]) == (results["checkpoint"], list(NAMES))
        assert entry["results"] == results
        assert entry["where"] == str(tuned.folder / "model.safetensors")
    assert "not ended" not in run(capsys, "check", tuned.folder)[2]
    interrupted = shutil.copytree(tuned.folder, tmp_path / "interrupted")
    (interrupted / "state.pt").touch()
    assert "not ended" in run(capsys, "check", interrupted)[2]
    assert ", ".join(NAMES) in run(capsys, "info", tuned.folder)[1]
    assert run(capsys, "check", tuned.folder / "model.safetensors")[0] == 0


def test_a_folder_or_hub_set_with_the_name_of_a_public_data_set_is_another_set(tmp_path):
    """Its card would describe the public one."""
    (tmp_path / "eurosat").mkdir()
    assert data_label(tmp_path / "eurosat") == "own-eurosat"
    assert data_label("hf:me/eurosat") == "own-eurosat"
    assert data_label("hf:me/cells") == "cells"
    assert data_label("eurosat") == data_label("EuroSAT") == "eurosat"
    assert data_label(tmp_path / "cells") == "cells"
    assert data_label("Zellen füllen ünï.npz") == "zellen-fullen-uni"
    (latin := tmp_path / os.fsdecode(b"M\xfcller")).mkdir()
    assert data_argument(latin) == "M?ller"  # as a report can hold it


def test_a_fine_tuned_network_is_fine_tuned_again(tuned, tmp_path):
    call = {"epochs": 1, "lr": 1e-8, "device": "cpu", "augment": "none"}
    same = eqzoo.finetune(str(tuned.folder), tuned.images, tmp_path / "same", **call)
    assert same.results["start"] == f"local-dir:{tuned.folder.name}"
    for name in REPO_FILES:  # which are uploaded, without the folders around
        path = same.folder / name
        assert not path.is_file() or str(tuned.folder.parent).encode() not in path.read_bytes(), name
    first = eqzoo.create_model(f"local-dir:{tuned.folder}", pretrained=True)
    torch.testing.assert_close(same.model.head.weight, first.head.weight)  # of the same classes, so it is kept
    (renamed := shutil.copytree(tuned.images, tmp_path / "renamed") / "bar").rename(renamed.with_name("stick"))
    other = eqzoo.finetune(tuned.folder, tmp_path / "renamed", tmp_path / "other", **call)
    assert not torch.allclose(other.model.head.weight, first.head.weight, atol=1e-3)
    torch.testing.assert_close(other.model.stem.state_dict(), same.model.stem.state_dict(), atol=1e-2, rtol=5e-2)


def test_a_start_that_is_for_non_commercial_use_is_told(tuned, tmp_path, capsys):
    start = shutil.copytree(tuned.folder, tmp_path / "start")
    config = json.loads((start / "config.json").read_text())
    for terms, told in (("mit", False), ("cc-by-nc-4.0", True)):
        config["pretrained_cfg"]["license"] = terms
        write_json(start / "config.json", config)
        call = {"freeze": True, "device": "cpu"}
        result = eqzoo.finetune(start, tuned.images, tmp_path / terms, **call)
        assert (terms in capsys.readouterr().err) is told
        assert result.model.pretrained_cfg["license"] == terms


def test_held_out_images_that_the_initial_weights_were_trained_on_are_counted(tuned, tmp_path):
    call = {"epochs": 1, "lr": 1e-8, "device": "cpu", "augment": "none"}
    grown = shutil.copytree(tuned.images, tmp_path / "grown")
    for label, name in enumerate(NAMES):
        for number in range(9):
            Image.fromarray(shape(label, 500 + number)).save(grown / name / f"new{number}.png")
    old, new = (complete_splits(read_images(folder, 28), None, None) for folder in (tuned.images, grown))
    seen = {image.numpy().tobytes() for image in old["train"].images}
    count = sum(image.numpy().tobytes() in seen for name in ("valid", "test") for image in new[name].images)
    assert count > 2
    said = f"the weights were trained on {count} of the {len(new['valid']) + len(new['test'])} validation and test"
    second = eqzoo.finetune(tuned.folder, grown, tmp_path / "second", **call)
    assert any(line.startswith(said) for line in second.results["advice"])
    # The second run saw none of these images, but its initial weights did.
    third = eqzoo.finetune(tmp_path / "second", grown, tmp_path / "third", size=30, **call)  # and of another size
    assert any(line.startswith(said) for line in third.results["advice"])
    for folder, images in ((tuned.folder, tuned.images), ("p4_cnn", grown)):
        fair = eqzoo.finetune(folder, images, tmp_path / f"fair {images.name}", **call)
        assert not any("weights were trained on" in line for line in fair.results["advice"])
    (tmp_path / "second" / "trained_on.npy").write_bytes(b"none")
    with pytest.raises(ValueError, match="pickle"):
        eqzoo.finetune(tmp_path / "second", tuned.images, tmp_path / "fourth", **call)


def test_a_run_is_not_resumed_from_a_start_that_was_trained_anew(tuned, tmp_path):
    call = {"epochs": 1, "device": "cpu", "augment": "none"}
    start = shutil.copytree(tuned.folder, tmp_path / "start")
    names = {"folder": start, "prefix": f"local-dir:{start}", "file": start / "model.safetensors"}
    runs = {kind: eqzoo.finetune(name, tuned.images, tmp_path / kind, **call).folder for kind, name in names.items()}
    seen = (runs["folder"] / "trained_on.npy").read_bytes()
    shutil.rmtree(start)
    eqzoo.finetune("p4_cnn", tuned.images, start, seed=1, **call)
    for kind, name in names.items():
        with pytest.raises(ValueError, match="weights_sha256 was"):
            eqzoo.finetune(name, tuned.images, runs[kind], **call)
    assert (runs["folder"] / "trained_on.npy").read_bytes() == seen
    recorded = {kind: json.loads((folder / "training.json").read_text())["name"] for kind, folder in runs.items()}
    assert (recorded["folder"], recorded["file"]) == ("local-dir:start", "start/model.safetensors")  # no folders around


def test_a_run_in_a_folder_called_like_its_network_goes_on(tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = {"epochs": 1, "device": "cpu", "augment": "none"}
    first = eqzoo.finetune("p4_cnn", tuned.images, "p4_cnn", **call)
    with pytest.warns(UserWarning, match="is the registered network"):
        assert eqzoo.finetune("p4_cnn", tuned.images, "p4_cnn", **call).results == first.results
    assert "weights_sha256" not in json.loads(Path("p4_cnn/training.json").read_text())


def test_a_loss_that_explodes_is_an_error_that_one_can_mend(tuned, tmp_path, capsys):
    args = ["finetune", "p4_cnn", tuned.images, "--output", tmp_path / "o", "--set", "optimizer=sgd", "lr=1e30"]
    code, _, err = run(capsys, *args, "--device", "cpu", "--epochs", "3")
    assert code == 2
    assert "a smaller lr" in err


def test_the_same_command_trains_nothing_more_and_other_images_are_refused(tuned, tmp_path, capsys):
    weights, log = ((tuned.folder / name).read_bytes() for name in ("model.safetensors", "log.jsonl"))
    assert not (tuned.folder / "state.pt").exists()
    assert command_line.main(tuned.args) == 0
    assert "has all of its epochs: none is trained" in capsys.readouterr().err
    assert (tuned.folder / "model.safetensors").read_bytes() == weights
    assert (tuned.folder / "log.jsonl").read_bytes() == log
    moved = shutil.copytree(tuned.images, tmp_path / "my Shapes")
    Image.fromarray(shape(1, 999)).save(moved / "bar" / "00.png")
    other = [str(moved) if arg == str(tuned.images) else arg for arg in tuned.args]
    for words, message in (
        (other, "images differ"),
        ([*tuned.args, "--test", "0"], "the test images differ"),
        (
            [*tuned.args, "--size", "32"],
            "input_size was [1, 28, 28] and is [1, 32, 32]",
        ),  # the images cannot be compared
        ([*tuned.args, "--precision", "bfloat16"], "precision 'float32', not 'bfloat16'"),
        ([*tuned.args, "--epochs", "9"], "epochs 8, not 9"),
        ([*tuned.args, "--patience", "3"], "patience None, not 3"),
    ):
        code, _, err = run(capsys, *words)
        assert code == 2
        assert message in err
    assert (tuned.folder / "model.safetensors").read_bytes() == weights


def test_the_command_of_a_card_is_that_of_the_run(tuned):
    def options(words):
        found = vars(command_line.parser().parse_args(words))
        return found | parse_settings(found.pop("set"))

    program, *words = shlex.split(json.loads((tuned.folder / "results.json").read_text())["command"])
    known = {"data": "my Shapes", "output": "DIR", "device": None, "json": False}
    known |= {"precision": "float32", "channels_last": False}  # which another machine may measure otherwise
    assert (program, options(words)) == ("eqzoo", options(tuned.args) | known)


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    splits = shapes(30)
    call = {"epochs": 3, "device": "cpu", "pretrained": False, "valid_fraction": 0.2, "test_fraction": 0.2}
    whole = eqzoo.finetune("z2_cnn", splits, tmp_path / "whole", **call)
    saved = RunDirectory.save_state

    def killed(directory, state):
        saved(directory, state)
        if state["epoch"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            eqzoo.finetune("z2_cnn", splits, tmp_path / "stopped", **call)
    assert not (tmp_path / "stopped" / "results.json").exists()
    codes = image_codes(complete_splits(splits, 0.2, 0.2)["train"])
    assert set(trained_images(tmp_path / "stopped")) == set(codes)  # its weights have seen them
    again = eqzoo.finetune("z2_cnn", splits, tmp_path / "stopped", **call)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_a_second_command_leaves_a_fine_tuning_that_has_just_begun_as_it_is(tmp_path, monkeypatch):
    splits = shapes(30)
    call = {"name": "z2_cnn", "data": splits, "output": tmp_path / "out", "device": "cpu", "pretrained": False}
    original, errors = finetuning.with_speed, []

    def with_a_second_command(*args):
        with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(finetuning, "with_speed", original)
            errors.append(pool.submit(eqzoo.finetune, **call, epochs=2).exception())
        return original(*args)

    monkeypatch.setattr(finetuning, "with_speed", with_a_second_command)
    assert eqzoo.finetune(**call, epochs=1).results["selected_epoch"] == 1
    assert [str(error).partition(" in ")[0] for error in errors] == ["another command trains"]


@pytest.mark.parametrize("channels", [1, 4, 5])
def test_a_file_of_any_channels_and_another_size(tmp_path, channels):
    x, y = arrays(30, channels, side=40)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, label_names=np.array(NAMES))
    result = eqzoo.finetune(
        "p4_cnn", tmp_path / "mine.npz", tmp_path / "out", epochs=1, size=32, device="cpu", freeze="stem"
    )
    training = json.loads((result.folder / "training.json").read_text())
    assert (training["input_size"], training["recipe"]["freeze"]) == ([channels, 32, 32], ["stem"])
    model = eqzoo.create_model(f"local-dir:{result.folder}", pretrained=True).eval()
    assert model.input_size == (channels, 32, 32)
    assert eqzoo.equivariance_error(model) < 1e-12
    first = eqzoo.create_model("p4_cnn", pretrained=True, in_chans=channels)
    assert torch.equal(next(model.stem.parameters()), next(first.stem.parameters()))  # it was frozen


def test_a_balanced_classifier_has_the_penalty_with_the_highest_mean_recall(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    splits, features = {}, {}
    for part, counts in (("train", (200, 20)), ("valid", (100, 25))):
        labels = torch.tensor([0] * counts[0] + [1] * counts[1])
        noise = torch.randn(len(labels), 40, generator=generator, dtype=torch.float64)
        features[part] = noise + 0.5 * labels[:, None] * (torch.arange(40) < 4)
        splits[part] = Split(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels, ("a", "b"))
    features = {id(splits[part]): found for part, found in features.items()}
    monkeypatch.setattr(frozen, "pooled_features", lambda model, split, workers: features[id(split)])
    model = SimpleNamespace(get_classifier=lambda: torch.nn.Linear(40, 2).double())
    fitted = {}
    for penalty in frozen._PENALTIES:
        monkeypatch.setattr(frozen, "_PENALTIES", (penalty,))
        fitted[penalty] = frozen._fit(_balanced_plan(), model, splits)
    monkeypatch.setattr(frozen, "_PENALTIES", tuple(fitted))
    found = frozen._fit(_balanced_plan(), model, splits)
    assert found["valid_recall"] == pytest.approx(max(row["valid_recall"] for row in fitted.values()), abs=0.5)
    assert found["valid_accuracy"] < max(row["valid_accuracy"] for row in fitted.values()) - 1
    assert "valid_recall" not in frozen._fit(_balanced_plan(()), model, splits)


def _balanced_plan(class_weights=(0.55, 5.5)):
    recipe = SimpleNamespace(class_weights=class_weights)
    return SimpleNamespace(request=SimpleNamespace(workers=0), recipe=recipe, names=("a", "b"))


def test_what_is_published_names_no_files(tmp_path):
    images = save_shapes(tmp_path / "images", (8, 8, 8))
    for index in range(6):
        shutil.copy(next((images / "bar").iterdir()), images / "bar" / f"Huber_Karl_1944_{index:02}.png")
    first, *_, other = sorted(path for path in images.iterdir() if path.is_dir())
    shutil.copy(next(first.iterdir()), other / "Huber_Karl_1944_99.png")
    (images / "bar" / "Huber_Karl.gif").write_bytes(b"")
    result = eqzoo.finetune("p4_cnn", images, tmp_path / "out", epochs=1, device="cpu")
    assert sum("Huber" in line for line in result.results["advice"]) >= 2
    for file in REPO_FILES:
        path = tmp_path / "out" / file
        assert not path.is_file() or b"Huber" not in path.read_bytes(), file
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["advice"]) == len(result.results["advice"])


def test_a_frozen_trunk_trains_the_classifier_alone(tmp_path):
    splits = shapes(24)
    result = eqzoo.finetune("p4_cnn", splits, tmp_path / "out", epochs=2, freeze=True, device="cpu")
    first = eqzoo.create_model("p4_cnn", pretrained=True).state_dict()
    for name, value in result.model.state_dict().items():
        assert name.startswith("head") or torch.equal(value, first[name]), name
    assert result.model.head.weight.shape != first["head.weight"].shape
    # Every network has a trunk and a classifier outside it.
    for name in ("p4_resnet29", "p4m_densenet", "r4_gsanet_t", "p4_e4net", "z2_allcnn"):
        with torch.device("meta"):
            model = eqzoo.create_model(name)
        names = frozen_modules(model, True)
        outside = [n for n, _ in model.named_parameters() if not n.startswith(tuple(f"{t}." for t in names))]
        assert names
        assert outside
        assert {id(p) for p in model.get_classifier().parameters()} <= {
            id(p) for n, p in model.named_parameters() if n in outside
        }


MODES = {
    "L.png": lambda gray: Image.fromarray(gray),
    "1.png": lambda gray: Image.fromarray(gray).convert("1"),
    "P.png": lambda gray: Image.fromarray(gray).convert("RGB").convert("P"),
    "RGB.jpg": lambda gray: Image.fromarray(gray).convert("RGB"),
    "RGBA.png": lambda gray: Image.fromarray(gray).convert("RGBA"),
    "LA.png": lambda gray: Image.fromarray(gray).convert("LA"),
    "CMYK.jpg": lambda gray: Image.fromarray(gray).convert("CMYK"),
    "CMYK.tif": lambda gray: Image.fromarray(gray).convert("CMYK"),
    "16.png": lambda gray: Image.fromarray(gray.astype(np.uint16) * 257),
    "16.tif": lambda gray: Image.fromarray(gray.astype(np.uint16) * 257),
}


@pytest.mark.parametrize("name", MODES)
def test_images_of_every_mode_give_the_same_pixels(tmp_path, name):
    gray = np.kron(np.array([[0, 255], [51, 204]], np.uint8), np.ones((16, 16), np.uint8))
    if name == "1.png":
        gray = np.where(gray > 100, 255, 0).astype(np.uint8)
    MODES[name](gray).save(tmp_path / name)
    for channels in (1, 3, 4):
        pixels = load_image(tmp_path / name, channels)
        assert pixels.shape == (channels, 32, 32)
        expected = torch.from_numpy(gray).float().expand(min(channels, 3), -1, -1)
        torch.testing.assert_close(pixels[:3], expected, rtol=0, atol=12.0 if name.endswith("jpg") else 1.0)
        assert channels < 4 or (pixels[3] == 255).all()


def test_what_is_transparent_is_black_unless_opacity_is_asked_for(tmp_path):
    image = np.full((4, 4, 4), 200, np.uint8)
    image[:2, :, 3], image[2:, :, 3] = 0, 255
    Image.fromarray(image).save(tmp_path / "a.png")
    pixels = load_image(tmp_path / "a.png", 3)
    assert (pixels[:, :2] == 0).all()
    assert (pixels[:, 2:] == 200).all()
    assert load_image(tmp_path / "a.png", 4)[:, 0, 0].tolist() == [200, 200, 200, 0]


def test_a_streamed_test_image_that_breaks_is_named_after_the_training(tmp_path, monkeypatch):
    save_shapes(tmp_path / "images" / "train")
    test = save_shapes(tmp_path / "images" / "test", (2, 2, 2))
    for path in (test / "bar").iterdir():
        path.write_bytes(path.read_bytes()[:200])  # the header is whole
    monkeypatch.setattr("eqzoo.data.folder.MEMORY_LIMIT", 0)
    call = {"epochs": 1, "pretrained": False, "device": "cpu", "workers": 1}
    with pytest.raises(ValueError, match=r"test/bar/\d\d\.png is not an image") as info:
        eqzoo.finetune("z2_cnn", tmp_path / "images", tmp_path / "out", **call)
    assert "Traceback" not in str(info.value)
    assert (tmp_path / "out" / "model.safetensors").is_file()  # not trained again


@pytest.mark.slow
def test_a_name_without_tag_is_fine_tuned_as_the_checkpoint_whose_weights_it_takes(tmp_path, monkeypatch):
    """Weights of PatchCamelyon, the first entry of p4m_densenet, are not published: it takes those of blood cells."""
    monkeypatch.setattr(write, "_SECONDS", 0.1)
    x, y = arrays(12, 3, 80)
    splits = {"train": Split(torch.from_numpy(x).movedim(-1, 1), torch.from_numpy(y))}
    call = {"size": 80, "freeze": True, "epochs": 1, "device": "cpu", "precision": "float32"}
    result = eqzoo.finetune("p4m_densenet", splits, tmp_path / "out", **call)
    own = timm.get_pretrained_cfg("p4m_densenet.chula_rbc12")
    assert result.results["start"] == "p4m_densenet.chula_rbc12"
    assert result.model.pretrained_cfg["mean"] == own.mean
    assert own.mean != timm.get_pretrained_cfg("p4m_densenet").mean


def test_colors_and_channels(tmp_path):
    images = save_shapes(tmp_path / "images", (3, 3, 3))
    assert read_images(images, 32)["train"].shape == (1, 32, 32)
    Image.fromarray(shape(0, 1)).convert("RGB").save(images / "bar" / "00.png")
    assert read_images(images, 32)["train"].shape == (3, 32, 32)
    assert read_images(images, 32, channels=4)["train"].shape == (4, 32, 32)
    with pytest.raises(ValueError, match=r"1, 3 or 4 channels.* 5"):
        read_images(images, 32, channels=5)
    with pytest.raises(ValueError, match="channels=3, and the splits have 1"):
        eqzoo.finetune("p4_cnn", shapes(24), tmp_path / "out", channels=3)


def test_parts_are_drawn_class_by_class_and_always_alike(tmp_path):
    split = read_images(save_shapes(tmp_path / "a", (20, 10, 4)), 16)["train"]
    parts = complete_splits({"train": split}, 0.2, 0.2)
    assert [part.labels.bincount().tolist() for part in parts.values()] == [[12, 6, 2], [4, 2, 1], [4, 2, 1]]
    again = complete_splits({"train": split}, 0.2, 0.2)
    assert all(torch.equal(parts[name].images, again[name].images) for name in parts)
    together = torch.cat([part.images for part in parts.values()])
    assert len(together.flatten(1).unique(dim=0)) == 34
    assert complete_splits({"train": split}, 0, 0).keys() == {"train"}
    few = split[torch.tensor([0, 20, 21, 22, 30, 31, 32])]
    for fractions, message in (
        ((-0.1, 0.2), "together less than 1"),
        ((0.6, 0.6), "together less than 1"),
        ((0.01, 0.98), "class 'bar' has too few images to split: of 20 that no other part has, 20 would"),
    ):
        with pytest.raises(ValueError, match=message):
            complete_splits({"train": split}, *fractions)
    with pytest.raises(ValueError, match="class 'bar' has too few images to split: of 1 that no"):
        complete_splits({"train": few})


def test_train_val_and_test_stay_what_they_are(tmp_path):
    for part, first in (("train", 0), ("val", 1000), ("test", 2000)):
        save_shapes(tmp_path / "a" / part, (4, 4, 4), first)
    splits = complete_splits(read_images(tmp_path / "a", 28))
    assert {name: len(split) for name, split in splits.items()} == {"train": 12, "valid": 12, "test": 12}
    for given in ({"valid": 0.3}, {"test": 0}):
        with pytest.raises(ValueError, match=rf"12 \w+ images, .*: leave --{next(iter(given))}"):
            complete_splits(splits, **given)


def test_settings_that_differ_from_those_of_a_run_are_named():
    run = {"data_sha256": {"train": "a"}, "input_size": [1, 28, 28], "mean": [0.1], "split_by": "folder"}
    other = {"data_sha256": {"train": "b"}, "mean": [0.2]}
    assert [*settings_differences(run, run | other)] == ["the training images differ", "mean was [0.1] and is [0.2]"]
    # Images that were split otherwise differ, and are not compared; a split that changes no image is the same run.
    assert [*settings_differences(run, run | other | {"split_by": None})] == ["split_by was 'folder' and is None"]
    assert [*settings_differences(run, run | {"split_by": None})] == []


def test_wrong_calls_are_errors_before_anything_is_written(tmp_path):
    images = save_shapes(tmp_path / "images", (4, 4, 4))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    np.savez(tmp_path / "deep.npz", x_train=np.zeros((4, 8, 8), np.float32), y_train=np.arange(4))
    shutil.copytree(images / "bar", tmp_path / "one" / "bar")
    for message, changes in {
        "no setting epoch; it has .* epochs": {"epoch": 3},
        "no setting samples_per_class": {"samples_per_class": 3},
        "freeze needs trained weights": {"freeze": True, "pretrained": False},
        "no weights for z2m_gsanet_b": {"name": "z2m_gsanet_b", "pretrained": True},
        "no weights for z2m_gsanet_b.cifar10: .*; --no-pretrained": {"name": "z2m_gsanet_b.cifar10"},
        "nothing is called 'p5_cnn'": {"name": "p5_cnn"},
        "copies are those of a group": {"name": "test_efficientnet", "copies": 1},
        "does not accept images of 29 x 29 .* 28 x 28 and 30 x 30": {"size": 29},
        "is inside the images": {"output": images / "out"},
        "holds other files": {"output": tmp_path / "full"},
        "no images at .*: give a folder": {"data": tmp_path / "full" / "thesis.tex"},
        "images are uint8, .* got float32": {"data": tmp_path / "deep.npz"},
        "one class, 'bar'": {"data": tmp_path / "one"},
        "together less than 1": {"valid_fraction": 0.6, "test_fraction": 0.6},
        "patience should be null without validation images": {"valid_fraction": 0, "patience": 5},
    }.items():
        call = {"name": "p4_cnn", "data": images, "output": tmp_path / "out", "device": "cpu"} | changes
        with pytest.raises((ValueError, OSError), match=message):
            eqzoo.finetune(**call)
        assert not (tmp_path / "out").exists(), message


def test_a_network_whose_weights_are_out_of_reach_is_not_trained_from_random_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("eqzoo.hub.shipped_folder", lambda: tmp_path)
    for name in ("p4_cnn", "resnet10t"):
        with pytest.raises(WeightsNotFoundError, match="; --no-pretrained trains from random weights"):
            eqzoo.finetune(name, shapes(24), tmp_path / "out", device="cpu")
        assert not (tmp_path / "out").exists()


def test_values_are_checked_before_images_are_read(tmp_path, monkeypatch):
    images = save_shapes(tmp_path / "images", (4, 4, 4))
    monkeypatch.setattr("eqzoo.finetuning.images.read_images", lambda *_: pytest.fail("images were read"))
    for changes, message in (
        ({"lr": -1.0}, "lr should be a finite number above 0"),
        ({"lr": 0.0}, "lr should be a finite number above 0"),
        ({"epochs": 0}, "epochs should be at least 1, got 0"),
        ({"augment": "nonesuch"}, "augment should be one of"),
        ({"optimizer": "nonesuch"}, "optimizer should be one of"),
        ({"freeze": ["nonesuch"]}, "freeze names modules of the network such as stem, .* got 'nonesuch'"),
        ({"device": "tpu"}, "device is 'cpu' or 'cuda', got 'tpu'"),
        ({"weights": "w.safetensors", "pretrained": False}, "pretrained=False would leave out the weights"),
    ):
        with pytest.raises(ValueError, match=message):
            eqzoo.finetune("p4_cnn", images, tmp_path / "out", **changes)


def test_gray_images_among_images_in_color_are_told(tmp_path):
    images = save_shapes(tmp_path / "images", (6, 6, 6))
    assert channels_found(images) == (1, [])
    for file in images.glob("*/*"):
        if file.name != "00.png" or file.parent.name != "bar":
            Image.open(file).convert("RGB").save(file)
    (line,) = channels_found(images)[1]
    assert line.startswith("some images are gray (1 of 18, such as 'bar/00.png') and others in color")
    call = {"epochs": 1, "device": "cpu", "pretrained": False}
    assert line in eqzoo.finetune("z2_cnn", images, tmp_path / "a", **call).results["advice"]
    assert line not in eqzoo.finetune("z2_cnn", images, tmp_path / "b", channels=1, **call).results["advice"]
    Image.open(images / "bar" / "00.png").convert("RGB").save(images / "bar" / "00.png")
    assert channels_found(images) == (3, [])


class Pairs:
    """A data set as torchvision makes them."""

    classes = NAMES

    def __init__(self, root, split="train", download=False):
        if split not in ("train", "test"):
            raise ValueError(split)
        if not download:
            raise RuntimeError("not there")
        self.first = 0 if split == "train" else 500

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i >= 12:
            raise IndexError
        return Image.fromarray(shape(i % 3, self.first + i)), i % 3


def test_data_sets_of_torchvision_by_name(tmp_path, monkeypatch):
    import torchvision

    monkeypatch.setattr(torchvision.datasets, "Flowers102", Pairs)
    splits = read_images("flowers102", 28, data_dir=tmp_path, download=True)
    assert {name: len(split) for name, split in splits.items()} == {"train": 12, "test": 12}
    assert splits["train"].shape == (1, 28, 28)
    assert splits["test"].classes == NAMES
    with pytest.raises(FileNotFoundError, match="--download"):
        read_images("Flowers102", 28, data_dir=tmp_path)
    monkeypatch.setattr("eqzoo.data.external.MEMORY_LIMIT", 0)
    assert isinstance(read_images("Flowers102", 28, data_dir=tmp_path, download=True)["train"], Streamed)


def test_data_sets_of_the_hub_by_name(tmp_path, monkeypatch):
    kinds = {"image": type("Image", (), {})(), "label": type("ClassLabel", (), {"names": NAMES})()}

    class Rows:
        features = kinds

        decoded = True

        def cast_column(self, key, images):
            assert key == "image"
            rows = Rows()
            rows.decoded = images["decode"]
            return rows

        def __getitem__(self, key):
            if key == "label":
                return [0, 1, 2] * 3
            deep = shape(key % 3, key).astype(np.uint16)[..., None] * 257
            (tmp_path / f"{key}.tif").write_bytes(tiff((deep, {"t262": [0], "t274": [1]})))  # where 0 is white
            if self.decoded:  # as `datasets` does it, which loses the tags
                return {"image": ImageOps.exif_transpose(Image.open(tmp_path / f"{key}.tif"))}
            inside = {"bytes": (tmp_path / f"{key}.tif").read_bytes(), "path": None}
            return {"image": inside if key % 2 else {"bytes": None, "path": str(tmp_path / f"{key}.tif")}}

    module = ModuleType("datasets")
    module.Image = dict
    module.load_dataset = lambda name, cache_dir: {"train": Rows(), "validation": Rows()}
    monkeypatch.setitem(sys.modules, "datasets", module)
    splits = read_images("hf:some/shapes", 28, data_dir=tmp_path)
    assert {name: len(split) for name, split in splits.items()} == {"train": 9, "valid": 9}
    assert splits["valid"].classes == NAMES
    assert splits["train"].shape == (1, 28, 28)
    assert splits["train"].images.double().mean() > 128  # inverted, as the TIFF says
    monkeypatch.setitem(kinds, "coarse_label", kinds["label"])
    with pytest.raises(ValueError, match=r"one of type ClassLabel; it has .*'coarse_label': 'ClassLabel'"):
        read_images("hf:some/shapes", 28, data_dir=tmp_path)


def test_the_network_comes_before_the_images(tmp_path, capsys):
    images = save_shapes(tmp_path / "shapes", (6, 6, 6))
    code, _, said = run(capsys, "finetune", images, "p4_cnn", "--output", tmp_path / "out")
    assert code == 2
    assert f"the network comes before the images: eqzoo finetune p4_cnn {images}" in said


def where_the_mean_is_above(threshold, monkeypatch):
    """Networks whose logits are zero on darker images, as those of p4_cnn are where all features are."""
    build = Plan.build

    def network(plan):
        model = build(plan)
        model.register_forward_hook(lambda _, inputs, y: y * (inputs[0].mean((1, 2, 3)) > threshold)[:, None])
        return model

    monkeypatch.setattr(Plan, "build", network)


def test_a_collapsed_network_is_named_so(tmp_path, capsys, monkeypatch):
    where_the_mean_is_above(1e9, monkeypatch)
    args = ["finetune", "p4_cnn", save_shapes(tmp_path / "shapes", (6, 6, 6)), "--output", tmp_path / "out"]
    code, _, said = run(capsys, *args, "--epochs", 1, "--device", "cpu")
    assert code == 2
    assert "all classes have the same logit on all of 12 training images: the network has collapsed" in said
    assert not (tmp_path / "out" / "results.json").exists()


def test_logits_that_are_zero_on_noise_and_on_some_images(tmp_path, capsys, monkeypatch):
    where_the_mean_is_above(0.0, monkeypatch)
    noise = equivariance.errors.noise_images
    monkeypatch.setattr(equivariance.errors, "noise_images", lambda *args: -noise(*args).abs())
    args = ["finetune", "p4_cnn", save_shapes(tmp_path / "shapes", (9, 9, 9)), "--output", tmp_path / "out"]
    assert run(capsys, *args, "--epochs", 1, "--device", "cpu", "--test", 0.3)[0] == 0
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert 0 < report["equivariance_error"] < 1e-12
    assert any(
        re.search(rf"On \d of 9 images all classes have the same logit, and '{NAMES[0]}'", note)
        for note in report["notes"]
    )
