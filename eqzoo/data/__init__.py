"""Data sets, image files, preprocessing and augmentation."""

from .arrays import npz, unlabeled_images
from .augmentation import AUGMENTATIONS, augment, draw
from .catalog import CATALOG, IMAGENET, DataSet, dataset
from .datasets import load_splits
from .folder import channels_found, files_left_out, folders_in_classes, image_folder
from .held_out import check_apart, complete_splits, image_sources, source_counts
from .images import load_image, normalize, pixels, preprocess
from .rotated_mnist import rotmnist, rotmnist_from_amat
from .splits import AnySplit, Split, Streamed, batches, check, hold_out, num_classes, per_class, resized, stratified
from .user_data import labeled_images, native_sides, read_images

__all__ = [
    "AUGMENTATIONS",
    "CATALOG",
    "IMAGENET",
    "AnySplit",
    "DataSet",
    "Split",
    "Streamed",
    "augment",
    "batches",
    "channels_found",
    "check",
    "check_apart",
    "complete_splits",
    "dataset",
    "draw",
    "files_left_out",
    "folders_in_classes",
    "hold_out",
    "image_folder",
    "image_sources",
    "labeled_images",
    "load_image",
    "load_splits",
    "native_sides",
    "normalize",
    "npz",
    "num_classes",
    "per_class",
    "pixels",
    "preprocess",
    "read_images",
    "resized",
    "rotmnist",
    "rotmnist_from_amat",
    "source_counts",
    "stratified",
    "unlabeled_images",
]
