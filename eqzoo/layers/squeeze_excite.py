"""Squeeze and excitation for regular fields."""

import torch
from torch import Tensor, nn

from ..groups import Group
from ._checks import check_field
from ._layout import is_channels_last
from ._planes import Planes


class GroupSqueezeExcite(nn.Module):
    """Squeeze and excitation: scales each field by a gate computed from the means of all fields.

    ``out(c, h, x) = σ(W₂ relu(W₁ s + b₁) + b₂)_c f(c, h, x)`` with ``s_c`` the mean of ``f(c, ·, ·)`` over the group
    and space. s, and with it the gates, are invariant.

    Args:
        group: The point group H.
        channels: The number of regular fields, C.
        reduction: The ratio of fields to hidden units, r; it divides C.

    Shape:
        ``(B, C, |H|, height, width)`` to the same.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), section 3.3, equations 17 and 18
        https://arxiv.org/abs/1911.07704
        Squeeze-and-Excitation Networks (Hu et al., 2018), section 3, https://arxiv.org/abs/1709.01507

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> GroupSqueezeExcite(P4, 16, reduction=4)(torch.zeros(2, 16, 4, 8, 8)).shape
        torch.Size([2, 16, 4, 8, 8])
    """

    def __init__(self, group: Group, channels: int, reduction: int = 16) -> None:
        super().__init__()
        if channels % reduction:
            raise ValueError(f"the reduction divides the number of fields, and {reduction} does not divide {channels}")
        self.group = group
        self.channels = channels
        self.reduce = nn.Linear(channels, channels // reduction)
        self.act = nn.ReLU()
        self.expand = nn.Linear(channels // reduction, channels)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, self.channels, self.group.order)
        places = self.group.order * x.shape[3] * x.shape[4]
        if is_channels_last(x):
            # In memory order, for sums and their gradients without strides.
            flat = x.permute(0, 3, 4, 2, 1).flatten(1, 3)
            y = flat * self._gates(flat, (1,), places)[:, None]
            return y.unflatten(1, (*x.shape[3:], -1)).permute(0, 4, 3, 1, 2)
        return x * self._gates(x, (2, 3, 4), places)[:, :, None, None, None]

    def _gates(self, x: Tensor, axes: tuple[int, ...], places: int) -> Tensor:
        # On a CPU the mean of a bfloat16 tensor copies it to float32, the sum does not; bfloat16 has float32's range.
        means = x.sum(axes) / places if x.dtype == torch.bfloat16 else x.mean(axes)
        gates: Tensor = self.gate(self.expand(self.act(self.reduce(means))))
        return gates

    def fuse(self) -> nn.Module:
        """The equivalent layer on planes, ``(B, C·|H|, height, width)``."""
        return Planes(self, self.group.order)

    def extra_repr(self) -> str:
        return f"{self.group.name}, {self.channels}"
