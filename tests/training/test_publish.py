"""Cards and tables: rendered from the files of a checkpoint's folder, and true for every kind of them."""

import hashlib
import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo.cards import card, push_folder, read_checkpoint, render_card
from eqzoo.evaluation.metrics import scores
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import publish

NAME = "p4_cnn.rotmnist"
SHIPPED = ROOT / "model_cards" / NAME


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A tree of its own, so that nothing of the project is written."""
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "CARDS", tmp_path / "model_cards")
    (tmp_path / "docs").mkdir()
    (tmp_path / "model_cards").mkdir()
    table = "<!-- checkpoints: rendered by training/tables.py -->\n\n<!-- end of checkpoints -->"
    for name in ("README.md", "docs/results.md"):
        (tmp_path / name).write_text(f"before\n{table}\nafter\n")
    return tmp_path


def changed(name=NAME, **results):
    """A checkpoint of the zoo whose results say something else."""
    checkpoint = read_checkpoint(ROOT / "model_cards" / name)
    return replace(checkpoint, results=dict(checkpoint.results) | results)


def write_results(folder, **values):
    path = folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_run_becomes_a_folder_of_the_zoo(zoo):
    run = shutil.copytree(SHIPPED, zoo / "run")
    (run / "predictions.csv").write_text("the user's\n")
    publish.main([str(run)])
    folder = zoo / "model_cards" / NAME
    assert not (folder / "predictions.csv").exists()
    assert (folder / "model.safetensors").read_bytes() == (SHIPPED / "model.safetensors").read_bytes()
    for name in ("docs/results.md", "README.md"):
        text = (zoo / name).read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert NAME in text
    before = {path: path.read_bytes() for path in zoo.rglob("*") if path.is_file()}
    publish.main([str(run)])
    publish.main(["--render"])
    assert {path: path.read_bytes() for path in zoo.rglob("*") if path.is_file()} == before


def test_a_run_that_is_not_of_its_recipe_or_of_other_weights_is_refused(zoo):
    run = shutil.copytree(SHIPPED, zoo / "run")
    publish.main([str(run)])
    training = json.loads((run / "training.json").read_text())
    (run / "training.json").write_text(json.dumps(training | {"recipe": training["recipe"] | {"epochs": 3}}))
    with pytest.raises(SystemExit, match="was not made by the recipe of its name"):
        publish.main([str(run)])
    (run / "training.json").write_text(json.dumps(training))
    weights = run / "model.safetensors"
    save_file({key: 2 * value for key, value in load_file(weights).items()}, weights)
    with pytest.raises(SystemExit, match="other weights than"):
        publish.main([str(run)])
    write_results(run, weights_sha256=hashlib.sha256(weights.read_bytes()).hexdigest())
    with pytest.raises(SystemExit, match="holds other weights; --replace"):
        publish.main([str(run)])
    publish.main([str(run), "--replace"])


def test_a_network_that_is_not_the_registered_one_is_refused(zoo):
    run = shutil.copytree(SHIPPED, zoo / "run")
    config = json.loads((run / "config.json").read_text())
    cfg = config["pretrained_cfg"]
    for other, message in (
        ({"architecture": "p4_cnn_w11"}, "does not fit p4_cnn_w11"),
        ({"model_args": {"width": 8}}, "does not fit p4_cnn"),
        ({"pretrained_cfg": cfg | {"mean": [0.5]}}, "is not the registered p4_cnn.rotmnist: they differ in mean"),
    ):
        (run / "config.json").write_text(json.dumps(config | other))
        with pytest.raises(SystemExit, match=message):
            publish.main([str(run)])
    narrow = eqzoo.create_model("p4_cnn", width=8)
    save_file(narrow.state_dict(), run / "model.safetensors")
    write_results(run, weights_sha256=hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest())
    (run / "config.json").write_text(json.dumps(config | {"model_args": {"width": 8}}))
    with pytest.raises(SystemExit, match="they differ in the shapes of weights; train the registered one"):
        publish.main([str(run)])
    write_results(run, checkpoint="p4_cnn_w11.rotmnist")
    with pytest.raises(SystemExit, match=r"is called p4_cnn_w11.rotmnist, and its network is p4_cnn$"):
        publish.main([str(run)])
    assert not list((zoo / "model_cards").iterdir())
    write_results(run, data="mine")  # whose mean differs too
    with pytest.raises(SystemExit, match="mine is no data set of the zoo: `eqzoo publish`"):
        publish.main([str(run)])


@pytest.mark.parametrize("name", [NAME, "z2_resnet29.eurosat", "p4m_densenet.chula_rbc12", "r8_gsanet_t.rotmnist"])
def test_cards_have_the_metadata_of_the_hub_and_the_numbers_of_the_results(name):
    checkpoint = changed(name)
    text = render_card(checkpoint, f"eqzoo/{name}")
    data, r = ModelCard(text).data, checkpoint.results
    assert (data.library_name, data.pipeline_tag) == ("eqzoo", "image-classification")
    assert data.eval_results[0].metric_value == pytest.approx(r["accuracy"], abs=1e-3)
    assert f"{r['accuracy']:.2f} %" in text
    assert f"{r['parameters']:,}" in text
    assert r["weights_sha256"] in text


def test_a_card_of_validation_images_has_no_result_for_the_hub():
    assert ModelCard(render_card(changed(evaluated_on="valid"))).data.eval_results is None


def test_a_card_shows_classes_of_unequal_sizes_and_those_of_a_user():
    found = scores(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]), ("round", "torn"))
    text = render_card(changed(**found))
    assert "| round | 3 | 100.00 % | 66.67 % | 80.00 % |" in text
    assert "| round | 2 | 1 |" in text
    equal = scores(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), ("round", "torn"))
    assert "| round |" not in render_card(changed(**equal))
    assert "| round |" in render_card(replace(changed(**equal), zoo=False))
    missing = scores(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1]), ("round", "torn"))
    assert "mean F1 of the classes that have images |" in render_card(changed(**missing))
    assert "that have images" not in text


@pytest.mark.parametrize(
    ("group", "promise"), [("z2", "neither rotations"), ("p4", "90° rotations"), ("p4m", "reflections")]
)
def test_a_card_promises_what_the_group_keeps(group, promise):
    assert promise in card._promise({"group": group, "equivariance_error": 1e-15})
    assert "approximately" in card._promise({"group": "p4", "equivariance_error": 1e-3})


def test_an_onnx_file_of_other_weights_is_not_pushed(tmp_path):
    folder = shutil.copytree(SHIPPED, tmp_path / NAME)
    eqzoo.export_onnx(eqzoo.create_model("p4_cnn"), folder / "model.onnx")
    with pytest.raises(ValueError, match="was not made of the checkpoint beside it"):
        push_folder(folder, "me/x")
