"""Our recipes for CIFAR-10, on one core of a CPU and on one GPU."""

from collections.abc import Iterable
from typing import Any

from ._entry import MUON, Entry, family

_CPU = (
    "Our recipe, for one core of a CPU: {length} in bfloat16 with Muon, batch size 64, a cosine learning rate "
    "schedule from {lr:g} (0.3 times that for parameters that are not matrices), weight decay 1e-2, label smoothing "
    "0.1, a moving average of the weights, and augmentation by flips and by shifts of up to 4 pixels. 5,000 of the "
    "50,000 training images, drawn with a fixed seed, select the epoch. {more}"
)
_CPU_VALUES: dict[str, Any] = MUON | {
    "batch_size": 64,
    "lr": 0.03,
    "augment": "standard",
    "ema_decay": 0.999,
    "precision": "bfloat16",
    "valid_size": 5_000,
}
_GPU = (
    "Our recipe, for one GPU: {epochs} epochs in bfloat16 with Muon, batch size {batch_size}, a cosine learning rate "
    "schedule from {lr:g} after a warm-up of {warmup} (0.3 times that for parameters that are not matrices), weight "
    "decay {weight_decay:g}, label smoothing 0.1, a moving average of the weights, and augmentation by flips, by "
    "shifts of up to 4 pixels and by Cutout: a square, a quarter of the side wide, gets the image's mean color. 5,000 "
    "of the 50,000 training images, drawn with a fixed seed, select the epoch. On the GPU sums have no fixed order "
    "(deterministic=false), so that a second run gives other weights. {more}"
)
_GPU_VALUES: dict[str, Any] = MUON | {
    "batch_size": 256,
    "lr": 0.04,
    "warmup_epochs": 1,
    "augment": "standard_cutout",
    "ema_decay": 0.998,
    "precision": "bfloat16",
    "cuda_graphs": True,
    "deterministic": False,
    "valid_size": 5_000,
}


def on_a_cpu(model: str, more: str, *, variant: str = "", **values: Any) -> dict[str, Entry]:
    """The recipe for a network; ``more`` says what the paper does."""
    values = _CPU_VALUES | values
    length = "one epoch" if values["epochs"] == 1 else f"{values['epochs']} epochs"
    text = _CPU.format(more=more, length=length, **values)
    if half := values.get("half_size_epochs"):
        text += f" In the first {half} epochs the images have half their side, 16 x 16, and no epoch is selected."
    return family((model,), "cifar10", text, variant, **values)


def on_a_gpu(models: Iterable[str], variant: str, more: str, **values: Any) -> dict[str, Entry]:
    """The recipe for some networks; ``more`` says what the papers do and how the run went."""
    values = _GPU_VALUES | values
    warmup = "one epoch" if values["warmup_epochs"] == 1 else f"{values['warmup_epochs']} epochs"
    return family(models, "cifar10", _GPU.format(more=more, warmup=warmup, **values).strip(), variant, **values)
