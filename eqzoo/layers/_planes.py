"""A layer of fields inside a network of planes."""

import copy

from torch import Tensor, nn

__all__ = ["Planes"]


class Planes(nn.Module):
    """Applies a layer of regular fields to planes, for fused networks.

    Args:
        layer: The layer, from ``(B, C, |H|, height, width)`` or, without an order, from pictures. It is copied: timm
            goes on fusing the children of the layer that it has replaced.
        order: The number of elements, ``|H|``; None for a layer that takes pictures.

    Shape:
        ``(B, C·|H|, height, width)`` to ``(B, C'·|H|, height', width')``.
    """

    def __init__(self, layer: nn.Module, order: int | None) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x if self.order is None else x.unflatten(1, (-1, self.order)))
        return y.flatten(1, 2)

    def fuse(self) -> "Planes":
        """The same again, so that a fused network may be fused once more."""
        return Planes(self.layer, self.order)

    def extra_repr(self) -> str:
        return f"order={self.order}"
