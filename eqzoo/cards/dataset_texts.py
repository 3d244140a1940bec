"""The texts about data sets in cards and tables; counts and scores come from results.json."""

from dataclasses import dataclass

__all__ = ["DATASETS", "DataSet", "dataset"]


@dataclass(frozen=True)
class DataSet:
    """A data set in words.

    Args:
        title: Its name.
        noun: What one of its images is called, in the plural.
        text: What was trained and tested on; ``{train}``, ``{valid}`` and ``{test}`` stand for the counts.
        use: What a network trained on it is for, and where that ends.
        hub_id: The data set on the Hub that it is or is made from, or None.
        same_as_hub: Whether it is that data set, rather than made from it.
        images: What an image has to look like, beyond size and color; may be empty.
    """

    title: str
    noun: str
    text: str
    use: str
    hub_id: str | None = None
    same_as_hub: bool = False
    images: str = ""


_BENCHMARK = (
    "A small network for a benchmark of research: to compare networks, to study equivariance, and to start fine-tuning "
    "from. Every image gets one of the classes, whatever it shows, and the probabilities are not calibrated."
)

DATASETS = {
    "rotmnist": DataSet(
        "Rotated MNIST, regenerated",
        "digits",
        "rotated MNIST made anew from MNIST: {train} training and {valid} validation digits from MNIST's training "
        "split, {test} test digits from the rest of it and MNIST's test split, each rotated by a random angle with "
        "bicubic interpolation. It has the size and the distribution of the original set but not its digits, so "
        "numbers on the two are close, not the same",
        "Made for single digits on a plain ground, to show and to test equivariance; it knows nothing else.",
        "ylecun/mnist",
        images="white on black, with digits rotated by any angle, not transposed",
    ),
    "cifar10": DataSet(
        "CIFAR-10",
        "images",
        "CIFAR-10: {train} training and {valid} validation images from its training split, and the {test} images "
        "of its test split, of ten kinds of animals and vehicles",
        f"{_BENCHMARK} CIFAR-10 has a fixed orientation: a network can be accurate there and not on rotated images.",
        "uoft-cs/cifar10",
        same_as_hub=True,
        images="photographs of one object that fills the frame",
    ),
    "cifar100": DataSet(
        "CIFAR-100",
        "images",
        "CIFAR-100: {train} training and {valid} validation images from its training split, and the {test} images "
        "of its test split, of a hundred kinds of things",
        f"{_BENCHMARK} CIFAR-100 has a fixed orientation: a network can be accurate there and not on rotated images.",
        "uoft-cs/cifar100",
        same_as_hub=True,
        images="photographs of one object that fills the frame",
    ),
    "pcam": DataSet(
        "PatchCamelyon",
        "patches",
        "PatchCamelyon: {train} training, {valid} validation and {test} test patches of lymph node sections stained "
        "with haematoxylin and eosin; the class says whether the middle 32 x 32 pixels hold tumour tissue",
        "For research on methods alone: it is no medical device and must not be used to diagnose. It has seen one "
        "stain and the scanners of the two hospitals of the Camelyon16 challenge; on other stains, scanners or tissues "
        "it is not to be relied on before it has been measured there.",
        "1aurent/PatchCamelyon",
        same_as_hub=True,
        images="patches at 10x magnification, 0.97 micrometres a pixel",
    ),
    "eurosat": DataSet(
        "EuroSAT",
        "tiles",
        "EuroSAT in red, green and blue: {train} training, {valid} validation and {test} test tiles of 64 x 64 pixels "
        "from Sentinel-2, drawn class by class with a fixed seed; the class is one of ten kinds of land use. There is "
        "no official split, and neighboring tiles may be in different parts",
        "Made to start fine-tuning from on images from above, and to show equivariance. It has seen European land at "
        "10 m a pixel under a clear sky; at other resolutions, seasons or regions it is not to be relied on before it "
        "has been measured there.",
        images="satellite tiles at 10 m a pixel, in natural color",
    ),
    "chula_rbc12": DataSet(
        "Chula RBC-12",
        "cells",
        "Chula RBC-12: {train} training, {valid} validation and {test} test cells, crops of 80 x 80 pixels around the "
        "labeled centers of red blood cells in micrographs of blood smears; the class is one of eleven kinds. The "
        "parts differ in their micrographs: runs of ten consecutive ones stay together",
        "For research on methods, and to start fine-tuning from: it is no medical device and must not be used to "
        "diagnose. It has seen the smears of one laboratory, with one microscope and camera; on others it is not to be "
        "relied on before it has been measured there.",
        images="single red blood cells in the center of a crop, stained and taken as in the data set: at a "
        "magnification of 1,000, about 50 of the 80 pixels of a crop wide",
    ),
}


def dataset(name: str) -> DataSet:
    """The words for a data set; general ones for a data set that the zoo does not have."""
    return DATASETS.get(name) or DataSet(
        name,
        "images",
        f"the data set {name}: {{train}} training, {{valid}} validation and {{test}} test images",
        f"Trained on one data set, {name}. Every image gets one of its classes, whatever it shows, and the "
        "probabilities are not calibrated. Whether it is good enough for a purpose has to be measured on images of "
        "that purpose.",
    )
