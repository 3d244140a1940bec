"""Adapter from planes to fields, for fused networks."""

import copy

from torch import Tensor, nn


class Planes(nn.Module):
    """Applies a layer of regular fields to planes, for fused networks.

    Args:
        layer: The layer, which takes fields ``(B, C, |H|, height, width)`` or, if ``order`` is None, images. It is
            copied, because timm continues to fuse the children of the layer that this one replaces.
        order: The order of the group, ``|H|``; None for a layer that takes images.

    Shape:
        ``(B, C·|H|, height, width)`` to ``(B, C'·|H|, height', width')``; an output that is no field is
        returned as it is.
    """

    def __init__(self, layer: nn.Module, order: int | None) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x if self.order is None else x.unflatten(1, (-1, self.order)))
        return y.flatten(1, 2) if y.ndim == 5 else y

    def fuse(self) -> "Planes":
        """A copy, so that fusing a fused network changes nothing."""
        return Planes(self.layer, self.order)

    def extra_repr(self) -> str:
        return f"order={self.order}"
