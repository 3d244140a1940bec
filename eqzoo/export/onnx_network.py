"""Networks to predict with: checkpoints, and the ONNX files that this package writes."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..groups import Group
from ..models import EquivariantNet
from ..models.loading import load_network
from .onnx_file import OnnxFile

__all__ = ["OnnxNetwork", "Predictor", "load_predictor"]

_NEEDED = ("classes", "group", "input_size", "mean", "std")


class OnnxNetwork(nn.Module):
    """The network in an ONNX file of this package, as far as predictions need it; ONNX Runtime runs it on the CPU.

    It maps normalized images ``(B, C, height, width)`` to logits ``(B, classes)``, both in float32 whatever the images'
    type, and has the attributes of a network that its metadata hold: ``group``, ``num_classes``, ``in_chans``,
    ``input_size`` and ``pretrained_cfg``. It has no parameters.

    Args:
        path: The file, as `eqzoo.export_onnx` and `eqzoo.quantize_onnx` write it.

    Raises:
        ImportError: If ONNX Runtime is not installed.
        FileNotFoundError: If there is no such file.
        ValueError: If ONNX Runtime cannot run the file, or its metadata do not say what its classes are and how its
            images are normalized.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._file = OnnxFile(Path(path))
        found = self._file.metadata
        if missing := [key for key in _NEEDED if key not in found]:
            raise ValueError(
                f"the metadata of {path} lack {', '.join(missing)}, so its images and classes are unknown; eqzoo "
                "predicts with the ONNX files that eqzoo export writes"
            )
        try:
            classes, size, mean, std = (json.loads(found[key]) for key in ("classes", "input_size", "mean", "std"))
            self.group = Group.from_name(found["group"])
            self.input_size: tuple[int, int, int] = (int(size[0]), int(size[1]), int(size[2]))
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"the metadata of {path} are damaged: {error}; export the network again") from error
        self.in_chans, self.num_classes = self.input_size[0], len(classes)
        self.pretrained_cfg: dict[str, Any] = {
            "architecture": found.get("architecture") or Path(path).stem,
            "tag": found.get("tag", ""),
            "input_size": self.input_size,
            "mean": tuple(mean),
            "std": tuple(std),
            # Classes without names are numbered in the metadata.
            "label_names": () if classes == [str(i) for i in range(len(classes))] else tuple(classes),
        }

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images."""
        return self._file(x.detach().to("cpu", torch.float32))


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
    if Path(text).suffix == ".onnx":
        if device not in (None, "cpu"):
            raise ValueError(f"{text} is an ONNX file, which runs on the CPU; leave device={device!r} out")
        return Predictor(OnnxNetwork(text).eval(), text, text)
    loaded = load_network(text, pretrained=True)
    cfg = loaded.network.pretrained_cfg
    tagged = ".".join(part for part in (cfg["architecture"], cfg.get("tag")) if part)
    # What is no registered name goes by what the user called it: two runs on the same images have one tag.
    title = loaded.name if loaded.source.config else tagged
    network = loaded.network.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Predictor(network, loaded.name, title, loaded.source.folder, loaded.source.image_side)
