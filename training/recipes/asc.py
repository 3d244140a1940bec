"""Recipes of ResNet-29 and ResNet-83 with affine self convolutions (Diaconu and Worrall, 2019, appendix C)."""

from collections.abc import Iterable
from typing import Any

from ._entry import MUON, Entry, family
from ._gpu import on_a_gpu

__all__ = ["NETWORKS", "OURS", "RECIPES", "gpu_resnets"]

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
    "training and 2,000 to select the epoch. A first recipe of 10 epochs had 3.75 % validation error and 3.53 % test "
    "error."
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
_CIFAR = (
    "Our recipe, for {cores} of a CPU: {epochs} epochs in {precision} with Muon, batch size 64, a cosine learning "
    "rate schedule from {lr:g} (0.3 times that for parameters that are not matrices), weight decay 1e-2, label "
    "smoothing 0.1, a moving average of the weights, and augmentation by flips and by shifts of up to 4 pixels. 5,000 "
    "of the 50,000 training images for validation, as in the paper, drawn with a fixed seed. The paper uses SGD and "
    "100 epochs. "
)
_AGAIN = (
    "Each batch was divided between two processes, so batch norm statistics are over 32 images. An earlier recipe, of "
    "23 epochs in one process without label smoothing, had 8.08 % validation error and 8.65 % test error; its "
    "validation loss rose from epoch 16 on, which is why labels are smoothed here. Here it rises slightly from epoch "
    "20 on, from 0.273 to 0.284."
)
_CONTINUED = (
    "A square of each training image, a quarter of the side wide, gets the image's mean color (Cutout). The run "
    "started from the weights of a first one, of the recipe p4_resnet29.cifar10_first: 28 epochs, 7.56 % validation "
    "error and 8.15 % test error, 97.7 % accuracy on 5,000 training images without augmentation and 92.4 % on the "
    "validation images, 2.1 hours on an Intel Xeon. The command reads them from the folder of that run, so train "
    "p4_resnet29.cifar10_first before. The first three epochs ran in one process, the others in two, whose batch "
    "norms see 32 images each. The rate starts anew, so that the validation accuracy fell at first, as the curve "
    "shows, whose values are rounded to 0.1 % but for the last; the validation loss was 0.266 at the end, 0.275 "
    "before. Whether longer training, Cutout or both helped was not separated. The paper trains for 100 epochs, this "
    "network was trained for 39, so few epochs may be the reason for the difference."
)
_LONGER = (
    "A square of each training image, a quarter of the side wide, gets the image's mean color (Cutout). The run "
    "started from the weights of a second one, of the recipe p4_resnet29.cifar10_second, and this one from those of a "
    "first one, p4_resnet29.cifar10_first, without Cutout: 28 and 11 epochs, 8.15 and 7.56 % test error, 7.56 and "
    "7.18 % validation error. The command reads the weights from the folder of the second run, so train the first and "
    "the second one before. The rate and the optimizer start anew each time, so that the validation accuracy falls at "
    "first, as the curve shows. All epochs ran in one process, whose batch norms see 64 images; those of most earlier "
    "ones saw 32. The 51 epochs took 2.1 hours and 1.1 hours on two cores and 1.5 hours on one. The paper trains "
    "for 100 epochs, so few epochs may be the reason for the difference."
)
_PLAIN_LONGER = (
    "A square of each training image, a quarter of the side wide, gets the image's mean color (Cutout). The run "
    "started from the weights of a first one, of the recipe z2_resnet29.cifar10_first, without Cutout: 20 epochs, 7.87 "
    "% test error and 7.12 % validation error. The command reads them from the folder of that run, so train "
    "z2_resnet29.cifar10_first before. The rate falls to 0 twice: after 11 epochs it starts anew, from 0.02; there the "
    "validation error was 6.58 %. These are 51 epochs in three cycles, as those of p4_resnet29.cifar10_third, of which "
    "the last 23 had Cutout and here the last 31. They took 1.3 and 2.0 hours on one core, the second time beside "
    "other work. The paper trains for 100 epochs."
)
_PLAIN_ROTATED = (
    "After Cutout each training image is rotated by 0°, 90°, 180° or 270°. The run started from the weights of "
    "z2_resnet29.cifar10, which have seen 45 epochs of images that were not rotated. It is a baseline for "
    "p4_resnet29.cifar10, whose card has its error: one run had 12.20 % test error on images as they are, 13.30 % over "
    "the four rotations (the weights that it started from: 6.07 and 43.66 %), the same class at all of them for 84 % "
    "of the test images, and 11.77 % where the probabilities of the four are averaged. The validation error, of images "
    "as they are, was lowest in epoch 11, 12.12 %, and 12.18 % in the last; the validation loss was still falling, so "
    "longer training may help. The twelve epochs took 1.3 hours on one core, beside other work. A first run, of six "
    "epochs from earlier weights, had 13.71 and 15.67 %. The weights are not published."
)
_HALF = "In the first four epochs the images have half their side, 16 x 16, and no epoch is selected."
_AFTER = "run:runs/{model}.cifar10_first/seed{{seed}}"  # goes on with the weights of a first run
_CIFAR_VALUES: dict[str, Any] = MUON | {
    "batch_size": 64,
    "lr": 0.03,
    "augment": "standard",
    "ema_decay": 0.999,
    "precision": "bfloat16",
    "valid_size": 5_000,
}


def _ours(model: str, epochs: int, cores: str, more: str = "", variant: str = "", **values: Any) -> dict[str, Entry]:
    """Our recipe for CIFAR-10; that of the paper has the variant "paper"."""
    values = _CIFAR_VALUES | values
    text = (_CIFAR.format(epochs=epochs, cores=cores, precision=values["precision"], lr=values["lr"]) + more).strip()
    return family((model,), "cifar10", text, variant, epochs=epochs, **values)


_SAME = (
    "It is the recipe of z2_resnet29, p4_resnet29, p4_se_resnet29 and p4m_resnet29 on CIFAR-10, so that "
    "they can be compared. The paper uses SGD and 100 epochs{reflections}. "
)
_GPU_PLAIN = _SAME.format(reflections="") + (
    "These weights were made without a GPU: on one core of an Intel Xeon, the last eleven epochs on two, in 2.1 hours "
    "beside other work. The validation error was lowest in epoch 43, 5.60 %, and 5.62 % in the last one; the "
    "validation loss was lowest in epoch 37, 0.2203, and rose to 0.2278. That of seed 1, on an AMD EPYC, was lowest in "
    "epoch 42, 5.60 %. Two runs of an earlier recipe, of 51 epochs "
    "in three cycles of the learning rate (z2_resnet29.cifar10_second), had 5.94 and 6.10 % validation error and 6.61 "
    "± 0.09 % test error."
)
_GPU_P4 = _SAME.format(reflections="") + (
    "The weights are those of seed 1: 17 epochs in 5.2 hours on an AMD EPYC, beside other work, and 28 on an H200. The "
    "validation error was lowest in the last epoch, 6.18 %, the validation loss in epoch 38, 0.2453, from where it "
    "rose to 0.2477. Seed 0 took 3.2 minutes on an H200; its validation error was lowest in epoch 44, 6.38 %, its loss "
    "in epoch 39, 0.2495, and it rose to 0.2541. An earlier recipe, of 51 epochs in "
    "three cycles of the learning rate on a CPU (p4_resnet29.cifar10_third), had 6.66 % validation error and 7.29 % "
    "test error."
)
_GPU_SE = _SAME.format(reflections="") + (
    "On an H200, which trained up to three other networks at the same time, the run took 11.9 minutes. The validation "
    "error was lowest in epoch 35, 6.90 %, and 7.10 % in the last one; the validation loss was lowest in epoch 36, "
    "0.283, and rose to 0.290. Three recipes before had higher validation errors: 8.08 % after 30 epochs with batches "
    "of 256 and weight decay 0.01, 8.66 % after 79 epochs with SGD, and 7.82 % (8.48 % test error) after 32 epochs on "
    "a CPU with batches of 64, without Cutout, in the last 16 of which the network also learned from the predictions "
    "of two others. What helped was not separated."
)
_GPU_P4M = _SAME.format(reflections=", and has no network with reflections") + (
    "On an H200, which trained p4_asc_resnet29 at the same time, the run with seed 0 took 7.7 minutes. The validation "
    "error was lowest in epoch 41, 5.48 %, and 5.60 % in the last one; the validation loss was lowest in epochs 34 and "
    "36, 0.2299, and rose to 0.2332. The validation error of seed 1, on an H200 beside other trainings, was lowest in "
    "epoch 37, 5.62 %, its loss in epoch 36, 0.2298, from where it rose to 0.2386. A first recipe, of 30 epochs with "
    "batches of 256 and weight decay 0.01, had 7.56 % validation error and 7.41 % test error."
)
_TAUGHT = (
    "It is the recipe of p4_asc_resnet29 and p4m_asc_resnet29 on CIFAR-10. The paper uses SGD and 100 epochs, and "
    "distills no network{reflections}. Queries and keys, and their maps, have 0.3 of the learning rates above. In the "
    "first five epochs the images have half their side, 16 x 16, and no epoch is selected. The network also learned "
    "from others (distillation): 0.8 of the loss is the cross-entropy with the mean of the probabilities that "
    "z2_resnet29.cifar10 and p4_resnet29.cifar10 give the same augmented image, 0.2 that with the label. Both were "
    "trained on the same 45,000 images; {teachers}. What the teachers brought was not measured; the networks without "
    "attention learned from none. "
)
_GPU_P4_ASC = _TAUGHT.format(
    reflections="",
    teachers=(
        "those of both seeds were the weights with seed 0, with 6.07 and 6.59 % test error, whose mean has 4.72 % "
        "validation error; a new run learns from the present p4_resnet29.cifar10, of seed 1, with 6.87 %"
    ),
) + (
    "The run with seed 0 took 7.4 minutes on an H200. The validation error was lowest in epoch 41, 5.70 %, and 5.74 % "
    "in the last one; the validation loss was lowest in epoch 40, 0.2372, and 0.2383 at the end. The validation error "
    "of seed 1, on an H200 beside other trainings and in the last epoch on an AMD EPYC, was lowest in epoch 37, 6.08 "
    "%, its loss at the end, 0.2370. An earlier run on a CPU, without Cutout and with batches of 64, had 9.04 % "
    "validation error and 9.56 % test error after 41 epochs without teachers (13.89, 11.69 and 10.13 % test error at "
    "the ends of cycles of the rate before), and 7.08 and 7.69 % after 18 more with earlier weights of the same "
    "teachers, which have 7.87 and 7.56 % test error (8.20 % after nine)."
)
_GPU_P4M_ASC = _TAUGHT.format(
    reflections=", and has no network with reflections",
    teachers=(
        "they were those of earlier recipes, with 6.54 and 7.29 % test error, and their mean has 4.98 % validation "
        "error; a new run learns from the present ones"
    ),
) + (
    "The run took nine minutes on an H200. Queries and keys have lower rates because attention can become too sharp "
    "otherwise: in trials of three epochs without teachers, on 23,000 images of half the side, the validation loss was "
    "1.05 with a rate of 0.015, 1.15 with 0.03, and 0.98 with 0.03 and 0.3 times that for queries and keys; the root "
    "mean square of the scores, in the layer where it is highest, was then 26, 115 and 7. A run of 26 epochs with one "
    "rate of 0.04 and without teachers had 14.64 % validation error and was not evaluated on the test images. Nor was "
    "one of five more epochs from these weights, on a CPU, with a rate of 0.015, without epochs at half the side, and "
    "with z2_resnet29 and p4m_resnet29 as teachers (6.07 and 5.70 % test error): its validation error was 6.96 % at "
    "first and 6.00 % at the end, above the 5.82 % before; a new cycle of the rate may have to be longer."
)


def _of_attention(*parts: str) -> dict[str, Any]:
    """Rates of networks with self-attention, lower ones for the parts that make its scores."""
    return {"lr": 0.03, "lr_factors": {f"*.{part}.*": 0.3 for part in parts}}


_QUERIES_AND_KEYS = _of_attention("query", "key", "query_map", "key_map")
_OF_ALL: dict[str, Any] = {"epochs": 45, "batch_size": 128, "weight_decay": 2e-2, "channels_last": True}
_OF_TAUGHT: dict[str, Any] = {
    "epochs": 42,
    "batch_size": 128,
    "weight_decay": 2e-2,
    "warmup_epochs": 2,
    "half_size_epochs": 5,
    "channels_last": True,
    **_QUERIES_AND_KEYS,
    "teachers": ("z2_resnet29.cifar10", "p4_resnet29.cifar10"),
    "teacher_weight": 0.8,
}

OURS: dict[str, Entry] = {
    **_ours("z2_se_resnet29", 16, "one core", channels_last=True),
    **_ours("z2_sasa_resnet29", 12, "one core", _HALF, channels_last=True, half_size_epochs=4),
    **_ours("z2_asc_resnet29", 16, "one core"),
    **_ours("z2_simple_asc_resnet29", 11, "one core"),
    **_ours("z2_asc_se_resnet29", 12, "one core", _HALF, channels_last=True, half_size_epochs=4),
    **on_a_gpu(("z2_resnet29",), "", _GPU_PLAIN, **_OF_ALL),
    **on_a_gpu(("p4_resnet29",), "", _GPU_P4, **_OF_ALL),
    **on_a_gpu(("p4_se_resnet29",), "", _GPU_SE, **_OF_ALL),
    **on_a_gpu(("p4_asc_resnet29",), "", _GPU_P4_ASC, **_OF_TAUGHT),
}


_GPU_ASC = (
    "The paper uses SGD and 100 epochs. On an H200, which trained p4_resnet29, p4_se_resnet29 and p4m_resnet29 at the "
    "same time, with a rate of 0.04, the three took 5 to 6 minutes and had 8.00, 8.08 and 7.56 % validation error. The "
    "validation loss of p4_se_resnet29 and p4m_resnet29 was lowest in epochs 21 and 20 and rose from there on, by "
    "0.005 and 0.014. Longer training with SGD instead (Nesterov momentum 0.9, a rate of 0.2, weight decay 5e-4, the "
    "rest as here) was worse: p4_se_resnet29 had 8.66 % after 79 epochs, p4m_resnet29 8.04 % after 63. "
)
_RATES: dict[str, dict[str, Any]] = {
    "z2_sasa_resnet29": _of_attention("query", "key"),
    "z2_simple_asc_resnet29": {"lr": 0.015},  # has one embedding for queries, keys and values
    "z2_asc_resnet29": _QUERIES_AND_KEYS,
    "z2_asc_se_resnet29": _QUERIES_AND_KEYS,
    "p4_asc_resnet29": _QUERIES_AND_KEYS,
}
_LOWER = (
    "Queries and keys have 0.3 of the learning rate of other parts: so p4m_asc_resnet29 learned best in three trials "
    "of three epochs. "
)


def gpu_resnets(models: Iterable[str], variant: str = "", more: str = "") -> dict[str, Entry]:
    """Our recipe for CIFAR-10 on a GPU."""
    found: dict[str, Entry] = {}
    for model in models:
        rates = _RATES.get(model, {})
        text = _GPU_ASC + (_LOWER if "lr_factors" in rates else "") + more
        found |= on_a_gpu((model,), variant, text, channels_last=True, **rates)
    return found


def _values(epochs: int, milestones: tuple[int, int]) -> dict[str, Any]:
    return {
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


def _rows(depth: int, dataset: str, epochs: int, milestones: tuple[int, int]) -> dict[str, Entry]:
    text = _TEXT.format(milestones="{} and {}".format(*milestones), epochs=epochs)
    models = [f"{name}_resnet{depth}" for name in NETWORKS]
    values = _values(epochs, milestones)
    ours = [name for name in models if f"{name}.{dataset}" in OURS]
    theirs = [name for name in models if name not in ours]
    return family(theirs, dataset, text, **values) | family(ours, dataset, text, "paper", **values)


RECIPES: dict[str, Entry] = {
    **OURS,
    **on_a_gpu(
        ("z2_resnet29",),
        "rotated",
        _PLAIN_ROTATED,
        **_OF_ALL | {"epochs": 12, "lr": 0.02},
        augment="standard_cutout_rotations",
        start="z2_resnet29.cifar10",
    ),
    **on_a_gpu(("p4m_resnet29",), "", _GPU_P4M, **_OF_ALL),
    **on_a_gpu(("p4m_asc_resnet29",), "", _GPU_P4M_ASC, **_OF_TAUGHT),
    **_ours("p4_resnet29", 28, "two cores", _AGAIN, "first", channels_last=True),
    **_ours(
        "p4_resnet29",
        11,
        "one or two cores",
        _CONTINUED,
        "second",
        channels_last=True,
        lr=0.02,
        augment="standard_cutout",
        start=_AFTER.format(model="p4_resnet29"),
    ),
    **_ours(
        "p4_resnet29",
        12,
        "one core",
        _LONGER,
        "third",
        channels_last=True,
        lr=0.02,
        augment="standard_cutout",
        start="run:runs/p4_resnet29.cifar10_second/seed{seed}",
    ),
    **_ours("z2_resnet29", 20, "one core", "", "first"),
    **_ours(
        "z2_resnet29",
        31,
        "one core",
        _PLAIN_LONGER,
        "second",
        channels_last=True,
        lr=0.02,
        restarts=(11,),
        restart_lrs=(0.02,),
        augment="standard_cutout",
        start=_AFTER.format(model="z2_resnet29"),
    ),
    **_rows(29, "cifar10", 100, (50, 75)),
    **_rows(29, "cifar100", 100, (50, 75)),
    **family(("p4_asc_resnet29",), "rotmnist", _MNIST, **_MNIST_VALUES),
    **_rows(83, "cifar10", 200, (100, 150)),
}
