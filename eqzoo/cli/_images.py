"""Image files as network inputs."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..data import files_left_out, load_image, preprocess
from ..data.folder import images_below
from ..data.images import DARK, dark_images, normalized
from ..groups import Group, transform
from ..models import EquivariantNet

__all__ = ["copies_of", "image_files", "is_dark", "transformed_copies"]


def image_files(paths: Sequence[str]) -> list[str]:
    """Files as they are given, and for each folder the images below it, sorted.

    Files of other image formats in a folder are reported on stderr.

    Raises:
        ValueError: If there is no image below a folder.
    """
    found = []
    for path in paths:
        files = [str(file) for file in images_below(Path(path))] if Path(path).is_dir() else [path]
        for line in files_left_out(path):
            print(f"eqzoo: {line}", file=sys.stderr)
        if not files:
            raise ValueError(f"no image in the folder {path}; images end in .png, .jpg, .tif, .webp and the like")
        found += files
    return found


def transformed_copies(path: str, model: EquivariantNet, group: Group, invert: bool) -> Tensor:
    """The images of a file under every element of a group, normalized, ``(elements, C, height, width)`` float64."""
    return copies_of(load_image(path, model.in_chans), model, group, invert)


def copies_of(image: Tensor, model: EquivariantNet, group: Group, invert: bool) -> Tensor:
    """The same of an image that has been read, ``(C, height, width)`` with values in 0 to 255."""
    image = image.double()
    if invert:  # a fourth channel is the opacity
        image = torch.cat([255 - image[:3], image[3:]])
    cfg = model.pretrained_cfg
    _, height, width = model.input_size
    views = [preprocess(transform(image, group, g, "trivial"), (height, width)) for g in group.elements]
    return normalized(torch.stack(views), cfg["mean"], cfg["std"], torch.float64)


def is_dark(image: Tensor, model: EquivariantNet) -> bool:
    """Whether an image ``(C, height, width)``, 0 to 255, is dark and those that a network was trained on are not."""
    bright = max(model.pretrained_cfg["mean"]) * 255 >= 2 * DARK
    return bright and bool(dark_images(image[None, :3]).any())
