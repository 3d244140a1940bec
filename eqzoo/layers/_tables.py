"""Tables of indices: buffers that follow from the arguments of a layer."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

__all__ = ["KeepsTables"]


class KeepsTables(nn.Module):
    """The base of layers with tables, which the state dict does not hold and nothing but the arguments changes.

    A conversion to another device can leave buffers without values: `torch.nn.Module.to_empty`, with which networks of
    the meta device get memory before their weights are loaded. Here it gives them the values of the table.
    """

    _tables: dict[str, tuple[Tensor, Tensor]]  # the values on the CPU, and the buffer that has them

    def register_table(self, name: str, table: Tensor) -> None:
        """Registers a buffer outside of the state dict.

        Args:
            name: Its name.
            table: Its values, on the CPU.
        """
        self.register_buffer(name, table, persistent=False)
        self.__dict__.setdefault("_tables", {})[name] = (table, table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        tables = self.__dict__.get("_tables", {})
        # One that was assigned by hand is converted as any other buffer.
        own = [name for name, (_, buffer) in tables.items() if self._buffers.get(name) is buffer]
        super()._apply(fn, recurse)
        for name in own:
            table, before = tables[name]
            after = self._buffers[name]
            if after is not None and after is not before:
                self._buffers[name] = table.to(after.device)
                tables[name] = (table, self._buffers[name])
        return self
