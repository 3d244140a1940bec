"""Recipes for images without a canonical orientation: land from above, cells, tissue and galaxies."""

from typing import Any

from ._entry import MUON, Entry, family

_TEXT = (
    "Our recipe, for {where}: {epochs} epochs{precision} {start}{sizes}. Muon, batch size {batch_size}, a cosine "
    "learning rate schedule from {lr:g} after a warm-up of one epoch (0.3 times that for parameters that are not "
    "matrices), weight decay {weight_decay:g}, label smoothing 0.1, a moving average of the weights. Augmentation by "
    "rotations, of half of the images by any angle and of the others by multiples of 90°, reflections{color} and "
    "shifts of up to a sixteenth of the side, with the image reflected at its edges. {split}.{more}"
)
_OTHER_RUN = " The command makes a run of this recipe, not these weights: {reason}."
_BEFORE = " This run started from earlier weights of {model}.cifar10, with {error} % test error, not its present ones."
# Of the weights of Tiny ImageNet: they learned from photographs of ImageNet.
_TERMS = (
    " The weights of the start learned from ImageNet, whose terms allow non-commercial research and education; these "
    "are for the same."
)
_PAPER = (
    " The paper of the data set has 92.1 % accuracy with a pretrained EfficientNet-B1, on 12 classes, another split "
    "and cells that were separated first."
)
_SCALED = " Cells are scaled to 40 x 40 pixels." + _PAPER
_SPLITS = {
    "eurosat": "5,400 of the 27,000 tiles select the epoch; 16,200 are for training and 5,400 for the test",
    "ucmerced": "420 of the 2,100 scenes select the epoch; 1,260 are for training and 420 for the test",
    "lc25000": "One image of each group is taken; 147 select the epoch, 444 are for training and 149 for the test",
    "radio": "The authors' 200 validation maps select the epoch; 1,758 are for training and 200 for the test",
    "pbc": "3,418 of the 17,092 cells select the epoch; 10,255 are for training and 3,419 for the test",
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
        more=more + (_TERMS if start and start.endswith(".tiny_imagenet") else ""),
    )
    return family((model,), dataset, text, **values)


_HALF: dict[str, Any] = {"precision": "bfloat16"}
_COLORS: dict[str, Any] = {"augment": "affine_color"}
_CELLS: dict[str, Any] = _HALF | _COLORS
_P4 = _BEFORE.format(model="p4_resnet29", error=8.15)
_P4 += _OTHER_RUN.format(reason="in its first ten epochs all images were rotated by any angle")
_P4M = _OTHER_RUN.format(reason="at full size it went in parts, with a cosine schedule that starts anew, from 0.01")
_Z2, _Z2_CELLS = (_BEFORE.format(model="z2_resnet29", error=error) for error in (7.87, 6.54))
_P4_CELLS = _BEFORE.format(model="p4_resnet29", error=7.29) + " The run took 3.0 minutes on an H200."
_TO_56 = " Cells are scaled to 56 x 56 pixels."
_POSES = " All embeddings of relative poses begin as the one of the start." + _TO_56 + _PAPER
_TO_64 = " Cells are scaled to 64 x 64 pixels."
_MAPS_TO_64 = (
    " Maps are scaled to 64 x 64 pixels; the first layer, of three colors, begins with the sum of its filters."
)
_TO_96 = " Images are scaled to 96 x 96 pixels."
_CROPS = " The crops of 80 x 80 pixels are not scaled." + _PAPER
_ATTENTIVE = " All layers but those of attention begin with the weights of the start." + _CROPS
_ON_A_GPU: dict[str, Any] = {
    "batch_size": 128,
    "weight_decay": 2e-2,
    "ema_decay": 0.998,
    "cuda_graphs": True,
    "deterministic": False,
}

RECIPES: dict[str, Entry] = {
    **_recipe("p4_resnet29", "eurosat", 12, 0.02, "p4_resnet29.cifar10", _P4, half_size_epochs=9),
    **_recipe("p4m_resnet29", "eurosat", 29, 0.02, None, _P4M, half_size_epochs=18, **_HALF),
    **_recipe("p4m_resnet_m", "eurosat", 16, 0.01, "p4m_resnet_m.tiny_imagenet", **_HALF),
    **_recipe("p4m_resnet_s", "eurosat", 28, 0.02, None, half_size_epochs=14, **_HALF),
    **_recipe("p4m_resnet_l", "eurosat", 12, 0.01, "p4m_resnet_l.tiny_imagenet", _TO_96, half_size_epochs=6, **_HALF),
    **_recipe("p4m_resnet_m", "pbc", 12, 0.01, "p4m_resnet_m.tiny_imagenet", _TO_64, **_HALF),
    **_recipe("p4m_resnet_m", "chula_rbc12", 14, 0.01, "p4m_resnet_m.tiny_imagenet", _TO_64 + _PAPER, **_CELLS),
    **_recipe("p4m_resnet_s", "chula_rbc12", 14, 0.01, "p4m_resnet_s.eurosat", _TO_64 + _PAPER, **_CELLS),
    **_recipe("p4m_resnet_m", "ucmerced", 40, 0.01, "p4m_resnet_m.tiny_imagenet", _TO_96, half_size_epochs=20, **_HALF),
    **_recipe("p4m_resnet_m", "lc25000", 40, 0.01, "p4m_resnet_m.tiny_imagenet", _TO_96, **_CELLS),
    **_recipe("p4m_resnet_m", "radio", 30, 0.01, "p4m_resnet_m.tiny_imagenet", _MAPS_TO_64, **_HALF),
    **_recipe("p4m_resnet_s", "pbc", 12, 0.01, "p4m_resnet_s.tiny_imagenet", _TO_64, **_HALF),
    **_recipe("p4m_resnet_s", "lc25000", 40, 0.01, "p4m_resnet_s.tiny_imagenet", _TO_96, **_CELLS),
    **_recipe("p4m_resnet_s", "radio", 30, 0.01, "p4m_resnet_s.tiny_imagenet", _MAPS_TO_64, **_HALF),
    **_recipe("z2_resnet29", "eurosat", 12, 0.02, "z2_resnet29.cifar10", _Z2, half_size_epochs=9, **_HALF),
    **_recipe(
        "p4_resnet29", "chula_rbc12", 42, 0.03, "p4_resnet29.cifar10", _P4_CELLS + _SCALED, **_CELLS, **_ON_A_GPU
    ),
    **_recipe("z2_resnet29", "chula_rbc12", 6, 0.02, "z2_resnet29.cifar10", _Z2_CELLS + _SCALED, **_CELLS),
    **_recipe("p4m_resnet29", "chula_rbc12", 8, 0.01, "p4m_resnet29.eurosat", _SCALED, **_CELLS),
    **_recipe("z2_gsanet_s", "chula_rbc12", 8, 0.01, None, _TO_56 + _PAPER, batch_size=16, **_COLORS),
    **_recipe("r4_gsanet_s", "chula_rbc12", 2, 0.005, "z2_gsanet_s.chula_rbc12", _POSES, batch_size=16, **_COLORS),
    **_recipe("z2_densenet", "chula_rbc12", 10, 0.02, None, _CROPS, **_CELLS),
    **_recipe("p4_densenet", "chula_rbc12", 10, 0.02, None, _CROPS, **_CELLS),
    **_recipe("p4m_densenet", "chula_rbc12", 10, 0.02, None, _CROPS, **_CELLS),
    **_recipe("p4_alpha_f_densenet", "chula_rbc12", 4, 0.01, "p4_densenet.chula_rbc12", _ATTENTIVE, **_COLORS),
    **_recipe("p4m_alpha_f_densenet", "chula_rbc12", 3, 0.01, "p4m_densenet.chula_rbc12", _ATTENTIVE, **_COLORS),
}
