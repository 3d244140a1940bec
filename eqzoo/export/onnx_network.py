"""Networks in the ONNX files that this package writes."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..groups import Group
from .onnx_file import OnnxFile

_NEEDED = ("classes", "group", "input_size", "mean", "std")


class OnnxNetwork(nn.Module):
    """The network in an ONNX file of this package, as far as predictions need it; ONNX Runtime runs it on the CPU.

    It maps normalized images ``(B, C, height, width)`` to logits ``(B, classes)``, both in float32 whatever the images'
    type, and has the attributes of a network that its metadata hold: ``group``, ``num_classes``, ``in_chans``,
    ``input_size`` and ``pretrained_cfg``; ``metadata`` has them as they stand in the file. It has no parameters.

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
        self.path = Path(path)
        self._file = OnnxFile(self.path)
        found = self.metadata = self._file.metadata
        if missing := [key for key in _NEEDED if key not in found]:
            raise ValueError(
                f"the metadata of {path} lack {', '.join(missing)}, so its images and classes are unknown; eqzoo "
                "predicts with the ONNX files that eqzoo export writes"
            )
        try:
            channels, height, width, labels, mean, std = _read(found)
            self.group = Group.from_name(found["group"])
        except ValueError as error:
            raise ValueError(f"the metadata of {path} are damaged: {error}; export the network again") from error
        takes, size = self._file.input_shape, (channels, height, width)
        if len(takes) != 4 or any(side not in (None, known) for side, known in zip(takes[1:], size, strict=True)):
            raise ValueError(f"{path} takes {takes}, and its metadata say {size}; export the network again")
        self.input_size = size
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

    def __reduce__(self) -> tuple[type["OnnxNetwork"], tuple[Path], dict[str, Any]]:
        """A copy, also in another process, reads the file again: a session of ONNX Runtime cannot be copied."""
        return OnnxNetwork, (self.path.resolve(),), {"pretrained_cfg": self.pretrained_cfg, "training": self.training}

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalized images."""
        return self._file(x).float()


def _read(found: Mapping[str, str]) -> tuple[int, int, int, tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Channels, height, width, classes, mean and standard deviation of metadata.

    Raises:
        ValueError: If they are not JSON, or of another kind.
    """
    size, classes, mean, std = (json.loads(found[key]) for key in ("input_size", "classes", "mean", "std"))
    if not (isinstance(size, list) and len(size) == 3 and all(type(side) is int and side > 0 for side in size)):
        raise ValueError(f"input_size is [channels, height, width], got {size!r}")
    if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ValueError(f"classes is a list of names, got {classes!r}")
    if len({*classes}) < len(classes):
        raise ValueError(f"classes have different names, got {classes!r}")
    for name, values in (("mean", mean), ("std", std)):
        numbers = isinstance(values, list) and all(isinstance(v, int | float) and math.isfinite(v) for v in values)
        if not numbers or len(values) not in (1, size[0]) or (name == "std" and min(values) <= 0):
            raise ValueError(f"{name} has a number for each of {size[0]} channels, got {values!r}")
    return size[0], size[1], size[2], tuple(classes), tuple(mean), tuple(std)
