"""Data: sets by name, folders and files, pictures, and their augmentation."""

from .augment import AUGMENTATIONS, augment, draw
from .folder import image_folder
from .pictures import load_picture, normalise, preprocess
from .rotated_mnist import rotmnist, rotmnist_from_amat
from .sets import DATASETS, load_splits, npz
from .split import AnySplit, Split, Streamed, batches, check, hold_out, num_classes, per_class

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "AnySplit",
    "Split",
    "Streamed",
    "augment",
    "batches",
    "check",
    "draw",
    "hold_out",
    "image_folder",
    "load_picture",
    "load_splits",
    "normalise",
    "npz",
    "num_classes",
    "per_class",
    "preprocess",
    "rotmnist",
    "rotmnist_from_amat",
]
