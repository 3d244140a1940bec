"""GSA-Nets (Romero and Cordonnier, 2021, appendix F)."""

from typing import Any

from ._entry import Entry, family

__all__ = ["RECIPES"]

MNIST = ("z2_gsanet_t", "r4_gsanet_t", "r8_gsanet_t", "r12_gsanet_t", "r16_gsanet_t")
CIFAR = ("z2_gsanet_b", "z2m_gsanet_b")
PCAM = ("z2_gsanet_s", "r4_gsanet_s", "r8_gsanet_s", "r4m_gsanet_s")

_MNIST = (
    "The paper's Adam with 1e-3, batch 8, weight decay 1e-4, attention and value dropout 0.1, and 300 epochs. Its "
    "mixed precision is float16 with scaled losses, here bfloat16 without. 10,000 digits train and 2,000 choose the "
    "epoch, as the paper has it; the authors' code chooses it on the test digits."
)
_MNIST_SHORTER = (
    "The paper's batch and weight decay; the rest is ours, to learn in few epochs: Muon with Nesterov's momentum and "
    "1e-2 for matrices, AdamW with 3e-3 for other parameters, both halved after epochs 5, 7, 9 and 10 of 11, "
    "against the paper's Adam with 1e-3 in 300 epochs. No dropout; digits are turned again, by any angle, bilinearly, "
    "where the paper's are left alone; a moving average of the weights. In float32, two hours on one core of a CPU for "
    "r4. 10,000 digits train and 2,000 choose the epoch."
)
_R4 = (
    " A first recipe, of 8 epochs with Adam, dropout and digits left alone, had 5.90 % validation and 6.04 % test "
    "error. The decays of this one were set while it trained, by its training and validation losses."
)
_R8 = (
    "Starts from the weights of r4_gsanet_t.rotmnist, which are those of a network of 8 turns but for the tables of "
    "relative poses, interpolated between the quarter turns. Then the paper's batch and weight decay, and ours for the "
    "rest: 4 epochs, against the paper's 300, of Muon with Nesterov's momentum for matrices and AdamW for other "
    "parameters, along a cosine from half the rates that r4_gsanet_t began with, 5e-3 and 1.5e-3. No dropout; digits "
    "are turned again, by any angle, bilinearly, where the paper's are left alone; a moving average of the weights. In "
    "float32. 10,000 digits train and 2,000 choose the epoch, the same as for r4_gsanet_t."
)
_SGD = (
    "The paper's SGD with momentum 0.9, learning rate 0.01 along a cosine, batch {batch}, weight decay 1e-4 and "
    "{epochs} epochs in float32; it found that mixed precision diverges here. The warm-up of 10 epochs is the authors' "
    "code's. "
)
_CIFAR = (
    _SGD.format(batch=24, epochs=350) + "Attention and value dropout 0.1, dropout 0.3 on the picture and 0.2 before "
    "each pool are the paper's, the latter two the other way round in the code. 40,000 pictures train and 10,000, "
    "drawn by a fixed seed, choose the epoch, as the paper has it; the code trains on all 50,000 and chooses it on the "
    "test pictures. No augmentation."
)
_PCAM = (
    _SGD.format(batch=8, epochs=100)
    + "Attention and value dropout 0.1 are the paper's. The set's own 262,144 training, "
    "32,768 validation and 32,768 test pictures; no augmentation."
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
    "schedule": "multistep",
    "milestones": (5, 7, 9, 10),
    "decay_rate": 0.5,
    "augment": "turns",
    "ema_decay": 0.999,
    "model_args": {"attn_drop_rate": 0.0, "value_drop_rate": 0.0},
}

_FROM_R4: dict[str, Any] = _MUON | {
    "epochs": 4,
    "lr": 0.005,
    "schedule": "cosine",
    "milestones": (),
    "decay_rate": 0.1,
    "start": "r4_gsanet_t.rotmnist",
}

RECIPES: dict[str, Entry] = {
    **family(("r4_gsanet_t",), "rotmnist", _MNIST_SHORTER + _R4, **_MUON),
    **family(("r8_gsanet_t",), "rotmnist", _R8, **_FROM_R4),
    **family(("z2_gsanet_t", "r12_gsanet_t", "r16_gsanet_t"), "rotmnist", _MNIST_SHORTER, **_MUON),
    **family(MNIST, "rotmnist", _MNIST, "paper", epochs=300, batch_size=8, schedule="constant", precision="bfloat16"),
    **family(CIFAR, "cifar10", _CIFAR, valid_size=10_000, **_sgd(350, 24)),
    **family(PCAM, "pcam", _PCAM, **_sgd(100, 8)),
}
