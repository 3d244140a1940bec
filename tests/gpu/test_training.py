"""Training on a GPU: recorded passes are the passes themselves."""

import pytest
import torch

from eqzoo.data import Split
from eqzoo.engine import Recipe, build_network, train


def trained(tmp_path, name, model, **values):
    recipe = Recipe(
        model=model, dataset="cifar10", epochs=2, batch_size=16, lr=1e-2, augment="standard_cutout", ema_decay=0.9,
        optimizer="nmuon", **values,
    )  # fmt: skip
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (80, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 10, (80,))
    splits = {"train": Split(images, labels), "valid": Split(images[:32], labels[:32])}
    weights = train(recipe, lambda: build_network(recipe), splits, tmp_path / name, "cuda").state_dict()
    return {key: value.double().cpu() for key, value in weights.items()}


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("model", ["p4_resnet29", "p4_asc_resnet29"])
def test_recorded_passes_train_the_same_network(tmp_path, model, half):
    torch.set_default_dtype(torch.float32)
    plain = trained(tmp_path, "plain", model, half_size_epochs=half)
    recorded = trained(tmp_path, "recorded", model, half_size_epochs=half, cuda_graphs=True)
    other = trained(tmp_path, "other", model, half_size_epochs=half, seed=1)
    assert plain["stem.norm.num_batches_tracked"] == recorded["stem.norm.num_batches_tracked"] > 0
    for key, value in plain.items():
        assert (recorded[key] - value).norm() <= 1e-3 * value.norm() + 1e-6, key
    assert any((other[key] - value).norm() > 1e-2 * value.norm() for key, value in plain.items())
