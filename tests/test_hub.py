"""Where weights come from: the order of the places, adaptation, and the errors."""

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo.hub import find_weights, shipped_folder
from eqzoo.models import GroupCNN
from tests.conftest import ROOT

NAME = "p4_cnn.rotmnist"
SHIPPED = ROOT / "model_cards" / NAME / "model.safetensors"


def zeros_checkpoint(folder, name=NAME):
    """A checkpoint that can be told from the shipped one: all zeros."""
    model = eqzoo.create_model(name.partition(".")[0])
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


def test_other_classes_and_channels_keep_the_trunk():
    source = eqzoo.create_model("p4_cnn", pretrained=True).double().eval()
    model = eqzoo.create_model(NAME, pretrained=True, num_classes=4, in_chans=3).double().eval()
    grey = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(model.forward_features(grey.expand(-1, 3, -1, -1)), source.forward_features(grey))
    assert model(grey.expand(-1, 3, -1, -1)).shape == (2, 4)


def test_nothing_found_names_the_three_ways(tmp_path, monkeypatch):
    monkeypatch.setattr("eqzoo.hub.shipped_folder", lambda: tmp_path)
    for build in (eqzoo.create_model, timm.create_model):
        with pytest.raises(eqzoo.WeightsNotFoundError, match="Three ways on") as caught:
            build(NAME, pretrained=True)
        for way in ("checkpoint_path=FILE.safetensors", "EQZOO_WEIGHTS", "go online"):
            assert way in str(caught.value)
    with pytest.raises(eqzoo.WeightsNotFoundError, match="not been published"):
        eqzoo.create_model("p4m_cnn", pretrained=True)


def test_wrong_folders_and_tags_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no checkpoint 'p4_cnn.nope'; of p4_cnn there are p4_cnn.rotmnist"):
        eqzoo.create_model("p4_cnn.nope")
    with pytest.raises(ValueError, match=r"model.safetensors does not fit p4_cnn"):
        eqzoo.create_model("p4_cnn", pretrained=True, width=11)
    monkeypatch.setenv("EQZOO_WEIGHTS", str(tmp_path / "typo"))
    with pytest.raises(eqzoo.WeightsNotFoundError, match="which is no folder"):
        eqzoo.create_model("p4_cnn", pretrained=True)


def test_features_of_a_checkpoint():
    extractor = eqzoo.create_model("p4_cnn", checkpoint_path=SHIPPED, features_only=True).double().eval()
    model = eqzoo.create_model("p4_cnn", pretrained=True).double().eval()
    x = torch.rand(1, 1, 28, 28)
    torch.testing.assert_close(extractor(x)[-1], model.forward_features(x).flatten(1, 2))


def test_unfit_files_are_named(tmp_path):
    torch.save({}, tmp_path / "w.pth")
    (tmp_path / "broken.safetensors").write_bytes(SHIPPED.read_bytes()[:1000])
    with pytest.raises(ValueError, match="safetensors files alone"):
        eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"broken\.safetensors is not a readable"):
        eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match="does not fit p4_cnn_w11"):
        eqzoo.create_model("p4_cnn_w11", checkpoint_path=SHIPPED)
    with pytest.raises(FileNotFoundError, match="no file at"):
        eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / "none.safetensors")


def test_a_broken_file_in_the_weights_folder_is_named(tmp_path, monkeypatch):
    zeros_checkpoint(tmp_path).write_bytes(b"\0" * 100)
    monkeypatch.setenv("EQZOO_WEIGHTS", str(tmp_path))
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        eqzoo.create_model(NAME, pretrained=True)


@pytest.mark.parametrize("served", [True, False])
def test_the_hub_is_the_last_place(tmp_path, served):
    """A loopback server speaks the two requests of a download; a repo it does not have is an error with three ways."""
    data = SHIPPED.read_bytes()

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            found = served and self.path == f"/eqzoo/{NAME}/resolve/main/model.safetensors"
            self.send_response(200 if found else 404)
            self.send_header("ETag", '"0123456789abcdef"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(data) if found else 0))
            if not found:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            return found

        def do_GET(self):
            if self.do_HEAD():
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = f"""
import pathlib, eqzoo, eqzoo.hub
eqzoo.hub.shipped_folder = lambda: pathlib.Path({str(tmp_path)!r})
try:
    print(eqzoo.create_model({NAME!r}, pretrained=True).head.weight.abs().max().item() > 0)
except eqzoo.WeightsNotFoundError as error:
    print(error)
"""
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PATH": "",
    }
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    server.shutdown()
    if served:
        assert ran.stdout == "True\n"
    else:
        assert "RepositoryNotFoundError" in ran.stdout
        assert "Three ways on" in ran.stdout


@pytest.mark.parametrize("name", eqzoo.list_pretrained())
def test_every_published_checkpoint_is_here_and_its_config_is_the_registered_one(name):
    folder = shipped_folder() / name
    config = json.loads((folder / "config.json").read_text())
    registered = timm.get_pretrained_cfg(name).to_dict()
    for key, value in config["pretrained_cfg"].items():
        assert json.loads(json.dumps(registered[key])) == value, key
    assert config["architecture"] == registered["architecture"]
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors", "results.json"}


@pytest.mark.parametrize("name", eqzoo.list_pretrained())
def test_a_published_checkpoint_keeps_its_promise(name):
    model = eqzoo.create_model(name, pretrained=True)
    assert eqzoo.equivariance_error(model) < 1e-12
    if name.startswith("z2"):
        assert eqzoo.equivariance_error(model, group=eqzoo.P4) > 1e-2


def test_torch_hub_lists_describes_and_loads_from_a_clone(tmp_path):
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
print(torch.hub.list("eqzoo/eqzoo:main", **known))
print(torch.hub.help("eqzoo/eqzoo:main", "p4_cnn", **known))
model = torch.hub.load("eqzoo/eqzoo:main", "p4_cnn", pretrained=True, **known)
print(sys.modules[type(model).__module__].__file__, model.num_classes)
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    listed, *described, loaded = ran.stdout.strip().splitlines()
    assert ast.literal_eval(listed) == eqzoo.list_models()
    assert "rotated MNIST" in "".join(described)
    assert loaded == f"{clone / 'eqzoo' / 'models' / 'gcnn.py'} 10"
