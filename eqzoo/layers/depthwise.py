"""Depthwise group convolution: one filter per field, rotated and reflected with the pose."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import Group, orbit_array
from ..ops import expand_filters
from ._cache import CachesFilters, cached
from ._checks import check_field, check_size, with_size_check
from ._layout import from_planes, is_channels_last, to_planes
from ._padding import PaddingMode, padded
from ._plain import plain_conv2d
from ._tables import KeepsTables

__all__ = ["DepthwiseGroupConv2d"]


class DepthwiseGroupConv2d(KeepsTables, CachesFilters):
    """Correlates every map of a regular field with its field's filter, transformed as the map's pose.

    ``out(c, h) = f(c, h) ⋆ (h·ψ_c) + b_c``: neither fields nor poses mix, so it costs what a plain depthwise
    convolution of the same planes costs, with 1/|H| of its parameters.

    Args:
        group: The point group H; it must map the pixel grid onto itself.
        channels: The number of regular fields, C.
        kernel_size: The side of the square filter, in pixels.
        padding: The pixels added to each side, zeros unless ``padding_mode`` says otherwise.
        bias: Whether to add a bias, one per field.
        stride: The step between outputs, in pixels.
        dilation: The step between filter taps, in pixels.
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

    orbit_index: Tensor

    def __init__(
        self,
        group: Group,
        channels: int,
        kernel_size: int,
        padding: int = 0,
        bias: bool = True,
        *,
        stride: int = 1,
        dilation: int = 1,
        exact: bool = True,
        padding_mode: PaddingMode = "zeros",
    ) -> None:
        super().__init__()
        self.group = group
        self.channels = channels
        self.kernel_size = kernel_size
        self.padding = padding
        self.stride = stride
        self.dilation = dilation
        self.exact = exact
        self.padding_mode: PaddingMode = padding_mode
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.register_table("orbit_index", orbit_array(group, kernel_size, "trivial"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias uniformly from ``±1/k``, as torch does for a depthwise convolution."""
        bound = 1 / math.sqrt(self.kernel_size**2)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @cached
    def filters(self) -> Tensor:
        """The filters ``(C, |H|, k, k)``: for each field its filter under all elements."""
        k, order = self.kernel_size, self.group.order
        return expand_filters(self.weight.flatten(2), self.orbit_index, order).reshape(-1, order, k, k)

    def forward(self, x: Tensor) -> Tensor:
        order = self.group.order
        check_field(self, x, self.channels, order)
        check_size(self, self.group, x, self._span, self.stride, self.padding, self.exact)
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = padded(x, padding, self.padding_mode), 0
        last = is_channels_last(x)
        filters = (self.filters().transpose(0, 1) if last else self.filters()).flatten(0, 1)[:, None]
        bias = None
        if self.bias is not None:
            bias = self.bias.repeat(order) if last else self.bias.repeat_interleave(order)
        y = F.conv2d(to_planes(x), filters, bias, self.stride, padding, self.dilation, self.channels * order)
        return from_planes(y, self.channels, order, last)

    @property
    def _span(self) -> int:
        return self.dilation * (self.kernel_size - 1) + 1

    def fuse(self) -> nn.Conv2d:
        """The same map as a plain depthwise `torch.nn.Conv2d` on planes, ``(B, C·|H|, height, width)``.

        It raises ValueError at sizes at which the stride breaks equivariance, unless ``exact`` is False.
        """
        filters, order = self.filters().flatten(0, 1)[:, None], self.group.order
        bias = None if self.bias is None else self.bias.repeat_interleave(order)
        sampling = (self.stride, self.padding, self.dilation, self.channels * order, self.padding_mode)
        conv = plain_conv2d(filters, bias, *sampling).train(self.training)
        return with_size_check(conv, self, self.group, self._span, self.stride, self.padding, self.exact)

    def extra_repr(self) -> str:
        more = f", stride={self.stride}" * (self.stride > 1) + f", dilation={self.dilation}" * (self.dilation > 1)
        more += f", padding_mode={self.padding_mode!r}" * (self.padding_mode != "zeros")
        return (
            f"{self.group.name}, {self.channels}, kernel_size={self.kernel_size}, padding={self.padding}, "
            f"bias={self.bias is not None}{more}"
        )
