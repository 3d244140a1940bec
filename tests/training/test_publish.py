"""The folder of a checkpoint, its card and the tables: made from results.json, whole, and true for every data set."""

import hashlib
import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo.cards import (
    REPO_FILES,
    card,
    draw_rotation_curve,
    draw_training_curve,
    published_config,
    render_card,
    render_summary,
    render_table,
    repository,
)
from eqzoo.cards.repository import with_label_names
from eqzoo.cli import main as command_line
from eqzoo.evaluation.metrics import scores
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import publish
import reproduce

NAME = "p4_cnn.rotmnist"
SHIPPED = ROOT / "model_cards" / NAME
CURVE = {"angles": list(range(0, 360, 15)), "accuracy": [90 + i % 6 / 3 for i in range(24)], "images": 1_234}
NEW = {
    "seeds": 3,
    "test_errors": [2.228, 2.3, 2.2],
    "test_error_std": 0.05,
    "rotation_curve": CURVE,
    "valid_accuracies": [91.0, 96.5, 96.0, 97.5],
    "selected_epoch": 4,
    "multiply_adds": 12_345_678,
    "throughput": {"images_per_second": 4321.0, "batch_size": 256, "machine": "NVIDIA H100"},
}
SCORES = ("macro_f1", "balanced_accuracy", "classes")


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """A tree of its own, so that nothing of the project is written."""
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "CARDS", tmp_path / "model_cards")
    (tmp_path / "docs").mkdir()
    for name, block in (("README.md", "results"), ("docs/results.md", "checkpoints")):
        (tmp_path / name).write_text(f"before\n{empty_table(block)}\nafter\n")
    return tmp_path / "model_cards"


def empty_table(block):
    """The place of a rendered table."""
    return f"<!-- {block}: rendered by training/tables.py -->\n\n<!-- end of {block} -->"


def shipped_results():
    """A shipped checkpoint's results, without what results did not always have."""
    results = json.loads((SHIPPED / "results.json").read_text())
    new = {*NEW, *SCORES} - {"seeds", "selected_epoch"}
    return {key: value for key, value in results.items() if key not in new}


def make_run(folder, state=None, file="model.safetensors", **changes):
    """The folder of an evaluated run."""
    folder.mkdir(exist_ok=True)
    save_file(state or load_file(SHIPPED / "model.safetensors"), folder / file)
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    results = shipped_results() | {"weights_sha256": digest} | changes
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return str(folder)


def own(*words):
    """`eqzoo publish`, for the user's own checkpoint."""
    assert command_line.main(["publish", *map(str, words)]) == 0


def results_of(model, dataset, checkpoint=None, **changes):
    """What evaluation would say of a network on a data set."""
    r = shipped_results()
    counts = {"name": dataset, "train": 40_000, "valid": 10_000, "test": 8_000}
    recipe = r["recipe"] | {"model": model, "dataset": dataset}
    return r | {"checkpoint": checkpoint or f"{model}.{dataset}", "dataset": counts, "recipe": recipe} | changes


def card_of(r, tmp_path, repo_id="eqzoo/x", ours=True):
    model = eqzoo.create_model(r["recipe"]["model"], **r["recipe"]["model_args"])
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    config = published_config(r, tmp_path / "w.safetensors")
    return render_card(r, config, 1_234_567, repo_id, "model_cards/x", ours)


def test_a_run_becomes_a_folder_that_loads(tmp_path, cards, capsys):
    run = make_run(tmp_path / "run", **NEW)
    publish.main([run])
    folder = cards / NAME
    assert {path.name for path in folder.iterdir()} == set(REPO_FILES) - {"model.onnx"}
    for builder in (eqzoo.create_model, timm.create_model):
        model = builder(f"local-dir:{folder}", pretrained=True)
        torch.testing.assert_close(model.head.weight, load_file(SHIPPED / "model.safetensors")["head.weight"].double())
    for name, row in (("docs/results.md", "2.24 ± 0.05 % (3 seeds) | 2.048 ± 0.045 %"), ("README.md", "2.24 ± 0.05 %")):
        text = (tmp_path / name).read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert row in text
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    publish.main([run])
    publish.main(["--render"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # What newer results no longer have goes.
    publish.main([make_run(tmp_path / "run")])
    for name in ("rotation_curve", "training_curve"):
        assert not (folder / f"{name}.svg").exists()
        assert name not in (folder / "README.md").read_text()


def test_nothing_is_written_where_anything_is_wrong(tmp_path, cards, monkeypatch):
    publish.main([make_run(tmp_path / "run")])
    before = {path: path.read_bytes() for path in cards.rglob("*") if path.is_file()}
    state, recipe = load_file(SHIPPED / "model.safetensors"), shipped_results()["recipe"]
    other = {key: value / 2 if value.is_floating_point() else value for key, value in state.items()}
    cells = {"name": "cells", "train": 1, "valid": 1, "test": 1}
    wide = eqzoo.create_model("p4_cnn_w11").state_dict()
    cases = {
        "holds other weights; --replace": {"state": other},
        "does not fit p4_cnn": {"state": wide},
        "and .* has [0-9a-f]{64}; run python training/evaluate.py": {"weights_sha256": "0" * 64},
        "2 names of classes for a network of 10 classes": {"label_names": ["a", "b"]},
        "not the network that p4_cnn stands for": {"recipe": recipe | {"model_args": {"global_pool": "avg"}}},
        "model_args of .*: .*has no argument": {"recipe": recipe | {"model_args": {"depth": 3}}},
        "is no network of eqzoo": {"recipe": recipe | {"model": "resnet18"}, "checkpoint": "resnet18.rotmnist"},
        "the data set cells, which is not the zoo's": {"dataset": cells, "checkpoint": "p4_cnn.cells"},
    }
    for message, changes in cases.items():
        run = make_run(tmp_path / "run", **changes)
        with pytest.raises(SystemExit, match=message):
            publish.main([run])
    (tmp_path / "run" / "results.json").write_text("{")
    with pytest.raises(SystemExit, match="is not JSON"):
        publish.main([str(tmp_path / "run")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"run python training/evaluate.py .*empty first"):
        publish.main([str(tmp_path / "empty")])
    monkeypatch.setattr(publish, "GIT_LIMIT", 1000)
    with pytest.raises(SystemExit, match=r"evaluate it in half precision"):
        publish.main([make_run(tmp_path / "run")])
    monkeypatch.setattr(repository, "render_card", lambda *_: 1 / 0)
    monkeypatch.setattr(publish, "GIT_LIMIT", 16_000_000)
    with pytest.raises(ZeroDivisionError):
        publish.main([make_run(tmp_path / "run", other), "--replace"])
    assert {path: path.read_bytes() for path in cards.rglob("*") if path.is_file()} == before


def test_a_run_of_other_settings_is_none_of_the_recipe(tmp_path, cards):
    recipe = shipped_results()["recipe"] | {"epochs": 3}
    run = make_run(tmp_path / "run", recipe=recipe)
    with pytest.raises(SystemExit, match=r"other settings than the recipe p4_cnn\.rotmnist"):
        publish.main([run])
    own(run, "--output", tmp_path / "own")
    text, plain = (path.read_text() for path in (tmp_path / "own" / "README.md", SHIPPED / "README.md"))
    said = publish.recipe_text(NAME)[:40]
    assert said in plain.replace("\n", " ")
    assert said not in text.replace("\n", " ")


def test_the_words_of_a_card_are_those_of_its_group(tmp_path):
    text = card_of(results_of("p4m_cnn", "rotmnist", group="r2m"), tmp_path)
    assert "exactly equivariant to 180° rotations and reflections" in " ".join(text.split())
    assert "at angles between multiples of 180°" in " ".join(text.split())
    assert "Group Equivariant Convolutional Networks" in text  # its family's paper, which has no row of it
    text = card_of(results_of("p4_cnn", "rotmnist", equivariance_error=0.1), tmp_path)
    assert "approximately equivariant" in text
    assert "is exact for" not in " ".join(text.split())


def test_a_card_counts_the_epochs_until_patience_ended_the_run(tmp_path):
    r = results_of("p4_cnn", "rotmnist", valid_accuracies=[60.0, 50.0, 40.0], selected_epoch=1)
    assert "%, epoch 1 of 3 |" in card_of(r, tmp_path)
    assert f"%, epoch 1 of {r['recipe']['epochs']} |" in card_of(r | {"valid_accuracies": []}, tmp_path)


def test_a_fine_tuned_network_has_the_arguments_of_its_recipe(tmp_path):
    """Not those of the checkpoint whose data set has the same name as the user's folder."""
    r = results_of("p4_convnext_atto", "eurosat", mean=[0.5] * 3, std=[0.5] * 3, group="p4")
    r["recipe"] |= {"model_args": {"num_classes": 3, "in_chans": 3}}
    save_file(eqzoo.create_model("p4_convnext_atto", num_classes=3).state_dict(), tmp_path / "w.safetensors")
    r["label_names"] = [*"abc"]
    assert published_config(r, tmp_path / "w.safetensors")["model_args"] == {"num_classes": 3, "in_chans": 3}


def test_a_network_with_fewer_channels_than_its_configuration_is_published_as_it_was_trained(tmp_path, cards):
    torch.set_default_dtype(torch.float32)
    model = eqzoo.create_model("p4_resnet29", in_chans=1, num_classes=3)
    recipe = shipped_results()["recipe"] | {"model": "p4_resnet29"}
    recipe |= {"dataset": "cells", "model_args": {"in_chans": 1, "num_classes": 3}}
    changes = {"checkpoint": "p4_resnet29.cells", "recipe": recipe, "label_names": [*"abc"], "base_model": None}
    changes |= {"dataset": {"name": "cells", "train": 90, "valid": 10, "test": 20}}
    own(make_run(tmp_path / "run", model.state_dict(), **changes), "--output", tmp_path / "mine")
    loaded = eqzoo.create_model(f"local-dir:{tmp_path / 'mine'}", pretrained=True)
    assert list(loaded.pretrained_cfg["mean"]) == list(model.pretrained_cfg["mean"])
    assert len(loaded.pretrained_cfg["mean"]) == 1


@pytest.mark.slow
def test_an_onnx_file_of_other_weights_is_not_pushed(tmp_path, monkeypatch):
    folder = shutil.copytree(ROOT / "model_cards" / "p4_cnn.rotmnist", tmp_path / "p4_cnn.rotmnist")
    other = eqzoo.create_model("p4_cnn").float()
    eqzoo.export_onnx(other, folder / "model.onnx")
    monkeypatch.setattr(repository, "push", lambda *args: pytest.fail("it is pushed"))
    with pytest.raises(
        SystemExit, match=r"model.onnx was not made of the checkpoint beside it, its weights_sha256 diff"
    ):
        publish.main([str(folder), "--push", "me"])
    publish.main([str(folder), "--onnx"])
    eqzoo.quantize_onnx(folder / "model.onnx", torch.zeros(1, 1, 28, 28), tmp_path / "int8.onnx")
    (tmp_path / "int8.onnx").replace(folder / "model.onnx")
    with pytest.raises(SystemExit, match="its quantized differ"):
        publish.main([str(folder), "--push", "me"])
    publish.main([str(folder), "--onnx"])
    monkeypatch.setattr(repository, "push", lambda files, *args: sorted(files))
    publish.main([str(folder), "--push", "me"])


def test_an_export_of_other_weights_goes_with_them(tmp_path, cards):
    state = load_file(SHIPPED / "model.safetensors")
    other = {key: value / 2 if value.is_floating_point() else value for key, value in state.items()}
    publish.main([make_run(tmp_path / "run")])
    (cards / NAME / "model.onnx").write_bytes(b"of the first weights")
    publish.main([make_run(tmp_path / "run"), "--replace"])
    assert (cards / NAME / "model.onnx").exists()
    publish.main([make_run(tmp_path / "run", other), "--replace"])
    assert torch.equal(load_file(cards / NAME / "model.safetensors")["head.weight"], state["head.weight"] / 2)
    assert not (cards / NAME / "model.onnx").exists()


def test_arguments_that_do_not_go_together(tmp_path, cards, capsys):
    publish.main([make_run(tmp_path / "run")])
    run, folder = str(tmp_path / "run"), str(cards / NAME)
    for arguments, message in {
        (): "name runs or finished folders",
        (run, "--render"): "name runs or finished folders",
        (run, "--time"): "--time goes with --render",
        (run, "--private"): "--private goes with --push OWNER",
        (folder,): "nothing to do with it without --push",
    }.items():
        with pytest.raises(SystemExit):
            publish.main(list(arguments))
        assert message in capsys.readouterr().err


def test_the_throughput_of_all_is_measured_in_turn(tmp_path, cards, monkeypatch, capsys):
    publish.main([make_run(tmp_path / "run")])
    before = json.loads((cards / NAME / "results.json").read_text())
    rates, sizes = iter([30.0, 9_876.0, 70_000.0]), []

    def measured(network, size):
        sizes.append(tuple(size))
        return {"images_per_second": next(rates), "batch_size": 64, "machine": "A, 2 cores, 1 thread"}

    monkeypatch.setattr(publish, "throughput", measured)
    publish.main(["--render", "--time"])
    assert sizes == [(1, 28, 28)] * 3
    assert f"{NAME}: 9,876 images/s" in capsys.readouterr().out
    after = json.loads((cards / NAME / "results.json").read_text())
    assert after == before | {
        "throughput": {"images_per_second": 9_876.0, "batch_size": 64, "machine": "A, 2 cores, 1 thread"}
    }
    assert list(after) == list(before | {"throughput": None})
    assert (
        "9,876 a second, float32, contiguous, batch 64, A, 2 cores, 1 thread;"
        in (cards / NAME / "README.md").read_text()
    )


def test_half_precision_is_what_was_evaluated(tmp_path, cards):
    state = load_file(SHIPPED / "model.safetensors")
    half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    make_run(tmp_path / "run", half, "model.half.safetensors", weights_dtype="float16")
    publish.main([str(tmp_path / "run")])
    folder = cards / NAME
    assert (folder / "model.safetensors").stat().st_size < 0.6 * (SHIPPED / "model.safetensors").stat().st_size
    assert json.loads((folder / "config.json").read_text())["eqzoo"]["weights_dtype"] == "float16"
    card = " ".join((folder / "README.md").read_text().split())
    assert "rounded to half precision before the evaluation" in card
    torch.set_default_dtype(torch.float32)
    for model in (
        timm.create_model(f"local-dir:{folder}", pretrained=True),
        eqzoo.create_model("p4_cnn", checkpoint_path=folder),
        eqzoo.create_model("p4_cnn", checkpoint_path=folder, in_chans=1).eval(),
    ):
        for key, value in model.state_dict().items():
            assert value.dtype == state[key].dtype
            torch.testing.assert_close(value, half[key].to(value.dtype), rtol=0, atol=0)
    # Negative control: rounding changed something.
    assert not torch.equal(model.head.weight, state["head.weight"])


def test_a_fine_tuned_network_has_its_classes_and_a_card_of_its_own(tmp_path, cards):
    torch.set_default_dtype(torch.float32)
    model = eqzoo.create_model(NAME, pretrained=True, num_classes=3).eval()
    run = make_run(
        tmp_path / "run",
        model.state_dict(),
        checkpoint="p4_cnn.cells",
        dataset={"name": "cells", "train": 90, "valid": 10, "test": 20},
        recipe=shipped_results()["recipe"] | {"dataset": "cells"},
    )
    output = tmp_path / "mine"
    flags = ["--label-names", "round", "long", "torn", "--license", "cc0-1.0", "--base-model", f"eqzoo/{NAME}"]
    own(run, "--output", output, *flags)
    assert not cards.exists()
    loaded = eqzoo.create_model(f"local-dir:{output}", pretrained=True).eval()
    x = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
    assert list(loaded.pretrained_cfg["label_names"]) == ["round", "long", "torn"]
    card = ModelCard.load(output / "README.md")
    assert (card.data.license, card.data.base_model) == ("cc0-1.0", f"eqzoo/{NAME}")
    assert card.data.eval_results[0].dataset_type == "cells"
    for words in ("20 images", "local-dir:mine", "round, long, torn", "fine-tuned from"):
        assert words in card.content
    for words in ("digit", "MNIST", "hf-hub:", "The paper's number"):
        assert words not in card.content
    # Without names the classes are counted by the weights.
    own(run, "--output", output, "--checkpoint", "p4_cnn.other")
    config = json.loads((output / "config.json").read_text())
    assert (config["num_classes"], config["label_names"], config["pretrained_cfg"]["tag"]) == (3, [], "other")


@pytest.mark.parametrize(
    ("model", "dataset", "checkpoint", "noun"),
    [
        ("p4_cnn", "rotmnist", None, "digits"),
        ("p4_allcnn", "cifar10", None, "images"),
        ("p4_allcnn", "cifar10", "p4_allcnn.cifar10_aug", "images"),
        ("p4_asc_resnet29", "cifar100", None, "images"),
        ("p4m_densenet", "pcam", None, "patches"),
        ("r8_gsanet_t", "rotmnist", None, "digits"),
        ("z2_cnn", "leaves.npz", None, "images"),
    ],
)
def test_a_card_says_what_holds_for_its_data_set(tmp_path, model, dataset, checkpoint, noun):
    values = NEW | {"test_error": 2.228, "group": eqzoo.create_model(model).group.name}
    r = results_of(model, dataset, checkpoint, **values)
    text = card_of(r, tmp_path)
    card = ModelCard(text)
    assert card.data.library_name == "eqzoo"
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.model_name == r["checkpoint"]
    assert card.data.eval_results[0].metric_value == 97.772
    assert f"test error, 8,000 {noun}, seed 0 | 2.228 % |" in text
    assert "| 2.243 ± 0.050 % |" in text
    assert "12,345,678" in text
    assert "4,321 a second, float32, contiguous, batch 256, NVIDIA H100" in text
    assert f"lowest and highest, the first 1,234 {noun} | 90.00 %, 91.67 % |" in text
    assert "(rotation_curve.svg)" in text
    assert "(training_curve.svg)" in text
    assert r["weights_sha256"] in text
    assert ("digit" in text) == (dataset == "rotmnist")
    assert ("patch" in text.lower()) == (dataset == "pcam")
    assert ("CIFAR" in text) == dataset.startswith("cifar")
    assert ("must not be used to diagnose" in " ".join(text.split())) == (dataset == "pcam")
    flowing = " ".join(text.split())
    assert ("It is the baseline" in flowing) == model.startswith("z2")
    assert ("approximately to the rotations between" in flowing) == model.startswith("r8")
    assert ("and reflections" in flowing) == model.startswith("p4m")
    assert "None" not in text
    assert max(map(len, text.partition("## Results")[2].splitlines())) < 400


def test_a_card_without_validation_or_newer_keys(tmp_path):
    r = results_of("p4_cnn", "rotmnist", valid_error=None)
    del r["dataset"]["valid"], r["test_error_of_rotated_copies"]
    text = card_of(r, tmp_path)
    assert "no validation digits" in text
    assert "No digits were held out for validation" in text
    assert "rotation_curve" not in text
    assert "F1" not in text
    assert "the curve over the angle" not in text.lower()
    r = results_of("p4_cnn", "rotmnist", equivariance_error=0.1)
    assert "approximately equivariant under p4" in card_of(r, tmp_path)
    assert "exactly equivariant" not in card_of(r, tmp_path)


def test_a_card_says_on_which_images_rotations_were_measured(tmp_path):
    """Results of before the sample was drawn are of the first images, and do not say so."""
    changes = {"rotation_curve": CURVE, "rotated_images": 500}
    text = card_of(results_of("p4_cnn", "rotmnist", **changes), tmp_path)
    assert "lowest and highest, the first 1,234 digits |" in text
    assert "by 0°, 90°, 180°, 270°, the first 500 digits |" in text
    changes["rotation_curve"] = CURVE | {"sample": "drawn with seed 0"}
    text = card_of(results_of("p4_cnn", "rotmnist", **changes), tmp_path)
    assert "lowest and highest, 1,234 digits drawn with seed 0 |" in text
    assert "by 0°, 90°, 180°, 270°, 500 digits drawn with seed 0 |" in text


def test_a_card_shows_classes_of_unequal_sizes(tmp_path):
    found = scores(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), ("round", "a | b", "torn"))
    r = results_of("p4_cnn", "rotmnist", **{key: found[key] for key in SCORES})
    text = card_of(r, tmp_path)
    assert "| macro F1, the mean over classes, 8,000 digits | 66.667 % |" in text
    table = text.partition("| class | test digits | recall | F1 |\n")[2].splitlines()
    assert table[1:4] == [
        "| round | 2 | 50.00 % | 66.67 % |",
        "| a \\| b | 1 | 100.00 % | 66.67 % |",
        "| torn | 0 |  |  |",
    ]
    for row in r["classes"]:
        row["images"] = 5
    assert "| class |" not in card_of(r, tmp_path)


def test_the_license_of_a_run_is_that_of_its_start(tmp_path):
    """A run of training/train.py has no config.json, and names the checkpoint that it started from."""
    for start, wanted in (("eqzoo/p4_cnn.rotmnist", "mit"), ("me/p4_cnn.cells", None), (None, None)):
        assert repository.license_of_start(tmp_path, {"base_model": start}) == {"license": wanted}
    assert repository.license_of_start(tmp_path, {}) == {"license": None}
    (tmp_path / "config.json").write_text('{"pretrained_cfg": {"license": "cc0-1.0"}}')
    assert repository.license_of_start(tmp_path, {"base_model": "eqzoo/x"}) == {"license": "cc0-1.0"}


def test_tables_are_grouped_by_data_set():
    models = [("p4_allcnn", "cifar10"), ("p4_cnn", "rotmnist"), ("z2_cnn", "zebras"), ("z2_allcnn", "cifar10")]
    text = render_table([results_of(model, dataset) for model, dataset in models])
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## Rotated MNIST, regenerated", "## CIFAR-10", "## zebras"]
    cifar = text.partition("## CIFAR-10")[2].partition("## zebras")[0]
    assert [line.split("]")[0] for line in cifar.splitlines() if line.startswith("| [")] == [
        "| [p4_allcnn.cifar10",
        "| [z2_allcnn.cifar10",
    ]


def test_cards_of_networks_that_started_from_earlier_weights_say_so():
    """As the text of their recipes has it: the link leads to other weights."""
    for name in ("p4_resnet29.chula_rbc12", "z2_resnet29.chula_rbc12", "p4_resnet29.eurosat", "z2_resnet29.eurosat"):
        card = " ".join((ROOT / "model_cards" / name / "README.md").read_text().split())
        assert "It was fine-tuned from earlier weights of [eqzoo/" in card
    card = (ROOT / "model_cards" / "p4m_resnet29.chula_rbc12" / "README.md").read_text()
    assert "earlier weights of [eqzoo/" not in " ".join(card.split())


def test_the_summary_has_the_best_equivariant_and_the_best_plain_checkpoint():
    several = {"seeds": 2, "test_errors": [1.0, 2.0], "test_error_std": 0.71}
    found = [
        results_of("p4_allcnn", "cifar10", test_error=3.0, group="p4"),
        results_of("p4_allcnn", "cifar10", "p4_allcnn.cifar10_aug", test_error=1.0, group="p4", **several),
        results_of("z2_allcnn", "cifar10", test_error=2.0, group="z2"),
        results_of("z2_allcnn", "cifar10", "z2_allcnn.cifar10_aug", test_error=1.9, group="z2", distilled=True),
        results_of("p4_cnn", "rotmnist", test_error=2.5, group="p4", seeds=1),
    ]
    digits, photographs = render_summary(found).splitlines()[2:]
    best, plain = (f"[{name}.cifar10_aug](model_cards/{name}.cifar10_aug)" for name in ("p4_allcnn", "z2_allcnn"))
    assert photographs == f"| CIFAR-10 | {best} | 1.50 ± 0.71 % (2 seeds) | {plain} | 1.90 % (distilled) |"
    assert digits == ("| Rotated MNIST, regenerated | [p4_cnn.rotmnist](model_cards/p4_cnn.rotmnist) | 2.50 % |  |  |")


def test_networks_that_learned_from_others_are_marked(tmp_path):
    r = results_of("p4_allcnn", "cifar10")
    taught = r | {"distilled": True, "recipe": r["recipe"] | {"teachers": ["z2_cnn", "p4_cnn"], "teacher_weight": 0.8}}
    rows = [line for line in render_table([r, taught]).splitlines() if line.startswith("| [")]
    assert ["(distilled)" in row for row in rows] == [False, True]
    assert [reproduce.error(one).endswith(" (distilled)") for one in (r, taught)] == [False, True]
    assert "| teachers | " in card_of(taught, tmp_path)
    assert "| teacher_weight | 0.8 |" in card_of(taught, tmp_path)
    untaught = r | {"recipe": r["recipe"] | {"teachers": [], "teacher_weight": 0.5}}
    assert "teacher" not in card_of(untaught, tmp_path)


def test_a_table_has_the_counts_of_each_row_where_they_differ():
    some = [results_of("p4_allcnn", "cifar10"), results_of("z2_allcnn", "cifar10")]
    assert "images: train" not in render_table(some)
    some[1]["dataset"] = {"name": "cifar10", "train": 50_000, "test": 8_000}
    text = render_table(some)
    flowing = " ".join(text.split())
    assert "40,000 or 50,000 training and 10,000 or no validation images" in flowing
    assert "the 8,000 images of its test split" in flowing
    ends = [line.rpartition(" | ")[2] for line in text.splitlines() if line.startswith("| [")]
    assert ends == ["40,000; 10,000; 8,000 |", "50,000; no; 8,000 |"]


def test_the_code_of_a_card_runs(tmp_path, monkeypatch, capsys):
    """What a reader would paste: the first example as it stands, and timm's from the folder."""
    torch.set_default_dtype(torch.float32)
    blocks = (SHIPPED / "README.md").read_text().split("```python\n")[1:]
    example, with_timm, with_hub = (block.partition("```")[0] for block in blocks)
    monkeypatch.chdir(ROOT)
    exec(example.replace("image.png", "examples/seven.png"), {})
    printed = capsys.readouterr().out
    assert "indices=tensor([7," in printed
    exec("\n".join(line for line in with_timm.splitlines() if "hf-hub" not in line), {})
    exec(with_hub.replace('"eqzoo/eqzoo"', '"."').replace("trust_repo=True", 'source="local"'), {})


@pytest.mark.parametrize("channels", [4, 5])
def test_the_code_of_a_card_runs_for_networks_of_other_channels(tmp_path, cards, monkeypatch, capsys, channels):
    torch.set_default_dtype(torch.float32)
    model = eqzoo.create_model("p4_cnn", in_chans=channels)
    recipe = shipped_results()["recipe"] | {"dataset": "bands", "model_args": {"in_chans": channels}}
    dataset = {"name": "bands", "train": 90, "valid": 10, "test": 20}
    changes = {"checkpoint": "p4_cnn.bands", "dataset": dataset, "recipe": recipe, "base_model": None}
    own(make_run(tmp_path / "run", model.state_dict(), **changes), "--output", tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    Image.new("RGB", (40, 30)).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    exec(text.partition("```python\n")[2].partition("```")[0], {})
    assert "indices=tensor([" in capsys.readouterr().out
    assert ("eqzoo predict image.png" in text) == ("create_transform" in text) == (channels == 4)
    assert ("eqzoo predict images.npz" in text) == (channels == 5)


def test_the_curve_is_small_the_same_everywhere_and_readable():
    text = draw_rotation_curve(CURVE["angles"], CURVE["accuracy"], "a<b", "digits")
    assert text == draw_rotation_curve(CURVE["angles"], CURVE["accuracy"], "a<b", "digits")
    assert len(text.encode()) < 40_000
    root = ElementTree.fromstring(text)
    names = [element.tag.rpartition("}")[2] for element in root]
    assert names.count("circle") == 20
    assert names.count("rect") == 1 + 5  # the ground, and 0, 90, 180, 270 and 360 degrees
    points = [tuple(map(float, pair.split(","))) for pair in root.find("{*}polyline").get("points").split()]
    assert len(points) == 25
    assert points[0][1] == points[-1][1]  # 360 degrees is 0 degrees
    heights = {value: y for value, (_, y) in zip(CURVE["accuracy"], points, strict=False)}
    assert sorted(heights, key=heights.get) == sorted(heights, reverse=True)  # better is higher
    assert all(64 <= x <= 624 and 40 <= y <= 252 for x, y in points)
    for accuracy in ([100.0] * 24, [0.0] * 24, [99.9, 10.0] * 12):
        drawn = ElementTree.fromstring(draw_rotation_curve(CURVE["angles"], accuracy, "x", "y"))
        assert 2 <= sum(element.get("text-anchor") == "end" for element in drawn) <= 8  # ticks
    for angles, accuracy in (([], []), ([0, 15], [1.0]), ([360], [1.0]), ([0], [101.0])):
        with pytest.raises(ValueError, match="rotation curve"):
            draw_rotation_curve(angles, accuracy, "x", "digits")


def test_the_curve_of_a_training_marks_the_epoch_that_is_kept():
    root = ElementTree.fromstring(draw_training_curve([91.0, 96.5, 98.0, 97.5], 3, "a", "digits"))
    points = [tuple(map(float, pair.split(","))) for pair in root.find("{*}polyline").get("points").split()]
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    assert [y for _, y in sorted(points, key=lambda point: -point[1])] == [points[i][1] for i in (0, 1, 3, 2)]
    (_, kept) = root.findall("{*}rect")  # the ground, and a square
    assert (float(kept.get("x")) + 5, float(kept.get("y")) + 5) == pytest.approx(points[2], abs=0.11)
    for count in (2, 12, 13, 30, 61, 400, 2_000):
        drawn = ElementTree.fromstring(draw_training_curve([50.0 + i / count for i in range(count)], count, "x", "y"))
        labels = [element.text for element in drawn.findall("{*}text") if (element.text or "").isdigit()]
        assert 2 <= len(labels) <= 13
        assert labels[0] == "1"
    drawn = draw_training_curve([91.0, 96.5, 98.0], 8, "a", "digits", first=7)
    assert [place for place in ("6", "7", "8", "9") if f">{place}</text>" in drawn] == ["7", "8", "9"]
    assert "epoch at full size" in drawn
    for accuracy, kept in (([90.0], 1), ([90.0, 91.0], 3), ([90.0, 101.0], 1)):
        with pytest.raises(ValueError, match="a training curve takes"):
            draw_training_curve(accuracy, kept, "x", "y")


def test_an_onnx_file_stands_beside_the_weights_and_is_the_same_again(tmp_path):
    folder = tmp_path / "p4_cnn.rotmnist"
    shutil.copytree(ROOT / "model_cards" / "p4_cnn.rotmnist", folder)
    publish.main([str(folder), "--onnx"])
    first = (folder / "model.onnx").read_bytes()
    publish.main([str(folder), "--onnx"])
    assert (folder / "model.onnx").read_bytes() == first
    assert "model.onnx" in REPO_FILES


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("p4", "It is exactly equivariant to 90° rotations by construction (group p4)."),
        ("r2", "It is exactly equivariant to 180° rotations by construction (group r2)."),
        ("r8", "to 90° rotations by construction (group r8), and approximately to the rotations between them."),
        ("r3", "It is approximately equivariant under r3: no rotation of it maps the pixel grid onto itself."),
    ],
)
def test_a_card_promises_what_the_group_keeps(group, said):
    assert card._promise({"group": group, "equivariance_error": 1e-15}).endswith(said)
    limits = card._rotations({"group": group, "equivariance_error": 1e-15})
    assert limits.startswith("It is approximate" if group == "r3" else "It is exact for")


def test_two_classes_of_one_name_are_not_published():
    results = {"classes": [{"name": "0"}, {"name": "1"}]}
    with pytest.raises(ValueError, match="two classes are named 'a'; give each a name of its own"):
        with_label_names(results, ["a", "a"])
