"""Small training runs on images of two classes, for the tests of the training loop and of run folders."""

import json
from dataclasses import replace

import pytest
import torch

import eqzoo
from eqzoo.data import Split
from eqzoo.engine import Recipe, loop, train
from eqzoo.layers import GroupBatchNorm2d, GroupLayerNorm2d


def bars(count, seed):
    """Two classes of images: bright in the middle or at the edge, which no rotation changes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    images = torch.randint(0, 60, (count, 1, 28, 28), generator=generator)
    images[labels == 1, :, 10:18, 10:18] += 150
    images[labels == 0, :, :3] += 150
    return Split(images.to(torch.uint8), labels)


SPLITS = {"train": bars(48, 0), "valid": bars(16, 1)}
RECIPE = Recipe("p4_cnn", "bars", epochs=3, batch_size=16, warmup_epochs=1, model_args={"width": 2, "num_classes": 2})


class Killed(BaseException):
    pass


def other(**changes):
    return replace(RECIPE, **changes)


def build():
    return eqzoo.create_model(RECIPE.model, **RECIPE.model_args).float()


def swap_norms(model):
    """Layer norms instead of batch norms: they know no batch, so that a batch may be split."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GroupBatchNorm2d):
                setattr(module, name, GroupLayerNorm2d(child.group, child.num_features, eps=1e-12))
    return model


def build_without_batch_norm():
    return swap_norms(eqzoo.create_model("p4_cnn", width=2, num_classes=2, drop_rate=0.0))


def go(folder, recipe=RECIPE, build=build_without_batch_norm, splits=SPLITS, **kwargs):
    torch.set_default_dtype(torch.float32)
    return train(recipe, build, splits, folder, **kwargs)


def run(folder, recipe=RECIPE):
    """A run of the network that the recipe names, with batch norms and dropout."""
    return go(folder, recipe, lambda: eqzoo.create_model(recipe.model, **recipe.model_args))


def rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [row["loss"] for row in rows(folder)]


def same(a, b):
    return all(torch.equal(a.state_dict()[name], value) for name, value in b.state_dict().items())


def kill_after(epochs, train, *args, **kwargs):
    """Trains until a run is killed behind its first epochs."""
    original = loop._train_epoch

    def stop(state, epoch, *args):
        if epoch == epochs:
            raise Killed
        return original(state, epoch, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_train_epoch", stop)
        with pytest.raises(Killed):
            train(*args, **kwargs)


def scored(monkeypatch, *accuracies):
    """Gives the epochs of a run these accuracies on the validation images."""
    values = iter(accuracies)
    validate = loop.TrainingState.validate
    monkeypatch.setattr(loop.TrainingState, "validate", lambda self: validate(self) | {"valid_accuracy": next(values)})
    return values


@torch.no_grad()
def predictions(model, images):
    return model.eval()(images).argmax(1)
