"""Recipes of ResNet-29 and ResNet-83 with affine self convolutions (Diaconu and Worrall, 2019, appendix C)."""

from typing import Any

from ._cifar10 import on_a_cpu, on_a_gpu
from ._entry import Entry, family

NETWORKS = ("z2", "z2_se", "z2_sasa", "z2_simple_asc", "z2_asc", "z2_asc_se", "p4", "p4_se", "p4_asc")

_TEXT = (
    "As in the paper: SGD with Nesterov momentum 0.9, weight decay 1e-4, learning rate 0.1 after a warm-up of 10 "
    "epochs, divided by 10 at {milestones}, and {epochs} epochs; augmentation by flips and by shifts of up to 2 "
    "pixels; 5,000 of the 50,000 training images for validation, here drawn with a fixed seed. The paper does not "
    "give the batch size, here 128. The warm-up is linear in steps, in the paper in epochs."
)
_MNIST = (
    "Our recipe; the paper does not train this network on rotated MNIST. SGD with Nesterov momentum 0.9 as in the "
    "paper, batch size 64, weight decay 5e-4, a cosine learning rate schedule from 0.1 after a warm-up of one epoch, "
    "26 epochs, augmentation by bilinear rotations by any angle; two hours on one CPU core. 10,000 digits for "
    "training and 2,000 to select the epoch."
)
_MNIST_VALUES: dict[str, Any] = {
    "epochs": 26,
    "batch_size": 64,
    "optimizer": "sgd",
    "optimizer_args": {"momentum": 0.9},
    "lr": 0.1,
    "weight_decay": 5e-4,
    "warmup_epochs": 1,
    "augment": "rotations",
}
_PAPER = "The paper uses SGD and {} epochs."
_GROWN = (
    " The run started from the weights of {start}: of each stage the first three bottlenecks are its own, the "
    "other six begin as the identity."
)
_GATED = " The run started from the weights of {start}; only the layers of squeeze-and-excitation are new."
_SLOWER = (
    " Embeddings and maps have 0.3 of the learning rates above, with which they grew until attention was too sharp to "
    "learn."
)
_HALF: dict[str, Any] = {"channels_last": True, "half_size_epochs": 4}

_SAME = (
    "It is the recipe of z2_resnet29, p4_resnet29, p4_se_resnet29 and p4m_resnet29 on CIFAR-10, so that they can be "
    "compared. The paper uses SGD and 100 epochs{reflections}. "
)
_Z2 = _SAME.format(reflections="") + (
    "These weights were made on one and two cores of an Intel Xeon in 2.1 hours, those of seed 1 on an AMD EPYC."
)
_P4 = _SAME.format(reflections="") + (
    "The weights are those of seed 1, of 17 epochs on a core of an AMD EPYC and 28 on an H200; seed 0 took 3.2 minutes "
    "on an H200."
)
_SE = _SAME.format(reflections="") + "The run took 11.9 minutes on an H200 beside other trainings."
_P4M = _SAME.format(reflections=", and has no network with reflections") + (
    "The run with seed 0 took 7.7 minutes on an H200 beside another training."
)
_TAUGHT = (
    "It is the recipe of p4_asc_resnet29 and p4m_asc_resnet29 on CIFAR-10. The paper uses SGD and 100 epochs, and "
    "distills no network{reflections}. Queries and keys, and their maps, have 0.3 of the learning rates above, as "
    "attention can become too sharp otherwise. In the first five epochs the images have half their side, 16 x 16, and "
    "no epoch is selected. The network also learned from others (distillation): 0.8 of the loss is the cross-entropy "
    "with the mean of the probabilities that z2_resnet29.cifar10 and p4_resnet29.cifar10 give the same augmented "
    "image, 0.2 that with the label. Both were trained on the same 45,000 images. Their weights were {teachers} test "
    "error; a new run learns from the present ones. What the teachers brought was not measured. The run took {time} "
    "on an H200."
)
_P4_ASC = _TAUGHT.format(reflections="", teachers="those of seed 0, with 6.07 and 6.59 %", time="7.4 minutes")
_P4M_ASC = _TAUGHT.format(
    reflections=", and has no network with reflections",
    teachers="those of earlier recipes, with 6.54 and 7.29 %",
    time="nine minutes",
)
_OF_ALL: dict[str, Any] = {"epochs": 45, "batch_size": 128, "weight_decay": 2e-2, "channels_last": True}
_OF_TAUGHT: dict[str, Any] = _OF_ALL | {
    "epochs": 42,
    "warmup_epochs": 2,
    "half_size_epochs": 5,
    "lr": 0.03,
    "lr_factors": {f"*.{part}.*": 0.3 for part in ("query", "key", "query_map", "key_map")},
    "teachers": ("z2_resnet29.cifar10", "p4_resnet29.cifar10"),
    "teacher_weight": 0.8,
}


def _on_a_cpu(model: str, epochs: int, more: str = "", **values: Any) -> dict[str, Entry]:
    return on_a_cpu(model, _PAPER.format(200 if model.endswith("83") else 100) + more, epochs=epochs, **values)


def _from(shallow: str, model: str, epochs: int, text: str = _GROWN, lr: float = 0.01) -> dict[str, Entry]:
    start = f"{shallow}_resnet29.cifar10"
    return _on_a_cpu(model, epochs, text.format(start=start), start=start, lr=lr, channels_last=True)


# That of the paper has the variant "paper".
OURS: dict[str, Entry] = {
    **_on_a_cpu("z2_se_resnet29", 16, channels_last=True),
    **_on_a_cpu("z2_sasa_resnet29", 12, **_HALF),
    **_on_a_cpu("z2_asc_resnet29", 16),
    **_on_a_cpu("z2_simple_asc_resnet29", 11),
    **_on_a_cpu("z2_asc_se_resnet29", 12, **_HALF),
    **_from("z2", "z2_resnet83", 3),
    **_from("z2_se", "z2_se_resnet83", 3),
    **_from("z2_sasa", "z2_sasa_resnet83", 3),
    **_from("z2_simple_asc", "z2_simple_asc_resnet83", 3),
    **_from("z2_asc", "z2_asc_resnet83", 3),
    **_from("z2_asc_se", "z2_asc_se_resnet83", 3),
    **_from("p4", "p4_resnet83", 2, lr=0.003),
    **_from("p4_se", "p4_se_resnet83", 2, lr=0.003),
    **_from("p4_asc", "p4_asc_resnet83", 1, lr=0.003),
    **on_a_gpu(("z2_resnet29",), "", _Z2, **_OF_ALL),
    **on_a_gpu(("p4_resnet29",), "", _P4, **_OF_ALL),
    **on_a_gpu(("p4_se_resnet29",), "", _SE, **_OF_ALL),
    **on_a_gpu(("p4_asc_resnet29",), "", _P4_ASC, **_OF_TAUGHT),
}


def _rows(depth: int, dataset: str, epochs: int, milestones: tuple[int, int]) -> dict[str, Entry]:
    text = _TEXT.format(milestones="{} and {}".format(*milestones), epochs=epochs)
    values: dict[str, Any] = {
        "epochs": epochs,
        "optimizer": "sgd",
        "optimizer_args": {"momentum": 0.9},
        "lr": 0.1,
        "schedule": "multistep",
        "milestones": milestones,
        "warmup_epochs": 10,
        "augment": "standard_pad2",
        "valid_size": 5_000,
    }
    models = [f"{name}_resnet{depth}" for name in NETWORKS]
    ours = [name for name in models if f"{name}.{dataset}" in OURS]
    theirs = [name for name in models if name not in ours]
    return family(theirs, dataset, text, **values) | family(ours, dataset, text, "paper", **values)


RECIPES: dict[str, Entry] = {
    **OURS,
    **on_a_gpu(("p4m_resnet29",), "", _P4M, **_OF_ALL),
    **_on_a_cpu("p4_simple_asc_resnet29", 12, _SLOWER, lr_factors={"*.embed.*": 0.3, "*.map.*": 0.3}, **_HALF),
    **_from("p4m", "p4m_se_resnet29", 3, _GATED, lr=0.003),
    **_from("p4_asc", "p4_asc_se_resnet29", 3, _GATED, lr=0.003),
    **on_a_gpu(("p4m_asc_resnet29",), "", _P4M_ASC, **_OF_TAUGHT),
    **_rows(29, "cifar10", 100, (50, 75)),
    **_rows(29, "cifar100", 100, (50, 75)),
    **family(("p4_asc_resnet29",), "rotmnist", _MNIST, **_MNIST_VALUES),
    **_rows(83, "cifar10", 200, (100, 150)),
}
