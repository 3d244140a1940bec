"""Where weights come from: the order of the places, adaptation, and the errors."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo.data.catalog import dataset
from eqzoo.hub import WeightsNotFoundError, fetch_weights, find_weights
from eqzoo.models import GroupCNN
from eqzoo.models.builder import configs
from eqzoo.models.load import load_network
from tests.conftest import ROOT

NAME = "p4_cnn.rotmnist"
SHIPPED = ROOT / "model_cards" / NAME / "model.safetensors"


def zeros_checkpoint(folder, name=NAME):
    """A checkpoint that can be told from the shipped one: all zeros."""
    model = eqzoo.create_model(name)
    (folder / name).mkdir(parents=True)
    state = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    save_file(state, folder / name / "model.safetensors")
    return folder / name / "model.safetensors"


def test_shipped_checkpoints_load_through_every_door():
    state = {key: value.double() for key, value in load_file(SHIPPED).items()}
    for model in (
        eqzoo.create_model("p4_cnn", pretrained=True),
        timm.create_model(NAME, pretrained=True),
        timm.create_model(f"local-dir:{SHIPPED.parent}", pretrained=True),
        eqzoo.create_model(f"local-dir:{SHIPPED.parent}", pretrained=True),
        eqzoo.create_model("p4_cnn", checkpoint_path=SHIPPED),
        eqzoo.create_model("p4_cnn", checkpoint_path=SHIPPED.parent),
        torch.hub.load(ROOT, "p4_cnn", source="local", pretrained=True),
    ):
        assert isinstance(model, GroupCNN)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value.double(), state[key])


def test_the_order_of_the_places(tmp_path, monkeypatch):
    assert find_weights(NAME, None) == SHIPPED
    mine = zeros_checkpoint(tmp_path)
    monkeypatch.setenv("EQZOO_WEIGHTS", str(tmp_path))
    assert find_weights(NAME, None) == mine
    assert eqzoo.create_model(NAME, pretrained=True).head.weight.abs().max() == 0
    explicit = eqzoo.create_model(NAME, pretrained=True, checkpoint_path=SHIPPED)
    assert explicit.head.weight.abs().max() > 0
    flat = mine.rename(tmp_path / f"{NAME}.safetensors")
    assert find_weights(NAME, None) == flat


def test_a_bare_name_takes_the_weights_that_it_stands_for_and_no_others(tmp_path, monkeypatch):
    name = "p4m_resnet18"  # no weights of it are published
    monkeypatch.setenv("EQZOO_WEIGHTS", str(tmp_path))
    zeros_checkpoint(tmp_path, f"{name}.cifar100")
    for create in (eqzoo.create_model, timm.create_model):
        assert create(f"{name}.cifar100", pretrained=True).num_classes == 100
        with pytest.raises(eqzoo.WeightsNotFoundError, match=r"no weights for p4m_resnet18\.cifar10:"):
            create(name, pretrained=True)
    zeros_checkpoint(tmp_path, f"{name}.cifar10")
    assert eqzoo.create_model(name, pretrained=True).pretrained_cfg["tag"] == "cifar10"


def test_other_classes_and_channels_keep_the_trunk():
    source = eqzoo.create_model("p4_cnn", pretrained=True).double().eval()
    model = eqzoo.create_model(NAME, pretrained=True, num_classes=4, in_chans=3).double().eval()
    gray = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(model.forward_features(gray.expand(-1, 3, -1, -1)), source.forward_features(gray))
    assert model(gray.expand(-1, 3, -1, -1)).shape == (2, 4)


def test_nothing_found_names_the_three_ways(tmp_path, monkeypatch):
    monkeypatch.setattr("eqzoo.hub.shipped_folder", lambda: tmp_path)
    for build in (eqzoo.create_model, timm.create_model):
        with pytest.raises(eqzoo.WeightsNotFoundError, match="To fix this") as caught:
            build(NAME, pretrained=True)
        for way in ("checkpoint_path=FILE.safetensors", "EQZOO_WEIGHTS", "go online"):
            assert way in str(caught.value)
    with pytest.raises(eqzoo.WeightsNotFoundError, match="not been published"):
        eqzoo.create_model("z2m_gsanet_b", pretrained=True)


def test_wrong_folders_and_tags_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no checkpoint 'p4_cnn.nope'; of p4_cnn there are p4_cnn.rotmnist"):
        eqzoo.create_model("p4_cnn.nope")
    with pytest.raises(
        ValueError, match=r"p4_resnet29\.rotmnist'; .* p4_resnet29.chula_rbc12, .* weights p4_resnet29.cifar100$"
    ):
        eqzoo.create_model("p4_resnet29.rotmnist")
    (tmp_path / "my_cells").mkdir()
    (tmp_path / "my_cells" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"nothing is called 'my_cels'.* near it are my_cells"):
        eqzoo.create_model("my_cels")
    shutil.rmtree(tmp_path / "my_cells")
    with pytest.raises(ValueError, match=r"model.safetensors does not fit p4_cnn"):
        eqzoo.create_model("p4_cnn", pretrained=True, width=11)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True)
    with pytest.raises(ValueError, match=r"names are <model>, <model>\.<checkpoint>, hf-hub:<owner>/<repo>"):
        eqzoo.create_model("http://somewhere")
    monkeypatch.setenv("EQZOO_WEIGHTS", str(tmp_path / "typo"))
    for name in ("p4_cnn", "p4_allcnn.cifar10"):  # published and not: neither falls back to random weights
        with pytest.raises(ValueError, match="which is no folder"):
            eqzoo.create_model(name, pretrained=True)
        with pytest.raises(ValueError, match="which is no folder"):
            load_network(name)


def test_a_published_checkpoint_of_a_new_name_needs_no_entry_in_the_model_file(tmp_path, monkeypatch):
    """A second recipe for a data set: its config.json is its entry, behind those that are typed."""
    for name in (NAME, "p4_cnn.rotmnist_long", "p9_cnn.rotmnist"):
        shutil.copytree(SHIPPED.parent, tmp_path / name)
    monkeypatch.setattr("eqzoo.hub.shipped_folder", lambda: tmp_path)
    monkeypatch.setattr("eqzoo.models.builder.shipped_folder", lambda: tmp_path)
    entries = configs(dict.fromkeys(("p4_cnn.rotmnist", "p4_cnn_w11.rotmnist"), dataset("rotmnist").cfg()))
    assert set(entries) == {"p4_cnn", "p4_cnn_w11"}
    assert list(entries["p4_cnn"].tags) == ["rotmnist", "rotmnist_long"]
    found = entries["p4_cnn"].cfgs["rotmnist_long"]
    assert found.hf_hub_id == "eqzoo/p4_cnn.rotmnist_long"
    assert (found.input_size, found.mean, found.label_names) == ((1, 28, 28), (0.1314,), tuple("0123456789"))
    assert not entries["p4_cnn_w11"].is_pretrained


def test_features_of_a_checkpoint():
    extractor = eqzoo.create_model("p4_cnn", checkpoint_path=SHIPPED, features_only=True).double().eval()
    model = eqzoo.create_model("p4_cnn", pretrained=True).double().eval()
    x = torch.rand(1, 1, 28, 28)
    torch.testing.assert_close(extractor(x)[-1], model.forward_features(x).flatten(1, 2))


def test_unfit_files_are_named(tmp_path):
    torch.save({}, tmp_path / "w.pth")
    (tmp_path / "broken.safetensors").write_bytes(SHIPPED.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"w\.pth does not fit p4_cnn"):
        eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"broken\.safetensors has no readable"):
        eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / "broken.safetensors")


def test_torch_hub_loads_from_a_clone(tmp_path):
    """As after a first download: a clone in torch.hub's cache, no network."""
    clone = tmp_path / "eqzoo_eqzoo_main"
    clone.mkdir()
    for part in ("eqzoo", "model_cards"):
        shutil.copytree(ROOT / part, clone / part)
    shutil.copy(ROOT / "hubconf.py", clone)
    script = f"""
import sys, torch
torch.hub.set_dir({str(tmp_path)!r})
known = dict(skip_validation=True, trust_repo=True)
model = torch.hub.load("eqzoo/eqzoo:main", "p4_cnn", pretrained=True, **known)
print(sys.modules[type(model).__module__].__file__, model.num_classes)
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == f"{clone / 'eqzoo' / 'models' / 'gcnn.py'} 10"


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"eqzoo": {"weights_sha256": "A" * 64}}, "has sha256"),
        ({"eqzoo": {"weights_sha256": "abc"}}, "has sha256"),
        ("{", "is not JSON"),
        ({}, None),
        (None, None),
    ],
)
@pytest.mark.parametrize("writable", [True, False])
def test_a_hash_that_is_stated_is_checked_whatever_it_looks_like(tmp_path, monkeypatch, config, error, writable):
    def download(repo_id, filename, cache_dir):
        if filename == "config.json" and config is None:
            raise WeightsNotFoundError from EntryNotFoundError("none")
        path = tmp_path / filename
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    monkeypatch.setattr("eqzoo.hub._download", download)
    if not writable:
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("read-only")))
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        assert fetch_weights("somebody/something").name == "model.safetensors"
    assert (tmp_path / "model.safetensors").exists() == (not writable or error != "has sha256")
