"""Networks in the ONNX files that this package writes."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..groups import Group
from .onnx_file import OnnxFile

__all__ = ["OnnxNetwork"]

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
            channels, height, width = map(int, size)
            mean, std, labels = tuple(map(float, mean)), tuple(map(float, std)), tuple(map(str, classes))
            if isinstance(classes, str) or not {len(mean), len(std)} <= {1, channels}:
                raise ValueError(
                    f"classes {classes!r}, and means and deviations {mean} and {std} of {channels} channels"
                )
            self.group = Group.from_name(found["group"])
        except (ValueError, TypeError) as error:
            raise ValueError(f"the metadata of {path} are damaged: {error}; export the network again") from error
        self.input_size = (channels, height, width)
        self.in_chans, self.num_classes = channels, len(labels)
        self.pretrained_cfg: dict[str, Any] = {
            "architecture": found.get("architecture") or Path(path).stem,
            "tag": found.get("tag", ""),
            "input_size": self.input_size,
            "mean": mean,
            "std": std,
            # Classes without names are numbered in the metadata.
            "label_names": () if labels == tuple(map(str, range(len(labels)))) else labels,
        }

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images."""
        return self._file(x.detach().to("cpu", torch.float32))
