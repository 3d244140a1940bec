"""ConvNeXt: timm's network where the group is trivial, and what its group is exact for."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import eqzoo
from eqzoo.data import Split
from eqzoo.engine import Recipe, build_network, train
from eqzoo.groups import P4, P4M, Z2
from eqzoo.models import ConvNeXt
from eqzoo.models.config import checkpoint_config
from eqzoo.models.load import resolve

SMALL = {"planes": (16, 32), "depths": (1, 2), "num_classes": 5}
NAMES = {"stages.": "blocks.", "mlp.fc1": "expand", "mlp.fc2": "reduce", "gamma": "scale.gamma"}


def ours(name):
    """What timm's parameter is called here."""
    if name.startswith("head."):
        return name.replace("head.norm", "norm").replace("head.fc", "head")
    if name.startswith("stem."):
        return name.replace("stem.0", "stem.conv").replace("stem.1", "stem.norm")
    for theirs, own in NAMES.items():
        name = name.replace(theirs, own)
    _, stage, kind, place, *rest = name.split(".")
    if kind == "downsample":
        return ".".join(["blocks", stage, "0", "norm" if place == "0" else "conv", *rest])
    return ".".join(["blocks", stage, str(int(place) + (stage != "0")), *rest])


def test_for_the_trivial_group_it_is_timms_network():
    planes, depths = (8, 8, 16, 16), (1, 1, 2, 1)
    theirs = timm.create_model("convnext_atto", dims=planes, depths=depths, num_classes=5).eval()
    model = ConvNeXt(Z2, planes, depths, num_classes=5).eval()
    for parameter in theirs.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    state = {ours(name): value for name, value in theirs.state_dict().items()}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.reshape(shapes[name]) for name, value in state.items()})
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x), theirs(x))
    torch.testing.assert_close(model.forward_features(x).flatten(1, 2), theirs.forward_features(x))


@pytest.mark.parametrize("group", [P4, P4M], ids=["p4", "p4m"])
@pytest.mark.parametrize("kwargs", [{}, {"patch_size": 2}, {"global_pool": "avg"}], ids=str)
def test_variants_are_exact_in_both_layouts(group, kwargs):
    model = ConvNeXt(group, **SMALL, **kwargs).eval()
    x = torch.randn(2, 3, 24, 40)
    error = eqzoo.equivariance_error(model, x, randomize=True)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, 0.1, 1.0) if parameter.ndim == 1 else None
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(last), model(x))
    assert max(error, eqzoo.equivariance_error(model, last)) < 1e-13
    reflections = eqzoo.equivariance_error(model, x, group=P4M)
    assert (reflections > 1e-8) == (group == P4)  # control: p4 is not exact for reflections


def test_sides_that_no_patches_tile_are_refused():
    model = ConvNeXt(P4M, **SMALL)
    with pytest.raises(ValueError, match="the nearest sizes that work are 24 x 32 and 32 x 32"):
        model(torch.randn(1, 3, 30, 32))
    with pytest.raises(ValueError, match="multiples of"):
        ConvNeXt(P4M, (12, 24), (1, 1))


def test_paths_are_dropped_in_training_alone():
    model = ConvNeXt(P4, **SMALL, drop_path_rate=0.9)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, 0.1, 1.0) if parameter.ndim == 1 else None
    x = torch.randn(4, 3, 16, 16)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_checkpoints_of_small_images_have_patches_of_two_pixels():
    own = eqzoo.create_model("p4m_convnext_atto.eurosat")
    assert own.stem.conv.kernel_size == 2
    assert (own.num_classes, own.pretrained_cfg["input_size"]) == (10, (3, 64, 64))
    assert eqzoo.create_model("p4m_convnext_atto").stem.conv.kernel_size == 4
    assert eqzoo.create_model("p4m_convnext_atto.eurosat", patch_size=4).stem.conv.kernel_size == 4
    assert resolve("p4m_convnext_atto.eurosat").model_args == {"patch_size": 2}
    assert resolve("p4m_convnext_atto").model_args == {}


def test_a_checkpoint_whose_data_set_has_a_known_name_is_built_as_its_config_says(tmp_path):
    """The user's own network of the default patches, trained on a folder named eurosat."""
    own = eqzoo.create_model("p4_convnext_atto", num_classes=3).eval()
    cfg = own.pretrained_cfg | {"tag": "eurosat", "input_size": (3, 64, 64), "num_classes": 3}
    args = {"num_classes": 3, "in_chans": 3}
    digest = {"group": "p4", "weights_sha256": "", "label_names": [*"abc"]}
    config = checkpoint_config(own, cfg, model_args=args, **digest)
    assert "license" not in config["pretrained_cfg"]  # weights from no others have none but their owner's
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(own.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(1, 3, 64, 64)
    loaded = eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), own(x))


def test_a_run_keeps_the_arguments_that_its_data_set_gives_and_not_those_that_timm_leaves_out(tmp_path):
    args = {"planes": (16, 32), "depths": (1, 1), "layer_scale_init_value": None}
    recipe = Recipe("p4m_convnext_atto", "eurosat", epochs=1, batch_size=8, model_args=args)
    images = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8)
    splits = dict.fromkeys(("train", "valid"), Split(images, torch.arange(10), tuple("abcdefghij")))
    trained = train(recipe, lambda: build_network(recipe), splits, tmp_path / "run", "cpu")
    loaded = eqzoo.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    again = build_network(recipe, checkpoint_path=tmp_path / "run").eval()
    assert loaded.stem.conv.weight.shape[-1] == 2
    with torch.no_grad():
        assert torch.equal(loaded(images / 255), trained(images / 255))
        assert torch.equal(again(images / 255), trained(images / 255))


def test_other_channels_have_a_mean_and_a_deviation_each():
    mean = eqzoo.create_model("p4_resnet29").pretrained_cfg["mean"]
    for channels in (1, 4):
        cfg = eqzoo.create_model("p4_resnet29", in_chans=channels).pretrained_cfg
        assert cfg["mean"] == (pytest.approx(sum(mean) / 3, abs=1e-6),) * channels
        assert len(cfg["std"]) == channels
    assert eqzoo.create_model("p4_resnet29").pretrained_cfg["mean"] == mean
