"""Properties of every registered network: counts, equivariance, fusing, features, gradients, export."""

import copy
import pickle
from decimal import Decimal

import numpy as np
import pytest
import timm
import torch
from timm.layers import LayerNorm2d, LayerScale2d
from timm.utils import reparameterize_model
from torch import nn

import eqzoo
from eqzoo.equivariance import equivariance_report, randomize_norms
from eqzoo.groups import P4, P4M, transform
from tests.conftest import NETWORKS, slow

# Octic ViTs take images of 224 pixels and give tokens; they have tests of their own, test_octic_vit.py.
NAMES = [name for name in eqzoo.list_models() if "octic_vit" not in name]
# The smallest side of an image, in pixels, by network class (GSA-Nets: by the last letter of the name).
SIDES = {
    "GroupCNN": 28,
    "PCamDenseNet": 80,
    "AllCNN": 8,
    "ResNet44": 8,
    "ASCResNet": 8,
    "E4Net": 8,
    "E4ResNet": 8,
    "ConvNeXt": 32,
    "GroupResNet": 16,
}
CLASSES = {
    "cifar100": 100,
    "pcam": 2,
    "chula_rbc12": 11,
    "pbc": 8,
    "lc25000": 3,
    "radio": 4,
    "ucmerced": 21,
    "tiny_imagenet": 200,
    "": 1000,
}  # of other data sets 10
GSA_SIDES = {"t": 22, "s": 72, "b": 8}
# Networks that take many seconds, each of an architecture that is tested at another size.
HEAVY = {"r12_gsanet_t", "r16_gsanet_t", "r8_gsanet_t", "r4_gsanet_s", "r8_gsanet_s", "r4m_gsanet_s"} | {
    f"{group}_convnext_{size}" for group in ("p4", "p4m") for size in ("femto", "pico", "nano", "tiny")
}
# One network of each class and mechanism, for tests of what a class does and for those that compile and export.
KINDS = [
    "z2_cnn",
    "p4_cnn",
    "p4m_cnn",
    "p4_alpha_cnn",
    "p4_alpha_f_cnn",
    "p4_alpha_rh_cnn",
    "p4m_alpha_f_densenet",
    "p4_alpha_f_allcnn",
    "p4m_resnet44",
    "p4_resnet29",
    "p4_asc_se_resnet29",
    "z2_sasa_resnet29",
    "p4_simple_asc_resnet29",
    "p4_e4net",
    "p4_e4_resnet18",
    "z2_gsanet_t",
    "z2m_gsanet_b",
    "p4m_convnext_atto",
    "p4m_resnet_s",
]
WEIGHTED = {
    LayerNorm2d,
    LayerScale2d,
    nn.Conv2d,
    nn.BatchNorm2d,
    nn.Linear,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.Embedding,
    nn.Conv3d,
}


def side(name, model):
    found = SIDES.get(type(model).__name__) or GSA_SIDES.get(name[-1])
    assert found, (
        f"SIDES in this file has the smallest side that each class takes, and not that of {type(model).__name__}"
    )
    return found


def trained_like(name, **kwargs):
    """A network with random norms and biases, and two small images."""
    model = eqzoo.create_model(name, **kwargs).eval()
    x = torch.randn(2, model.in_chans, side(name, model), side(name, model))
    randomize_norms(model, torch.Generator().manual_seed(1), x)
    return model, x


# Why the count that a paper prints is not the rounded count of the network here.
OTHER_COUNTS = {
    "p4_resnet29.cifar10": "printed 310k; the count for 100 classes agrees, and differs only in the classifier",
    "z2_cnn.rotmnist": "printed with the biases of the convolutions, which the authors' code does not have",
    "p4m_alpha_f_resnet44.cifar10": "printed 2.70M; no variant that we tried has that count",
    "p4m_e4_resnet18.cifar10": "the settings are those of the authors' code, which differ from the paper's",
    "p4_e4_resnet18.cifar10": "the settings are those of the authors' code, which differ from the paper's",
    "p4m_resnet18.cifar10": "printed 10.8M; the reason is not known",
    "p4_e4net.rotmnist": "the norm is tied over the group, see tests/layers/test_e4.py",
    "p4_e4net_large.rotmnist": "the norm is tied over the group, see tests/layers/test_e4.py",
    **{f"{name}.rotmnist": "printed once for all groups" for name in ("z2_gsanet_t", "r4_gsanet_t", "r8_gsanet_t")},
    "r12_gsanet_t.rotmnist": "printed once for all groups",
    **{f"{name}.pcam": "printed once for all groups" for name in ("z2_gsanet_s", "r4_gsanet_s", "r8_gsanet_s")},
    "r4m_gsanet_s.pcam": "printed once for all groups",
    **{f"{name}.cifar10": "printed once for all groups" for name in ("z2_gsanet_b", "z2m_gsanet_b")},
}


def tagged(row):
    """The registered name of a row of the table; networks for images of ImageNet's size have no data set yet."""
    return f"{row['name']}.{row['dataset']}" if row["dataset"] else row["name"]


def test_the_table_has_every_network():
    assert {row["name"] for row in NETWORKS} == set(NAMES), "networks.csv, beside this file, has every network"
    registered = {name for name in timm.list_models(include_tags=True) if name.partition(".")[0] in NAMES}
    assert set(map(tagged, NETWORKS)) == {name.removesuffix("_aug") for name in registered}  # a second recipe
    assert set(eqzoo.list_pretrained()) <= set(timm.list_models(pretrained=True))


@pytest.mark.parametrize("row", NETWORKS, ids=tagged)
def test_group_classes_and_parameters_are_those_of_the_table(row):
    with torch.device("meta"):
        model = eqzoo.create_model(tagged(row))
    assert model.group.name == row["group"]
    classes = CLASSES.get(row["dataset"], 10)
    assert model.num_classes == classes, f"CLASSES in this file has the number of classes of {row['dataset']}"
    assert sum(parameter.numel() for parameter in model.parameters()) == int(row["parameters"])


@pytest.mark.parametrize("name", eqzoo.list_models())
def test_docstrings_state_the_parameters(name):
    """Those of the large and huge octic ViTs are the released networks'."""
    counts = [int(row["parameters"]) for row in NETWORKS if row["name"] == name]
    if not counts:
        with torch.device("meta"):
            counts = [sum(parameter.numel() for parameter in eqzoo.create_model(name).parameters())]
    said = timm.model_entrypoint(name).__doc__
    assert f"({counts[0]:,} parameters)" in said, "the docstring of the registered function ends with its parameters"


def _last_digit(number):
    """The value of 1 in the last digit of a decimal number."""
    return Decimal(1).scaleb(Decimal(number).as_tuple().exponent)


def test_parameters_round_to_the_printed_ones():
    differ = set()
    for row in NETWORKS:
        printed = row["parameters_in_paper"].upper()
        if not printed:
            continue
        unit = {"K": 10**3, "M": 10**6}[printed[-1]]
        if abs(int(row["parameters"]) - Decimal(printed[:-1]) * unit) > _last_digit(printed[:-1]) * unit / 2:
            differ.add(f"{row['name']}.{row['dataset']}")
    assert differ == set(OTHER_COUNTS)


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", slow(NAMES, HEAVY))
@torch.no_grad()
def test_features_are_equivariant_and_logits_invariant(name):
    model, x = trained_like(name)
    features = model.forward_features(x)
    logits = model.forward_head(features)
    assert features.std() > 1e-3
    assert error(logits[:1], logits[1:]) > 1e-4  # logits that depend on the image
    for g in model.group.grid_elements:
        rotated = model.forward_features(transform(x, model.group, g, "trivial"))
        # About 1e-15, and up to 5e-11 in p4_asc_resnet83, whose 27 softmax layers amplify round-off.
        assert error(rotated, transform(features, model.group, g, "regular")) < 1e-9
        assert error(model.forward_head(rotated), logits) < 1e-9


def test_the_checks_above_can_fail():
    """Negative controls: groups that a network is not equivariant under, and a head that reads one element."""
    baseline, x = trained_like("z2_cnn")
    assert (baseline(transform(x, P4, 1, "trivial")) - baseline(x)).abs().max() > 1e-2
    assert eqzoo.equivariance_error(baseline, group=P4) > 1e-3
    model, _ = trained_like("p4_cnn")
    assert eqzoo.equivariance_error(model, group=P4M) > 1e-3
    model.global_pool = nn.Sequential(nn.Flatten(2), nn.AdaptiveMaxPool1d(3), nn.Flatten())
    model.global_pool.forward = lambda field: field[:, :, 0].amax((2, 3))
    report = equivariance_report(model)
    assert max(report.logits.values()) > 1e-3
    assert max(report.features.values()) < 1e-12


@pytest.mark.parametrize("name", slow(NAMES, HEAVY | {name for name in NAMES if name.endswith("83")}))
@torch.no_grad()
def test_fused_networks_are_plain_and_equal(name):
    model, x = trained_like(name)
    plain = reparameterize_model(model)
    assert error(plain(x), model(x)) < 1e-9
    assert error(plain.forward_features(x), model.forward_features(x).flatten(1, 2)) < 1e-9
    assert error(reparameterize_model(plain)(x), plain(x)) < 1e-12
    if "gsanet" not in name:  # its attention has no plain form
        weighted = {type(module) for module in plain.modules() if list(module.parameters(recurse=False))}
        assert weighted <= WEIGHTED


@pytest.mark.parametrize(
    ("name", "size", "nearest"),
    [
        ("p4_resnet29", (30, 31), "28 x 28 and 32 x 32"),
        ("p4m_resnet29", (32, 34), "32 x 32 and 32 x 36"),
        ("p4_cnn", (9, 28), "28 x 28"),
        ("p4_cnn", (29, 29), "28 x 28 and 30 x 30"),
        ("p4_cnn", (26, 30), "28 x 30"),  # a layer of the head
        ("z2_resnet29", (1, 1), "4 x 4"),
        pytest.param("r4_gsanet_t", (20, 28), "22 x 28", marks=pytest.mark.slow),
    ],
)
def test_a_size_of_images_that_a_layer_refuses_is_answered_with_sizes_of_images(name, size, nearest):
    model = eqzoo.create_model(name)
    near = rf"the nearest sizes? that works? (are|is) {nearest} \("
    said = rf"{name} does not accept images of {size[0]} x {size[1]} pixels; {near}"
    with pytest.raises(ValueError, match=said):
        model(torch.randn(2, model.in_chans, *size))
    if name == "p4_cnn":
        return  # its last convolution is in its head, which feature extractors leave out
    with pytest.raises(ValueError, match=said):
        eqzoo.create_model(name, features_only=True)(torch.randn(2, model.in_chans, *size))


def test_sizes_that_work_are_sought_side_by_side():
    """A group without rotations constrains the width alone."""
    with pytest.raises(ValueError, match="the nearest sizes that work are 29 x 28 and 29 x 32"):
        eqzoo.create_model("p4_resnet29", group=eqzoo.Z2M)(torch.randn(1, 3, 29, 30))
    with pytest.raises(ValueError, match="3 x 3 pixels; its own size is 80 x 80"):
        eqzoo.create_model("p4m_densenet")(torch.randn(1, 3, 3, 3))


@torch.no_grad()
def test_the_error_of_a_layer_is_not_lost_where_the_network_cannot_be_copied():
    model = eqzoo.create_model("p4_cnn").eval()
    with torch.enable_grad():
        model.feature = torch.ones(1, requires_grad=True).mul(1)  # no leaf: deepcopy refuses it
    with pytest.raises(ValueError, match=r"would break p4: .* It is exact at height 24 or 26"):
        model(torch.randn(1, 1, 29, 29))


@pytest.mark.parametrize(("name", "fits", "breaks"), [("p4_resnet29", 32, 30), ("p4m_cnn", 28, 27)])
def test_a_fused_network_refuses_the_sizes_that_the_network_refuses(name, fits, breaks):
    model = eqzoo.create_model(name).eval()
    for plain in (model, pickle.loads(pickle.dumps(copy.deepcopy(reparameterize_model(model))))):
        with torch.no_grad():
            plain(torch.randn(1, model.in_chans, fits, fits))
            with pytest.raises(ValueError, match=r"SpatialPool2d\(p4m?, 2.*would break p4m?: at height"):
                plain(torch.randn(1, model.in_chans, breaks, breaks))


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - set(KINDS)))
@torch.no_grad()
def test_channels_classes_and_state(name):
    model = eqzoo.create_model(name, in_chans=5, num_classes=3)
    x = torch.randn(2, 5, side(name, model), side(name, model))
    assert model.pretrained_cfg["input_size"][0] == 5
    assert len(model.pretrained_cfg["mean"]) in (1, 5)
    assert list(model.train().state_dict()) == list(copy.deepcopy(model).eval().state_dict())
    assert all(value.ndim <= 4 for value in model.state_dict().values())
    features = model.eval().forward_features(x)
    assert model.forward_head(features).shape == (2, 3)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    assert model.get_classifier() is model.head
    model.pretrained_cfg["label_names"] = ["a", "b", "c"]
    model.reset_classifier(3)
    assert model.pretrained_cfg["label_names"] is None  # a new classifier has no names, nor would an export
    with pytest.raises(ValueError, match="other"):
        model.reset_classifier(7, "other")
    assert model.num_classes == 3
    model.reset_classifier(7)
    assert model.forward_head(features).shape == (2, 7)
    model.reset_classifier(0)
    assert model.forward_head(features).shape == (2, model.num_features)


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - set(KINDS)))
@torch.no_grad()
def test_features_are_planes_in_both_of_timms_ways(name):
    model, x = trained_like(name, in_chans=1)
    last, features = model.forward_intermediates(x)
    assert torch.equal(last, model.forward_features(x))
    assert len(features) == len(model.feature_info) == len(model.blocks) + 1
    extractor = timm.create_model(name, features_only=True, out_indices=(0, 2), in_chans=1).double().eval()
    first, third = extractor(x)
    assert [first.shape[1], third.shape[1]] == extractor.feature_info.channels()
    assert third.shape in {y.shape for y in features[2:]}
    assert len(model.forward_intermediates(x, indices=2, intermediates_only=True)) == 2
    assert len(timm.create_model(name, features_only=True, in_chans=1).feature_info.channels()) >= 3


def test_features_of_other_bands_have_their_mean():
    extractor = eqzoo.create_model("p4m_resnet29.eurosat", features_only=True, in_chans=13)
    for cfg in (extractor.pretrained_cfg, extractor.model.pretrained_cfg):
        assert [len(cfg[key]) for key in ("mean", "std")] == [13, 13]


def test_features_of_another_depth_and_of_an_extractor_in_training():
    channels = eqzoo.create_model("p4m_resnet44", depth=2, features_only=True).feature_info.channels()
    assert channels == [8 * width for width in (11, 23, 45)]
    for widths in ((8, 16), (4, 8, 12, 16)):
        model = eqzoo.create_model("p4m_resnet44", depth=1, widths=widths, features_only=True)
        assert model.feature_info.channels() == [8 * width for width in widths]
    channels = eqzoo.create_model("p4_resnet18", depths=(1, 1), features_only=True).feature_info.channels()
    assert channels == [4 * width for width in (32, 64)]
    stages = eqzoo.create_model("r4_gsanet_t").feature_info
    assert len(eqzoo.create_model("r4_gsanet_t", features_only=True).feature_info.channels()) == len(stages)
    features = eqzoo.create_model("p4m_convnext_atto", features_only=True, planes=(16, 32), depths=(1, 1))
    assert len(features(torch.randn(1, 3, 64, 64))) == 2
    assert len(eqzoo.create_model("p4m_convnext_atto", features_only=True).feature_info.channels()) == 4


@pytest.mark.parametrize(
    "name", ["p4m_densenet", "p4_cnn", "p4_resnet29", "p4m_resnet_s", "p4m_octic_vit_tiny_patch16_224"]
)
def test_an_extractor_has_gradients_everywhere_with_and_without_checkpoints(name):
    kwargs = {"img_size": 32, "depth": 4, "patch_size": 4} if "vit" in name else {}
    extractor = eqzoo.create_model(name, features_only=True, **kwargs).double()
    x, found = torch.randn(2, extractor.model.in_chans, *[96 if "dense" in name else 32] * 2), []
    for checkpointed in (False, True):
        extractor.zero_grad()
        extractor.model.set_grad_checkpointing(checkpointed)
        saved = []
        torch.manual_seed(0)  # of dropout
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
            loss = sum(y.square().mean() for y in extractor(x))
        loss.backward()
        assert all(parameter.grad is not None for parameter in extractor.parameters())
        found.append((sum(saved), [parameter.grad.clone() for parameter in extractor.parameters()]))
    (much, first), (little, second) = found
    assert little < much
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - set(KINDS)))
def test_gradients_reach_every_parameter(name):
    model, x = trained_like(name)
    model.train()
    model.set_grad_checkpointing()
    expected = dict(model.named_parameters())
    for key, parameter in model.named_parameters():
        if key.endswith("attention.reduce"):
            # The few hidden units of channel attention see means and maxima of at least 0: with weights above 0, none
            # of their ReLUs is off for all images.
            parameter.data.abs_()
        if key.endswith("pose.weight") and model.group.order == 1:
            # With a single relative pose its term is the same for all keys, and a softmax does not depend on it.
            del expected[key]
    for _ in range(4):  # a ReLU may be off for two small images, not for all
        model(x).square().sum().backward()
        if all(parameter.grad.any() for parameter in expected.values()):
            break
        x = torch.randn_like(x)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert [key for key, parameter in expected.items() if not parameter.grad.any()] == []


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - set(KINDS)))
@torch.no_grad()
def test_channels_last_and_bfloat16(name):
    model, x = trained_like(name)
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    assert error(model(x.to(memory_format=torch.channels_last)), expected) < 1e-9
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.float()(x.float())
    assert low.isfinite().all()
    # In 27 blocks on maps of 2 x 2 pixels, bfloat16 round-off grows to the size of the logits.
    assert name.endswith("83") or error(low.double(), expected) < 0.3


# Those whose layers others of the list have too, with another group,
ALSO_SLOW = {"p4_asc_se_resnet29", "z2m_gsanet_b", "p4_e4_resnet18", "p4m_resnet44", "p4m_cnn", "p4_alpha_rh_cnn"}
# and those of which tests/layers and tests/ops compile and export a small network or a layer.
ALSO_SLOW |= {"z2_sasa_resnet29", "p4_resnet29", "p4_alpha_f_allcnn", "p4m_alpha_f_densenet", "z2_gsanet_t"}
assert set(KINDS) >= ALSO_SLOW


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - set(KINDS) | ALSO_SLOW | {"p4_simple_asc_resnet29"}))
def test_export_with_a_dynamic_batch(name):
    model, x = trained_like(name)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    larger = torch.randn(5, *x.shape[1:])
    assert error(program.module()(larger), model(larger)) < 1e-9


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - set(KINDS) | ALSO_SLOW | {"p4_simple_asc_resnet29"}))
@torch.no_grad()
def test_compiles_without_a_graph_break(name):
    model, x = trained_like(name)
    expected = model(x)
    torch._dynamo.reset()
    assert error(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p4_cnn", "p4_alpha_f_cnn", "p4_asc_resnet29", "p4_e4net", "r4_gsanet_t"])
@torch.no_grad()
def test_compiles_with_inductor(name):
    model, x = trained_like(name)
    expected = model(x)
    assert error(torch.compile(model, fullgraph=True)(x), expected) < 1e-9


def test_larger_images():
    model, _ = trained_like("p4_cnn")
    assert model(torch.randn(1, 1, 40, 36)).shape == (1, 10)
    assert eqzoo.equivariance_error(model, torch.randn(1, 1, 40, 36)) < 1e-12


def test_a_new_classifier_is_in_the_mode_of_its_network():
    model = eqzoo.create_model("p4_allcnn").eval()  # whose classifier has a batch norm
    model.reset_classifier(3)
    assert not any(module.training for module in model.modules())
    model.train().reset_classifier(4)
    assert all(module.training for module in model.modules())


def test_features_are_numbered_by_integers_of_numpy_too():
    model, x = eqzoo.create_model("p4_cnn"), torch.zeros(1, 1, 28, 28)
    found = model.forward_intermediates(x, list(np.array([1, -1])), intermediates_only=True)
    assert [y.shape[-1] for y in found] == [12, 4]


def test_filters_of_half_precision_are_summed_in_single_precision():
    torch.set_default_dtype(torch.float32)
    color, gray = (eqzoo.create_model("p4_e4_resnet18", pretrained=True, in_chans=count) for count in (3, 1))
    filters = [model.state_dict()[f"{model.pretrained_cfg['first_conv']}.weight"] for model in (color, gray)]
    assert filters[0].dtype == torch.float32
    assert torch.equal(filters[0].half().float(), filters[0])  # as they are stored
    torch.testing.assert_close(filters[1], filters[0].sum(1, keepdim=True), rtol=1e-6, atol=0)
