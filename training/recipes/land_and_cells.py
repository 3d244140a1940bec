"""Recipes for images without a canonical orientation: EuroSAT, land from above, and Chula RBC-12, blood cells."""

from typing import Any

from ._entry import MUON, Entry, family

__all__ = ["RECIPES"]

_TEXT = (
    "Our recipe, for {where}: {epochs} epochs{precision} {start}{sizes}. Muon, batch size {batch_size}, a cosine "
    "learning rate schedule from {lr:g} after a warm-up of one epoch (0.3 times that for parameters that are not "
    "matrices), weight decay {weight_decay:g}, label smoothing 0.1, a moving average of the weights. Augmentation by "
    "rotations, of half of the images by any angle and of the others by multiples of 90°, reflections{color} and "
    "shifts of up to a sixteenth of the side, with the image reflected at its edges. {split}.{more}"
)
_SHARP = (
    " Rotations by any angle interpolate, which blurs an image a little. In the first ten epochs of this run every "
    "training image was rotated, so that sharp images were unfamiliar: after the first epoch at full size the accuracy "
    "was 88.91 % on validation images, and 98.0 % on 450 of them interpolated. Since then half of the training images "
    "stay sharp. The command makes a run of this recipe, not these weights."
)
_KEPT = (
    " The published run started with the classifier of CIFAR-10 as well, which has ten classes too; a new run starts "
    "with a new classifier."
)
_BEFORE = (
    " This run started from earlier weights of {model}.cifar10 (of the recipe {model}.cifar10_{variant}, {error} % "
    "test error), not from its present ones."
)
_TWICE = (
    " The learning rate starts anew at full size, from 0.01. This run went there in parts: one cycle of 21 epochs, "
    "whose last three, at full size, had rates below 0.001 (98.26 % accuracy on validation images); two epochs at full "
    "size from 0.0006 (98.54 %, and 98.44 % on test images); the last six of the cycle, from 0.0057. The command makes "
    "a run of this recipe, not these weights."
)
_PAPER = (
    " The paper of the data set has 92.1 % accuracy with a pretrained EfficientNet-B1, on 12 classes, another split "
    "and cells that were separated first."
)
_PUBLISHED = " Cells are scaled to 40 x 40 pixels." + _PAPER
_LONGER = (
    " The run took 3.0 minutes on an H200, which trained another network at the same time. The validation error was "
    "lowest in epoch 17, 10.90 %, between 10.9 and 11.8 % from epoch 14 on, and 11.72 % in the last; the validation "
    "loss was lowest there too, 0.368, and rose to 0.408, so still longer training did not help. A first recipe, of "
    "six epochs on a CPU with batches of 64, a rate of 0.02 and weight decay 0.01, had 12.09 % validation error and "
    "15.49 % test error."
)
_SPLITS = {
    "eurosat": "5,400 of the 27,000 tiles select the epoch; 16,200 are for training and 5,400 for the test",
    "chula_rbc12": (
        "3,028 cells, of a fifth of the micrographs, select the epoch; 10,184 are for training and 3,202 for the test"
    ),
}
_VALUES: dict[str, Any] = MUON | {
    "batch_size": 64,
    "warmup_epochs": 1,
    "augment": "affine",
    "ema_decay": 0.99,
    "channels_last": True,
}


def _recipe(
    model: str, dataset: str, epochs: int, lr: float, start: str | None = None, more: str = "", **given: Any
) -> dict[str, Entry]:
    values = _VALUES | {"epochs": epochs, "lr": lr, "start": start} | given
    half = values.get("half_size_epochs", 0)
    text = _TEXT.format(
        where="one GPU" if values.get("cuda_graphs") else "one core of a CPU",
        epochs=epochs,
        lr=lr,
        batch_size=values["batch_size"],
        weight_decay=values["weight_decay"],
        start=f"from the weights of {start}" if start else "from random weights",
        precision=" in bfloat16" if values.get("precision") == "bfloat16" else "",
        sizes=f", of which the first {half} see images at half their side and are not selected" if half else "",
        color=", changes of contrast, brightness and tint" if values["augment"] == "affine_color" else "",
        split=_SPLITS[dataset],
        more=more,
    )
    return family((model,), dataset, text, **values)


RECIPES: dict[str, Entry] = {
    **_recipe(
        "p4_resnet29",
        "eurosat",
        12,
        0.02,
        "p4_resnet29.cifar10",
        _SHARP + _KEPT + _BEFORE.format(model="p4_resnet29", variant="first", error=8.15),
        half_size_epochs=9,
    ),
    **_recipe(
        "p4m_resnet29", "eurosat", 29, 0.02, None, _TWICE, half_size_epochs=18, full_size_lr=0.01, precision="bfloat16"
    ),
    **_recipe(
        "z2_resnet29",
        "eurosat",
        12,
        0.02,
        "z2_resnet29.cifar10",
        _KEPT + _BEFORE.format(model="z2_resnet29", variant="first", error=7.87),
        half_size_epochs=9,
        precision="bfloat16",
    ),
    **_recipe(
        "p4_resnet29",
        "chula_rbc12",
        42,
        0.03,
        "p4_resnet29.cifar10",
        _BEFORE.format(model="p4_resnet29", variant="third", error=7.29) + _LONGER + _PUBLISHED,
        batch_size=128,
        weight_decay=2e-2,
        ema_decay=0.998,
        augment="affine_color",
        precision="bfloat16",
        cuda_graphs=True,
        deterministic=False,
    ),
    **_recipe(
        "z2_resnet29",
        "chula_rbc12",
        6,
        0.02,
        "z2_resnet29.cifar10",
        _BEFORE.format(model="z2_resnet29", variant="second", error=6.54)
        + " An earlier run, from those of the recipe z2_resnet29.cifar10_first (7.87 % test error), had 13.57 % "
        "validation error and 15.77 % test error." + _PUBLISHED,
        augment="affine_color",
        precision="bfloat16",
    ),
    **_recipe(
        "p4m_resnet29",
        "chula_rbc12",
        8,
        0.01,
        "p4m_resnet29.eurosat",
        " An earlier run, from weights of p4m_resnet29.eurosat after 23 epochs (1.56 % test error), had 12.52 % "
        "validation error and 16.05 % test error; the errors of the three runs are equal within chance." + _PUBLISHED,
        augment="affine_color",
        precision="bfloat16",
    ),
    **_recipe(
        "p4m_densenet",
        "chula_rbc12",
        10,
        0.02,
        None,
        " The crops of 80 x 80 pixels are not scaled." + _PAPER,
        augment="affine_color",
        precision="bfloat16",
    ),
}
