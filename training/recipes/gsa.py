"""Recipes of GSA-Nets (Romero and Cordonnier, 2021, appendix F)."""

from typing import Any

from ._entry import Entry, family

TINY = ("z2_gsanet_t", "r4_gsanet_t", "r8_gsanet_t", "r12_gsanet_t", "r16_gsanet_t")
CIFAR = ("z2_gsanet_b", "z2m_gsanet_b")
PCAM = ("z2_gsanet_s", "r4_gsanet_s", "r8_gsanet_s", "r4m_gsanet_s")

_MNIST = (
    "As in the paper: Adam with learning rate 1e-3, batch size 8, weight decay 1e-4, attention and value dropout 0.1, "
    "and 300 epochs; 10,000 digits for training and 2,000 to select the epoch, for which the authors' code uses the "
    "test digits. The paper's mixed precision is float16 with loss scaling, here it is bfloat16."
)
_MNIST_SHORTER = (
    "Batch size and weight decay as in the paper; the rest is chosen for few epochs: Muon with Nesterov momentum and "
    "learning rate 1e-2 for matrices, AdamW with 3e-3 for other parameters, both halved after epochs 5, 7, 9 and 10 "
    "of 11 (the paper: Adam with 1e-3 over 300 epochs), no dropout, augmentation by bilinear rotations by any angle "
    "(the paper: none), and a moving average of the weights. In float32, two hours on one CPU core for r4. 10,000 "
    "digits for training and 2,000 to select the epoch."
)
_Z2 = (
    "Initialized with the weights of r4_gsanet_t.rotmnist, of whose embeddings of relative poses this network, which "
    "has one pose, takes the first. Batch size and weight decay as in the paper; 8 epochs (the paper: 300) with "
    "Muon with Nesterov momentum for matrices and AdamW for other parameters, a cosine learning rate schedule from "
    "6e-3 and 1.8e-3, no dropout, augmentation by bilinear rotations by any angle (the paper: none), and a moving "
    "average of the weights. In float32. {distilled}"
)
_R8 = (
    "Initialized with the weights of r4_gsanet_t.rotmnist, which learned from the same teachers; the embeddings of "
    "relative poses, the only weights that depend on the number of rotations, are interpolated between the 90° "
    "rotations. Batch size and weight decay as in the paper; 4 epochs (the paper: 300) with Muon with Nesterov "
    "momentum for matrices and AdamW for other parameters, a cosine learning rate schedule from 5e-3 and 1.5e-3, no "
    "dropout, augmentation by bilinear rotations by any angle (the paper: none), and a moving average of the weights. "
    "In float32, half an hour an epoch on two threads. {distilled}"
)
_KEPT = (
    "The weights of {start}; of the embeddings of relative poses, the only ones that depend on the group, {how}. "
    "Nothing is trained: the learning rate is 0. {more}"
)
_FINER = _KEPT.format(
    start="r8_gsanet_t.rotmnist",
    how="those between the 45° rotations are interpolated",
    more="For r12 an epoch of 1,000 digits made them worse: of 2,000 validation digits 97.25 % were right with a "
    "learning rate of 1e-3 and 97.60 with 1e-4, in place of 97.75. The paper trains for 300 epochs. The weights of r8 "
    "also learned from other networks, which no network of the paper did; their card names them.",
)
_OF_CELLS = "r4_gsanet_s.chula_rbc12"
_CELLS = (
    "Cells are scaled to 56 x 56 pixels; 3,202 are for the test. The paper does not train this network on blood cells."
)
_DISTILLED = (
    "The network also learned from others (distillation), which no network of the paper did: 0.8 of the loss is the "
    "cross-entropy with the mean of the probabilities that p4_e4net_large.rotmnist, p4_e4net.rotmnist and "
    "p4_cnn_w19.rotmnist (1.22, 1.50 and 1.54 % test error) give the same augmented digit, 0.2 that with the label. "
    "All were trained on the same 10,000 digits; 2,000 select the epoch."
)
_TAUGHT = (
    "Initialized with the weights of a first run, of the recipe r4_gsanet_t.rotmnist_first, with 2.77 % test error: "
    "the command reads them from the folder of that run, so train it before. Batch size and weight decay as in the "
    "paper; 8 more epochs with Muon with Nesterov momentum for matrices and AdamW for other parameters, a cosine "
    "learning rate schedule from 6e-3 and 1.8e-3 (the paper: Adam with 1e-3 over 300 epochs), no dropout, augmentation "
    "by bilinear rotations by any angle (the paper: none), and a moving average of the weights. In float32; both runs "
    "together took 3.6 hours. {distilled}"
)
_SGD = (
    "As in the paper: SGD with momentum 0.9, a cosine learning rate schedule from 0.01, batch size {batch}, weight "
    "decay 1e-4 and {epochs} epochs in float32, because mixed precision diverged. The warm-up of 10 epochs is from "
    "the authors' code. "
)
_CIFAR = (
    _SGD.format(batch=24, epochs=350) + "Attention and value dropout 0.1, dropout 0.3 on the image and 0.2 before "
    "each pool, as in the paper; the authors' code has the latter two interchanged. 40,000 images for training and "
    "10,000, drawn with a fixed seed, to select the epoch, as in the paper; the authors' code trains on all 50,000 and "
    "selects the epoch on the test images. No augmentation."
)
_PCAM = (
    _SGD.format(batch=8, epochs=100)
    + "Attention and value dropout 0.1, as in the paper. The official splits of 262,144 training, "
    "32,768 validation and 32,768 test images; no augmentation."
)


def _sgd(epochs: int, batch_size: int) -> dict[str, Any]:
    return {
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": "momentum",
        "optimizer_args": {"momentum": 0.9},
        "lr": 0.01,
        "warmup_epochs": 10,
    }


_MUON: dict[str, Any] = {
    "epochs": 11,
    "batch_size": 8,
    "optimizer": "nmuon",
    "optimizer_args": {"fallback_lr_scale": 0.3},
    "lr": 0.01,
    "augment": "rotations",
    "ema_decay": 0.999,
    "model_args": {"attn_drop_rate": 0.0, "value_drop_rate": 0.0},
}
_HALVED: dict[str, Any] = {"schedule": "multistep", "milestones": (5, 7, 9, 10), "decay_rate": 0.5}

_PAPER: dict[str, Any] = {"epochs": 300, "batch_size": 8, "schedule": "constant", "precision": "bfloat16"}
_TEACHERS: dict[str, Any] = {
    "teachers": ("p4_e4net_large.rotmnist", "p4_e4net.rotmnist", "p4_cnn_w19.rotmnist"),
    "teacher_weight": 0.8,
}
_NOT_TRAINED: dict[str, Any] = {"epochs": 1, "batch_size": 8, "optimizer": "sgd", "lr": 0.0}
_FROM_R8 = _NOT_TRAINED | {"start": "r8_gsanet_t.rotmnist"}
_FROM_R4 = _MUON | _TEACHERS | {"epochs": 4, "lr": 0.005, "start": "r4_gsanet_t.rotmnist"}
_EIGHT_EPOCHS: dict[str, Any] = {"epochs": 8, "lr": 0.006}
_FROM_FIRST = _FROM_R4 | _EIGHT_EPOCHS | {"start": "run:runs/r4_gsanet_t.rotmnist_first/seed{seed}"}

RECIPES: dict[str, Entry] = {
    **family(("r4_gsanet_t",), "rotmnist", _TAUGHT.format(distilled=_DISTILLED), **_FROM_FIRST),
    **family(("r4_gsanet_t",), "rotmnist", _MNIST_SHORTER, "first", **_MUON, **_HALVED),
    **family(("z2_gsanet_t",), "rotmnist", _Z2.format(distilled=_DISTILLED), **_FROM_R4 | _EIGHT_EPOCHS),
    **family(("r8_gsanet_t",), "rotmnist", _R8.format(distilled=_DISTILLED), **_FROM_R4),
    **family(("r12_gsanet_t", "r16_gsanet_t"), "rotmnist", _FINER, **_FROM_R8),
    **family(TINY, "rotmnist", _MNIST, "paper", **_PAPER),
    **family(
        ("r8_gsanet_s",),
        "chula_rbc12",
        _KEPT.format(start=_OF_CELLS, how="those between the 90° rotations are interpolated", more=_CELLS),
        start=_OF_CELLS,
        **_NOT_TRAINED,
    ),
    **family(
        ("r4m_gsanet_s",),
        "chula_rbc12",
        _KEPT.format(start=_OF_CELLS, how="a reflection takes that of its rotation", more=_CELLS),
        start=_OF_CELLS,
        **_NOT_TRAINED,
    ),
    **family(CIFAR, "cifar10", _CIFAR, valid_size=10_000, **_sgd(350, 24)),
    **family(PCAM, "pcam", _PCAM, **_sgd(100, 8)),
}
