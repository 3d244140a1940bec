"""Data: sets by name, folders and files, pictures, and their augmentation."""

from .augment import AUGMENTATIONS, augment, draw
from .folder import image_folder
from .own import divided, read_pictures
from .pictures import load_picture, normalise, pixels, preprocess
from .rotated_mnist import rotmnist, rotmnist_from_amat
from .sets import DATASETS, load_splits, npz
from .split import AnySplit, Split, Streamed, batches, check, hold_out, num_classes, per_class, stratified

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "AnySplit",
    "Split",
    "Streamed",
    "augment",
    "batches",
    "check",
    "divided",
    "draw",
    "hold_out",
    "image_folder",
    "load_picture",
    "load_splits",
    "normalise",
    "npz",
    "num_classes",
    "per_class",
    "pixels",
    "preprocess",
    "read_pictures",
    "rotmnist",
    "rotmnist_from_amat",
    "stratified",
]
