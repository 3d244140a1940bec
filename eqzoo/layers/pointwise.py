"""Pointwise convolution of regular fields: mixes channels, not poses."""

from torch import Tensor, nn

from ..groups import Group
from ._checks import check_field
from ._layout import group_last, is_channels_last, with_channels_last
from ._planes import Planes


class PointwiseConv2d(nn.Conv2d):
    """Linear map of the channels of a field, the same at every pose and position.

    ``out(c', h, x) = Σ_c W(c', c) f(c, h, x) + b(c')``, equivariant under any group. A 1 x 1 `GroupConv2d` mixes poses
    too, and has |H| times as many weights.

    Args:
        group: The point group H.
        in_channels: The number of input fields, C.
        out_channels: The number of output fields, C'.
        bias: Whether to add a bias, one per field.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C', |H|, height, width)``; the weight is ``(C', C, 1, 1)``.

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), appendix F
        https://arxiv.org/abs/2010.00977

    Example:
        >>> import torch
        >>> from eqzoo.groups import cyclic
        >>> PointwiseConv2d(cyclic(8), 6, 3)(torch.zeros(2, 6, 8, 5, 5)).shape
        torch.Size([2, 3, 8, 5, 5])
    """

    def __init__(self, group: Group, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 1, bias=bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, self.in_channels, self.group.order)
        if is_channels_last(x):
            # Poses and columns are merged into one axis, a view: a 1 x 1 kernel does not cross its borders.
            y = with_channels_last(super().forward(group_last(x).flatten(3)))
            return y.unflatten(3, (-1, self.group.order)).permute(0, 1, 4, 2, 3)
        # Rows and columns are merged into one axis, a view again.
        y = super().forward(x.flatten(3))
        return y.unflatten(3, x.shape[3:])

    def extra_repr(self) -> str:
        return f"{self.group.name}, {super().extra_repr()}"

    def fuse(self) -> nn.Module:
        """The same map on planes, ``(B, C·|H|, height, width)``.

        A plain convolution of planes would have ``|H|²`` times as many weights, most of them zero.
        """
        return Planes(self, self.group.order)
