"""The networks as encoders of segmentation_models_pytorch."""

import pytest
import torch

import eqzoo
from eqzoo.groups import transform

smp = pytest.importorskip("segmentation_models_pytorch")

DEPTHS = {
    "p4_resnet29": 2,
    "p4m_asc_resnet29": 2,
    "p4_allcnn": 2,
    "p4m_resnet44": 2,
    "p4_resnet18": 3,
    "p4m_resnet_m": 4,
    "p4m_convnext_atto": 5,
}


def unet(name, depth):
    channels = (32, 16, 8, 8, 8)[:depth]
    return smp.Unet(f"tu-{name}", depth, encoder_weights=None, decoder_channels=channels, classes=2).eval()


@pytest.mark.parametrize(("name", "depth"), DEPTHS.items())
def test_a_unet_has_an_equivariant_encoder(name, depth):
    model, x = unet(name, depth), torch.randn(1, 3, 64, 64)
    features = model.encoder(x)
    assert [y.shape[-1] for y in features] == [64 // 2**level for level in range(depth + 1)]
    extractor = model.encoder.model
    assert eqzoo.equivariance_error(extractor, x, randomize=True) < 1e-12
    assert model(x).shape == (1, 2, 64, 64)
    # The decoder is none of ours: the mask of a rotated image is no rotated mask.
    moved = transform(x, extractor.model.group, 1, "trivial")
    error = model(moved) - transform(model(x), extractor.model.group, 1, "trivial")
    assert error.norm() > 1e-2 * model(x).norm()


def test_indices_count_the_features_that_come_without_them():
    every = eqzoo.create_model("p4_allcnn", features_only=True).feature_info
    last = eqzoo.create_model("p4_allcnn", features_only=True, out_indices=(1,)).feature_info
    assert (every.reduction()[1:2], last.reduction()) == ([2], [2])
    assert every.module_name()[1:2] == last.module_name()
