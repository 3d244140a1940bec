"""What a user calls a network: names, repos, folders and files, and config.json files that are wrong."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo.cli import main as command_line
from eqzoo.hub import WeightsNotFoundError
from eqzoo.models.builder import configs, default_checkpoint
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
    assert resolve("p4_cnn.digits").model_args == {"in_chans": 1}
    assert resolve("p4_cnn").folder is None


def test_a_folder_with_the_name_of_a_network_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "model_cards" / "z2_cnn.rotmnist", tmp_path / "p4_cnn")
    with pytest.warns(UserWarning, match=r"\./p4_cnn"):
        assert resolve("p4_cnn").timm_name == "p4_cnn"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve("./p4_cnn").architecture == "z2_cnn"
        assert resolve("p4m_cnn").architecture == "p4m_cnn"


def test_weights_that_are_not_there(folder):
    assert not resolve("z2m_gsanet_b").has_weights
    with pytest.raises(WeightsNotFoundError, match="To fix this"):
        load_network("z2m_gsanet_b", pretrained=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsNotFoundError, match="no weights in"):
        load_network(folder)
    assert eqzoo.create_model(folder).num_classes == 10  # without weights the config is enough


@pytest.mark.parametrize("content", ["{", "[1, 2]", "3", {"architecture": None}, {"architecture": "p9_cnn"}])
def test_a_config_that_names_no_network_is_an_error_of_one_line(folder, capsys, content):
    file = folder / "config.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content)
    file.write_text(content)
    for name in (folder, f"local-dir:{folder}", folder / "model.safetensors"):
        with pytest.raises(ValueError, match=r"config\.json"):
            eqzoo.create_model(name, pretrained=True)
    assert command_line.main(["info", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_names_of_timm_are_accepted():
    assert resolve("resnet18.a1_in1k").has_weights
    assert eqzoo.create_model("resnet10t", num_classes=3).eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert "resnet18" not in eqzoo.list_models()


def test_names_of_classes_belong_to_weights(folder):
    digits = list("0123456789")
    assert eqzoo.create_model(folder).pretrained_cfg["label_names"] is None
    for kwargs in ({"pretrained": True}, {"checkpoint_path": folder}):
        assert list(eqzoo.create_model(folder, **kwargs).pretrained_cfg["label_names"]) == digits
        assert eqzoo.create_model("p4_cnn", num_classes=10, **kwargs).pretrained_cfg["label_names"]
    assert eqzoo.create_model("p4_cnn").pretrained_cfg["label_names"]
    assert eqzoo.create_model("p4_cnn", num_classes=10).pretrained_cfg["label_names"] is None


def test_weights_beside_a_name_take_its_config_if_it_is_of_the_same_network(folder, tmp_path):
    assert resolve("p4_cnn", folder).config["architecture"] == "p4_cnn"
    assert not resolve("z2_cnn", folder).config
    with pytest.raises(FileNotFoundError):
        eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / "none.safetensors")
    model = eqzoo.create_model("p4_cnn", num_classes=3)
    save_file(model.state_dict(), tmp_path / "three.safetensors")
    torch.save(model.state_dict(), tmp_path / "three.pth")
    for file in ("three.safetensors", "three.pth"):
        found = eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / file, num_classes=3)
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


def test_a_config_says_the_number_of_classes_for_every_network(folder):
    """Also where the class has other defaults than the configuration of the name."""
    cfg = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    config = {"architecture": "r4_gsanet_s", "num_classes": 5, "pretrained_cfg": cfg | {"input_size": [3, 96, 96]}}
    config["pretrained_cfg"]["num_classes"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    assert eqzoo.create_model(f"local-dir:{folder}").num_classes == 5
    assert eqzoo.create_model("r4_gsanet_s").num_classes == 11
    assert eqzoo.create_model("r4_gsanet_s").in_chans == eqzoo.create_model("z2_gsanet_b").in_chans == 3


def test_a_name_without_tag_stands_for_its_first_published_checkpoint():
    for name in ("p4m_resnet29.cifar10", "p4m_densenet.chula_rbc12", "p4_allcnn.cifar10_aug", "p4m_e4net.rotmnist"):
        model = name.partition(".")[0]
        assert default_checkpoint(model) == name
        assert eqzoo.create_model(model).pretrained_cfg["tag"] == name.partition(".")[2]
    assert default_checkpoint("p4_convnext_atto") == "p4_convnext_atto"


def test_arguments_of_a_checkpoint_stand_in_its_entry(monkeypatch):
    monkeypatch.setattr("eqzoo.models.builder.published_names", lambda: ["p9_cnn.second"])
    entry = {"input_size": (1, 28, 28), "mean": (0.5,), "std": (0.5,), "model_args": {"width": 3}}
    cfg = configs({"p9_cnn.first": entry | {"num_classes": 7}, "p9_cnn.second": entry | {"num_classes": 3}})["p9_cnn"]
    assert (cfg.default.num_classes, cfg.is_pretrained, list(cfg.tags)) == (3, True, ["second", "first"])
    assert cfg.default.model_args == {"width": 3}
    assert "model_args" not in cfg.default.to_dict()


def test_weights_of_others_say_whose_they_are_without_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "resnet10t.c3_in1k"
    for args in ({"model_name": name}, {"model_name": "orbitnet", "network": name, "group": "p4"}):
        with pytest.raises(WeightsNotFoundError, match=rf"the weights of {name} are not on this machine"):
            eqzoo.create_model(**args, pretrained=True, cache_dir=tmp_path)
