"""Tables of indices: buffers that follow from the arguments of a layer."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn


class KeepsTables(nn.Module):
    """Base class of layers with tables of indices: buffers that the state dict does not hold.

    `torch.nn.Module.to_empty` and ``load_state_dict(assign=True)``, with which networks of the meta device get their
    weights, leave such buffers without values, and an average over all buffers rounds indices to others. Conversions,
    loading, `train` and `eval` therefore write the tables anew.
    """

    _tables: dict[str, np.ndarray[Any, Any]]  # arrays, because torch.load moves every tensor

    def register_table(self, name: str, table: np.ndarray[Any, Any]) -> None:
        """Registers a buffer outside of the state dict, on PyTorch's default device as parameters are.

        Args:
            name: Its name.
            table: Its values, which are copied.
        """
        values = self.__dict__.setdefault("_tables", {})[name] = table.copy()
        self.register_buffer(name, _buffer(values, torch.get_default_device()), persistent=False)

    def init_non_persistent_buffers(self, device: torch.device | None = None) -> None:
        """Writes the tables anew, on their device or on another one; timm and transformers call it by this name."""
        for name, values in self.__dict__.get("_tables", {}).items():
            buffer = self._buffers.get(name)
            if buffer is not None:
                self._buffers[name] = _buffer(values, device or buffer.device)

    def train(self, mode: bool = True) -> Self:
        self.init_non_persistent_buffers()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.init_non_persistent_buffers()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if local_metadata.get("assign_to_params_buffers"):
            of_layer = [value for key, value in state_dict.items() if key.startswith(prefix)]
            shown = [x.device for x in (*of_layer, *state_dict.values()) if isinstance(x, Tensor)]
            self.init_non_persistent_buffers(shown[0] if shown else torch.device("cpu"))


def _buffer(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A copy of the values; never an inference tensor, which could not be used in training."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)
