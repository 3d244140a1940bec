"""Octic vision transformers: their law, timm's ways, the released formats, and files that run without the package."""

import argparse
import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.utils import reparameterize_model

import eqzoo
from eqzoo.cli import main as cli
from eqzoo.cli._networks import group_name
from eqzoo.equivariance import equivariance_report, randomize_norms
from eqzoo.groups import P4M, transform
from eqzoo.layers import OcticLinear, OcticPosition2d
from eqzoo.layers.irreps import Irreps
from eqzoo.layers.octic import OcticResidual
from eqzoo.layers.octic_embed import fold_quarters, resize_quarters, unfold_quarters
from eqzoo.models import OcticViT
from eqzoo.models.conversion import convert
from tests.conftest import SHARED
from tests.models.test_models import error

NAMES = eqzoo.list_models("*octic_vit*")
INVARIANT = eqzoo.list_models("p4m_octic_vit*")
# Depth and width do not touch the law; the patches are each network's own.
SMALL = {"depth": 4, "embed_dim": 64, "num_heads": 2}
TINY = SMALL | {"patch_size": 4, "img_size": 32, "num_classes": 10}
FILES = SHARED / "peer_weights" / "octic_vits"
RELEASED = ["deit3_invariant_tiny", "deit3_hybrid_tiny", "dinov2_invariant_tiny", "dinov2_hybrid_tiny"]


def trained_like(name="p4m_octic_vit_tiny_patch16_224", **kwargs):
    """A small network with norms, biases and layer scales away from their first values, and weights that matter."""
    model = eqzoo.create_model(name, **(SMALL | kwargs)).eval()
    randomize_norms(model, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def tiny(name="p4m_octic_vit_tiny_patch16_224", **kwargs):
    return trained_like(name, **(TINY | kwargs)), torch.randn(2, kwargs.get("in_chans", 3), 32, 32)


@pytest.mark.parametrize("name", INVARIANT)
@torch.no_grad()
def test_networks_are_invariant_under_p4m(name):
    model = trained_like(name, num_classes=5)
    side = 4 * model.patch_size
    x = torch.randn(2, 3, side, side)
    features, logits = model.feature_field(x), model(x)
    assert error(logits[:1], logits[1:]) > 1e-3  # logits that depend on the image
    for g in P4M.elements:
        moved = transform(x, P4M, g, "trivial")
        assert error(model.feature_field(moved), transform(features, P4M, g, "trivial")) < 1e-9
        assert error(model(moved), logits) < 1e-9


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_every_layer_keeps_its_law(size):
    model, _ = tiny()
    report = equivariance_report(model, torch.randn(2, 3, *size))
    assert report.largest < 1e-12
    assert set(report.logits) == set(report.features) == set(P4M.elements)
    assert len(report.layers) > 20


def test_the_checks_above_can_fail():
    """Negative controls: a hybrid, a law that is broken in one layer, and positions that are not of the group."""
    hybrid, x = tiny("octic_vit_large_patch16_224")
    assert hybrid.group.order == 1
    assert group_name("octic_vit_large_patch16_224") == "z2"
    assert eqzoo.equivariance_error(hybrid, x, group=P4M) > 1e-2
    model, _ = tiny()
    linear = model.blocks[1].mlp.fc2
    linear.forward = lambda field: type(field)(*(y + 1 for y in OcticLinear.forward(linear, field)))
    layers = equivariance_report(model, x).layers
    assert {name for name, value in layers.items() if value > 1e-9} == {"blocks.1", "blocks.1.mlp", "blocks.1.mlp.fc2"}
    model, _ = tiny()
    pos = model.stem.pos
    pos.positions = lambda: type(OcticPosition2d.positions(pos))(torch.randn(4, 8, 8, 8), torch.randn(2, 8, 8, 16))
    assert eqzoo.equivariance_error(model, x) > 1e-3


@torch.no_grad()
def test_sizes_that_are_taken_and_refused():
    model, _ = tiny()
    for size in ((8, 8), (16, 40), (64, 32)):
        assert model(torch.randn(1, 3, *size)).shape == (1, 10)
    with pytest.raises(ValueError, match="multiples of 8, an even number of patches; got width 36, and 32 or 40"):
        model(torch.randn(1, 3, 32, 36))
    for bad, said in (
        ({"img_size": 36}, "multiple of two patches"),
        ({"img_size": (32, 40)}, "square images"),
        ({"patch_size": 5, "img_size": 30}, "even"),
        ({"num_heads": 3}, "no equal share"),
        ({"mlp_ratio": 2.6}, "embed_dim times mlp_ratio"),
        ({"invariant": False}, "octic_vit_large_patch16_224 has invariant=False"),
        ({"global_pool": "max"}, "'token' or 'avg'"),
    ):
        with pytest.raises(ValueError, match=said):
            eqzoo.create_model("p4m_octic_vit_tiny_patch16_224", **(TINY | bad))
    assert eqzoo.create_model("p4m_octic_vit_tiny_patch16_224", **TINY | {"img_size": (32, 32)})(
        torch.randn(1, 3, 32, 32)
    ).shape == (1, 10)


@torch.no_grad()
def test_tables_unfold_fold_and_resize():
    quarters = torch.randn(6, 5, 3, 3)
    squares = unfold_quarters(quarters)
    for a, b in zip(unfold_quarters(fold_quarters(*squares)), squares, strict=True):
        torch.testing.assert_close(a, b)
    # Resizing the whole field is what a network does on images of another size.
    model, x = tiny()
    larger = eqzoo.create_model("p4m_octic_vit_tiny_patch16_224", **TINY | {"img_size": 48}).eval()
    state = model.state_dict()
    state["stem.pos.weight"] = resize_quarters(state["stem.pos.weight"], 12)
    larger.load_state_dict(state)
    images = torch.randn(1, 3, 48, 48)
    assert error(larger(images), model(images)) < 1e-12
    assert error(larger(x), model(x)) > 1e-6  # and back is an interpolation again


@pytest.mark.parametrize("name", ["p4m_octic_vit_tiny_patch16_224", "octic_vit_large_patch16_224"])
@torch.no_grad()
def test_timms_ways(name):
    model, x = tiny(name, in_chans=5)
    assert list(model.state_dict()) == [key for key, _ in model.named_parameters()]
    assert all(value.ndim <= 4 for value in model.state_dict().values())
    features = model.forward_features(x)
    assert features.shape == (2, 65, 64)
    assert torch.equal(model.forward_head(features), model(x))
    assert torch.equal(model.forward_head(features, pre_logits=True), features[:, 0])
    model.reset_classifier(7, "avg")
    assert model.get_classifier() is model.head
    assert error(model(x), model.head(features[:, 1:].mean(1))) < 1e-12
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features)
    last, found = model.forward_intermediates(x)
    assert torch.equal(last, features)
    assert len(found) == len(model.feature_info) == 5
    assert all(y.shape == (2, 64, 8, 8) for y in found)
    normed = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)[0]
    assert error(normed, model.feature_field(x)) < 1e-12
    with pytest.raises(ValueError, match="'NCHW'"):
        model.forward_intermediates(x, output_fmt="NLC")
    extractor = timm.create_model(name, features_only=True, out_indices=(1, 4), in_chans=5, **TINY)
    assert [y.shape[1] for y in extractor.eval()(x)] == extractor.feature_info.channels() == [64, 64]
    assert extractor.feature_info.reduction() == [4, 4]
    default = timm.create_model(name, features_only=True, **TINY)
    assert len(default.feature_info.channels()) == 4


def test_the_width_of_the_perceptron_is_the_ratio_that_a_file_tells():
    width, hidden = 448, 488  # of which 448 * (488 / 448) is a little less
    model = OcticViT(**(TINY | {"embed_dim": width, "mlp_ratio": hidden / width}))
    assert int(width * (hidden / width)) < hidden
    assert model.blocks[-1].mlp.fc1.out_features == hidden


@pytest.mark.parametrize("none", [0, 0.0, None])
def test_networks_without_layer_scale(none):
    model = OcticViT(**(TINY | {"init_values": none}))
    assert not [name for name, _ in model.named_parameters() if ".ls" in name]
    assert [name for name, _ in OcticViT(**TINY).named_parameters() if ".ls" in name]


def test_a_single_block_and_a_traced_network():
    assert len(OcticViT(**(TINY | {"depth": 1, "drop_path_rate": 0.1})).blocks) == 1
    model, x = tiny()
    assert error(torch.jit.trace(model, x)(x), model(x)) < 1e-12


def test_a_branch_that_is_always_dropped_adds_nothing():
    x = Irreps(torch.randn(4, 2, 5, 1), torch.randn(2, 2, 5, 2))
    for part, before in zip(OcticResidual(8, drop_path=1.0)(x, x), x, strict=True):
        assert torch.equal(part, before)


def test_gradients_reach_every_parameter_with_drop_path_and_checkpoints():
    model, x = tiny(drop_path_rate=0.3)
    model.train()
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients[0])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    torch.manual_seed(1)
    first = model(x)
    assert error(model(x), first) > 1e-6  # branches are dropped in training
    model.eval()
    assert torch.equal(model(x), model(x))


def test_optimizers_see_depth_and_leave_the_class_token_where_it_is():
    model, x = tiny()
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    assert len({group["lr_scale"] for group in groups}) == 6  # stem, four blocks, head
    optimizer = create_optimizer_v2(model, opt="adamw", lr=0.1, weight_decay=0.5)
    undecayed = {id(p) for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]}
    assert {id(model.stem.pos.weight), id(model.stem.class_token)} <= undecayed
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    # What is zero in the class token is no parameter: no optimizer can break the invariance.
    assert eqzoo.equivariance_error(model, x) < 1e-9


@torch.no_grad()
def test_reparameterized_autocast_and_compiled_networks_give_the_same():
    model, x = tiny()
    expected = model(x)
    plain = reparameterize_model(model)
    assert error(plain(x), expected) < 1e-12
    assert isinstance(plain.stem.patch.conv, torch.nn.Conv2d)
    assert equivariance_report(plain, x).largest < 1e-12
    torch._dynamo.reset()
    assert error(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected) < 1e-12
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.float()(x.float())
        with torch.enable_grad():
            model(x.float()).sum().backward()
        half = model.bfloat16()(x.bfloat16())
    assert error(low.double(), expected) < 0.1
    assert error(half.double(), expected) < 0.1
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_files_that_run_without_the_package(tmp_path):
    pytest.importorskip("onnxruntime")
    model, _ = tiny(depth=2)  # one block of each kind
    assert model.input_size == (3, 32, 32)
    model = model.float()
    report = eqzoo.export_pt2(model, tmp_path / "net.pt2")
    assert max(report.difference, *report.equivariance.values()) < 1e-5
    report = eqzoo.export_onnx(model, tmp_path / "net.onnx")
    assert max(report.difference, *report.equivariance.values()) < 1e-5
    assert eqzoo.check_equivariance(tmp_path / "net.onnx").exact


def test_multiply_adds_are_those_of_the_formula():
    model, _ = tiny()
    tokens, width, classes = 65, 64, 10
    octic = 12 * width**2 * tokens * 12 // 64
    attention = 2 * tokens**2 * width
    patches = 64 * width * 3 * 16
    middle = tokens * 48 * width
    gelu = tokens * 4 * width * 2 * 8  # to the values at the eight elements and back
    expected = 2 * (octic + gelu) + 2 * 12 * width**2 * tokens + 4 * attention + patches + middle + width * classes
    assert eqzoo.multiply_adds(model, (3, 32, 32)) == expected


needs_files = pytest.mark.skipif(not FILES.exists(), reason="no released files here")


def name_of(file):
    return "p4m_octic_vit_tiny_patch16_224" if "invariant" in file else "octic_vit_large_patch16_224"


def converted(path, folder, file, **settings):
    convert("octic_vits", path, name_of(file), folder, settings={"num_heads": 2} | settings)
    return eqzoo.create_model(f"local-dir:{folder}", pretrained=True).double().eval()


@needs_files
@pytest.mark.parametrize("file", RELEASED)
@torch.no_grad()
def test_released_formats_give_the_released_outputs(file, tmp_path, capsys):
    reference = np.load(FILES / "reference.npz")
    x, expected = (torch.from_numpy(reference[key]) for key in ("images", file))
    model = converted(FILES / f"{file}.pth", tmp_path / "net", file)
    assert (model(x) - expected).abs().max() < 1e-12
    assert (model(x.flip(-1)) - expected).abs().max() < 1e-12 or "hybrid" in file
    assert cli.main(["check", str(tmp_path / "net")]) == ("hybrid" in file)
    said = capsys.readouterr().out
    assert ("layers that end a group: middle, which hands irreps of p4m on" in " ".join(said.split())) == (
        "hybrid" in file
    )
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    assert config["pretrained_cfg"]["tag"] == file.partition("_")[0] + "_in1k"
    assert config["eqzoo"]["group"] == model.group.name


@needs_files
@torch.no_grad()
def test_wrappers_prefixes_and_what_training_saves_beside(tmp_path):
    file = RELEASED[2]
    state = torch.load(FILES / f"{file}.pth", weights_only=True)["teacher"]
    bare = {name.removeprefix("backbone."): value for name, value in state.items()}
    x = torch.randn(1, 3, 32, 32)
    expected = converted(FILES / f"{file}.pth", tmp_path / "net", file)(x)
    for held in (
        bare,
        {"model": {f"module.{name}": value for name, value in bare.items()}, "args": argparse.Namespace(lr=1)},
        {"teacher": {f"module.{name}": value for name, value in state.items()} | {"dino_head.weight": x}},
    ):
        torch.save(held, tmp_path / "file.pth")
        assert torch.equal(converted(tmp_path / "file.pth", tmp_path / "net", file)(x), expected)
    torch.save({name: value.half() for name, value in bare.items()}, tmp_path / "file.pth")
    converted(tmp_path / "file.pth", tmp_path / "net", file)
    kept = load_file(tmp_path / "net" / "model.safetensors")
    assert {value.dtype for value in kept.values()} == {torch.float32}  # as config.json says


@needs_files
def test_files_that_are_refused(tmp_path):
    file = RELEASED[0]
    state = torch.load(FILES / f"{file}.pth", weights_only=True)["model"]
    path, output = tmp_path / "file.pth", tmp_path / "net"

    def refused(change, said, model="p4m_octic_vit_tiny_patch16_224", **settings):
        torch.save({"model": {k: v for k, v in (state | change).items() if v is not None}}, path)
        with pytest.raises(ValueError, match=said):
            convert("octic_vits", path, model, output, settings={"num_heads": 2} | settings)
        assert not output.exists()

    refused(
        {"cls_token.3": torch.full((1, 1, 8), 1e-3)}, r"cls_token\.3, a part .* frozen at zero, is not zero .*1\.0e-03"
    )
    refused({"cls_token.4": torch.ones(1, 1, 2, 16)}, r"cls_token\.4")
    refused({"blocks.3.mlp.fc1.weight": torch.zeros(8, 8)}, r"does not fit .*blocks\.3\.mlp\.fc1\.weight")
    refused({"pos_embed.3": None}, r"lacks weights .*pos_embed\.3")
    refused({"pos_embed.0": torch.zeros(1, 5, 5, 8)}, "of an octic ViT, or they have other sizes")
    refused({"blocks.1.extra": torch.zeros(1)}, r"1 weights have no place .*: blocks\.1\.extra")
    refused({"blocks.2.gamma_1": None}, r"does not fit .*blocks\.2\.ls1\.gamma")
    refused({}, "is of an invariant network, and octic_vit_large_patch16_224 is not", "octic_vit_large_patch16_224")
    refused({}, "no equal share", num_heads=3)
    refused({}, "fit octic_vit_huge", "p4_cnn")
    torch.save(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(), path)
    with pytest.raises(ValueError, match="no file of an octic ViT"):
        convert("octic_vits", path, name_of(file), output)


@needs_files
@torch.no_grad()
def test_converted_weights_start_fine_tuning(tmp_path, capsys):
    """Other classes, channels and sizes; and the command line."""
    file, folder = RELEASED[2], tmp_path / "net"
    command = ["convert", "octic_vits", str(FILES / f"{file}.pth"), "--model", name_of(file), "--output", str(folder)]
    assert cli.main([*command, "--set", "num_heads=2"]) == 0
    assert "width 64, 4 blocks, 2 heads (as set), patches of 4 on 32 pixels, 0 classes" in capsys.readouterr().out
    assert cli.main([*command, "--set", "num_heads"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
    model = eqzoo.create_model(f"local-dir:{folder}", pretrained=True).eval()
    named = eqzoo.create_model(name_of(file), checkpoint_path=folder).eval()
    assert all(torch.equal(a, b) for a, b in zip(named.parameters(), model.parameters(), strict=True))
    other = eqzoo.create_model(f"local-dir:{folder}", pretrained=True, num_classes=3, img_size=48, in_chans=1).eval()
    assert other(torch.randn(1, 1, 48, 48)).shape == (1, 3)
    assert eqzoo.equivariance_error(other, torch.randn(1, 1, 48, 48)) < 1e-9
    x = torch.randn(1, 1, 48, 48)
    assert error(other.forward_features(x), model.forward_features(x.expand(-1, 3, -1, -1))) < 1e-6
    assert cli.main(["info", str(folder)]) == 0
    assert "24, 32, 40 (every 8 pixels; 24 to 40 were tried)" in capsys.readouterr().out
    assert type(model) is OcticViT
