"""Networks made invariant from outside: a mean over the copies of an image, or one canonical copy of it."""

import math
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..groups import Group, transform
from ..layers._layout import is_channels_last
from .builder import per_channel
from .canonical import canonical_elements, group_of_sides, needs_graph, take_copies

_SHARED = (
    "default_cfg",
    "drop_rate",
    "faster_channels_last",
    "grad_checkpointing",
    "head_hidden_size",
    "in_chans",
    "input_size",
    "num_classes",
    "num_features",
    "pretrained_cfg",
)


class OrbitNet(nn.Module):
    """Any classifier Φ, invariant under a group H of rotations by 90° and reflections.

    ``Ψ(x) = (1 / |H|) Σ_g Φ(g x)``: the sum has the same terms for each copy of an image, so ``Ψ(h x) = Ψ(x)`` up to
    round-off. As the classifier of a network is affine, this is also the classifier of the mean of the pooled features
    (symmetrization, frame averaging). A prediction costs ``|H|`` passes of Φ. Ψ keeps the symmetries of Φ: that of a p4
    network under z2m, left and right, is invariant under p4m.

    With ``copies=1``, Ψ(x) = Φ(c(x)) for the canonical copy c(x) of the image (canonicalization), see
    `eqzoo.models.canonical`: ``c(h x) = c(x)`` bit for bit, at the cost of a single pass, but c is not continuous: a
    small change of an image can choose another copy. With more copies, the mean is over the first ones.

    Images that are not square are rotated by 180° and reflected alone. The methods are those of timm's models;
    ``forward_features`` gives the features of each copy, ``(B, copies, ...)``. The keys of the state dict are those of
    Φ after ``network.``.

    Args:
        network: Φ, which maps images ``(B, C, height, width)`` to logits ``(B, classes)``. What it lacks of timm's
            methods is missing here too.
        group: H, or its name: ``"p4"``, the rotations, ``"p4m"``, reflections too, ``"z2m"``, reflections alone, or
            ``"z2"``, the identity, for the network as it is.
        copies: The number of copies of each image, chosen by `canonical_elements`; None for all.
        train_copies: The number of copies of each image in training mode, drawn at random; None for those of
            evaluation mode.
        average: What the mean is of: ``"logits"``, or ``"probabilities"``, which gives the logarithm of the mean of
            ``softmax(Φ(g x))`` (test-time augmentation).

    Raises:
        ValueError: If H has elements that do not map the pixel grid onto itself, or not so many.

    References:
        Frame Averaging for Invariant and Equivariant Network Design (Puny et al., 2022), section 2
        https://arxiv.org/abs/2110.03336
        Equi-Tuning: Group Equivariant Fine-Tuning of Pretrained Models (Basu et al., 2023)
        https://arxiv.org/abs/2210.06475
        Equivariance with Learned Canonicalization Functions (Kaba et al., 2023)
        https://arxiv.org/abs/2211.06489

    Example:
        >>> import timm, eqzoo
        >>> x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> model = OrbitNet(timm.create_model("resnet10t", num_classes=5), "p4m", copies=1).eval()
        >>> torch.equal(model(x.rot90(1, (2, 3))), model(x))
        True
    """

    network: Any
    pretrained_cfg: dict[str, Any]
    default_cfg: dict[str, Any]
    num_classes: int
    in_chans: int
    input_size: tuple[int, int, int]
    faster_channels_last: bool
    layers_have_group = False  # those inside are of another network, whatever their groups

    def __init__(
        self,
        network: nn.Module,
        group: Group | str,
        copies: int | None = None,
        train_copies: int | None = None,
        average: Literal["logits", "probabilities"] = "logits",
    ) -> None:
        super().__init__()
        self.copied = Group.from_name(group) if isinstance(group, str) else group
        order = self.copied.order
        if not self.copied.on_grid:
            raise ValueError(
                f"images have exact copies under p4, p4m and z2m, rotations by 90° and reflections; got {group}"
            )
        if not all(count is None or 1 <= count <= order for count in (copies, train_copies)):
            raise ValueError(f"an image has {order} copies under {self.copied.name}, got {copies} and {train_copies}")
        self.network = network
        self.copies = None if copies == order else copies
        # The mean over all copies keeps the symmetries of the network itself, the choice of one copy does not.
        own = getattr(network, "group", None)
        self.group = _joined(self.copied, own) if isinstance(own, Group) and self.copies is None else self.copied
        self.train_copies = train_copies
        self.average = average
        self.training = network.training

    def __getattr__(self, name: str) -> Any:
        """The network's own attributes, as far as timm's interface has them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _SHARED or "_modules" not in self.__dict__:
                raise
        network = self._modules["network"]
        if name == "input_size" and not hasattr(network, name):
            return tuple(self.pretrained_cfg["input_size"])
        return getattr(network, name)

    def forward(self, x: Tensor) -> Tensor:
        """The logits Ψ(x), ``(B, classes)``, of normalized images."""
        return self._mean(self._of_copies(self.network, x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last features of the copies of each image, ``(B, copies, ...)``."""
        return self._of_copies(self.network.forward_features, x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits Ψ(x), or the mean of the pooled features, of what `forward_features` gives."""
        y: Tensor = self.network.forward_head(x.flatten(0, 1), pre_logits=pre_logits).unflatten(0, x.shape[:2])
        return y.mean(1) if pre_logits else self._mean(y)

    def feature_field(self, x: Tensor) -> Tensor:
        """What the equivariance check compares beside the logits: the mean of the pooled features, ``(B, C)``."""
        return self.forward_head(self.forward_features(x), pre_logits=True)

    def get_classifier(self) -> nn.Module:
        """The network's classifier."""
        classifier: nn.Module = self.network.get_classifier()
        return classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None, **kwargs: Any) -> None:
        """Replaces the network's classifier, with classes without names.

        Args:
            num_classes: The number of classes; with 0 the output is the mean of the pooled features.
            global_pool: Another pooling, as far as the network has it; None keeps the present.
            **kwargs: What else the network's own method takes.
        """
        pool = {} if global_pool is None else {"global_pool": global_pool}
        before = dict(getattr(self.network, "_model_args", {}))
        self.network.reset_classifier(num_classes, **pool, **kwargs)
        changes = {k: v for k, v in getattr(self.network, "_model_args", {}).items() if before.get(k) != v}
        args: dict[str, Any] | None = getattr(self, "_model_args", None)
        if args is not None:  # timm built it, and saves its arguments with it
            self._model_args = args | changes | pool
        if (cfg := getattr(self, "pretrained_cfg", None)) and cfg.get("label_names"):
            cfg["label_names"] = None  # they name the classes of the weights

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The network's regular expressions by which timm groups parameters by depth."""
        return {key: _prefixed(value) for key, value in self.network.group_matcher(coarse).items()}

    def no_weight_decay(self) -> set[str]:
        """The network's parameters without weight decay, besides biases and norms."""
        names: set[str] = getattr(self.network, "no_weight_decay", set)()
        return {f"network.{name}" for name in names}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes the network's blocks in the backward pass."""
        self.network.set_grad_checkpointing(enable)

    def extra_repr(self) -> str:
        return f"group={self.copied.name}, copies={self.copies or self.copied.order}"

    def _mean(self, y: Tensor) -> Tensor:
        """The mean of what the network gives of the copies, ``(B, copies, classes)``, or without classes features."""
        if self.average == "probabilities" and getattr(self, "num_classes", None) != 0:
            return torch.logsumexp(y.log_softmax(2), 1) - math.log(y.shape[1])
        return y.mean(1)

    def _of_copies(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of the copies of each image, ``(B, copies, ...)``."""
        group = group_of_sides(self.copied, x.shape[2], x.shape[3])
        elements = self._elements(x, group)
        count = group.order if elements is None else elements.shape[1]
        if self.training or needs_graph(x):
            y = function(take_copies(x, group, elements))
        else:  # no more copies at a time than images
            size = max(1, len(x) // count)
            parts = zip(
                x.split(size), [None] * max(1, len(x)) if elements is None else elements.split(size), strict=False
            )
            y = torch.cat([function(take_copies(part, group, chosen)) for part, chosen in parts])
        return y.unflatten(0, (x.shape[0], count))

    def _elements(self, x: Tensor, group: Group) -> Tensor | None:
        """The elements whose copies of each image are taken, ``(B, copies)``; None for all."""
        if self.training and self.train_copies is not None:
            drawn = torch.rand(x.shape[0], group.order, device=x.device).argsort(1)
            return drawn[:, : self.train_copies]
        if self.copies is None or self.copies >= group.order:
            return None
        cfg = getattr(self, "pretrained_cfg", {})
        mean, std = (per_channel(cfg.get(*entry), x.shape[1]) for entry in (("mean", (0.0,)), ("std", (1.0,))))
        return canonical_elements(x, group, self.copies, mean, std)


def _joined(group: Group, other: Group) -> Group:
    """The group that a group of the pixel grid generates with those elements of another one that map the grid."""
    return Group(max(group.rotations, math.gcd(other.rotations, 4)), group.reflections or other.reflections)


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


def _prefixed(pattern: Any) -> Any:
    """An entry of timm's ``group_matcher`` for names after ``network.``."""
    if isinstance(pattern, str):
        unanchored = re.sub(r"(?<!\[)\^", "", pattern)
        return rf"^network\.(?:{unanchored})"
    if isinstance(pattern, list | tuple):
        return type(pattern)(_prefixed(part) for part in pattern)
    return pattern
