"""Recipes for images without a canonical orientation: EuroSAT, land from above, and Chula RBC-12, blood cells."""

from typing import Any

from ._entry import Entry, family

__all__ = ["RECIPES"]

_TEXT = (
    "Our recipe, for one core of a CPU: {epochs} epochs, of which the first {half} see {what} at half their side, from "
    "the weights of {start}. Muon, batch size 64, a cosine learning rate schedule from {lr:g} after a warm-up of one "
    "epoch (0.3 times that for parameters that are not matrices), weight decay 1e-2, label smoothing 0.1, a moving "
    "average of the weights. Augmentation by rotations by any angle, reflections and shifts of up to a sixteenth of "
    "the side, with the image reflected at its edges. The epoch is one at full size, selected by {valid}."
)
_VALUES: dict[str, Any] = {
    "batch_size": 64,
    "optimizer": "nmuon",
    "optimizer_args": {"fallback_lr_scale": 0.3},
    "weight_decay": 1e-2,
    "warmup_epochs": 1,
    "label_smoothing": 0.1,
    "augment": "affine",
    "ema_decay": 0.99,
    "channels_last": True,
}
_WORDS = {
    "eurosat": {"what": "tiles", "valid": "5,400 of the 27,000 tiles; 16,200 are for training and 5,400 for the test"},
}


def _recipe(model: str, dataset: str, start: str, epochs: int, half: int, lr: float, **values: Any) -> dict[str, Entry]:
    text = _TEXT.format(epochs=epochs, half=half, start=start, lr=lr, **_WORDS[dataset])
    options = _VALUES | {"epochs": epochs, "half_size_epochs": half, "start": start, "lr": lr} | values
    return family((model,), dataset, text, **options)


RECIPES: dict[str, Entry] = {
    **_recipe("p4_resnet29", "eurosat", "p4_resnet29.cifar10", epochs=12, half=9, lr=0.02),
}
