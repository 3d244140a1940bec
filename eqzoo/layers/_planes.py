"""A layer of fields inside a network of planes."""

from torch import Tensor, nn

__all__ = ["Planes"]


class Planes(nn.Module):
    """Applies a layer of regular fields to planes, for fused networks.

    Args:
        layer: The layer, ``(B, C, |H|, height, width)`` to the same with any C.
        order: The number of elements, ``|H|``.

    Shape:
        ``(B, C·|H|, height, width)`` to ``(B, C'·|H|, height', width')``.
    """

    def __init__(self, layer: nn.Module, order: int) -> None:
        super().__init__()
        self.layer = layer
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.unflatten(1, (-1, self.order)))
        return y.flatten(1, 2)

    def extra_repr(self) -> str:
        return f"order={self.order}"
