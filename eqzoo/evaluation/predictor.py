"""Predictors: a checkpoint, an ONNX file or a network, from images to probabilities."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._common import network_name
from ..analysis._mode import evaluation_mode
from ..data import AnySplit, batches
from ..data.images import normalized
from ..export.onnx_network import OnnxNetwork
from ..groups import Z2, Group
from ..models import OrbitNet
from ..models.load import load_network
from ..models.orbit import copy_logits

# On a CPU larger batches are slower where the activations between two layers no longer fit its caches.
BATCH_SIZE = 500 if torch.cuda.is_available() else 50


@dataclass(frozen=True)
class Predictor:
    """A classifier that predicts, and where it comes from.

    Args:
        network: The network in evaluation mode; its ``pretrained_cfg`` has the input size, mean and standard deviation
            and, if they are known, the names of the classes.
        name: What the user called it.
        title: The same; of a registered network its name with the tag of its weights.
        folder: The folder of the checkpoint, if it has one.
        image_side: The shorter side of the images that it was trained on, see `eqzoo.models.load.ModelSource`.
        channels_last: Whether images are channels last in memory; None for what is faster, see `in_layout`.
    """

    network: nn.Module
    name: str
    title: str
    folder: Path | None = None
    image_side: int | None = None
    channels_last: bool | None = None

    @classmethod
    def of(cls, network: nn.Module, channels_last: bool | None = None) -> "Predictor":
        """The predictor of a network itself, called by its architecture, or by its file."""
        inside = network.network if isinstance(network, OrbitNet) else network
        name = str(inside.path) if isinstance(inside, OnnxNetwork) else network_name(inside)
        if isinstance(network, OrbitNet) and (count := network.copies or network.copied.order) > 1:
            name += f" (mean of {count})"
        return cls(network, name, name, channels_last=channels_last)

    @property
    def cfg(self) -> dict[str, Any]:
        """The ``pretrained_cfg`` of the network."""
        return self.network.pretrained_cfg  # type: ignore[return-value]

    @property
    def input_size(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that the network takes."""
        found = getattr(self.network, "input_size", None) or self.cfg["input_size"]
        channels, height, width = found
        return int(channels), int(height), int(width)

    @property
    def group(self) -> Group:
        """The group under which the network promises to be invariant; translations alone if it promises none."""
        group = getattr(self.network, "group", None)
        return group if isinstance(group, Group) else Z2

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; numbers where they have none.

        Raises:
            ValueError: If the network predicts no classes.
        """
        count = int(getattr(self.network, "num_classes", 0))
        if count < 2:
            what = "a single output, a number and not a class" if count else "no classifier; eqzoo finetune trains one"
            raise ValueError(f"{self.name} has {what}")
        names: tuple[str, ...] = tuple(self.cfg.get("label_names") or ())
        return names if len(names) == count else tuple(map(str, range(count)))

    def normalized(self, images: Tensor) -> Tensor:
        """Images ``(B, C, height, width)`` with values in 0 to 255, normalized, on the network's device."""
        # An ONNX file has no parameter, and runs on the CPU.
        like = next(self.network.parameters(), torch.zeros((), dtype=torch.float32, device="cpu"))
        return normalized(images.to(like.device), self.cfg["mean"], self.cfg["std"], like.dtype)

    def in_layout(self, x: Tensor) -> Tensor:
        """Images in the memory format of `channels_last`.

        None is channels last on a CPU where the network's ``faster_channels_last`` says so (docs/speed.md); in float64
        neither is much faster, so that images stay as they are.
        """
        last = self.channels_last
        if last is None:
            fast = getattr(self.network, "faster_channels_last", False) and x.dtype != torch.float64
            last = bool(fast) and x.device.type == "cpu"
        return x.to(memory_format=torch.channels_last) if last else x

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """The probabilities of the classes, ``(B, classes)`` float64 on the CPU.

        Args:
            images: ``(B, C, height, width)`` with values in 0 to 255, of the network's input size.

        Raises:
            ValueError: If a logit is not finite.
        """
        with evaluation_mode(self.network):
            return finite(self.network(self.in_layout(self.normalized(images))).cpu()).double().softmax(1)

    def inputs(self, split: AnySplit, workers: int = 0) -> Iterator[Tensor]:
        """The normalized images of a split in batches."""
        for images in batches(split, torch.arange(len(split)).split(BATCH_SIZE), workers):
            yield self.in_layout(self.normalized(images))

    @torch.no_grad()
    def logits(self, split: AnySplit, workers: int = 0) -> Tensor:
        """The finite logits of a split, ``(n, classes)``, on the CPU.

        Args:
            split: The images, of the network's input size.
            workers: The processes that read images that are not in memory.

        Raises:
            ValueError: If a logit is not finite: the class with the largest of them would be the first one.
        """
        with evaluation_mode(self.network):
            return finite(torch.cat([self.network(x).cpu() for x in self.inputs(split, workers)]))

    @torch.no_grad()
    def copies_logits(self, split: AnySplit, group: Group, workers: int = 0) -> Tensor:
        """The finite logits for the copies of each image by all elements of a group, ``(|H|, n, classes)``."""
        with evaluation_mode(self.network):
            parts = [copy_logits(self.network, x, group).cpu() for x in self.inputs(split, workers)]
        return finite(torch.cat(parts, 1))


def finite(logits: Tensor) -> Tensor:
    """The logits ``(..., classes)``; those of NaN have no largest one, and `torch.argmax` would give the first class.

    Raises:
        ValueError: If one is not a number or infinite; -inf, by which classes are masked, is allowed beside others.
    """
    broken = int((~logits.amax(-1).isfinite()).sum())  # the largest is NaN if one of them is
    if broken:
        raise ValueError(
            f"the output of the network is not finite for {broken:,} of {logits[..., 0].numel():,} images; its weights "
            "or the images hold NaN or infinite numbers"
        )
    return logits


def check_device(device: str | None) -> None:
    """Raises ValueError unless there is such a device to run networks on; None is always right."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device is 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', and torch finds no GPU here; leave it out, or take 'cpu'")


def load_predictor(source: str | os.PathLike[str], device: str | None = None) -> Predictor:
    """Loads a network with its weights, or an ONNX file.

    Args:
        source: What `eqzoo.create_model` takes as a name, or the path of an .onnx file.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one. ONNX files run on the CPU alone.

    Raises:
        ValueError: As `eqzoo.models.load.load_network` and `OnnxNetwork`, or if an ONNX file is to run elsewhere.
        FileNotFoundError: If a path is given at which there is nothing.
        WeightsNotFoundError: If there are no weights.
    """
    text = os.fspath(source)
    if Path(text).suffix.lower() == ".onnx":
        if device not in (None, "cpu"):
            raise ValueError(f"{text} is an ONNX file, which runs on the CPU, and the device is {device!r}: take 'cpu'")
        return Predictor(OnnxNetwork(text).eval(), text, text)
    loaded = load_network(text, pretrained=True)
    cfg = loaded.network.pretrained_cfg
    tagged = ".".join(part for part in (cfg["architecture"], cfg.get("tag")) if part)
    # What is no registered name goes by what the user called it: two runs on the same images have one tag.
    title = loaded.name if loaded.source.config else tagged
    network = loaded.network.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Predictor(network, loaded.name, title, loaded.source.folder, loaded.source.image_side)


def averaged(predictors: Sequence[Predictor], name: str) -> list[Predictor]:
    """The networks with test-time augmentation: means over a group, see `eqzoo.models.OrbitNet`.

    Networks that are invariant under the group stay as they are, and those that are so in part average over the rest:
    their predictions for the other copies are the same. Those with options that give up exactness, ``exact=False`` of
    layers and the authors' variants of GSA-Nets, average over the whole group.

    Raises:
        ValueError: If the group is none of the pixel grid, or all networks are invariant under it.
    """
    group = Group.from_name(name)
    missing = [_missing(predictor, group) for predictor in predictors]
    if all(rest.order == 1 for rest in missing):
        names = " and ".join(predictor.name for predictor in predictors)
        raise ValueError(
            f"{names} {'are' if len(predictors) > 1 else 'is'} invariant under {name}, so that a mean over the copies "
            "of an image changes nothing; leave tta (--tta) out"
        )
    return [
        _averaged(predictor, rest) if rest.order > 1 else predictor
        for predictor, rest in zip(predictors, missing, strict=True)
    ]


def _missing(predictor: Predictor, group: Group) -> Group:
    """The group to average the predictions of a network over, so that they become invariant under ``group``.

    Averages over more copies would be the same: those that differ by an element of the network's own group are equal,
    but where an option of a layer gives that up.
    """
    if any(getattr(layer, "exact", None) is False for layer in predictor.network.modules()):  # at some sizes only
        return group
    own = predictor.group.of_grid
    rotations = 1 if own.rotations % group.rotations == 0 else group.rotations
    return Group(rotations, group.reflections and not own.reflections)


def _averaged(predictor: Predictor, group: Group) -> Predictor:
    more = f" (mean of {group.order})"
    network = OrbitNet(predictor.network, group, average="probabilities")
    return replace(predictor, network=network, name=predictor.name + more, title=predictor.title + more)
