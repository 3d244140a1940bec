"""Test-time augmentation: the mean of a network's predictions over the copies of an image."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..equivariance.errors import group_to_check
from ..groups import Group, transform
from ..layers._layout import is_channels_last

__all__ = ["AveragedNet", "copy_logits"]


def copy_logits(model: nn.Module, x: Tensor, group: Group) -> Tensor:
    """The logits of all rotated and reflected copies of images, ``(|H|, B, classes)``; those of the images come first.

    Args:
        model: The classifier.
        x: The images, ``(B, C, height, width)``, in the memory format in which the copies are given to the network.
        group: A group H of the pixel grid.
    """
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    copies = (transform(x, group, g, "trivial") for g in group.elements)
    # Written anew, because torch takes any strides of images of one channel for either layout.
    return torch.stack([model(torch.empty_like(copy, memory_format=layout).copy_(copy)) for copy in copies])


class AveragedNet(nn.Module):
    """A classifier that is invariant because it averages its probabilities over a group (test-time augmentation).

    ``Ψ(x) = log (1 / |H|) Σ_g softmax(Φ(g x))`` for a classifier Φ and a group H of rotations by 90° and reflections;
    the softmax of these logits is the mean. As the sum has the same terms for each copy of an image, Ψ(g x) = Ψ(x)
    up to round-off, for any Φ, such as a plain network of timm. A prediction costs ``|H|`` passes of Φ. It is made for
    predictions, and has no features; in training random rotations of the images are the usual way.

    Args:
        model: The classifier Φ, which maps images ``(B, C, height, width)`` to logits ``(B, classes)``. Its
            ``pretrained_cfg``, ``num_classes``, ``in_chans``, ``input_size`` and ``faster_channels_last`` are found
            here too, as far as it has them.
        group: H, or its name: ``"p4"``, the rotations, ``"p4m"``, reflections too, or ``"z2m"``, reflections alone.

    Raises:
        TypeError: If H is neither a group nor a name.
        ValueError: If H has elements that do not map the pixel grid onto itself, or none but the identity, or the model
            has less than two classes.

    Example:
        >>> import timm, eqzoo
        >>> x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> model = AveragedNet(timm.create_model("resnet10t", num_classes=5).eval(), "p4m")
        >>> torch.allclose(model(x.rot90(1, (2, 3))).softmax(1), model(x).softmax(1), atol=1e-6)
        True
    """

    layers_have_group = False  # those inside are of another network, whatever their groups
    pretrained_cfg: dict[str, Any]
    num_classes: int
    in_chans: int
    input_size: tuple[int, int, int]
    faster_channels_last: bool

    def __init__(self, model: nn.Module, group: Group | str) -> None:
        super().__init__()
        group = group_to_check(group)
        if not group.on_grid:
            raise ValueError(
                f"predictions are averaged over rotations by 90° and reflections, p4, p4m or z2m, got {group.name}"
            )
        _check_classes(getattr(model, "num_classes", 2))
        self.model = model
        self.group = group
        self.training = model.training
        for name in ("pretrained_cfg", "num_classes", "in_chans", "input_size", "faster_channels_last"):
            if (value := getattr(model, name, None)) is not None:
                setattr(self, name, value)
        if not hasattr(self, "input_size") and "input_size" in getattr(self, "pretrained_cfg", ()):
            self.input_size = tuple(self.pretrained_cfg["input_size"])

    def forward(self, x: Tensor) -> Tensor:
        """The logits Ψ(x), ``(B, classes)``, of normalized images.

        Raises:
            ValueError: If images that are to be rotated are not square, or the model has less than two logits.
        """
        if self.group.rotations == 4 and x.shape[-2] != x.shape[-1]:
            raise ValueError(f"images of {x.shape[-2]} x {x.shape[-1]} pixels are rotated by 90°; they must be square")
        logits = copy_logits(self.model, x, self.group)
        _check_classes(logits.shape[2])
        return torch.logsumexp(logits.log_softmax(2), 0) - math.log(self.group.order)

    def extra_repr(self) -> str:
        return f"group={self.group.name}"


def _check_classes(count: int) -> None:
    if count < 2:
        raise ValueError(f"probabilities of classes are averaged, two or more, and the model has num_classes={count}")
