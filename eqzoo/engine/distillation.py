"""Distillation: trained networks, or their kept predictions, that another network learns."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import AnySplit
from ..data.images import normalized, preprocess
from ..evaluation import Predictor
from ..evaluation.progress import counting
from ..models import OrbitNet, create_model
from .recipe import Recipe


class Teachers:
    """The networks that a recipe names as its ``teachers``; a network learns the mean of their probabilities.

    With w the ``teacher_weight``, z the logits of an image, p the mean of the teachers' probabilities for the same
    image, and L the loss of the labels, the loss is ``(1 − w)·L − w·Σ p·log softmax(z)``; the sum is over the classes,
    and the loss is the mean over the images. Teachers see images of their own size, normalized as they were trained.

    A network of this package predicts each image as it is augmented. An `eqzoo.models.OrbitNet`, which is large and has
    to predict several copies, predicts each training image once, without augmentation: what it predicts for an image
    rotated by an element of its group is the same, for one that is rotated by another angle or shifted nearly so.

    Args:
        recipe: The recipe.
        classes: The names of the classes, or () where they have none.
        device: Where the teachers run.

    Raises:
        ValueError: If a teacher has other classes by their names. Where the teacher or the images have none, their
            numbers are taken.

    References:
        Distilling the Knowledge in a Neural Network (Hinton, Vinyals and Dean, 2015), section 2, at temperature 1
        https://arxiv.org/abs/1503.02531
    """

    def __init__(self, recipe: Recipe, classes: Sequence[str], device: torch.device) -> None:
        self.weight = recipe.teacher_weight
        found = [_teacher(name, classes, device) for name in recipe.teachers]
        self._each_step = [teacher for teacher in found if not isinstance(teacher.predictor.network, OrbitNet)]
        self._once = [teacher for teacher in found if isinstance(teacher.predictor.network, OrbitNet)]

    @torch.no_grad()
    def of_training_images(self, read: Callable[[int], AnySplit], workers: int) -> Tensor | None:
        """The mean of the probabilities by the teachers that predict each image once, ``(n, classes)`` on the CPU.

        Args:
            read: The training images with a side in pixels.
            workers: The processes that read images that are not in memory.

        Returns:
            None without such teachers.
        """
        found = []
        for teacher in self._once:
            predictor = teacher.predictor
            split = read(predictor.input_size[-1])
            with counting(predictor.network, f"predictions of {predictor.name}", len(split)):
                found.append(teacher.probabilities(predictor.logits(split, workers)).cpu())
        return torch.stack(found).mean(0) if found else None

    @torch.no_grad()
    def probabilities(
        self, images: Tensor, soft: Tensor | None, autocast: AbstractContextManager[Any], channels_last: bool
    ) -> Tensor | None:
        """The mean of the probabilities, ``(n, classes)``; None where there is nothing to learn from.

        Args:
            images: Augmented images at full size, ``(n, channels, height, width)`` with values in 0 to 255.
            soft: Their rows of `of_training_images`, or of the soft labels.
            autocast: The number format that the teachers compute in.
            channels_last: Whether they read images in the channels-last memory format.
        """
        layout = torch.channels_last if channels_last else torch.contiguous_format
        found = [] if soft is None else [soft.float()] * max(1, len(self._once))
        with autocast:
            for teacher in self._each_step:
                x = preprocess(images, teacher.predictor.input_size[1:])
                x = normalized(x, teacher.mean, teacher.std, teacher.mean.dtype).to(memory_format=layout)
                found.append(teacher.probabilities(teacher.predictor.network(x)))
        return torch.stack(found).mean(0) if found else None

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
        ValueError: If the array has another shape, as rows would be those of other images, or rows are no
            probabilities: not below 0, with a sum of 1 but for rounding.
    """
    found = torch.from_numpy(np.load(path))
    if found.shape != (images, num_classes):
        raise ValueError(
            f"soft_labels={path!r} has the shape {tuple(found.shape)}; {images:,} training images of {num_classes} "
            f"classes need {(images, num_classes)}, in the order of the training split"
        )
    least, sums = found.min(), found.double().sum(1)
    if not (least >= 0 and (sums - 1).abs().max() < 0.01):
        raise ValueError(
            f"soft_labels={path!r} has rows that are no probabilities, from 0 to 1 with a sum of 1: values from "
            f"{least:.3g}, sums from {sums.min():.3g} to {sums.max():.3g}; logits need a softmax"
        )
    return found


@dataclass(frozen=True)
class _Teacher:
    """A teacher; what a step needs is on its device already, as steps that are recorded as CUDA graphs require.

    Args:
        predictor: The network, without gradients.
        mean: The mean that it normalizes images by.
        std: The standard deviation.
        order: The numbers of its classes in the order of those of the images.
    """

    predictor: Predictor
    mean: Tensor
    std: Tensor
    order: Tensor

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.to(self.order.device).float().softmax(1).index_select(1, self.order)


def _teacher(name: str, classes: Sequence[str], device: torch.device) -> _Teacher:
    network: Any = create_model(name, pretrained=True)
    names = list(network.pretrained_cfg.get("label_names") or ())
    if names and classes and sorted(names) != sorted(classes):
        raise ValueError(
            f"a teacher has the classes of the images, {', '.join(classes)}; {name} has {', '.join(names)}"
        )
    order = [names.index(label) for label in classes] if names and classes else range(network.num_classes)
    network = network.to(device).eval().requires_grad_(False)
    dtype, cfg = next(network.parameters()).dtype, network.pretrained_cfg
    mean, std = (torch.tensor(cfg[key], dtype=dtype, device=device) for key in ("mean", "std"))
    return _Teacher(Predictor(network, name, name), mean, std, torch.tensor(order, device=device))
