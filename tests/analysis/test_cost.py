"""Multiply-adds: against closed forms of every attention, and against the papers' numbers."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import eqzoo
from eqzoo import layers
from eqzoo.analysis import throughput
from eqzoo.analysis.sizes import weightless
from eqzoo.groups import P4, Z2
from eqzoo.ops import use_backend


def test_e4_counts_generator_encoder_and_sums():
    layer = layers.E4Layer2d(P4, 8, 8, kernel_size=5, slices=2)
    places = 4 * 6 * 6  # poses and pixels
    maps = 2 * 8 * (8 * 4)
    assert eqzoo.multiply_adds(layer, (8, 4, 6, 6)) == places * (maps + 2 * 25 * 8 + 8 * 25)


def test_octic_networks_count_the_same_with_and_without_their_operators():
    name = "p4m_octic_vit_tiny_patch16_224"
    counted = eqzoo.multiply_adds(eqzoo.create_model(name))
    assert counted == eqzoo.multiply_adds(weightless(name))  # on the meta device the formulas run
    assert counted > eqzoo.multiply_adds(eqzoo.create_model(name, depth=10))


def test_affine_attention_counts_maps_scores_and_sums():
    layer = layers.AffineSelfConv2d(P4, 8, kernel_size=5, num_heads=8)
    field = 8 * 4 * 6 * 6
    embeddings = 4 * 8 * 4  # of queries, keys, values and the output
    maps = 4 + 2 * 4 * 25
    assert eqzoo.multiply_adds(layer, (8, 4, 6, 6)) == field * (embeddings + maps + 2 * 25)


def test_maps_that_are_the_identity_count_nothing():
    """Stand-alone self-attention has none but the embedding of positions, which is added."""
    layer, field = layers.StandAloneSelfAttention2d(P4, 8, kernel_size=5, num_heads=2), 8 * 4 * 6 * 6
    assert eqzoo.multiply_adds(layer, (8, 4, 6, 6)) == field * (4 * 8 * 4 + 2 * 25)


def test_full_attention_counts_every_response_once():
    layer = layers.AttentiveGroupConv2d(P4, 6, 5, 3, padding=1, attention="full", attention_size=7)
    responses = (5 * 4) * (6 * 4) * 8 * 8
    convolution = responses * 9
    perceptron = 2 * 2 * (5 * 4) * 4 * 3 * 6  # of mean and maximum, two matrices each, for every output plane and pose
    maps = (5 * 4) * 4 * 8 * 8 * (2 * 49 + 1)
    counted = eqzoo.multiply_adds(layer, (6, 4, 8, 8))
    # The means over pixels come from a small product, which is not worth a formula here.
    assert 0 <= counted - (2 * convolution + responses + perceptron + maps) < 0.02 * counted


def test_group_self_attention_counts_what_the_factorized_softmax_needs():
    layer = layers.GroupSelfAttention2d(P4, 12, 12, kernel_size=3, num_heads=2)
    d, order, taps, places = 6, 4, 9, 5 * 5
    linear = order * places * 12 * (3 * 2 * d + 12)
    attention = 2 * places * taps * (order**2 * d + 4 * order**2 + order**3 + order**2 * d)
    counted = eqzoo.multiply_adds(layer, (12, 4, 5, 5))
    codes = counted - linear - attention  # encoding 9 positions for 4 elements
    assert 0 <= codes < 0.15 * counted


def test_a_global_window_counts_the_places_there_are():
    everywhere, window = (layers.GroupSelfAttention2d(P4, 8, 8, side, num_heads=2) for side in ("global", 17))
    assert eqzoo.multiply_adds(everywhere, (8, 4, 9, 9)) == eqzoo.multiply_adds(window, (8, 4, 9, 9))
    assert eqzoo.multiply_adds(everywhere, (8, 4, 9, 9)) < 2 * 9**4 * 2 * (16 * 4 + 4 * 4 * 4 * 2 + 64)


# The E4 paper prints 17M, 36.9M, 0.56G and 2.99G; it does not say what it counts besides convolutions.
COUNTS = {
    "p4_e4net": 17_640_160,
    "p4_e4net_large": 37_763_952,
    "z2_resnet18": 555_422_720,
    "p4_resnet18": 2_973_108_736,
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_networks(name):
    assert eqzoo.multiply_adds(eqzoo.create_model(name).float()) == COUNTS[name]


def test_smaller_images_count_less():
    model = eqzoo.create_model("p4_cnn")
    assert eqzoo.multiply_adds(model) > eqzoo.multiply_adds(model, (1, 28, 30)) / 1.1
    assert eqzoo.multiply_adds(model, (1, 32, 32)) > eqzoo.multiply_adds(model)


def test_what_eager_torch_multiplies_elementwise_would_be_missed():
    layer = layers.AffineSelfConv2d(Z2, 8, kernel_size=5)
    size = (8, 1, 20, 20)  # large enough for the margin of black, which eager torch maps too, to be small
    counted = eqzoo.multiply_adds(layer, size)
    with use_backend("eager"):
        assert eqzoo.multiply_adds(layer, size) < 0.8 * counted
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, x: eqzoo.multiply_adds(model, tuple(x.shape[1:])),
        lambda model, x: throughput(model, tuple(x.shape[1:]), batch_size=1, min_seconds=1e-3),
        lambda model, x: eqzoo.rotation_curve(model, x, torch.zeros(len(x), dtype=torch.int64), [0]),
    ],
    ids=["multiply_adds", "throughput", "rotation_curve"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_frozen_norms_stay_frozen(measure, fails):
    """Also where the network raises an error: here the classifier has a size of its own."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36 + fails, 3)).train()
    model[1].eval()
    with pytest.raises(RuntimeError) if fails else nullcontext():
        measure(model, torch.randn(2, 1, 5, 5))
    assert [module.training for module in model] == [True, False, True, True]


def test_a_network_without_parameters_multiplies_nothing():
    assert eqzoo.multiply_adds(nn.AvgPool2d(2), (1, 8, 8)) == 0


def test_attention_of_torch_is_counted_with_any_release():
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    torch.set_default_dtype(torch.float32)
    assert eqzoo.multiply_adds(Attention(), (2, 10, 8)) == 2 * 2 * 10 * 10 * 8  # scores and sums of values, in 2 heads


@pytest.mark.parametrize(("vectors", "said"), [("AVX2", " cores with AVX2, "), ("DEFAULT", " cores, ")])
def test_throughput_names_the_vectors_of_the_processor(monkeypatch, vectors, said):
    """Some names, such as "AMD EPYC", are those of processors of several kinds."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    assert said in throughput(nn.Identity(), (1, 4, 4), min_seconds=1e-3)["machine"]


def test_attention_of_torchs_own_transformers_is_counted():
    """In evaluation mode torch computes them in one operation, which its counter does not know."""

    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float32)

        def forward(self, x):
            return self.layer(x.flatten(2).mT)

    tokens, width, hidden = 20, 16, 32
    products = tokens * (4 * width**2 + 2 * width * hidden) + 2 * tokens**2 * width
    assert eqzoo.multiply_adds(Tokens(), (16, 4, 5)) == products
    assert torch.backends.mha.get_fastpath_enabled()
