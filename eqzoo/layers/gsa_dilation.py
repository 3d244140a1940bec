"""Self-attention on the dilation-translation group: one neighborhood for each scale.

Dilations change areas, so sums over a scaled neighborhood need the Haar measure, ``dx dh / h^(d + 1)`` with d = 2. The
scales are finitely many of a geometric sequence, ``first·base^s``; equivariance ends at the smallest and largest one.
"""

import math
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..groups import Z2
from ..ops import local_group_attention
from ._planes import Planes
from ._tables import KeepsTables
from .gsa import AttentionHeads2d, PositionEncoder2d

Normalization = Literal["haar", "paper"]

_PLANE = 2  # the dimension d of the space that dilations act on


class _DilationSelfAttention2d(AttentionHeads2d):
    """Base class of both layers: scales, their neighborhoods, and encoded positions."""

    lifts: ClassVar[bool]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_scales: int = 3,
        base: float = 2,
        first: float = 1,
        kernel_size: int = 3,
        sparse: bool = True,
        num_heads: int = 9,
        head_channels: int | None = None,
        attn_drop: float = 0.0,
        normalization: Normalization = "haar",
    ) -> None:
        in_order = None if self.lifts else num_scales
        super().__init__(in_channels, out_channels, in_order, num_scales, num_heads, head_channels, attn_drop)
        self.scales = _scales(num_scales, base, first, sparse)
        self.base = base
        self.kernel_size = kernel_size
        self.sparse = sparse
        self.normalization = normalization
        self.as_printed = {"haar": False, "paper": True}[normalization]
        self.position = PositionEncoder2d(Z2, self.head_channels // self.query_parts)
        self._make_poses(num_scales)
        self.reset_parameters()

    def _make_poses(self, num_scales: int) -> None:
        """Makes the embedding of relative scales, if the layer has one."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.split(x)
        return self.merge(torch.cat([self._factor(scale) * self._attend(qkv, scale) for scale in self.scales], 3))

    def _attend(self, qkv: Tensor, scale: float) -> Tensor:
        """One output scale: keys come from the scaled neighborhood, and their positions are divided by the scale."""
        size, step = self._window(scale)
        return local_group_attention(
            qkv,
            self.position((size, size), max(1, self.kernel_size // 2) * scale / step),
            self._poses(),
            self._log_measure(qkv),
            kernel_size=(size, size),
            dilation=step,
            scale=self.scale,
            dropout=self.dropout,
        )

    def _window(self, scale: float) -> tuple[int, int]:
        """The side of the neighborhood ``h·N``, in taps, and the step between taps, in pixels."""
        if self.sparse:
            return self.kernel_size, round(scale)
        return 2 * math.ceil(round(scale * self.kernel_size / 2, 9)) - 1, 1  # √2·√2 is not quite 2

    def _factor(self, scale: float) -> float:
        dimension = _PLANE + (self.in_order is not None)
        return scale**-dimension if self.as_printed else 1.0

    def _poses(self) -> Tensor | None:
        return None

    def _log_measure(self, like: Tensor) -> Tensor | None:
        return None

    def fuse(self) -> nn.Module:
        """The equivalent layer with output planes ``(B, C'·scales, height, width)`` and input planes or images."""
        if self.in_order is None:
            return Planes(self, None)
        return Planes(self, self.out_order)

    def extra_repr(self) -> str:
        return (
            f"scales={self.scales}, kernel_size={self.kernel_size}, sparse={self.sparse}, {super().extra_repr()}, "
            f"normalization={self.normalization!r}"
        )


class LiftingDilationSelfAttention2d(_DilationSelfAttention2d):
    """Lifting self-attention: the pixels of an image attend to neighborhoods of several scales.

    For each head, ``out(h, i) = Σ_(j in hN(i)) softmax_j[(⟨q_i, k_j⟩ + ⟨q_i, ρ(h⁻¹ (x_j − x_i))⟩)/√C] val_j``, and a
    linear map combines the heads. The Haar factor ``h⁻²`` multiplies all sums over ``hN``, including that of the
    softmax, and therefore cancels.

    With sparse neighborhoods, which take every h-th pixel, the layer is exactly equivariant to shrinking the image: for
    ``g(x) = f(base·x)``, ``out_g(h, x) = out_f(base·h, base·x)``. With dense ones this holds approximately.

    Args:
        in_channels: The number of image channels, C.
        out_channels: The number of fields, C'.
        num_scales: The number of scales.
        base: The ratio of neighboring scales, above 1.
        first: The smallest scale, 1 or more.
        kernel_size: The side of the neighborhood N, in pixels, odd.
        sparse: Whether hN is every h-th pixel; all scales then have the same cost, and have to be integers. False: hN
            is all pixels closer than h·k/2 along both axes.
        num_heads: The number of heads.
        head_channels: The number of channels of a head; by default half of C'.
        attn_drop: The dropout probability of the attention weights.
        normalization: ``"haar"``, as above; or ``"paper"``: the factor ``h⁻²`` only on the sum outside of the softmax,
            as the equation is printed, so that the output at scale h is multiplied by ``h⁻²``.

    Shape:
        ``(B, C, height, width)`` to ``(B, C', scales, height, width)``.

    Raises:
        ValueError: If sparse scales are not integers, or a head has fewer than 2 channels.

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), appendix E, equation 20
        https://arxiv.org/abs/2010.00977

    Example:
        >>> LiftingDilationSelfAttention2d(3, 20, num_scales=3)(torch.zeros(2, 3, 9, 9)).shape
        torch.Size([2, 20, 3, 9, 9])
    """

    lifts = True


class DilationSelfAttention2d(KeepsTables, _DilationSelfAttention2d):
    """Self-attention over the scales and positions of a field, once for each output scale.

    For each head::

        out(h, i) = Σ_g Σ_(m, j in hN(i)) softmax_(m, j)[s(h, g, i, m, j) + log μ(m)] val(m, j)
        s = (⟨q(g, i), k(m, j)⟩ + ⟨q(g, i), ρ(h⁻¹ (x_j − x_i))⟩ + ⟨q(g, i), E(m/g)⟩)/√C

    with the softmax over all scales m and neighbors j. Every sum over the group is taken with its Haar measure: the
    weight of scale m is ``μ(m) = m⁻³ Δm``, and ``Δm`` is proportional to m in a geometric sequence, so
    ``μ(m) = m⁻²`` up to a constant, which cancels.

    With sparse neighborhoods the layer is exactly equivariant to shrinking the image: for
    ``G(m, x) = F(base·m, base·x)``, the layer with first scale h maps G to the subsampled output that the layer with
    first scale base·h has for F. With dense ones this holds approximately.

    Args:
        in_channels: The number of input fields, C.
        out_channels: The number of output fields, C'.
        num_scales: The number of scales.
        base: The ratio of neighboring scales, above 1.
        first: The smallest scale, 1 or more.
        kernel_size: The side of the neighborhood N, in pixels, odd.
        sparse: Whether hN is every h-th pixel; all scales then have the same cost, and have to be integers. False: hN
            is all pixels closer than h·k/2 along both axes.
        num_heads: The number of heads.
        head_channels: The number of channels of a head; by default half of C'.
        attn_drop: The dropout probability of the attention weights, each of one scale of one neighbor.
        normalization: ``"haar"``, as above; or ``"paper"``: ``μ = 1`` and a factor ``h⁻³`` outside of the softmax, as
            the equation is printed, so that the output at scale h is multiplied by ``h⁻³``.

    Shape:
        ``(B, C, scales, height, width)`` to ``(B, C', scales, height, width)``.

    Raises:
        ValueError: If sparse scales are not integers, or a head has fewer than 3 channels.

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), appendix E, equation 21.
        The relative scale ``h⁻¹ g⁻¹ m`` of the paper is not invariant; the layer uses ``g⁻¹ m``, which is.
        https://arxiv.org/abs/2010.00977

    Example:
        >>> DilationSelfAttention2d(20, 20, num_scales=3)(torch.zeros(2, 20, 3, 9, 9)).shape
        torch.Size([2, 20, 3, 9, 9])
    """

    lifts = False
    pose_table: Tensor
    exponents: Tensor

    def _make_poses(self, num_scales: int) -> None:
        self.pose = nn.Embedding(2 * num_scales - 1, self.head_channels - 2 * (self.head_channels // 3))
        exponents = np.arange(num_scales)
        self.register_table("exponents", exponents)
        self.register_table("pose_table", exponents - exponents[:, None] + num_scales - 1)

    def reset_parameters(self, scale: float = math.sqrt(2)) -> None:
        """Draws weights from ``N(0, scale²/fan_in)`` and the embeddings of scales from N(0, 1); biases are 0."""
        super().reset_parameters(scale)
        self.pose.reset_parameters()

    def _poses(self) -> Tensor:
        codes: Tensor = self.pose(self.pose_table)
        return codes.movedim(-1, 0)

    def _log_measure(self, like: Tensor) -> Tensor | None:
        if self.as_printed:
            return None
        return -_PLANE * math.log(self.base) * self.exponents.to(like.dtype)


def _scales(num_scales: int, base: float, first: float, sparse: bool) -> tuple[float, ...]:
    scales = tuple(first * base**s for s in range(num_scales))
    if sparse and any(scale != round(scale) for scale in scales):
        raise ValueError(f"sparse neighborhoods need scales that are integers, got {scales}; or pass sparse=False")
    return scales
