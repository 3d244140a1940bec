"""Checkpoints in Hugging Face transformers: AutoModelForImageClassification, pipeline and Trainer."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import eqzoo
from tests.conftest import ROOT

transformers = pytest.importorskip("transformers")
TINY_VIT = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 2}
FAMILIES = {
    "p4_cnn": {},
    "p4m_alpha_f_allcnn": {},
    "p4_resnet29": {},
    "p4_asc_resnet29": {"depth": 11},
    "z2_sasa_resnet29": {"depth": 11},
    "p4_e4net": {},
    "p4_e4_resnet18": {"depths": (1, 1)},
    "p4m_convnext_atto": {"planes": (16, 32), "depths": (1, 1)},
    "r4_gsanet_t": {"kernel_size": 3},
    "p4m_densenet": {},
    "p4m_resnet44": {"depth": 1},
    "p4m_resnet_s": {},
    "p4m_octic_vit_tiny_patch16_224": TINY_VIT,
    "octic_vit_large_patch16_224": TINY_VIT,
}


@pytest.fixture(autouse=True)
def _float32_and_garbage_in_uninitialized_memory():
    """As users have it; and PyTorch fills what `torch.empty` gives with NaN and the largest integers."""
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def saved(model, folder):
    """A folder as `timm.models.save_for_hf` writes it, but for the number of classes, which is in it twice."""
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    del config["model_args"]["num_classes"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder):
    return transformers.AutoModelForImageClassification.from_pretrained(folder).eval()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_saved_networks_give_the_same_logits(name, tmp_path):
    model = eqzoo.create_model(name, num_classes=3, **FAMILIES[name]).eval()
    x = torch.randn(2, *model.input_size)
    folder = saved(model, tmp_path)
    torch.testing.assert_close(loaded(folder)(pixel_values=x).logits, model(x), rtol=0, atol=1e-6)
    again = eqzoo.create_model(folder, pretrained=True).eval()
    assert torch.equal(again(x), model(x))
    assert not torch.equal(eqzoo.create_model(folder).eval()(x), model(x))  # random weights differ


def test_a_pipeline_predicts_as_the_network_does():
    folder = ROOT / "model_cards" / "p4_resnet29.eurosat"
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    best = transformers.pipeline("image-classification", str(folder))(Image.fromarray(pixels))[0]
    model = eqzoo.create_model(folder, pretrained=True).eval()
    cfg = model.pretrained_cfg
    x = eqzoo.data.normalize(torch.from_numpy(pixels).permute(2, 0, 1)[None], cfg["mean"], cfg["std"], torch.float32)
    score, index = model(x).softmax(1)[0].max(0)
    assert best["label"] == cfg["label_names"][index]
    assert best["score"] == pytest.approx(score.item(), abs=1e-4)


def test_a_network_is_fine_tuned_by_trainer(tmp_path):
    network = loaded(saved(eqzoo.create_model("p4_cnn", pretrained=True, num_classes=3), tmp_path / "start"))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    images = torch.randn(8, 1, 28, 28)
    data = [{"pixel_values": image, "labels": i % 3} for i, image in enumerate(images)]
    settings = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, save_strategy="no", report_to="none", seed=0
    )
    trainer = transformers.Trainer(network, settings, train_dataset=data)
    trainer.train()
    trainer.save_model(tmp_path / "tuned")
    network = network.eval()
    assert any(not torch.equal(value, before[name]) for name, value in network.state_dict().items())
    with torch.no_grad():
        expected = network(pixel_values=images).logits
        assert expected.shape == (8, 3)
        assert torch.equal(loaded(tmp_path / "tuned")(pixel_values=images).logits, expected)
        assert torch.equal(eqzoo.create_model(tmp_path / "tuned", pretrained=True).eval()(images), expected)
    assert eqzoo.equivariance_error(network.timm_model) < 1e-9
