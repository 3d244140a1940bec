"""Pooling over space, over the group, and over both."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import Group
from ._checks import SizeError, check_field, check_size, with_size_check
from ._layout import from_planes, is_channels_last, to_planes
from ._planes import Planes

Reduce = Literal["max", "avg"]


class _Pool(nn.Module):
    """Base class of pools under a group: the maximum or mean of what a subclass says."""

    def __init__(self, group: Group, reduce: Reduce = "max") -> None:
        super().__init__()
        if reduce not in ("max", "avg"):
            raise ValueError(f"reduce (of a network: global_pool) is 'max' or 'avg', got {reduce!r}")
        self.group = group
        self.reduce = reduce

    def extra_repr(self) -> str:
        return f"{self.group.name}, reduce={self.reduce!r}"


class SpatialPool2d(_Pool):
    """Maximum or mean of an image or regular field over square windows.

    ``out(c, h, x) = max or mean over the window at x of f(c, h, ·)``, for each element h separately.

    Args:
        group: The point group H under which the layer is equivariant.
        kernel_size: The side of the window, in pixels.
        stride: The step of the window, in pixels; by default the side of the window.
        padding: The pixels added to each side; the maximum ignores them, the mean counts them as zeros.
        reduce: ``"max"`` or ``"avg"``.
        exact: Whether sizes at which the stride breaks equivariance raise ValueError; False allows them.

    Shape:
        ``(B, ..., height, width)`` to ``(B, ..., height', width')``.

    Raises:
        SizeError: If the windows do not end at the edge of the image: ``(side + 2·padding − k) % stride`` must be 0.

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> SpatialPool2d(P4, 2)(torch.zeros(2, 16, 4, 24, 24)).shape
        torch.Size([2, 16, 4, 12, 12])
    """

    def __init__(
        self,
        group: Group,
        kernel_size: int,
        stride: int | None = None,
        padding: int = 0,
        reduce: Reduce = "max",
        exact: bool = True,
    ) -> None:
        super().__init__(group, reduce)
        self.kernel_size = kernel_size
        self.stride = kernel_size if stride is None else stride
        self.padding = padding
        self.exact = exact

    def forward(self, x: Tensor) -> Tensor:
        check_size(self, self.group, x, self.kernel_size, self.stride, self.padding, self.exact)
        pool = F.max_pool2d if self.reduce == "max" else F.avg_pool2d
        y = pool(to_planes(x), self.kernel_size, self.stride, self.padding)
        return from_planes(y, x.shape[1], x.shape[2], is_channels_last(x)) if x.ndim == 5 else y

    def fuse(self) -> nn.Module:
        """The equivalent plain pool on planes, ``(B, C·|H|, height, width)``, with the same check of sizes."""
        plain = nn.MaxPool2d if self.reduce == "max" else nn.AvgPool2d
        window = (self.kernel_size, self.stride, self.padding)
        return with_size_check(plain(*window), self, self.group, *window, self.exact)

    def extra_repr(self) -> str:
        return (
            f"{self.group.name}, {self.kernel_size}, stride={self.stride}, padding={self.padding}, "
            f"reduce={self.reduce!r}"
        )


class SpatialAdaptiveAvgPool2d(nn.Module):
    """Mean over a given number of windows, placed symmetrically: equivariant at every image size.

    Args:
        output_size: The side of the output, in pixels.

    Shape:
        ``(B, ..., height, width)`` to ``(B, ..., output_size, output_size)``.

    Example:
        >>> import torch
        >>> SpatialAdaptiveAvgPool2d(4)(torch.zeros(2, 16, 4, 9, 9)).shape
        torch.Size([2, 16, 4, 4, 4])
    """

    def __init__(self, output_size: int) -> None:
        super().__init__()
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(to_planes(x), self.output_size)
        return from_planes(y, x.shape[1], x.shape[2], is_channels_last(x)) if x.ndim == 5 else y

    def fuse(self) -> nn.AdaptiveAvgPool2d:
        """The equivalent plain `torch.nn.AdaptiveAvgPool2d` on planes."""
        return nn.AdaptiveAvgPool2d(self.output_size)

    def extra_repr(self) -> str:
        return f"{self.output_size}"


class HalvingPool2d(_Pool):
    """Maximum or mean over windows with stride 2 that halves sides of either parity, equivariantly.

    Windows have 2 pixels along an even side and 3 along an odd one, where neighbors share a pixel, so that the first
    and the last window touch the edges: ``(side − window) % 2 = 0``. The output has side ``side // 2``, as that of the
    usual 2-pixel pool, which drops the last row and column of an odd side and is not equivariant there.

    A program that `torch.export.export` or `torch.onnx.export` writes for sides of any length takes both parities;
    with ``strict=True`` torch asks for one of them.

    Args:
        group: The point group H under which the layer is equivariant.
        reduce: ``"max"`` or ``"avg"``.

    Shape:
        ``(B, ..., height, width)`` to ``(B, ..., height // 2, width // 2)``.

    Raises:
        SizeError: If a side is shorter than 2 pixels.

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> HalvingPool2d(P4)(torch.zeros(2, 16, 4, 7, 7)).shape
        torch.Size([2, 16, 4, 3, 3])
    """

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if min(height, width) < 2:
            raise SizeError(f"{self} has no output at {height} x {width} pixels", "It takes sides of 2 pixels or more")
        planes = to_planes(x)
        if isinstance(height, torch.SymInt) or isinstance(width, torch.SymInt):  # an export for sides of either parity
            y = _halved(_halved(planes, 2, self.reduce), 3, self.reduce)
        else:
            pool = F.max_pool2d if self.reduce == "max" else F.avg_pool2d
            y = pool(planes, (2 + height % 2, 2 + width % 2), 2)
        return from_planes(y, x.shape[1], x.shape[2], is_channels_last(x)) if x.ndim == 5 else y


def _halved(planes: Tensor, axis: int, reduce: Reduce) -> Tensor:
    """`HalvingPool2d` along one axis, without a kernel whose side depends on that of the image.

    The last pixel of a window of 3 is the first of the next one; a window of 2 has its second pixel once more there.
    """
    side = planes.shape[axis]
    odd = side % 2
    start = 2 * torch.arange(side // 2, device=planes.device)
    first, second, last = (planes.index_select(axis, start + offset) for offset in (0, 1, 1 + odd))
    if reduce == "max":
        return first.maximum(second).maximum(last)
    return (first + second + odd * last) / (2 + odd)


class _PoolOverGroup(_Pool):
    """Base class of pools over the group: the maximum or mean over ``axes`` of a field, of which 2 is the group."""

    axes: ClassVar[tuple[int, ...]]

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, None, self.group.order)
        return x.amax(self.axes) if self.reduce == "max" else x.mean(self.axes)

    def fuse(self) -> nn.Module:
        """The equivalent layer on planes, ``(B, C·|H|, height, width)``, with the same output."""
        return Planes(self, self.group.order)


class GroupPool(_PoolOverGroup):
    """Maximum or mean over the group axis: maps a regular field to a trivial one.

    ``out(c, x) = max or mean over h of f(c, h, x)``. Rotating the input rotates the output.

    Args:
        group: The point group H.
        reduce: ``"max"`` or ``"avg"``.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C, height, width)``.

    References:
        Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 6.3
        https://arxiv.org/abs/1602.07576

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> GroupPool(P4)(torch.zeros(2, 16, 4, 8, 8)).shape
        torch.Size([2, 16, 8, 8])
    """

    axes = (2,)


class GlobalPool(_PoolOverGroup):
    """Maximum or mean over the group and over space: maps a regular field to an invariant vector.

    ``out(c) = max or mean over h and x of f(c, h, x)``.

    Args:
        group: The point group H.
        reduce: ``"max"`` or ``"avg"``.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C)``.

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> GlobalPool(P4)(torch.zeros(2, 16, 4, 8, 8)).shape
        torch.Size([2, 16])
    """

    axes = (2, 3, 4)
