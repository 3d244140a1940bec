"""Recipes of E⁴-Net on rotated MNIST and ResNet-18 on CIFAR (He et al., 2021)."""

from typing import Any

from ._cifar10 import on_a_gpu
from ._entry import Entry, family

RESNETS = ("z2_resnet18", "p4_resnet18", "p4m_resnet18", "p4_e4_resnet18", "p4m_e4_resnet18")
TRAINED = ("p4_e4_resnet18", "p4m_e4_resnet18")  # by our recipe

_MNIST = (
    "As in the paper: Adam with learning rate 0.02, divided by 10 at 60, 120 and 160, batch size 128, weight decay "
    "1e-4, 200 epochs and no augmentation. 10,000 digits for training and 2,000 to select the epoch; the authors' "
    "code trains on all 12,000, for 199 epochs with a new Adam optimizer in each, and reports the best test error "
    "from epoch 60 on."
)
_FIRST = (
    "Adam, batch size and weight decay as in the paper; a cosine learning rate schedule from 1e-2 over 60 epochs (the "
    "paper: steps from 2e-2 over 200 epochs), and augmentation by bilinear rotations by any angle (the paper: none). "
    "10,000 digits for training and 2,000 to select the epoch."
)
_P4M = (
    "The paper has no network with reflections on these digits. Adam, batch size and weight decay as in its others; a "
    "cosine learning rate schedule from 1e-2 over 24 epochs (the paper: steps from 2e-2 over 200 epochs), a moving "
    "average of the weights, and augmentation by bilinear rotations by any angle (the paper: none). 10,000 digits for "
    "training and 2,000 to select the epoch."
)
_LONGER = (
    "Adam, batch size and weight decay as in the paper; a cosine learning rate schedule from 4e-3 over 30 epochs in "
    "bfloat16, a moving average of the weights, and augmentation by bilinear rotations by any angle (the paper: steps "
    "from 2e-2 over 200 epochs, none of the rest). The run started from the weights of a first one, of the recipe "
    "p4_e4net.rotmnist_first, with 1.46 % test error, within chance the same: the command reads them from the folder "
    "of that run, so train it before. 10,000 digits for training and 2,000 to select the epoch."
)
_TAUGHT = (
    "Adam, batch size and weight decay as in the paper; a cosine learning rate schedule from 1e-2 over 80 epochs in "
    "bfloat16, a moving average of the weights, and augmentation by bilinear rotations by any angle (the paper: steps "
    "from 2e-2 over 200 epochs, none of the rest). The network also learned from others (distillation), which no "
    "network of the paper did: 0.8 of the loss is the cross-entropy with the mean of the probabilities that "
    "p4_e4net_large.rotmnist, p4_e4net.rotmnist and p4_cnn_w19.rotmnist give the same augmented digit, 0.2 that with "
    "the label. All were trained on the same 10,000 digits; the first of them had earlier weights, with 1.34 % test "
    "error, and a new run learns from the present ones. 2,000 digits select the epoch; the run took two and a half "
    "minutes on an H200."
)
_CIFAR = (
    "As in the paper: SGD with Nesterov momentum 0.9, learning rate 0.1 divided by 5 at 60, 120 and 160, weight decay "
    "5e-4, batch size 128, 200 epochs and no augmentation, on all 50,000 training images without a validation split. "
    "The weights are those of the last epoch; the authors' code reports the best test error of all epochs."
)
_GPU = (
    "The paper has SGD, a batch size of 128, 200 epochs, no augmentation, and all 50,000 images for training; the "
    "authors' code reports the best test error of all epochs. The run took {minutes} minutes on an H200 beside other "
    "trainings."
)

_OURS: dict[str, Any] = {"augment": "rotations", "ema_decay": 0.999, "precision": "bfloat16"}
_MNIST_VALUES: dict[str, Any] = {
    "epochs": 200,
    "lr": 0.02,
    "schedule": "multistep",
    "milestones": (60, 120, 160),
}
_CIFAR_VALUES: dict[str, Any] = {
    "epochs": 200,
    "optimizer": "sgd",
    "optimizer_args": {"momentum": 0.9},
    "lr": 0.1,
    "weight_decay": 5e-4,
    "schedule": "multistep",
    "milestones": (60, 120, 160),
    "decay_rate": 0.2,
    "valid_size": 0,
}

RECIPES: dict[str, Entry] = {
    **family(("p4_e4net",), "rotmnist", _FIRST, "first", epochs=60, lr=1e-2, augment="rotations"),
    **family(
        ("p4_e4net",),
        "rotmnist",
        _LONGER,
        epochs=30,
        lr=4e-3,
        start="run:runs/p4_e4net.rotmnist_first/seed{seed}",
        **_OURS,
    ),
    **family(("p4m_e4net",), "rotmnist", _P4M, epochs=24, lr=1e-2, augment="rotations", ema_decay=0.999),
    **family(
        ("p4_e4net_large",),
        "rotmnist",
        _TAUGHT,
        epochs=80,
        lr=1e-2,
        channels_last=True,
        cuda_graphs=True,
        deterministic=False,
        teachers=("p4_e4net_large.rotmnist", "p4_e4net.rotmnist", "p4_cnn_w19.rotmnist"),
        teacher_weight=0.8,
        **_OURS,
    ),
    **family(("p4_e4net", "p4_e4net_large"), "rotmnist", _MNIST, "paper", **_MNIST_VALUES),
    **on_a_gpu(("p4_e4_resnet18",), "", _GPU.format(minutes=7.5), epochs=15),
    **on_a_gpu(("p4m_e4_resnet18",), "", _GPU.format(minutes=10.7), epochs=14, channels_last=True),
    **family(TRAINED, "cifar10", _CIFAR, "paper", **_CIFAR_VALUES),
    **family([name for name in RESNETS if name not in TRAINED], "cifar10", _CIFAR, **_CIFAR_VALUES),
    **family(RESNETS, "cifar100", _CIFAR, **_CIFAR_VALUES),
}
