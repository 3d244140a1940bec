"""Depthwise group convolution: one filter per field, rotated and reflected with the pose."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import Group
from ._checks import check_field, check_size
from ._layout import from_planes, is_channels_last, to_planes
from ._padding import PaddingMode, padded
from .group_conv import _OrbitConv2d


class DepthwiseGroupConv2d(_OrbitConv2d):
    """Correlates every map of a regular field with its field's filter, transformed as the map's pose.

    ``out(c, h) = f(c, h) ⋆ (h·ψ_c) + b_c``: neither fields nor poses mix, so it costs what a plain depthwise
    convolution of the same planes costs, with 1/|H| of its parameters.

    Args:
        group: The point group H; it must map the pixel grid onto itself.
        channels: The number of regular fields, C.
        kernel_size: The side of the square filter, in pixels.
        stride: The step between outputs, in pixels.
        padding: The pixels added to each side, zeros unless ``padding_mode`` says otherwise.
        dilation: The step between filter taps, in pixels.
        bias: Whether to add a bias, one per field.
        exact: Whether sizes at which the stride breaks equivariance raise ValueError; False allows them.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``, as in `torch.nn.Conv2d`.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C, |H|, height', width')``; the weight is ``(C, 1, k, k)``.

    Raises:
        SizeError: If the stride samples other pixels of a rotated input, see `GroupConv2d`.

    References:
        A ConvNet for the 2020s (Liu et al., 2022), section 2.3, for the plain layer, https://arxiv.org/abs/2201.03545

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4M
        >>> DepthwiseGroupConv2d(P4M, 6, kernel_size=7, padding=3)(torch.zeros(2, 6, 8, 14, 14)).shape
        torch.Size([2, 6, 8, 14, 14])
    """

    in_field = "trivial"  # of a filter, which has no poses

    def __init__(
        self,
        group: Group,
        channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = True,
        exact: bool = True,
        padding_mode: PaddingMode = "zeros",
    ) -> None:
        super().__init__(
            group,
            channels,
            channels,
            kernel_size,
            stride,
            padding,
            dilation,
            bias,
            exact,
            groups=channels,
            padding_mode=padding_mode,
        )
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        order, padding = self.group.order, self.padding
        check_field(self, x, self.channels, order)
        check_size(self, self.group, x, self._span, self.stride, padding, self.exact)
        if self.padding_mode != "zeros":
            x, padding = padded(x, padding, self.padding_mode), 0
        last, filters, bias = is_channels_last(x), self.filters(), self.expanded_bias()
        if last:
            filters = filters.unflatten(0, (self.channels, order)).transpose(0, 1).flatten(0, 1)
            bias = None if self.bias is None else self.bias.repeat(order)
        y = F.conv2d(to_planes(x), filters, bias, self.stride, padding, self.dilation, self.channels * order)
        return from_planes(y, self.channels, order, last)

    def fuse(self) -> nn.Module:
        """The same map as a plain depthwise `torch.nn.Conv2d` on planes, ``(B, C·|H|, height, width)``.

        It raises ValueError at sizes at which the stride breaks equivariance, unless ``exact`` is False.
        """
        return self._plain(self.channels * self.group.order)

    def extra_repr(self) -> str:
        more = f", stride={self.stride}" * (self.stride > 1) + f", dilation={self.dilation}" * (self.dilation > 1)
        more += f", padding_mode={self.padding_mode!r}" * (self.padding_mode != "zeros")
        return (
            f"{self.group.name}, {self.channels}, kernel_size={self.kernel_size}, padding={self.padding}, "
            f"bias={self.bias is not None}{more}"
        )
