"""Base class of the networks: timm's model methods on regular fields."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..groups import Group
from ..layers import GlobalPool, SizeError
from ..layers._planes import Planes
from .sizes import with_image_size


class EquivariantNet(nn.Module):
    """Base class of all networks of the zoo: a stem, blocks and a head, with the methods that timm expects.

    ``forward(x) = forward_head(forward_features(x))``. The features are a regular field of the group,
    ``(B, C, |H|, height, width)``; the logits are invariant, ``(B, num_classes)``. A subclass sets ``stem``, ``blocks``
    and ``feature_info`` (one entry for the stem and one for each block), and writes ``forward_head``,
    ``build_classifier`` and ``set_pool`` where its head is not a `GlobalPool` and a linear layer.

    Args:
        group: The point group under which the network is equivariant.
        num_classes: The number of classes.
        in_chans: The number of image channels.
        num_features: The number of fields of the last features, and the length of the pooled features.
    """

    stem: nn.Module
    blocks: nn.Sequential
    head: nn.Module
    global_pool: Any  # a module, or the name of what the head does
    feature_info: list[dict[str, Any]]
    pretrained_cfg: dict[str, Any]
    output_fmt: ClassVar[str] = "NCHW"
    blocks_are_stages: ClassVar[bool] = False  # whether ``blocks`` holds sequences of blocks
    planes_are_fields: ClassVar[bool] = True  # whether intermediate features are planes of regular fields
    faster_channels_last: bool = False  # whether it predicts faster channels last, in float32 on a CPU

    def __init__(self, group: Group, num_classes: int, in_chans: int, num_features: int) -> None:
        super().__init__()
        self.group = group
        self.num_classes = operator.index(num_classes)  # not NumPy's, which JSON does not have
        self.in_chans = operator.index(in_chans)
        self.num_features = self.head_hidden_size = num_features
        self.grad_checkpointing = False

    @property
    def _deployed(self) -> bool:
        """Whether `timm.utils.reparameterize_model` has written out the filters and norms of all poses.

        The network then has none of the layers to fuse that it had when its classifier was built. Training would make
        the poses differ, so that it would no longer be equivariant.
        """
        return self.group.order > 1 and getattr(self, "_can_be_fused", False) and not _has_layers_to_fuse(self)

    @property
    def input_size(self) -> tuple[int, int, int]:
        """The default input size: ``(channels, height, width)``, sides in pixels."""
        _, height, width = self.pretrained_cfg["input_size"]
        return self.in_chans, height, width

    def forward_features(self, x: Tensor) -> Tensor:
        """The last features, a regular field ``(B, C, |H|, height', width')``, of images ``(B, C, height, width)``."""
        with self._valid_sizes(x):
            y: Tensor = self._checkpointed(self.blocks, self.stem(x))
            return y

    def feature_field(self, x: Tensor) -> Tensor:
        """The last features as a field whose law its shape tells, which is what the equivariance check compares.

        Here the regular field of ``forward_features``. A network whose features are of another kind gives them as
        invariant maps, ``(B, C, height', width')``.
        """
        y = self.forward_features(x)
        return y.unflatten(1, (-1, self.group.order)) if y.ndim == 4 else y  # a fused network gives planes

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        pooled: Tensor = self.global_pool(x)
        return pooled if pre_logits else self.head(pooled)

    def forward(self, x: Tensor) -> Tensor:
        features = self.forward_features(x)
        with self._valid_sizes(x):
            return self.forward_head(features)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The features after the stem and after each block, in the interface of timm's feature extraction.

        Args:
            x: The images, ``(B, C, height, width)``.
            indices: Which features to return: all (None), the last n (an int), or a list of indices; 0 is the stem.
            norm: Ignored: a final norm, where there is one, is part of the head.
            stop_early: Whether to stop after the last requested feature.
            output_fmt: ``"NCHW"``: planes ``(B, C·|H|, height, width)``, the only supported format.
            intermediates_only: Whether to return the list of features alone.

        Returns:
            The list of features, as planes; or the last features, as a field, and that list.

        Raises:
            ValueError: If the format is not supported.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is 'NCHW', planes (B, C·|H|, height, width); got {output_fmt!r}")
        wanted, highest = feature_take_indices(len(self.blocks) + 1, indices)
        last = highest if stop_early or intermediates_only else len(self.blocks)
        found = []
        y = x
        with self._valid_sizes(x):
            for place, stage in enumerate([self.stem, *self.blocks][: last + 1]):
                y = self._checkpointed([stage], y) if place else stage(y)
                if place in wanted:
                    found.append(y.flatten(1, 2) if y.ndim == 5 else y)
        return found if intermediates_only else (y, found)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the blocks after the last requested feature, and the head; returns the indices of the features.

        Call `forward_intermediates` then; what `forward` gives without the head is of no use, or an error.

        Args:
            indices: The features, as those of `forward_intermediates`.
            prune_norm: Whether to remove the final norm too, where there is one: no feature is behind it.
            prune_head: Whether to remove the head.
        """
        wanted, highest = feature_take_indices(len(self.blocks) + 1, indices)
        self.blocks = self.blocks[:highest]
        if prune_norm and hasattr(self, "norm"):
            self.add_module("norm", nn.Identity())
        if prune_head:
            self.reset_classifier(0)
        return wanted

    def get_classifier(self) -> nn.Module:
        """The classifier."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Initializes a new classifier, whose classes have no names.

        Args:
            num_classes: The number of classes; with 0 the output is the pooled features ``(B, num_features)``.
            global_pool: Another global pooling, as the argument ``global_pool`` of the class; None keeps the present.

        Raises:
            ValueError: If the network is deployed, unless the classifier is a plain linear layer and the pooling stays.
        """
        num_classes = operator.index(num_classes)
        head = self.build_classifier(num_classes) if num_classes else nn.Identity()
        if self._deployed and (global_pool is not None or not isinstance(head, nn.Linear | nn.Identity)):
            raise ValueError(
                f"a deployed {type(self).__name__} takes no new {'classifier' if global_pool is None else 'pooling'}: "
                "call reset_classifier before reparameterize_model"
            )
        if global_pool is not None:
            self.set_pool(global_pool)
            if (
                args := getattr(self, "_model_args", None)
            ) is not None:  # timm built it, and saves its arguments with it
                self._model_args = args | {"global_pool": global_pool}
        # Layers of a deployed network may have buffers alone.
        reference = next(t for t in chain(self.parameters(), self.buffers()) if t.is_floating_point())
        self._can_be_fused = getattr(self, "_can_be_fused", False) or _has_layers_to_fuse(self)
        if any((p.device, p.dtype) != (reference.device, reference.dtype) for p in head.parameters()):
            head = head.to(reference.device, reference.dtype)
        self.head = head.train(self.training)
        self.num_classes = num_classes
        if (cfg := getattr(self, "pretrained_cfg", None)) and cfg.get("label_names"):
            cfg["label_names"] = None  # they name the classes of the weights

    def set_pool(self, global_pool: str) -> None:
        """Sets the global pooling, to a value of the argument ``global_pool`` of the class: here a `GlobalPool`."""
        self.global_pool = GlobalPool(self.group, global_pool)  # type: ignore[arg-type]

    def build_classifier(self, num_classes: int) -> nn.Module:
        """A new classifier for one or more classes: here a linear layer of the pooled features."""
        return nn.Linear(self.num_features, num_classes)

    def convert_group(self, state: dict[str, Tensor], source: Group | None) -> dict[str, Tensor]:
        """Weights of a network for another group, or an unknown one, as weights for this one.

        The numbers of tensors may fit without any meaning: p4 and two rotations with reflections have four elements
        each. So a class that has no conversion refuses weights that are known to be of another group.

        Args:
            state: The weights.
            source: Their group; None if it is unknown.

        Raises:
            ValueError: If the class has no conversion.
        """
        if source is not None:
            raise ValueError(
                f"weights for the group {source.name} mean something else in a network for {self.group.name}; leave "
                "the argument group out, or train that network from random weights"
            )
        return state

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions by which timm groups parameters by depth, for layer-wise learning rate decay."""
        if self.blocks_are_stages:
            return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)" if coarse else r"^blocks\.(\d+)\.(\d+)"}
        return {"stem": r"^stem", "blocks": r"^blocks" if coarse else [(r"^blocks\.(\d+)", None)]}

    def no_weight_decay(self) -> set[str]:
        """The parameters without weight decay, besides biases and norms: none."""
        return set()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes the blocks in the backward pass, which saves memory and takes time.

        As in timm, batch norms there update their running statistics twice in a step.
        """
        self.grad_checkpointing = enable

    def _checkpointed(self, blocks: Iterable[nn.Module], x: Any) -> Any:
        """Blocks in turn, whose activations are recomputed in the backward pass if that is set."""
        if self.grad_checkpointing and self.training:
            return checkpoint_seq(list(blocks), x, flatten=self.blocks_are_stages)
        if isinstance(blocks, nn.Sequential):  # whose hooks are called
            return blocks(x)
        for block in blocks:
            x = block(x)
        return x

    @contextmanager
    def _valid_sizes(self, x: Tensor) -> Iterator[None]:
        """Adds the nearest valid image sizes to a layer's SizeError; not on meta tensors, which only probe sizes."""
        try:
            yield
        except SizeError as error:
            raise (error if x.is_meta else with_image_size(self, x, error)) from error


def _has_layers_to_fuse(network: nn.Module) -> bool:
    """Whether `timm.utils.reparameterize_model` would change a layer; what is inside of `Planes` is fused."""
    layers = [network]
    while layers:
        layer = layers.pop()
        if not isinstance(layer, Planes):
            if hasattr(layer, "fuse"):
                return True
            layers += layer.children()
    return False
