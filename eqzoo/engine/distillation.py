"""Distillation: trained networks, or their kept predictions, that another network learns."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.images import normalized
from ..models import create_model
from .recipe import Recipe

__all__ = ["Teachers", "soft_labels"]


class Teachers:
    """The networks that a recipe names as its ``teachers``; a network learns the mean of their probabilities.

    With w the ``teacher_weight``, z the logits of an image, p the mean of the teachers' probabilities for the same
    image, augmented alike, and L the loss of the labels, the loss is ``(1 − w)·L − w·Σ p·log softmax(z)``; the sum is
    over the classes, and the loss is the mean over the images.

    Args:
        recipe: The recipe.
        classes: The names of the classes, or () where they have none.
        device: Where the teachers run.

    Raises:
        ValueError: If a teacher cannot be created, or the names of its classes are others.

    References:
        Distilling the Knowledge in a Neural Network (Hinton, Vinyals and Dean, 2015), section 2, at temperature 1
        https://arxiv.org/abs/1503.02531
    """

    def __init__(self, recipe: Recipe, classes: Sequence[str], device: torch.device) -> None:
        self.weight = recipe.teacher_weight
        self._teachers = []
        for name in recipe.teachers:
            network = _teacher(name, classes).to(device)
            dtype, cfg = next(network.parameters()).dtype, network.pretrained_cfg
            mean, std = (torch.tensor(cfg[key], dtype=dtype, device=device) for key in ("mean", "std"))
            self._teachers.append((network, mean, std))

    @torch.no_grad()
    def probabilities(self, images: Tensor, autocast: AbstractContextManager[Any], channels_last: bool) -> Tensor:
        """The mean of the probabilities, ``(n, classes)``.

        Args:
            images: Augmented images at full size, ``(n, channels, height, width)`` with values in 0 to 255.
            autocast: The number format that the teachers compute in.
            channels_last: Whether they read images in the channels-last memory format.
        """
        layout = torch.channels_last if channels_last else torch.contiguous_format
        with autocast:
            found = [
                network(normalized(images, mean, std, mean.dtype).to(memory_format=layout)).float().softmax(1)
                for network, mean, std in self._teachers
            ]
        return torch.stack(found).mean(0)

    def loss(self, of_labels: Tensor, logits: Tensor, probabilities: Tensor) -> Tensor:
        """The loss of the labels and that of the teachers' probabilities, weighted and added."""
        of_teachers = F.cross_entropy(logits, probabilities.to(logits.dtype))
        return (1 - self.weight) * of_labels + self.weight * of_teachers


def soft_labels(path: str, images: int, num_classes: int) -> Tensor:
    """The probabilities of a .npy file, a row for each training image.

    Args:
        path: The file, of an array ``(images, num_classes)``.
        images: The number of training images.
        num_classes: The number of classes.

    Raises:
        ValueError: If the array has another shape: rows would be those of other images.
    """
    found = torch.from_numpy(np.load(path))
    if found.shape != (images, num_classes):
        raise ValueError(
            f"soft_labels={path!r} has the shape {tuple(found.shape)}; {images:,} training images of {num_classes} "
            f"classes need {(images, num_classes)}, in the order of the training split"
        )
    return found


def _teacher(name: str, classes: Sequence[str]) -> Any:
    """A teacher in evaluation mode, without gradients."""
    network: Any = create_model(name, pretrained=True)
    names = network.pretrained_cfg.get("label_names") or ()
    if names and classes and list(names) != list(classes):
        raise ValueError(
            f"a teacher has the classes of the images, {', '.join(classes)}; {name} has {', '.join(names)}"
        )
    return network.eval().requires_grad_(False)
