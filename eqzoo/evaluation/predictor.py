"""Networks to predict with: checkpoints and ONNX files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from ..export.onnx_network import OnnxNetwork
from ..groups import Group
from ..models import EquivariantNet, OrbitNet
from ..models.load import load_network

__all__ = ["Network", "Predictor", "averaged", "check_device", "load_predictor"]

Network: TypeAlias = EquivariantNet | OnnxNetwork | OrbitNet


@dataclass(frozen=True)
class Predictor:
    """A network that predicts, and where it comes from.

    Args:
        network: The network, in evaluation mode.
        name: What the user called it.
        title: The same; of a registered network its name with the tag of its weights.
        folder: The folder of the checkpoint, if it has one.
        image_side: The shorter side of the images that it was trained on, see
            `eqzoo.models.load.ModelSource.image_side`.
    """

    network: Network
    name: str
    title: str
    folder: Path | None = None
    image_side: int | None = None


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
    missing = [_missing(predictor.network, group) for predictor in predictors]
    found = [
        _averaged(predictor, rest) if rest.order > 1 else predictor
        for predictor, rest in zip(predictors, missing, strict=True)
    ]
    if all(new is old for new, old in zip(found, predictors, strict=True)):
        names = " and ".join(predictor.name for predictor in predictors)
        raise ValueError(
            f"{names} {'are' if len(found) > 1 else 'is'} invariant under {name}, so that a mean over the copies of an "
            "image changes nothing; leave tta (--tta) out"
        )
    return found


def _missing(network: Network, group: Group) -> Group:
    """The group to average the predictions of a network over, so that they become invariant under ``group``.

    Averages over more copies would be the same: those that differ by an element of the network's own group are equal,
    but where an option of a layer gives that up.
    """
    if any(_is_inexact(layer) for layer in network.modules()):
        return group
    own = network.group.of_grid
    rotations = 1 if own.rotations % group.rotations == 0 else group.rotations
    return Group(rotations, group.reflections and not own.reflections)


def _is_inexact(layer: nn.Module) -> bool:
    """Whether a layer is to be equivariant at some sizes only (``exact=False``), or in part, as the authors' code."""
    index = getattr(layer, "pose_index", None)  # a table of numbers in other layers
    return getattr(layer, "exact", None) is False or (isinstance(index, str) and index == "released")


def _averaged(predictor: Predictor, group: Group) -> Predictor:
    more = f" (mean of {group.order})"
    network = OrbitNet(predictor.network, group, average="probabilities")
    return replace(predictor, network=network, name=predictor.name + more, title=predictor.title + more)
