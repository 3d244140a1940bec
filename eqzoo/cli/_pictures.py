"""Pictures from files, as networks take them."""

from typing import cast

import torch
from torch import Tensor

from ..data import load_picture, normalise, preprocess
from ..groups import Group, transform
from ..models import EquivariantNet, create_model

__all__ = ["copies", "pretrained"]


def pretrained(name: str) -> EquivariantNet:
    """A network with its weights, in evaluation mode: of a name, or of the folder of a checkpoint."""
    return cast(EquivariantNet, create_model(name, pretrained=True)).eval()


def copies(path: str, model: EquivariantNet, group: Group, invert: bool) -> Tensor:
    """A picture and its transformed copies as the network takes them, ``(elements, C, height, width)`` float64."""
    picture = load_picture(path, model.in_chans).double()
    if invert:
        picture = 255 - picture
    cfg = model.pretrained_cfg
    _, height, width = model.input_size
    views = [preprocess(transform(picture, group, g, "trivial"), (height, width)) for g in group.elements]
    return normalise(torch.stack(views), cfg["mean"], cfg["std"], torch.float64)
