"""Says which checkpoints the wheel and the source archive carry: all cards, and weights of up to 2 MB.

The larger ones are in git and on the Hub; `eqzoo.create_model` looks for them there.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WEIGHTS_LIMIT = 2_000_000  # bytes


class CheckpointsHook(BuildHookInterface):
    """Adds the folder of checkpoints without its large weights."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files; an editable install reads them from the clone."""
        if version == "editable":
            return
        root = Path(self.root)
        into = "eqzoo/" if self.target_name == "wheel" else ""
        for path in sorted((root / "model_cards").glob("*/[!.]*")):
            if path.suffix == ".onnx":  # made from the weights, and in no clone
                continue
            if path.suffix != ".safetensors" or path.stat().st_size <= WEIGHTS_LIMIT:
                build_data["force_include"][str(path)] = into + path.relative_to(root).as_posix()
