"""Tables of indices: buffers that follow from the arguments of a layer."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

__all__ = ["KeepsTables"]


class KeepsTables(nn.Module):
    """The base of layers with tables, which the state dict does not hold and nothing but the arguments changes.

    A conversion to another device can leave buffers without values: `torch.nn.Module.to_empty`, with which networks of
    the meta device get memory before their weights are loaded. It never changes a table here.
    """

    _tables: dict[str, Tensor]

    def register_table(self, name: str, table: Tensor) -> None:
        """Registers a buffer outside of the state dict.

        Args:
            name: Its name.
            table: Its values, on the CPU.
        """
        self.register_buffer(name, table, persistent=False)
        self.__dict__.setdefault("_tables", {})[name] = table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name, table in self.__dict__.get("_tables", {}).items():
            converted = self._buffers[name]
            if converted is not None and converted is not table:
                self._buffers[name] = table.to(converted.device)
        return self
