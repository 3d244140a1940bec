"""Image files as network inputs."""

import torch
from torch import Tensor

from ..data import load_image, normalize, preprocess
from ..groups import Group, transform
from ..models import EquivariantNet

__all__ = ["transformed_copies"]


def transformed_copies(path: str, model: EquivariantNet, group: Group, invert: bool) -> Tensor:
    """The images of a file under every element of a group, normalized, ``(elements, C, height, width)`` float64."""
    image = load_image(path, model.in_chans).double()
    if invert:
        image = 255 - image
    cfg = model.pretrained_cfg
    _, height, width = model.input_size
    views = [preprocess(transform(image, group, g, "trivial"), (height, width)) for g in group.elements]
    return normalize(torch.stack(views), cfg["mean"], cfg["std"], torch.float64)
