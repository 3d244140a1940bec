"""What a user calls a network: names, repos, folders and files, and config.json files that are wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo.cli import main as command_line
from eqzoo.hub import WeightsNotFoundError
from eqzoo.models import papers
from eqzoo.models.builder import configs, published_checkpoints
from eqzoo.models.load import load_network, resolve
from tests.conftest import ROOT

CARD = ROOT / "model_cards" / "p4_cnn.rotmnist"


@pytest.fixture
def folder(tmp_path):
    """A copy of a published checkpoint, under another name."""
    return shutil.copytree(CARD, tmp_path / "mine")


def test_every_way_to_name_a_checkpoint_gives_the_same_network(folder, monkeypatch):
    shutil.copy(folder / "model.safetensors", folder / "best.safetensors")
    monkeypatch.setenv("EQZOO_WEIGHTS", str(folder.parent / "own"))
    shutil.copytree(CARD, folder.parent / "own" / "p4_cnn.digits")
    monkeypatch.chdir(folder.parent)
    torch.set_default_dtype(torch.float32)
    head = load_file(CARD / "model.safetensors")["head.weight"]
    names = ["p4_cnn", "p4_cnn.rotmnist", "p4_cnn.digits", "mine", folder, f"local-dir:{folder}"]
    for name in [*names, folder / "model.safetensors", "mine/best.safetensors"]:
        source = resolve(name)
        assert source.architecture == "p4_cnn"
        assert source.has_weights
        for network in (load_network(name).network, eqzoo.create_model(name, pretrained=True)):
            assert torch.equal(network.head.weight, head), name
        assert not torch.equal(eqzoo.create_model(name).head.weight, head), name
    assert resolve("mine").folder.name == "mine"
    assert resolve("p4_cnn.digits").model_args == {"num_classes": 10, "in_chans": 1}
    assert resolve("p4_cnn").folder is None


def test_a_registered_name_comes_before_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "model_cards" / "z2_cnn.rotmnist", tmp_path / "p4_cnn")
    assert resolve("p4_cnn").timm_name == "p4_cnn"
    assert resolve("./p4_cnn").architecture == "z2_cnn"


def test_weights_that_are_not_there(folder):
    assert not resolve("r16_gsanet_t").has_weights
    with pytest.raises(WeightsNotFoundError, match="To fix this"):
        load_network("r16_gsanet_t", pretrained=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights at"):
        load_network(folder)
    assert eqzoo.create_model(folder).num_classes == 10  # without weights the config is enough


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "is a JSON list, and should be an object"),
        ("3", "is a JSON int"),
        ({"architecture": None}, "names no architecture"),
        ({"architecture": ["p4_cnn"]}, "names no architecture"),
        ({"architecture": "p9_cnn"}, "neither eqzoo nor timm has"),
        ({"num_classes": -3}, "num_classes should be a whole number of at least 0, got -3"),
        ({"num_classes": True}, "num_classes should be a whole number"),
        ({"num_classes": 7}, "num_classes should be the same everywhere, got 7 in config"),
        ({"model_args": [1]}, "model_args should be an object"),
        ({"model_args": {"in_chans": 0}}, "in_chans should be a whole number of at least 1, got 0"),
        ({"model_args": {"depth": 3}}, "does not build p4_cnn .*'depth'"),
        ({"pretrained_cfg": "x"}, "pretrained_cfg should be an object"),
        ({"pretrained_cfg": {"input_size": [1, 28]}}, r"input_size should be \[channels, height, width\]"),
        ({"pretrained_cfg": {"mean": "gray"}}, "mean should be a list of numbers"),
    ],
)
def test_a_config_that_is_wrong_is_an_error_of_one_line(folder, capsys, content, message):
    file = folder / "config.json"
    if isinstance(content, dict):
        config = json.loads(file.read_text())
        for key, value in content.items():
            both = isinstance(value, dict) and isinstance(config[key], dict)
            config[key] = config[key] | value if both else value
        if content == {"num_classes": 7}:
            config["model_args"]["num_classes"] = 7
        content = json.dumps(config)
    file.write_text(content)
    for name in (folder, f"local-dir:{folder}", folder / "model.safetensors"):
        with pytest.raises(ValueError, match=message) as info:
            eqzoo.create_model(name, pretrained=True)
        assert "\n" not in str(info.value)
        with pytest.raises(ValueError, match=message):
            load_network(name)
    for command in (["info"], ["check"], ["predict", str(ROOT / "examples" / "seven.png"), "--model"]):
        if command == ["info"] and "fit" in message:
            continue  # loads no weights
        assert command_line.main([*command, str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len([line for line in err.splitlines() if line.startswith("eqzoo ")]) == 1
        assert "Traceback" not in err


def test_a_hub_config_that_is_wrong_is_an_error_too(monkeypatch):
    monkeypatch.setattr("eqzoo.models.load.fetch_config", lambda *_: [1])
    with pytest.raises(ValueError, match=r"config\.json of some/repo is a JSON list"):
        eqzoo.create_model("hf-hub:some/repo")


def test_names_of_timm_are_accepted_on_request(folder):
    assert resolve("resnet18", any_timm=True).architecture == "resnet18"
    with pytest.raises(ValueError, match="no network 'resnet18' here"):
        resolve("resnet18")


def test_weights_beside_a_name_take_its_config_if_it_is_of_the_same_network(folder, tmp_path):
    assert resolve("p4_cnn", folder).config["architecture"] == "p4_cnn"
    assert not resolve("z2_cnn", folder).config
    with pytest.raises(ValueError, match="read from safetensors files alone"):
        resolve("p4_cnn", folder / "config.json")
    with pytest.raises(FileNotFoundError, match="no weights at"):
        resolve("p4_cnn", tmp_path / "none.safetensors")
    model = eqzoo.create_model("p4_cnn", num_classes=3)
    save_file(model.state_dict(), tmp_path / "three.safetensors")
    found = eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / "three.safetensors", num_classes=3)
    assert torch.equal(found.head.weight, model.head.weight)


@pytest.mark.parametrize("kwargs", [{"features_only": True}, {"num_classes": 4}])
def test_weights_that_leave_some_out_or_have_others_are_refused(tmp_path, monkeypatch, kwargs):
    """timm loads what fits where the classifier is left out; here nothing stays random unnoticed."""
    monkeypatch.setenv("EQZOO_WEIGHTS", str(tmp_path))
    whole, file = load_file(CARD / "model.safetensors"), tmp_path / "p4_cnn.rotmnist.safetensors"
    save_file(whole, file)
    eqzoo.create_model("p4_cnn", pretrained=True, **kwargs)
    wrapped = {
        f"model.{name}": value.clone() for name, value in whole.items()
    }  # as timm's extractor of features names them
    less = {name: value for name, value in whole.items() if name != "blocks.1.conv.weight"}
    for state, said in (
        (wrapped, "Missing"),
        (less, r"Missing .* 'blocks\.1\.conv\.weight'"),
        (whole | wrapped, "Unexp"),
    ):
        save_file(state, file)
        with pytest.raises(ValueError, match=rf"does not fit p4_cnn with these arguments: {said}"):
            eqzoo.create_model("p4_cnn", pretrained=True, **kwargs)


def test_weights_of_another_group_are_refused_also_where_the_numbers_fit(folder):
    other = eqzoo.dihedral(2)  # of four elements, as p4
    said = "has weights of p4_cnn for the group p4, which mean something else in a network for r2m"
    with pytest.raises(ValueError, match=said):
        eqzoo.create_model("p4_cnn", pretrained=True, group=other)
    for kwargs in ({}, {"features_only": True}):
        with pytest.raises(ValueError, match=said):
            eqzoo.create_model("p4_cnn", checkpoint_path=folder, group=other, **kwargs)
    with pytest.raises(ValueError, match=said):
        eqzoo.create_model(f"local-dir:{folder}", pretrained=True, group=other)
    assert eqzoo.create_model("p4_cnn", pretrained=True, group=eqzoo.P4).group == eqzoo.P4
    assert eqzoo.create_model("p4_cnn", group=other).group == other


def test_a_config_says_the_number_of_classes_for_every_network(folder):
    """Also where the class has other defaults than the configuration of the name."""
    cfg = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    config = {"architecture": "r4_gsanet_s", "num_classes": 5, "pretrained_cfg": cfg | {"input_size": [3, 96, 96]}}
    config["pretrained_cfg"]["num_classes"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    assert eqzoo.create_model(f"local-dir:{folder}").num_classes == 5
    assert eqzoo.create_model("r4_gsanet_s").num_classes == 2
    assert eqzoo.create_model("r4_gsanet_s").in_chans == eqzoo.create_model("z2_gsanet_b").in_chans == 3


def test_a_name_without_tag_takes_the_published_weights_that_are_typed_first():
    names = [f"p4m_resnet29.{tag}" for tag in ("cifar10", "eurosat", "chula_rbc12")]
    assert published_checkpoints("p4m_resnet29") == names != sorted(names)
    assert eqzoo.create_model("p4m_resnet29", pretrained=True).pretrained_cfg["tag"] == "cifar10"
    assert eqzoo.create_model("p4m_densenet", pretrained=True).pretrained_cfg["tag"] == "chula_rbc12"
    assert eqzoo.create_model("p4_resnet29", pretrained=True).pretrained_cfg["tag"] == "cifar10"


def test_a_name_without_tag_builds_the_first_entry_whichever_weights_there_are(monkeypatch):
    monkeypatch.setattr("eqzoo.models.builder.published_names", lambda: ["p9_cnn.second"])
    monkeypatch.setattr("eqzoo.models.builder._MODELS", set())
    entry = {"input_size": (1, 28, 28), "mean": (0.5,), "std": (0.5,)}
    for first in ("p9_cnn", "p9_cnn.first"):
        cfg = configs({first: {**entry, "num_classes": 7}, "p9_cnn.second": {**entry, "num_classes": 3}})["p9_cnn"]
        assert (cfg.default.num_classes, cfg.is_pretrained) == (7, True)
        assert set(cfg.tags) == {first.partition(".")[2], "second"}


def test_numbers_of_a_paper_whose_choice_is_not_told_are_an_error(monkeypatch):
    monkeypatch.setattr(papers, "_NOTES", {})
    with pytest.raises(ValueError, match=r"papers\.csv has .*: add _NOTES\[.*\] to papers\.py"):
        papers.rows.__wrapped__()
