"""Another network, trained on the same images in the same time as a fine-tuned one."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

import timm
import torch
from torch import nn

from ..analysis.sizes import weightless
from ..data import AnySplit
from ..engine.epochs import best_row
from ..engine.loop import train
from ..engine.recipe import Recipe
from ..engine.run import RunDirectory
from ..engine.speed import recorded_speed
from ..evaluation.metrics import BATCH_SIZE, copy_probabilities, evaluation_bar, scores
from ..evaluation.rotation import inputs, rotation_curve, sample
from ..groups import Group
from ..models.load import list_models
from .rules import keeps_statistics, rate_factor, stronger_augmentation, suitable_augmentation, with_rules

__all__ = ["baseline_network", "baseline_recipe", "check_baseline", "train_baseline"]

FOLDER = "against"
_OF_BOTH = ("loss", "label_smoothing", "ema_decay", "clip_grad")  # keys of the recipe of the fine-tuning
# Of AdamW, for timm's networks with batch norms and without, from trained weights and from random ones. Networks of the
# zoo have the higher rates of `eqzoo.finetuning.rules`.
_RATES = {True: {True: 1e-3, False: 4e-3}, False: {True: 1e-4, False: 1e-3}}


def check_baseline(name: str, shape: Sequence[int]) -> None:
    """Checks that timm builds a network of this name, its own or the zoo's, that takes such images.

    Args:
        name: The name, with a tag for trained weights: ``resnet18``, ``resnet18.a1_in1k``, ``z2_resnet29.cifar10``.
        shape: The channels, height and width of the images.

    Raises:
        ValueError: If there is no such network or tag, or the network takes other images.
        OSError: If the name has a tag, and its weights are found nowhere.
    """
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), n=3)
        more = f"; near it are {', '.join(near)}" if near else ""
        raise ValueError(f"there is no network {architecture!r} to compare with, in timm or here{more}")
    if "." in name and name not in (tagged := timm.list_pretrained(f"{architecture}.*")):
        more = f"; there are {', '.join(tagged)}" if tagged else ""
        raise ValueError(f"there are no trained weights {name!r} to compare with{more}; or leave the tag out")
    try:
        with torch.device("meta"):
            timm.create_model(name, num_classes=2, in_chans=shape[0])(torch.empty(2, *shape))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        size = " x ".join(map(str, shape))
        raise ValueError(f"{name} takes no images of {size} (channels, height, width): {error}") from error
    if "." in name:  # weights that are missing are missed before the training and not after it
        try:
            timm.create_model(name, pretrained=True, num_classes=2, in_chans=shape[0])
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"the weights {name} to compare with were not found ({error}); without a tag it starts from random ones"
            ) from error


def baseline_recipe(name: str, own: Recipe, **given: Any) -> Recipe:
    """The recipe of another network, with the batches, the seed and the class weights of a fine-tuning.

    Batches are split into as many passes, of at least two images; its batch norms then see the parts, as those of the
    fine-tuned network do.

    AdamW by the rules of `eqzoo.finetuning.rules`, with the loss, smoothed labels, average of the weights and limit of
    the gradients of the fine-tuning; the network learns from no other ones. The augmentation is the one that suits the
    group of the fine-tuned network: shifts, for p4 also rotations by any angle, for p4m also reflections; or that of
    the fine-tuning, if it is stronger, such as with changes of color. What the fine-tuned network takes for a change of
    meaning, such as reflections for p4, is not shown to the other network either.

    Args:
        name: The network, as `check_baseline` takes it. Those of the zoo have the learning rate that `eqzoo.finetune`
            gives them; timm's own with batch norms 1e-3 with a tag and 4e-3 without, without batch norms 1e-4 and 1e-3.
        own: The recipe of the fine-tuning.
        **given: Other keys of a recipe, ``epochs`` among them, which come first.
    """
    architecture, trained = name.partition(".")[0], "." in name
    with torch.device("meta"):
        blank = timm.create_model(architecture)
    group = weightless(own.model, **own.model_args).group
    augment = stronger_augmentation(suitable_augmentation(group), own.augment)
    of_timm = architecture not in list_models()
    rate = {"lr": _RATES[not keeps_statistics(blank)][trained]} if of_timm else {}
    of_both = {key: getattr(own, key) for key in _OF_BOTH}
    if own.teacher_weight == 1:  # which learns from no labels, so that none are smoothed
        del of_both["label_smoothing"]
    given = rate | of_both | {"augment": augment, **given}
    kept = {key: getattr(own, key) for key in ("batch_size", "seed", "class_weights", "valid_size", "deterministic")}
    # A batch norm of one image of one pixel, as the last of a ResNet on small images, has no statistics.
    passes = [
        n for n in range(1, own.accumulate + 1) if own.batch_size % n == 0 and (n == 1 or own.batch_size >= 2 * n)
    ]
    return Recipe(name, own.dataset, accumulate=passes[-1], **kept, **with_rules(given, rate_factor(blank, trained)))


def baseline_network(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """Another network for the images of a fine-tuning, with its initial weights.

    Mean and standard deviation are those of the fine-tuning, but those of the weights in networks without batch norms
    that start from trained ones.

    Args:
        name: The network, as `check_baseline` takes it.
        settings: The ``label_names``, ``input_size``, ``mean`` and ``std`` of finetune.json.
    """
    sizes = {"num_classes": len(settings["label_names"]), "in_chans": settings["input_size"][0]}
    trained = "." in name
    model: Any = timm.create_model(name, pretrained=trained, **sizes)
    if trained:
        model.reset_classifier(sizes["num_classes"])  # the trained one is of other classes
    if not trained or not keeps_statistics(model) or len(model.pretrained_cfg["mean"]) != sizes["in_chans"]:
        model.pretrained_cfg = {**model.pretrained_cfg, "mean": settings["mean"], "std": settings["std"]}
    return cast(nn.Module, model)


def train_baseline(
    name: str,
    own: Recipe,
    splits: Mapping[str, AnySplit],
    settings: Mapping[str, Any],
    directory: RunDirectory,
    device: str | None,
    workers: int,
    evaluated: str,
    metrics: Mapping[str, Any],
    formats: Mapping[str, Any],
) -> dict[str, Any]:
    """Trains another network on the same images for the time that a fine-tuning took, and evaluates it likewise.

    It has the recipe of `baseline_recipe` with the number of epochs whose time is nearest, at least one, and the epoch
    most accurate on the validation images is kept. The folder ``against/<name>`` of the run holds the files, so that it
    is resumed with it, and a finished run can be compared with several networks.

    Args:
        name: The network, as `check_baseline` takes it.
        own: The recipe of the fine-tuning.
        splits: The images.
        settings: The content of finetune.json.
        directory: The run directory of the fine-tuning, which is finished.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one.
        workers: The processes that read images that are not in memory.
        evaluated: The split that is evaluated.
        metrics: The metrics of the fine-tuned network: the same images are rotated by the same angles.
        formats: ``precision`` and ``channels_last`` of the recipe; what is left out is measured.

    Returns:
        What report.json holds as ``against``: ``model``, ``start``, ``lr``, ``augment``, ``epochs``,
        ``selected_epoch``, ``training_seconds``, ``accuracy`` and ``macro_f1`` in percent, the same and the number of
        ``copies`` as ``averaged``, of the mean of the probabilities for the copies of each image by the elements of the
        fine-tuned network's group (test-time augmentation), and the ``rotation_curve``.

    Raises:
        ValueError: If the folder holds another run.
        FloatingPointError: If the loss of the other network is not finite.
    """
    start = name if "." in name else None
    folder = RunDirectory(directory.path / FOLDER / name)
    seconds = sum(row["seconds"] for row in directory.rows())

    def build() -> nn.Module:
        return baseline_network(name, settings)

    said = {key: settings[key] for key in ("data", "data_sha256", "input_size", "mean", "std", "label_names")}
    said |= {"name": name, "start": start, "minutes": seconds / 60}
    parts = {key: split for key, split in splits.items() if key != "test"}
    _set_aside_if_other(folder, name, own, said)
    whole = baseline_recipe(name, own, epochs=own.epochs)
    speed = recorded_speed(folder, said, whole, build, splits, formats, device, workers, saving=False)
    chosen = {"precision": speed.precision, "channels_last": speed.channels_last}
    nearest = speed.epochs_nearest(seconds, splits)
    epochs = folder.recipe().epochs if folder.training.is_file() else nearest
    recipe = baseline_recipe(name, own, epochs=epochs, **chosen)
    print(f"eqzoo: against {name}: {recipe.epochs} epochs in the same time", file=sys.stderr)
    try:
        model = train(recipe, build, parts, folder.path, device, workers).eval()
    except FloatingPointError as error:
        raise FloatingPointError(
            f"{str(error).partition(';')[0]} in training {name}, to compare with, at its lr of {recipe.lr}; name "
            f"another network, or leave it out: the fine-tuned network is finished, in {directory.path}"
        ) from error
    group = weightless(own.model, **own.model_args).group.of_grid
    found = _evaluated(model, splits[evaluated], settings["label_names"], group, metrics, recipe.channels_last, workers)
    return {
        "model": name,
        "start": start,
        "lr": recipe.lr,
        "augment": recipe.augment,
        "epochs": recipe.epochs,
        "selected_epoch": best_row(folder.rows())["epoch"],
        "training_seconds": round(sum(row["seconds"] for row in folder.rows())),
    } | found


def _set_aside_if_other(folder: RunDirectory, name: str, own: Recipe, said: Mapping[str, Any]) -> None:
    """Removes a run of the other network if the fine-tuning has gone on since, or if its recipe is not this one.

    The recipe of an earlier version of eqzoo may be another one. A run on other images stays, and is an error.
    """
    if not (old := folder.settings()):
        return
    other = [key for key, value in json.loads(json.dumps(said)).items() if old.get(key) != value]
    there = folder.recipe() if folder.training.is_file() else None
    kept = {} if there is None else {key: getattr(there, key) for key in ("epochs", "precision", "channels_last")}
    if other == ["minutes"]:
        why = "the fine-tuning has gone on since"
    elif not other and there is not None and there != baseline_recipe(name, own, **kept):
        why = "an earlier version of eqzoo trained it by another recipe"
    else:
        return
    print(f"eqzoo: {name} is trained anew: {why}", file=sys.stderr)
    aside = folder.path.with_name(f".{folder.path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)  # of a command that was killed here
    shutil.rmtree(folder.path.rename(aside))


@torch.no_grad()
def _evaluated(
    model: nn.Module,
    split: AnySplit,
    names: Sequence[str],
    group: Group,
    metrics: Mapping[str, Any],
    channels_last: bool,
    workers: int,
) -> dict[str, Any]:
    """The scores of the other network, its mean over the copies by ``group``, and its curve at the same angles."""
    curve = metrics["rotation_curve"]
    rotated = sample(sample(split, metrics["rotated_images"]), curve["images"])
    total = group.order * len(split) + len(curve["angles"]) * len(rotated)
    with evaluation_bar(model, total, channels_last):
        probabilities = copy_probabilities(model, split, group, workers)
        found = scores(split.labels, probabilities[0].argmax(1), names)
        averaged = scores(split.labels, probabilities.mean(0).argmax(1), names)
        x = torch.cat(list(inputs(model, rotated, BATCH_SIZE, workers)))
        values_at = rotation_curve(model, x, rotated.labels.to(x.device), curve["angles"], BATCH_SIZE)
    return {
        "accuracy": found["accuracy"],
        "macro_f1": found["macro_f1"],
        "averaged": {"copies": group.order, "accuracy": averaged["accuracy"], "macro_f1": averaged["macro_f1"]},
        "rotation_curve": {
            "angles": curve["angles"],
            "accuracy": [round(value, 2) for value in values_at],
            "images": curve["images"],
        },
    }
