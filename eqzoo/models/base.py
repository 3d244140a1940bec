"""Base class of the networks: timm's model methods on regular fields."""

import inspect
import operator
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar, Self, SupportsIndex

import torch
from timm.models import checkpoint_seq
from torch import Tensor, nn

from .._common import network_name
from ..groups import Group, whole
from ..layers import GlobalPool, SizeError
from ..layers._planes import Planes
from .sizes import with_image_size

__all__ = ["EquivariantNet"]


def check_is_group(group: Any) -> None:
    """Raises ValueError unless this is a `Group`."""
    if not isinstance(group, Group):
        raise ValueError(f"group is an eqzoo.Group such as eqzoo.P4 or eqzoo.cyclic(8), got {group!r}")


def refuse_without_effect(network: type[nn.Module], setting: str, **arguments: Any) -> None:
    """Raises ValueError for an argument of a class that has no effect beside a setting, unless it is the default."""
    defaults = inspect.signature(network).parameters
    for name, value in arguments.items():
        if value != defaults[name].default:
            raise ValueError(f"{name}={value!r} has no effect with {setting}; leave it out")


class EquivariantNet(nn.Module):
    """Base class of all networks of the zoo: a stem, blocks and a head, with the methods that timm expects.

    ``forward(x) = forward_head(forward_features(x))``. The features are a regular field of the group,
    ``(B, C, |H|, height, width)``; the logits are invariant, ``(B, num_classes)``. A subclass sets ``stem``, ``blocks``
    and ``feature_info`` (one entry for the stem and one for each block), and writes ``forward_head`` and, where its
    classifier is no linear layer or its pool no `GlobalPool`, ``build_classifier`` and ``set_pool``.

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
    converts_groups: ClassVar[bool] = False  # whether its filter of weights converts those of another group, ``source``
    blocks_are_stages: ClassVar[bool] = False  # whether ``blocks`` holds sequences of blocks
    planes_are_fields: ClassVar[bool] = True  # whether intermediate features are planes of regular fields
    faster_channels_last: bool = False  # whether it predicts faster channels last, in float32 on a CPU

    def __init__(self, group: Group, num_classes: int, in_chans: int, num_features: int) -> None:
        super().__init__()
        check_is_group(group)
        whole(num_classes, "num_classes is a whole number")
        whole(in_chans, "in_chans is a whole number")
        if num_classes < 0 or in_chans < 1:
            raise ValueError(f"a network needs num_classes >= 0 and in_chans >= 1, got {num_classes} and {in_chans}")
        self.group = group
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = num_features
        self.grad_checkpointing = False

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the network; warns of a deployed one, which loses its equivariance when it is trained."""
        if mode and self._deployed:
            warnings.warn(
                f"{self._name} is deployed (reparameterized): the filters of all poses are parameters of their own; "
                "training makes them differ, so that the network is no longer equivariant; train the network "
                "that it was made of",
                stacklevel=2,
            )
        return super().train(mode)

    @property
    def _deployed(self) -> bool:
        """Whether filters and norms of all poses are written out, as `timm.utils.reparameterize_model` does.

        The network then has none of the layers to fuse that it had when its classifier was built.
        """
        return self.group.order > 1 and getattr(self, "_can_be_fused", False) and not _has_layers_to_fuse(self)

    @property
    def input_size(self) -> tuple[int, int, int]:
        """The default input size: ``(channels, height, width)``, sides in pixels."""
        _, height, width = self.pretrained_cfg["input_size"]
        return self.in_chans, height, width

    def forward_features(self, x: Tensor) -> Tensor:
        """The last features, a regular field ``(B, C, |H|, height', width')``, of images ``(B, C, height, width)``."""
        self._check_images(x)
        try:
            return self._through_blocks(self.stem(x))
        except SizeError as error:
            raise self._said_for(x, error) from error
        except RuntimeError as error:
            self._check_type(x, error)
            raise

    def feature_field(self, x: Tensor) -> Tensor:
        """The last features as a field whose law its shape tells, which is what the equivariance check compares.

        Here the regular field of ``forward_features``. A network whose features are of another kind gives them as
        invariant maps, ``(B, C, height', width')``.
        """
        y = self.forward_features(x)
        return y.unflatten(1, (-1, self.group.order)) if y.ndim == 4 else y  # a fused network gives planes

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method forward_head(x, pre_logits=False); it needs one"
        )

    def forward(self, x: Tensor) -> Tensor:
        features = self.forward_features(x)
        try:
            return self.forward_head(features)
        except SizeError as error:
            raise self._said_for(x, error) from error

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
            ValueError: If an index is out of range, indices do not ascend, or the format is not supported.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is 'NCHW', planes (B, C·|H|, height, width); got {output_fmt!r}")
        self._check_images(x)
        wanted = self._feature_indices(indices)
        last = max(wanted) if stop_early or intermediates_only else len(self.blocks)
        found = []
        y = x
        for place, stage in enumerate([self.stem, *self.blocks][: last + 1]):
            try:
                y = self._checkpointed([stage], y) if place else stage(y)
            except SizeError as error:
                raise self._said_for(x, error) from error
            except RuntimeError as error:
                self._check_type(x, error)
                raise
            if place in wanted:
                found.append(y.flatten(1, 2) if y.ndim == 5 else y)
        return found if intermediates_only else (y, found)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the blocks after the last requested feature, and the head; returns the indices of the features.

        Args:
            indices: The features, as those of `forward_intermediates`.
            prune_norm: Whether to remove the final norm too, where there is one: no feature is behind it.
            prune_head: Whether to remove the head.
        """
        wanted = self._feature_indices(indices)
        self.blocks = self.blocks[: max(wanted)]
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
            ValueError: If the number is negative, or the network has no such pooling.
        """
        if not isinstance(num_classes, SupportsIndex) or operator.index(num_classes) < 0:
            raise ValueError(f"num_classes is a whole number of at least 0, got {num_classes!r}")
        num_classes = operator.index(num_classes)
        head = self.build_classifier(num_classes) if num_classes else nn.Identity()
        of_fields = global_pool is not None or any(getattr(m, "group", None) is not None for m in head.modules())
        if self._deployed and self.planes_are_fields and of_fields:
            raise ValueError(
                f"{self._name} is deployed (reparameterized), and its "
                f"{'pool' if global_pool is not None else 'classifier'} is a layer of fields; reset the classifier of "
                "the network that it was made of"
            )
        if global_pool is not None:
            self.set_pool(global_pool)
            # timm saves it with the network, and builds the network that it loads with it.
            self._model_args = {**getattr(self, "_model_args", {}), "global_pool": global_pool}
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
        """Sets the global pooling, to a value of the argument ``global_pool`` of the class: here a `GlobalPool`.

        Raises:
            ValueError: If it is no such value.
        """
        self.global_pool = GlobalPool(self.group, global_pool)  # type: ignore[arg-type]

    def build_classifier(self, num_classes: int) -> nn.Module:
        """A new classifier for one or more classes: here a linear layer of the pooled features."""
        return nn.Linear(self.num_features, num_classes)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions by which timm groups parameters by depth, for layer-wise learning rate decay."""
        if self.blocks_are_stages:
            return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)" if coarse else r"^blocks\.(\d+)\.(\d+)"}
        return {"stem": r"^stem", "blocks": r"^blocks" if coarse else [(r"^blocks\.(\d+)", None)]}

    def no_weight_decay(self) -> set[str]:
        """The parameters without weight decay, besides biases and norms: none."""
        return set()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes the blocks in the backward pass, which saves memory and takes time."""
        self.grad_checkpointing = enable

    def _through_blocks(self, x: Tensor) -> Tensor:
        y: Tensor = self._checkpointed(self.blocks, x)
        return y

    def _checkpointed(self, blocks: Iterable[nn.Module], x: Any) -> Any:
        """Blocks in turn, whose activations are recomputed in the backward pass if that is set."""
        if self.grad_checkpointing and self.training:
            return checkpoint_seq(list(blocks), x, flatten=self.blocks_are_stages)
        if isinstance(blocks, nn.Sequential):  # whose hooks are called
            return blocks(x)
        for block in blocks:
            x = block(x)
        return x

    def _classified(self, x: Tensor) -> Tensor:
        """The field of logits by a head that acts on fields, before they are pooled.

        Raises:
            TypeError: If the head has been replaced by a linear layer, which would take the width for channels.
        """
        if (linear := _linear_layer(self.head)) is not None:
            raise TypeError(
                f"the head of {self._name} is a layer of fields, which are pooled after it, and it was replaced by a "
                f"linear layer; model.reset_classifier({linear.out_features}) makes a head of as many classes, and "
                "with num_classes=0 the network gives pooled features for a linear layer of your own"
            )
        y: Tensor = self.head(x)
        return y

    @property
    def _name(self) -> str:
        return network_name(self)

    def _check_images(self, x: Tensor) -> None:
        """Raises ValueError unless these are a batch of images with the network's number of channels."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{self._name} takes images as a tensor (B, {self.in_chans}, height, width), got {type(x).__name__}; "
                "eqzoo.data.preprocess and normalize make them of files, torch.from_numpy of arrays"
            )
        if x.ndim == 4 and x.shape[1] == self.in_chans:
            return
        way = ""
        if x.ndim == 3 and x.shape[0] == self.in_chans:
            way = "; image[None] is a batch of one"
        elif x.ndim == 3 and self.in_chans == 1:
            way = "; images[:, None] have one channel"
        elif x.ndim == 4 and x.shape[3] == self.in_chans:
            way = "; images.permute(0, 3, 1, 2) have their channels there"
        elif x.ndim == 4:
            way = f"; in_chans={x.shape[1]} makes a network for images of as many channels"
        raise ValueError(f"{self._name} takes images (B, {self.in_chans}, height, width), got {tuple(x.shape)}{way}")

    def _check_type(self, x: Tensor, error: RuntimeError) -> None:
        """Raises TypeError where images failed that have another type of number than the network."""
        if x.is_meta or isinstance(error, torch.OutOfMemoryError):
            return
        if self._deployed and any(isinstance(module, nn.SyncBatchNorm) for module in self.modules()):
            raise ValueError(
                f"{self._name} has torch.nn.SyncBatchNorm, which is not deployed or exported with it; load its state "
                f"dict into a fresh eqzoo.create_model({self._name!r}, ...)"
            ) from error
        own = next(self.parameters()).dtype
        if x.dtype == own:
            return
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # which autocast leaves alone
            return
        way = f"images.to({own}), or model.to({x.dtype}), makes them fit"
        if not x.is_floating_point():
            way = f"eqzoo.data.normalize(images, mean, std, {own}) makes normalized images of pixels, 0 to 255"
        raise TypeError(f"the images are {x.dtype} and the network is {own}; {way}") from error

    def _said_for(self, x: Tensor, error: SizeError) -> SizeError:
        """The error of a layer, with sizes of images that work unless the network only tries the size."""
        return error if x.is_meta else with_image_size(self, x, error)

    def _feature_indices(self, indices: int | Sequence[int] | None) -> list[int]:
        count = len(self.blocks) + 1
        if indices is None:
            return list(range(count))
        asked = list(range(-indices, 0) if isinstance(indices, int) else indices)
        if not asked or not all(isinstance(i, SupportsIndex) and -count <= i.__index__() < count for i in asked):
            raise ValueError(
                f"features are numbered 0 (stem) to {count - 1}; give a list of these, or the number of the last "
                f"ones, 1 to {count}; got {indices!r}"
            )
        places = [i % count for i in map(operator.index, asked)]
        if places != sorted(set(places)):
            raise ValueError(
                f"features come in the order of the network, each once: {sorted(set(places))}; got {indices!r}"
            )
        return places


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


def _linear_layer(module: nn.Module) -> nn.Linear | None:
    """A linear layer in a module, but for those inside of the layers of this package."""
    if isinstance(module, nn.Linear):
        return module
    if type(module).__module__.startswith("eqzoo."):
        return None
    return next((found for child in module.children() if (found := _linear_layer(child)) is not None), None)
