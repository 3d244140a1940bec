"""Hashes of images and splits, by which a run recognizes those of another one."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .splits import AnySplit, Split

SPLIT_NAMES = {"train": "training", "valid": "validation", "test": "test"}
USES = {"train": "train", "valid": "validate", "test": "test"}  # what the images of a split are for
TRAINED_NAME = "trained_on.npy"


def split_digest(split: AnySplit) -> str:
    """A hash of a split: of labels and pixels in memory, of the labels alone if it is streamed."""
    digest = hashlib.sha256(split.labels.cpu().numpy().tobytes())
    if isinstance(split, Split):
        digest.update(split.images.cpu().reshape(-1).numpy().data)  # the buffer itself, no copy
    return digest.hexdigest()


def split_digests(splits: Mapping[str, AnySplit]) -> dict[str, str]:
    """The `split_digest` of the training and the validation images."""
    return {name: split_digest(splits[name]) for name in ("train", "valid") if name in splits}


def image_codes(split: AnySplit) -> np.ndarray:
    """``(n,)`` uint64, a hash of the pixels of each image; of no image if the split is streamed."""
    if not isinstance(split, Split):
        return np.empty(0, np.uint64)
    hashes = (hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in split.images.cpu().numpy())
    return np.frombuffer(b"".join(hashes), np.uint64)


def split_differences(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """What differs between the images of two runs, by the digests of their splits, in words."""
    for split, word in SPLIT_NAMES.items():
        if there.get(split) != here.get(split):
            yield f"the {word} images differ"


def settings_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the settings of two fine-tunings, in words.

    Images that were scaled to another size, read with other channels or split by another source cannot be compared; how
    they were split matters only where the splits differ, and the weights of the start only where their hash is there.
    """
    if there.get("data_sha256") == here.get("data_sha256"):
        there = {**there, "split_by": here.get("split_by")}
    other = any(there.get(key) != here.get(key) for key in ("input_size", "split_by"))
    for key in here:
        before, now = there.get(key), here[key]
        if (other and key in ("data_sha256", "mean", "std")) or (key == "weights_sha256" and before is None):
            continue
        if key == "data_sha256":
            yield from split_differences(before or {}, now)
        elif before != now:
            yield f"{key} was {before!r} and is {now!r}"


def trained_images(folder: Path | None) -> np.ndarray:
    """The `image_codes` of the images that the weights of a folder were trained on, ``(n,)`` uint64.

    Empty where they are unknown: without a folder or its trained_on.npy, which that of a published checkpoint lacks.
    """
    path = folder and folder / TRAINED_NAME
    return np.load(path, allow_pickle=False) if path and path.is_file() else np.empty(0, np.uint64)
