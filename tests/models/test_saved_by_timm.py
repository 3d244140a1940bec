"""Networks that timm saves and loads, and arguments as timm's scripts and a config.json give them."""

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import eqzoo
from eqzoo.cli import main as command_line
from eqzoo.groups import P4
from eqzoo.models.gsanet import GSANet, Stage
from tests.cli.commands import IMAGE


def saved(model, folder):
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def same(model, other, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(other(x), model.eval()(x), rtol=1e-4, atol=1e-5)


def test_another_pool_is_saved(tmp_path):
    model = timm.create_model("p4_cnn", pretrained=True)
    model.reset_classifier(3, "avg")
    same(model, saved(model, tmp_path), (2, 1, 28, 28))


def test_the_arguments_of_a_checkpoints_name_are_saved(tmp_path):
    model = timm.create_model("p4_convnext_atto.eurosat", num_classes=4)
    assert model.stem.conv.kernel_size == 2
    same(model, saved(model, tmp_path), (2, 3, 32, 32))


def test_images_have_the_side_that_was_saved_not_that_of_the_positions(tmp_path):
    """As after fine-tuning an octic ViT on images of another side than its weights."""
    model = timm.create_model(
        "p4m_octic_vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=64, depth=2, num_heads=2
    )
    assert model.input_size == (3, 32, 32)
    model.pretrained_cfg["input_size"] = (3, 64, 64)
    assert saved(model, tmp_path).input_size == (3, 64, 64)
    for name in (tmp_path, f"local-dir:{tmp_path}", tmp_path / "model.safetensors"):
        other = eqzoo.create_model(name, pretrained=True)
        assert other.input_size == (3, 64, 64)
        assert other.stem.pos.weight.shape == model.stem.pos.weight.shape
        assert eqzoo.create_model(name, pretrained=True, in_chans=1).input_size == (1, 64, 64)
        asked = eqzoo.create_model(name, pretrained=True, img_size=48)
        assert asked.input_size == (3, 48, 48)
        assert asked.stem.pos.weight.shape != model.stem.pos.weight.shape
    for trained in (False, True):
        asked = timm.create_model(f"local-dir:{tmp_path}", pretrained=trained, img_size=(48, 48))
        assert asked.input_size == (3, 48, 48)
        assert timm.create_model(f"local-dir:{tmp_path}", pretrained=trained).input_size == (3, 64, 64)


def test_the_size_of_the_images_is_that_of_the_positions():
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 2}
    given = eqzoo.create_model("p4m_octic_vit_tiny_patch16_224", pretrained_cfg={"num_classes": 2}, **small)
    assert given.input_size == (3, 32, 32)
    features = eqzoo.create_model("p4m_octic_vit_tiny_patch16_224", features_only=True, **small)
    assert features.model.input_size == (3, 32, 32)


def test_stages_may_be_lists(tmp_path):
    model = timm.create_model("r4_gsanet_t", stages=(Stage((20,), (2,)),))
    same(model, saved(model, tmp_path), (1, 1, 14, 14))
    assert len(GSANet(P4, stages=[[[20, 20], [2, 2], True]]).blocks) == 2


def test_a_trunk_is_loaded_where_the_classifier_has_several_layers(tmp_path):
    model = eqzoo.create_model("p4_allcnn")
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    trunk = eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=0)
    torch.testing.assert_close(dict(trunk.blocks.named_parameters()), dict(model.blocks.named_parameters()))
    broken = {name: value for name, value in model.state_dict().items() if name != "stem.conv.weight"}
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"stem\.conv\.weight"):
        eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=0)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_states_of_wrapped_networks_are_loaded(tmp_path, prefix):
    model = eqzoo.create_model("p4_cnn")
    save_file({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    same(model, eqzoo.create_model("p4_cnn", checkpoint_path=tmp_path / "w.safetensors").eval(), (2, 1, 28, 28))


def test_an_empty_path_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert eqzoo.create_model("p4_cnn", checkpoint_path="").num_classes == 10


def test_a_group_may_be_given_by_its_name():
    assert eqzoo.create_model("p4m_convnext_atto", group="p4").group == P4
    assert eqzoo.create_model("p4_cnn", group="p4m").group.name == "p4m"
    with pytest.raises(ValueError, match="p4m"):
        eqzoo.create_model("p4_resnet29", pretrained=True, group="p4m")
    with pytest.raises(ValueError, match="q7"):
        eqzoo.create_model("p4_cnn", group="q7")


@pytest.mark.parametrize("name", ["p4m_densenet", "p4m_resnet44"])
def test_dropout_before_the_classifier(name):
    model = timm.create_model(name, drop_rate=0.5)
    x = torch.randn(2, *model.input_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = model.train().forward_features(x)
        assert (model.forward_head(features) - model.forward_head(features)).abs().max() > 0
        model.eval()
        assert torch.equal(model.forward_head(features), model.forward_head(features))


def test_an_octic_extractor_of_early_features_has_no_parameters_that_it_does_not_use():
    model = eqzoo.create_model("p4m_octic_vit_tiny_patch16_224", img_size=32, features_only=True, out_indices=(0, 1))
    sum(x.sum() for x in model(torch.randn(1, 3, 32, 32))).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(("name", "twin"), [("p4_convnext_atto", "convnext_atto"), ("p4_e4_resnet18", "resnet18")])
def test_layers_are_grouped_by_block_as_timms_are(name, twin):
    ours, theirs = (
        [len(timm.models.group_parameters(model, model.group_matcher(by_stage))) for by_stage in (False, True)]
        for model in (eqzoo.create_model(name), timm.create_model(twin))
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["p4_convnext_atto", "p4_e4_resnet18", "p4_resnet29"])
def test_activations_of_each_block_are_recomputed(name, monkeypatch):
    segments = []
    whole = torch.utils.checkpoint.checkpoint

    def counted(*args, **kwargs):
        segments.append(args)
        return whole(*args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", counted)
    model = eqzoo.create_model(name).train()
    model.set_grad_checkpointing()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert len(segments) == sum(map(len, model.blocks)) > len(model.blocks)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["p4_cnn", "p4_allcnn", "p4m_densenet"])
def test_a_network_without_classifier_gets_a_new_one(name, tmp_path):
    trunk = eqzoo.create_model(name, num_classes=0)
    timm.models.save_for_hf(trunk, tmp_path, safe_serialization=True)
    found = eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=5)
    state = found.state_dict()
    assert {key for key in state if not key.startswith("head.")} == trunk.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in trunk.state_dict().items())
    key = next(iter(trunk.state_dict()))
    save_file({k: v for k, v in trunk.state_dict().items() if k != key}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"Missing key.*{key}"):
        eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=5)


def test_numbers_are_no_classes_to_predict(tmp_path, capsys):
    timm.models.save_for_hf(eqzoo.create_model("p4_cnn", num_classes=1), tmp_path / "size", safe_serialization=True)
    assert command_line.main(["predict", str(IMAGE), "--model", str(tmp_path / "size")]) == 2
    assert "has a single output, a number and not a class" in capsys.readouterr().err


@pytest.mark.parametrize("saved_as", ["p4", "r2m"])
def test_saved_weights_of_another_group_are_refused_where_the_numbers_fit(saved_as, tmp_path):
    """By the argument that timm saves, or the name of the network."""
    other = "r2m" if saved_as == "p4" else "p4"
    model = eqzoo.create_model("p4_cnn", **({} if saved_as == "p4" else {"group": eqzoo.dihedral(2)}))
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(again.state_dict()["stem.conv.weight"], model.state_dict()["stem.conv.weight"])
    said = f"weights for the group {saved_as} mean something else in a network for {other}"
    with pytest.raises(ValueError, match=said):
        eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True, group=other)
    for kwargs in ({}, {"features_only": True}):
        with pytest.raises(ValueError, match=said):
            eqzoo.create_model("p4_cnn", checkpoint_path=str(tmp_path), group=other, **kwargs)


def test_a_number_of_classes_may_be_of_any_integer_type():
    model = eqzoo.create_model("p4_cnn", num_classes=np.int64(3))
    assert type(model.num_classes) is int
    model.reset_classifier(np.int64(4))
    assert model(torch.randn(1, 1, 28, 28)).shape == (1, 4)
    with pytest.raises(TypeError):
        model.reset_classifier(2.0)
