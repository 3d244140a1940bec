"""The efficient equivariant (E⁴) layer: depthwise filters generated at each pixel."""

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import Group, orbit_array
from ..ops import generated_depthwise
from ._cache import CachesFilters, cached
from ._checks import check_arguments, check_field
from ._plain import plain_conv2d, written_out
from ._tables import KeepsTables
from .group_conv import GroupConv2d

KernelNormAffine = Literal["tied", "per_element"]


class _E4(nn.Module):
    """Base class of the layer and its fused form: from input to output, given the modules."""

    hidden: nn.Module
    norm: nn.Module
    taps: nn.Module
    value: nn.Module

    def __init__(self, order: int, slices: int) -> None:
        super().__init__()
        self.order = order
        self.slices = slices

    def bank(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the generator's last map: ``(|H|·s·k·k, C/r, 1, 1)`` and ``(|H|·s·k·k,)``."""
        raise NotImplementedError

    def aggregate(self, x: Tensor) -> Tensor:
        """The output field ``(B, C', |H|, height, width)`` for an input of fields or planes."""
        hidden = self._field(F.relu(self.norm(self.hidden(x)), inplace=True))
        weight, bias = self.bank()
        lead = (self.order, self.slices, -1)
        maps = weight.reshape(*lead, weight.shape[1]), bias.reshape(lead)
        return generated_depthwise(hidden, *maps, self._field(self.value(x)))

    def _field(self, x: Tensor) -> Tensor:
        return x if x.ndim == 5 else x.unflatten(1, (-1, self.order))


class E4Layer2d(_E4):
    """Efficient equivariant layer: a filter is generated at each pixel and group element and applied depthwise.

    ``out(c, h, x) = Σ_d (h·K)(slice(c), h, d, x) V(c, h, x + d)`` over k x k offsets d, with zero padding, the encoder
    ``V = W_V f`` and the generator ``K = W₂ ReLU(norm(W₁ f)) + b``. W₁ and W_V are 1 x 1 group convolutions, the only
    maps that mix group elements. W₂ and b are shared by all elements; the filter generated for element h is
    transformed by h. The norm has, for each hidden field of each image, one mean and one variance over group, height
    and width.

    Args:
        group: The point group H; it must map the pixel grid onto itself.
        in_channels: The number of input fields, C.
        out_channels: The number of output fields, C'.
        kernel_size: The side k of the square filters, in pixels, odd.
        slices: The number of filters per pixel, s; blocks of ``C'/s`` consecutive channels share one.
        reduction: The ratio of input fields to hidden fields, r; it divides C.
        kernel_norm_affine: ``"tied"``: one scale and shift per hidden field, which is equivariant. ``"per_element"``:
            one for each element, as in the authors' code, which is not equivariant once it is trained.
        eps: Added to the variance of the norm.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C', |H|, height, width)``.

    References:
        Efficient Equivariant Network (He et al., 2021), section 4.1, equation 12
        https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf

    Example:
        >>> from eqzoo.groups import P4
        >>> layer = E4Layer2d(P4, 16, 16, kernel_size=5, slices=2)
        >>> layer(torch.zeros(2, 16, 4, 28, 28)).shape  # (B, C', |H|, height, width)
        torch.Size([2, 16, 4, 28, 28])
    """

    hidden: GroupConv2d
    norm: "_KernelNorm"
    taps: "_RotatedTaps"
    value: GroupConv2d

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 5,
        slices: int = 2,
        reduction: int = 1,
        kernel_norm_affine: KernelNormAffine = "tied",
        eps: float = 1e-5,
    ) -> None:
        check_arguments(group, kernel_size=kernel_size, slices=slices, reduction=reduction)
        if out_channels % slices or kernel_size % 2 == 0 or reduction < 1 or in_channels % reduction:
            raise ValueError(
                f"E4Layer2d takes an odd kernel_size, slices that divide out_channels and a reduction that divides "
                f"in_channels, got {kernel_size}, {slices}, {out_channels}, {reduction} and {in_channels}"
            )
        super().__init__(group.order, slices)
        self.group = group
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        hidden = in_channels // reduction
        self.hidden = GroupConv2d(group, in_channels, hidden, 1, bias=False)
        self.norm = _KernelNorm(group, hidden, kernel_norm_affine, eps)
        self.taps = _RotatedTaps(group, hidden, slices, kernel_size)
        self.value = GroupConv2d(group, in_channels, out_channels, 1, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws W₁ and W_V from ``N(0, 2/fan_in)``, fan_in = input planes, and W₂ and b as torch does."""
        for layer in (self.hidden, self.value):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        self.taps.reset_parameters()
        self.norm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, self.in_channels, self.order)
        return self.aggregate(x)

    def bank(self) -> tuple[Tensor, Tensor]:
        return self.taps.bank()

    def fuse(self) -> nn.Module:
        """The equivalent layer on planes ``(B, C·|H|, height, width)``, made of plain convolutions."""
        return _PlaneE4(self)

    def extra_repr(self) -> str:
        return (
            f"{self.group.name}, {self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"slices={self.slices}"
        )


class _PlaneE4(_E4):
    """Fused `E4Layer2d`, on planes."""

    def __init__(self, layer: E4Layer2d) -> None:
        super().__init__(layer.order, layer.slices)
        self.hidden = layer.hidden.fuse()
        self.norm = layer.norm.fuse()
        self.taps = layer.taps.fuse()
        self.value = layer.value.fuse()
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.aggregate(x).flatten(1, 2)

    def bank(self) -> tuple[Tensor, Tensor]:
        assert isinstance(self.taps, nn.Conv2d)
        assert self.taps.bias is not None
        return self.taps.weight, self.taps.bias


class _KernelNorm(nn.GroupNorm):
    """Normalizes each hidden field of each image over group, height and width."""

    def __init__(self, group: Group, num_features: int, affine: KernelNormAffine, eps: float) -> None:
        tied = {"tied": True, "per_element": False}[affine]
        super().__init__(num_features, num_features * (1 if tied else group.order), eps)
        self.group = group
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        # torch's layer refuses a single number, whose normalized value is the bias.
        if self.tied:
            return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        y = torch.group_norm(x.flatten(1, 2), self.num_groups, self.weight, self.bias, self.eps)
        return y.unflatten(1, x.shape[1:3])

    def fuse(self) -> nn.GroupNorm:
        """The equivalent norm on planes."""
        copies = self.group.order if self.tied else 1
        norm = nn.GroupNorm(self.num_groups, self.num_groups * self.group.order, self.eps)
        return written_out(norm, self, copies, weight=self.weight, bias=self.bias)


class _RotatedTaps(KeepsTables, CachesFilters, nn.Conv2d):
    """The generator's last map W₂, with its rows permuted for each element.

    Transforming the generated filters equals permuting the rows that generate them, which is cheaper: the rows are few,
    and there is a filter for every pixel.
    """

    rows: Tensor

    def __init__(self, group: Group, in_channels: int, slices: int, kernel_size: int) -> None:
        super().__init__(in_channels, slices * kernel_size**2, 1)
        self.order = group.order
        offsets = orbit_array(group, kernel_size, "trivial")[:, None]
        rows = np.arange(slices)[:, None] * kernel_size**2 + offsets
        self.register_table("rows", rows.flatten())

    @cached
    def bank(self) -> tuple[Tensor, Tensor]:
        """Weight and bias for all elements, slices and offsets: ``(|H|·s·k·k, C, 1, 1)`` and ``(|H|·s·k·k,)``."""
        assert self.bias is not None
        return self.weight.index_select(0, self.rows), self.bias.index_select(0, self.rows)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, *self.bank(), groups=self.order)

    def fuse(self) -> nn.Conv2d:
        """The equivalent plain convolution."""
        weight, bias = self.bank()
        return plain_conv2d(weight, bias, groups=self.order).train(self.training)
