"""Lifting and group convolutions, computed as plain convolutions with the orbits of the filters."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import Field, Group, orbit_array
from ..ops import expand_filters, group_conv2d
from ..ops.group_conv import through_irreps
from ._cache import CachesFilters, cached
from ._checks import check_arguments, check_field, check_size, with_size_check
from ._layout import from_planes, is_channels_last, laid_out_as, to_planes
from ._padding import PaddingMode, padded
from ._plain import plain_conv2d
from ._tables import KeepsTables

_MOST_PARTS = 4  # that are convolved one by one; more of them are faster at once


class _OrbitConv2d(KeepsTables, CachesFilters):
    """Base class of lifting, group and depthwise convolutions: parameters, filter bank and fusing."""

    in_field: ClassVar[Field]
    orbit_index: Tensor

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = True,
        exact: bool = True,
        groups: int = 1,
        padding_mode: PaddingMode = "zeros",
    ) -> None:
        super().__init__()
        check_arguments(
            group, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation, groups=groups
        )
        if groups < 1 or in_channels % groups or out_channels % groups:  # what divides the planes may part poses
            raise ValueError(f"groups divides the channels, {in_channels} and {out_channels}; got {groups}")
        self.group = group
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.exact = exact
        self.groups = groups
        self.padding_mode: PaddingMode = padding_mode
        self.in_planes = in_channels * (group.order if self.in_field == "regular" else 1)
        self.weight = nn.Parameter(torch.empty(out_channels, self.in_planes // groups, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        index = orbit_array(group, kernel_size, self.in_field)
        self.register_table("orbit_index", index.reshape(1, group.order, 1, -1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias uniformly from ``±1/√fan_in``, fan_in = input planes / groups · k², as torch does."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @cached
    def filters(self) -> Tensor:
        """The filter bank ``(C'·|H|, planes in / groups, k, k)``: for each filter, its copies under all elements."""
        return self._orbit()

    def _orbit(self) -> Tensor:
        order, k = self.group.order, self.kernel_size
        if order == 1:
            return self.weight
        weight = self.weight.reshape(self.out_channels, self.in_channels // self.groups, -1)
        copies = expand_filters(weight, self.orbit_index, order)
        return copies.reshape(self.out_channels * order, self.in_planes // self.groups, k, k)

    @cached
    def expanded_bias(self) -> Tensor | None:
        """The bias of the filter bank, ``(C'·|H|,)``: one value per field, the same for all elements."""
        return None if self.bias is None else self.bias.repeat_interleave(self.group.order)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = padded(x, padding, self.padding_mode), 0
        if self.groups > 1:
            return self._grouped(x, padding)
        if self.in_field == "regular" and through_irreps(x, self.weight, self.group):
            return group_conv2d(x, self.weight, self.bias, self.group, self.stride, padding, self.dilation)
        return self._expanded(x, padding)

    def _expanded(self, x: Tensor, padding: int) -> Tensor:
        last = is_channels_last(x)
        filters, bias = self._filters_channels_last() if last else (self.filters(), self.expanded_bias())
        y = F.conv2d(to_planes(x), filters, bias, self.stride, padding, self.dilation)
        return from_planes(y, self.out_channels, self.group.order, last)

    def _grouped(self, x: Tensor, padding: int) -> Tensor:
        """Each part of the fields for itself; the planes of a part are neighbors only where channels come first."""
        if self.in_field == "regular" and self.groups <= _MOST_PARTS:
            fields, weights = x.chunk(self.groups, 1), self.weight.chunk(self.groups)
            if through_irreps(fields[0], weights[0], self.group):
                biases = [None] * self.groups if self.bias is None else self.bias.chunk(self.groups)
                parts = [
                    group_conv2d(*part, self.group, self.stride, padding, self.dilation)
                    for part in zip(fields, weights, biases, strict=True)
                ]
                return laid_out_as(x, torch.cat(parts, 1))
        planes = x.flatten(1, 2) if x.ndim == 5 else x
        y = F.conv2d(planes, self.filters(), self.expanded_bias(), self.stride, padding, self.dilation, self.groups)
        field = from_planes(y.contiguous(), self.out_channels, self.group.order, channels_last=False)
        return laid_out_as(x, field)

    @cached
    def _filters_channels_last(self) -> tuple[Tensor, Tensor | None]:
        """The filter bank and bias of planes ``(|H|·C, height, width)``, whose group axis is slow."""
        order, k = self.group.order, self.kernel_size
        filters = self._orbit().reshape(self.out_channels, order, self.in_channels, -1, k, k)
        filters = filters.permute(1, 0, 3, 2, 4, 5).reshape(-1, self.in_planes, k, k)
        if not self.training:  # a convolution would copy them at every call
            filters = filters.contiguous(memory_format=torch.channels_last)
        return filters, None if self.bias is None else self.bias.repeat(order)

    def fuse(self) -> nn.Module:
        """The equivalent plain `torch.nn.Conv2d` on planes, ``(B, C·|H|, height, width)``.

        It raises ValueError at sizes at which the stride breaks equivariance, unless ``exact`` is False.
        """
        return self._plain(self.groups)

    def _plain(self, groups: int) -> nn.Conv2d:
        sampling = (self.stride, self.padding, self.dilation, groups, self.padding_mode)
        conv = plain_conv2d(self.filters(), self.expanded_bias(), *sampling).train(self.training)
        return with_size_check(conv, self, self.group, self._span, self.stride, self.padding, self.exact)

    @property
    def _span(self) -> int:
        return self.dilation * (self.kernel_size - 1) + 1

    def _check(self, x: Tensor) -> None:
        check_field(self, x, self.in_channels, None if self.in_field == "trivial" else self.group.order)
        check_size(self, self.group, x, self._span, self.stride, self.padding, self.exact)

    def extra_repr(self) -> str:
        more = f", groups={self.groups}" * (self.groups > 1)
        more += f", padding_mode={self.padding_mode!r}" * (self.padding_mode != "zeros")
        return (
            f"{self.group.name}, {self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, bias={self.bias is not None}"
            f"{more}"
        )


class LiftingConv2d(_OrbitConv2d):
    """Correlates an image with every transformed copy of its filters.

    ``out(h) = f ⋆ (h·ψ) + b``. The output is a regular field: rotating the image rotates the maps and permutes
    the group axis.

    The arguments are those of `GroupConv2d`; ``in_channels`` counts image channels.

    Shape:
        ``(B, C, height, width)`` to ``(B, C', |H|, height', width')``; the weight is ``(C', C / groups, k, k)``.

    Raises:
        TypeError: As `GroupConv2d`.
        ValueError: If the group does not map the pixel grid onto itself, or ``groups`` does not divide the channels.
        SizeError: If the image is smaller than the window, or the stride samples other pixels of a rotated input:
            ``(side + 2·padding − dilation·(k − 1) − 1) % stride`` must be 0.

    References:
        Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 6, equation 10
        https://arxiv.org/abs/1602.07576

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> lift = LiftingConv2d(P4, 3, 16, kernel_size=3, padding=1)
        >>> lift(torch.zeros(2, 3, 32, 32)).shape  # (B, C', |H|, height, width)
        torch.Size([2, 16, 4, 32, 32])
    """

    in_field = "trivial"


class GroupConv2d(_OrbitConv2d):
    """Correlates a regular field with every transformed copy of its filters.

    ``out(h) = Σ_h' f(h') ⋆ (h·ψ)(h') + b`` with ``(h·ψ)(h') = h·ψ(h⁻¹h')``. Input and output are regular
    fields: a rotation rotates their maps and permutes their group axis.

    Args:
        group: The point group H; it must map the pixel grid onto itself.
        in_channels: The number of input fields, C.
        out_channels: The number of output fields, C'.
        kernel_size: The side of the square filter, in pixels, odd or even.
        stride: The step between outputs, in pixels.
        padding: The pixels added to each side, zeros unless ``padding_mode`` says otherwise.
        dilation: The step between filter taps, in pixels.
        bias: Whether to add a bias, one per field.
        exact: Whether sizes at which the stride breaks equivariance raise ValueError; False allows them.
        groups: The number of equal parts of the fields, each of which gives as many of the output fields, as in
            `torch.nn.Conv2d`; not to be mistaken for ``group``. The filters of more than four parts are always
            expanded (see `eqzoo.ops.group_conv2d`), and channels-last fields are copied.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``, as in `torch.nn.Conv2d`.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C', |H|, height', width')``; the weight is
        ``(C', C / groups · |H|, k, k)``, read as ``(C', C / groups, |H|, k, k)``.

    Raises:
        TypeError: If ``group`` is no `Group`, or ``kernel_size``, ``stride``, ``padding``, ``dilation`` or ``groups``
            no whole number.
        ValueError: If the group does not map the pixel grid onto itself, or ``groups`` does not divide the channels.
        SizeError: If the image is smaller than the window, or the stride samples other pixels of a rotated input:
            ``(side + 2·padding − dilation·(k − 1) − 1) % stride`` must be 0.

    References:
        Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 6, equation 11
        https://arxiv.org/abs/1602.07576

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4M
        >>> conv = GroupConv2d(P4M, 16, 8, kernel_size=1)
        >>> conv(torch.zeros(2, 16, 8, 32, 32)).shape  # (B, C', |H|, height, width)
        torch.Size([2, 8, 8, 32, 32])
    """

    in_field = "regular"
