"""torch.hub: list, help and load; that a clone suffices is tested in test_hub.py."""

import pytest
import torch

import eqzoo
from eqzoo.models import EquivariantNet
from tests.conftest import ROOT
from tests.models.test_models import KINDS

KNOWN = {"skip_validation": True, "trust_repo": True}


def load(name, **kwargs):
    return torch.hub.load(str(ROOT), name, source="local", **kwargs)


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """The name of this repository as torch.hub caches it after a download; connections fail the test."""
    (tmp_path / "eqzoo_eqzoo_main").symlink_to(ROOT)
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("it goes online"))
    return "eqzoo/eqzoo:main"


def test_list_has_the_networks_and_create_model(repo):
    assert sorted(torch.hub.list(repo, **KNOWN)) == sorted(["create_model", *eqzoo.list_models()])


def test_help_describes_the_network_and_its_weights(repo):
    said = torch.hub.help(repo, "p4_cnn", **KNOWN)
    assert said.startswith("The p4 CNN for rotated MNIST, 10 fields: exact for 90° rotations (24,610 parameters).")
    assert "Whether to load trained weights: rotmnist." in said
    default_first = "weights: cifar10, chula_rbc12, eurosat."
    assert default_first in torch.hub.help(repo, "p4m_resnet29", **KNOWN)
    assert "there are none yet" in torch.hub.help(repo, "z2m_gsanet_b", **KNOWN)
    assert torch.hub.load(repo, "p4_cnn", pretrained=True, **KNOWN).num_classes == 10


def test_entries_build_their_networks():
    for name in [*KINDS, "p4m_octic_vit_tiny_patch16_224"]:
        with torch.device("meta"):
            model = load(name, num_classes=3)
        assert isinstance(model, EquivariantNet)
        assert (model.num_classes, model.pretrained_cfg["architecture"]) == (3, name)


def test_pretrained_weights_and_checkpoint_names():
    expected = eqzoo.create_model("p4_cnn", pretrained=True).state_dict()
    for kwargs in ({}, {"checkpoint": "rotmnist"}):
        state = load("p4_cnn", pretrained=True, **kwargs).state_dict()
        assert all(torch.equal(state[key], value) for key, value in expected.items())
    with pytest.raises(ValueError, match=r"no checkpoint 'p4_cnn\.none'; of p4_cnn there are"):
        load("p4_cnn", checkpoint="none")
