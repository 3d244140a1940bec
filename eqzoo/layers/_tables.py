"""Tables of indices: buffers that follow from the arguments of a layer."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["KeepsTables"]


class KeepsTables(nn.Module):
    """The base of layers with tables of indices: buffers that the state dict does not hold.

    `torch.nn.Module.to_empty`, with which networks of the meta device get memory before their weights are loaded,
    leaves such buffers uninitialized, and `torch.nn.Module.load_state_dict` with ``assign=True``, which gives such
    networks their weights, leaves them on the meta device; these layers restore their tables after both.
    """

    # The values, as an array because torch.load moves every tensor, and the buffer that has them.
    _tables: dict[str, tuple[np.ndarray[Any, Any], Tensor]]

    def register_table(self, name: str, table: Tensor) -> None:
        """Registers a buffer outside of the state dict.

        Args:
            name: Its name.
            table: Its values, on the CPU; they are copied.
        """
        values = table.numpy().copy()
        self.register_buffer(name, _buffer(values, torch.device("cpu")), persistent=False)
        self.__dict__.setdefault("_tables", {})[name] = (values, self._buffers[name])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        tables, buffers = self.__dict__.get("_tables", {}), dict(self._buffers)
        super()._apply(fn, recurse)
        for name, (values, own) in tables.items():
            before, after = buffers.get(name), self._buffers.get(name)
            if before is None or after is None or after is before:
                continue
            if before is own or before.is_meta:  # one that was assigned is converted as any other buffer
                self._buffers[name] = restored = _buffer(values, after.device)
                tables[name] = (values, restored)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        loaded = [value for value in state_dict.values() if isinstance(value, Tensor) and not value.is_meta]
        if not local_metadata.get("assign_to_params_buffers") or not loaded:
            return
        own_first = sorted(state_dict, key=lambda key: not key.startswith(prefix))
        device = next(state_dict[key].device for key in own_first if any(state_dict[key] is value for value in loaded))
        for name, (values, _) in self.__dict__.get("_tables", {}).items():
            buffer = self._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                self._buffers[name] = restored = _buffer(values, device)
                self._tables[name] = (values, restored)


def _buffer(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A copy of the values; never an inference tensor, which could not be used in training."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)
