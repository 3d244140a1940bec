"""Networks to predict with: checkpoints and ONNX files."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models import EquivariantNet
from ..models.loading import load_network
from .onnx_network import OnnxNetwork

__all__ = ["Predictor", "load_predictor"]


@dataclass(frozen=True)
class Predictor:
    """A network that predicts, and where it comes from.

    Args:
        network: The network, in evaluation mode.
        name: What the user called it.
        title: The same; of a registered network its name with the tag of its weights.
        folder: The folder of the checkpoint, if it has one.
        image_side: The shorter side of the images that it was trained on, see
            `eqzoo.models.resolve.ModelSource.image_side`.
    """

    network: EquivariantNet | OnnxNetwork
    name: str
    title: str
    folder: Path | None = None
    image_side: int | None = None


def load_predictor(source: str | os.PathLike[str], device: str | None = None) -> Predictor:
    """Loads a network with its weights, or an ONNX file.

    Args:
        source: What `eqzoo.create_model` takes as a name, or the path of an .onnx file.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU where there is one. ONNX files run on the CPU alone.

    Raises:
        ValueError: As `eqzoo.models.loading.load_network` and `OnnxNetwork`, or if an ONNX file is to run elsewhere.
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
