"""Distillation: trained networks whose predictions another network learns."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from ..analysis.sizes import refusal
from ..data import normalize
from ..models import EquivariantNet, create_model
from .recipe import Recipe

__all__ = ["Teachers"]


class Teachers:
    """The networks that a recipe names as its ``teachers``; a network learns the mean of their probabilities.

    With w the ``teacher_weight``, z the logits of an image, p the mean of the teachers' probabilities for the same
    image, augmented alike, and L the loss of the labels, the loss is ``(1 − w)·L − w·Σ p·log softmax(z)``.

    Args:
        recipe: The recipe.
        classes: The names of the classes, or () where they have none.
        size: The channels, height and width of the images.
        num_classes: The number of classes of the network that learns.
        device: Where the teachers run.

    Raises:
        ValueError: If a teacher cannot be created, has other classes or channels, or does not accept the images.

    References:
        Distilling the Knowledge in a Neural Network (Hinton, Vinyals and Dean, 2015), section 2, at temperature 1
        https://arxiv.org/abs/1503.02531
    """

    def __init__(
        self,
        recipe: Recipe,
        classes: Sequence[str],
        size: tuple[int, int, int],
        num_classes: int,
        device: torch.device,
    ) -> None:
        self.recipe = recipe
        self.networks = [
            _teacher(name, classes, size, num_classes).to(device).requires_grad_(False) for name in recipe.teachers
        ]

    @torch.no_grad()
    def probabilities(self, images: Tensor, autocast: AbstractContextManager[Any]) -> Tensor:
        """The mean of the probabilities, ``(n, classes)``.

        Args:
            images: Augmented images at full size, ``(n, channels, height, width)`` with values in 0 to 255.
            autocast: The number format that the teachers compute in.
        """
        with autocast:
            found = [network(self._input(network, images)).float().softmax(1) for network in self.networks]
        return torch.stack(found).mean(0)

    def loss(self, of_labels: Tensor, logits: Tensor, probabilities: Tensor) -> Tensor:
        """The loss of the labels and that of the teachers' probabilities, weighted and added."""
        weight = self.recipe.teacher_weight
        of_teachers = -(probabilities.to(logits.dtype) * logits.log_softmax(1)).sum(1).mean()
        return (1 - weight) * of_labels + weight * of_teachers

    def _input(self, network: EquivariantNet, images: Tensor) -> Tensor:
        cfg = network.pretrained_cfg
        x = normalize(images, cfg["mean"], cfg["std"], next(network.parameters()).dtype)
        return x.to(memory_format=torch.channels_last) if self.recipe.channels_last else x


def _teacher(name: str, classes: Sequence[str], size: tuple[int, int, int], num_classes: int) -> EquivariantNet:
    """A teacher in evaluation mode."""
    try:
        network = cast(EquivariantNet, create_model(name, pretrained=True)).eval()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"teachers: {error}") from error
    names = network.pretrained_cfg.get("label_names") or ()
    if network.num_classes != num_classes or (names and classes and list(names) != list(classes)):
        theirs = ", ".join(names) or f"{network.num_classes} classes"
        raise ValueError(
            f"a teacher has the classes of the images, {', '.join(classes) or num_classes}; {name} has {theirs}"
        )
    if network.in_chans != size[0]:
        raise ValueError(f"images have {size[0]} channels, and the teacher {name} takes {network.in_chans}")
    if reason := refusal(copy.deepcopy(network).to("meta", torch.float32), *size[1:]):
        raise ValueError(f"the teacher {name} refuses images of {size[1]} x {size[2]} pixels: {reason}")
    return network
