"""Short recipes for one GPU; on CIFAR-10 those of p4_resnet29 and p4_se_resnet29 were measured, the others were not."""

from typing import Any

from . import asc, e4
from ._entry import Entry, family
from .attentive import ALLCNN_AUG, DENSENETS, RESNET_AUG
from .gsa import MNIST as GSA_MNIST
from .rotmnist import ATTENTIVE, WIDER

__all__ = ["RECIPES"]

_CIFAR = (
    "Our recipe for one GPU: {epochs} epochs in bfloat16, compiled, batch size 256; SGD with Nesterov momentum 0.9, "
    "weight decay {decay:g}, a cosine learning rate schedule from {lr:g} after a warm-up of 3 epochs, label smoothing "
    "0.1, a moving average of the weights, and augmentation by flips and by shifts of up to 4 pixels. 5,000 training "
    "images, drawn with a fixed seed, to select the epoch."
)
_MNIST = (
    "Our recipe for one GPU: 40 epochs in bfloat16, compiled, batch size {batch}; Adam with weight decay 1e-4, a "
    "cosine learning rate schedule from {lr:g} after a warm-up of 2 epochs, and a moving average of the weights."
)
_PCAM = (
    "Our recipe for one GPU: 5 epochs in bfloat16, compiled, batch size 256; Adam with weight decay 1e-4, a cosine "
    "learning rate schedule from 2e-3 after a warm-up of one epoch, a moving average of the weights, and augmentation "
    "by 90° rotations and flips unless the network is invariant under p4m. The official splits."
)
_GPU: dict[str, Any] = {"precision": "bfloat16", "compile": True, "deterministic": False, "ema_decay": 0.999}


def _cifar(models: tuple[str, ...], dataset: str, lr: float, decay: float, epochs: int = 30) -> dict[str, Entry]:
    values = _GPU | {
        "epochs": epochs,
        "batch_size": 256,
        "optimizer": "sgd",
        "optimizer_args": {"momentum": 0.9},
        "lr": lr,
        "weight_decay": decay,
        "warmup_epochs": 3,
        "label_smoothing": 0.1,
        "augment": "standard",
        "valid_size": 5_000,
    }
    return family(models, dataset, _CIFAR.format(epochs=epochs, decay=decay, lr=lr), "short", **values)


def _mnist(models: tuple[str, ...], lr: float, batch: int = 128) -> dict[str, Entry]:
    values = _GPU | {"epochs": 40, "batch_size": batch, "lr": lr, "warmup_epochs": 2}
    return family(models, "rotmnist", _MNIST.format(lr=lr, batch=batch), "short", **values)


def _pcam(models: tuple[str, ...], augment: str) -> dict[str, Entry]:
    values = _GPU | {"epochs": 5, "batch_size": 256, "lr": 2e-3, "warmup_epochs": 1, "augment": augment}
    return family(models, "pcam", _PCAM, "short", **values)


_MEASURED = ("p4_resnet29", "p4_se_resnet29")
_RESNET29 = tuple(f"{name}_resnet29" for name in asc.NETWORKS)
_NOT_TRAINED = "This network was not trained by it."

RECIPES: dict[str, Entry] = {
    **_mnist(("z2_cnn", "p4_cnn", *WIDER, *ATTENTIVE), lr=5e-3),
    **_mnist(("p4_e4net", "p4_e4net_large"), lr=2e-2),
    **_mnist(GSA_MNIST, lr=2e-3, batch=32),
    **asc.gpu_resnets(_MEASURED, "short"),
    **asc.gpu_resnets([name for name in _RESNET29 if name not in _MEASURED], "short", _NOT_TRAINED),
    **_cifar(_RESNET29, "cifar100", lr=0.2, decay=5e-4),
    **_cifar(("z2_allcnn", *ALLCNN_AUG), "cifar10", lr=0.1, decay=1e-3, epochs=40),
    **_cifar(("z2_resnet44", *RESNET_AUG), "cifar10", lr=0.1, decay=5e-4),
    **e4.gpu_resnets([name for name in e4.RESNETS if name not in e4.TRAINED], "short", _NOT_TRAINED),
    **_cifar(e4.RESNETS, "cifar100", lr=0.2, decay=5e-4),
    **_pcam(tuple(name for name in DENSENETS if not name.startswith("p4m")), "quarter_rotations_flips"),
    **_pcam(tuple(name for name in DENSENETS if name.startswith("p4m")), "none"),
}
