"""Images of bars, blobs and crosses, as a user's folder, as arrays and as splits."""

import numpy as np
import torch
from PIL import Image

from eqzoo.data import Split

NAMES = ("bar", "blob", "cross")


def shape(kind, seed, side=32):
    """A bar, a blob or a cross at a random place, uint8."""
    random = np.random.default_rng(seed)
    image = random.integers(0, 40, (side, side)).astype(np.uint8)
    y, x = random.integers(10, side - 10, 2)
    if kind in (0, 2):
        image[y - 1 : y + 1, x - 8 : x + 8] = 220
    if kind == 1:
        image[y - 5 : y + 5, x - 5 : x + 5] = 220
    if kind == 2:
        image[y - 8 : y + 8, x - 1 : x + 1] = 220
    return image


def save_shapes(folder, counts=(10, 10, 10), first=0):
    for kind, (name, count) in enumerate(zip(NAMES, counts, strict=True)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(shape(kind, first + 100 * kind + i)).save(folder / name / f"{i:02}.png")
    return folder


def arrays(count, channels=1, side=28, first=0):
    labels = np.arange(count) % 3
    images = np.stack([shape(label, first + i, side) for i, label in enumerate(labels)])
    return (images if channels == 1 else np.stack([images] * channels, -1)), labels


def shapes(count=30):
    images, labels = arrays(count)
    return {"train": Split(torch.from_numpy(images)[:, None], torch.from_numpy(labels))}
