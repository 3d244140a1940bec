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
    `torch.optim.swa_utils.AveragedModel` with ``use_buffers=True`` averages them too, and its rounding makes other
    indices of them; ``train`` and ``eval`` restore them, so call ``eval`` behind the last update.
    """

    # The values, as an array because torch.load moves every tensor, and the buffer that has them.
    _tables: dict[str, tuple[np.ndarray[Any, Any], Tensor]]

    def register_table(self, name: str, table: np.ndarray[Any, Any]) -> None:
        """Registers a buffer outside of the state dict, on PyTorch's default device as parameters are.

        Args:
            name: Its name.
            table: Its values, which are copied; an array, because a fake tensor would have none.
        """
        values = table.copy()
        self.register_buffer(name, _buffer(values, torch.get_default_device()), persistent=False)
        self.__dict__.setdefault("_tables", {})[name] = (values, self._buffers[name])

    def train(self, mode: bool = True) -> Self:
        """Sets the mode, and restores tables that were changed in place."""
        for name, (values, own) in self.__dict__.get("_tables", {}).items():
            buffer = self._buffers.get(name)
            if buffer is not None and buffer is own and _is_changed(buffer, values):
                with torch.no_grad():
                    buffer.copy_(torch.from_numpy(values))
        return super().train(mode)

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
        tables = self.__dict__.get("_tables", {})
        missing = [name for name in tables if (buffer := self._buffers.get(name)) is not None and buffer.is_meta]
        if not missing or not local_metadata.get("assign_to_params_buffers"):
            return
        devices = {
            key: value.device for key, value in state_dict.items() if isinstance(value, Tensor) and not value.is_meta
        }
        own = (device for key, device in devices.items() if key.startswith(prefix))
        if (device := next(own, next(iter(devices.values()), None))) is None:
            return
        for name in missing:
            values = tables[name][0]
            self._buffers[name] = restored = _buffer(values, device)
            tables[name] = (values, restored)


def _is_changed(table: Tensor, values: np.ndarray[Any, Any]) -> bool:
    if type(table) is not Tensor or table.is_meta or table.is_inference() or not table._version:
        return False
    return not np.array_equal(table.cpu().numpy(), values)


def _buffer(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A copy of the values; never an inference tensor, which could not be used in training."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)
