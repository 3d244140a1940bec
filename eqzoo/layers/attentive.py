"""Attentive lifting and group convolutions: attention on the responses or on the input."""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..groups import Field, Group, orbit_array
from ..ops import attend_input, attentive_conv, expand_filters
from ._cache import CachesFilters, cached
from ._checks import check_field, with_size_check
from ._tables import KeepsTables
from .group_conv import _OrbitConv2d

Attention = Literal["full", "channel", "spatial", "input", "pose"]

_FIELDS_AT_ONCE = 4  # output fields whose responses eager torch holds in memory


class InputAttention2d(KeepsTables, CachesFilters):
    """Attention on the input of a convolution: ``f ↦ (1 − α) f``.

    * ``"input"``: ``α = α^C α^X``. The channel attention is ``α^C = σ(φ(mean_x f) + φ(max_x f))``, one weight for each
      channel and pose, where φ is two 1 x 1 group convolutions with a ReLU between them. The spatial attention is
      ``α^X = σ(ψ ⋆ [mean_c, max_c](α^C f))``, one weight for each position and pose.
    * ``"pose"``: ``α = σ(ψ ⋆ f)`` with a 1 x 1 group convolution ψ to one field: one weight for each position and pose.

    On an image, φ mixes channels only, and ψ is a lifting convolution whose maximum over poses is taken.

    Args:
        group: The point group H; it must map the pixel grid onto itself.
        in_channels: The number of fields of a regular field, or of channels of an image, C.
        field: ``"regular"`` or, for an image, ``"trivial"``.
        attention: ``"input"`` or ``"pose"``.
        hidden_channels: The number of hidden fields of φ; by default half of C, at least 1.
        attention_size: The side of the filters ψ, in pixels, odd.
        attention_dilation: The dilation of ψ, in pixels.

    Shape:
        ``(B, C, |H|, height, width)`` or, for an image, ``(B, C, height, width)`` to the same. With S = |H|, or 1
        for an image, the weights are ``(hidden, C·S, 1, 1)``, ``(C, hidden·S, 1, 1)`` and ``(1, 2·S, n, n)``.

    References:
        Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 3.4, equation 20
        https://arxiv.org/abs/2002.03830
        Co-Attentive Equivariant Neural Networks (Romero and Hoogendoorn, 2020): attention over poses, there with a
        softmax in place of the sigmoid
        https://arxiv.org/abs/1911.07849

    Example:
        >>> from eqzoo.groups import P4
        >>> InputAttention2d(P4, 16)(torch.zeros(2, 16, 4, 8, 8)).shape
        torch.Size([2, 16, 4, 8, 8])
    """

    orbit_index: Tensor
    pose_index: Tensor

    def __init__(
        self,
        group: Group,
        in_channels: int,
        field: Field = "regular",
        attention: Literal["input", "pose"] = "input",
        hidden_channels: int | None = None,
        attention_size: int = 7,
        attention_dilation: int = 1,
    ) -> None:
        super().__init__()
        channel = {"input": True, "pose": False}[attention]
        self.group = group
        self.in_channels = in_channels
        self.field = field
        self.attention = attention
        self.hidden_channels = max(1, in_channels // 2) if hidden_channels is None else hidden_channels
        self.attention_size = attention_size if channel else 1
        self.attention_dilation = attention_dilation if channel else 1
        self.poses = poses = group.order if field == "regular" else 1
        hidden, maps, side = self.hidden_channels, 2 if channel else in_channels, self.attention_size
        self.reduce = nn.Parameter(torch.empty(hidden, in_channels * poses, 1, 1)) if channel else None
        self.expand = nn.Parameter(torch.empty(in_channels, hidden * poses, 1, 1)) if channel else None
        self.spatial = nn.Parameter(torch.empty(1, maps * poses, side, side))
        # On an image the channel attention has a single pose, for every group.
        pose_index = orbit_array(group, 1, field) if field == "regular" else np.zeros((1, 1), np.int64)
        self.register_table("pose_index", pose_index)
        self.register_table("orbit_index", orbit_array(group, side, field))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights uniformly from ``±1/√fan_in``, with ``fan_in`` = input planes · n²."""
        for weight in self.parameters():
            _draw(weight)

    @cached
    def banks(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The filter banks of the two layers of φ and of ψ, the arguments of `eqzoo.ops.attend_input`."""
        reduce = None if self.reduce is None else _filter_bank(self.reduce, self.pose_index)
        expand = None if self.expand is None else _filter_bank(self.expand, self.pose_index)
        return reduce, expand, _filter_bank(self.spatial, self.orbit_index)

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, self.in_channels, None if self.field == "trivial" else self.group.order)
        planes = x.flatten(1, 2) if x.ndim == 5 else x
        y = attend_input(planes, *self.banks(), self.poses, self.attention_dilation)
        return y.unflatten(1, (self.in_channels, self.group.order)) if x.ndim == 5 else y

    def fuse(self) -> nn.Module:
        """The equivalent layer on planes ``(B, C·|H|, height, width)``, with all transformed filters stored."""
        return _FusedInputAttention(self)

    def extra_repr(self) -> str:
        return (
            f"{self.group.name}, {self.in_channels}, field={self.field!r}, attention={self.attention!r}, "
            f"hidden_channels={self.hidden_channels}, attention_size={self.attention_size}, "
            f"attention_dilation={self.attention_dilation}"
        )


class _ResponseAttention(KeepsTables, CachesFilters):
    """The parameters of the attention on responses, and their orbits."""

    orbit_index: Tensor
    pose_index: Tensor

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        field: Field,
        attention: Attention,
        hidden: int,
        side: int,
    ) -> None:
        super().__init__()
        poses = group.order if field == "regular" else 1
        channel, spatial = {"full": (True, True), "channel": (True, False), "spatial": (False, True)}[attention]
        self.reduce = nn.Parameter(torch.empty(out_channels, hidden, in_channels, poses)) if channel else None
        self.expand = nn.Parameter(torch.empty(out_channels, in_channels, hidden, poses)) if channel else None
        self.spatial = nn.Parameter(torch.empty(out_channels, 2 * poses, side, side)) if spatial else None
        self.register_table("pose_index", orbit_array(group, 1, field))
        self.register_table("orbit_index", orbit_array(group, side, field))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            _draw(weight)

    @cached
    def banks(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        reduce = None if self.reduce is None else _matrix_bank(self.reduce, self.pose_index)
        expand = None if self.expand is None else _matrix_bank(self.expand, self.pose_index)
        return reduce, expand, None if self.spatial is None else _filter_bank(self.spatial, self.orbit_index)


class _AttentiveConv2d(_OrbitConv2d):
    """Base class of attentive lifting and group convolutions."""

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
        attention: Attention = "full",
        hidden_channels: int | None = None,
        attention_size: int = 7,
        attention_dilation: int = 1,
    ) -> None:
        super().__init__(group, in_channels, out_channels, kernel_size, stride, padding, dilation, bias, exact)
        self.attention_dilation = attention_dilation
        self.attention: InputAttention2d | _ResponseAttention
        if attention == "input" or attention == "pose":
            self.attention = InputAttention2d(
                group, in_channels, self.in_field, attention, hidden_channels, attention_size, attention_dilation
            )
        else:
            hidden = max(1, in_channels // 2) if hidden_channels is None else hidden_channels
            self.attention = _ResponseAttention(
                group, in_channels, out_channels, self.in_field, attention, hidden, attention_size
            )

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        if isinstance(self.attention, InputAttention2d):
            return super().forward(self.attention(x))
        y = attentive_conv(
            x.flatten(1, 2) if x.ndim == 5 else x, self.filters(), *self.attention.banks(), *self._sampling()
        )
        bias = self.expanded_bias()
        if bias is not None:
            y = y + bias.to(y.dtype)[:, None, None]
        return y.unflatten(1, (self.out_channels, self.group.order))

    def fuse(self) -> nn.Module:
        """The equivalent layer on planes ``(B, C·|H|, height, width)``, with all transformed filters stored."""
        if isinstance(self.attention, InputAttention2d):
            return nn.Sequential(self.attention.fuse(), super().fuse())
        fused = _FusedAttentiveConv(self)
        return with_size_check(fused, self, self.group, self._span, self.stride, self.padding, self.exact)

    def _sampling(self) -> tuple[int, int, int, int, int, int]:
        poses = self.in_planes // self.in_channels
        chunk = _FIELDS_AT_ONCE * self.group.order
        return poses, self.stride, self.padding, self.dilation, self.attention_dilation, chunk


class AttentiveLiftingConv2d(_AttentiveConv2d):
    """Lifting convolution with attention on the responses of its filters to each channel, or on its input.

    ``out(h) = Σ_c (1 − α(h, c)) f̃(h, c) + b`` with the responses ``f̃(h, c) = f(c) ⋆ (h·ψ)(c)``. The attention is that
    of `AttentiveGroupConv2d`, without the axis of input poses, which an image does not have.

    The arguments are those of `AttentiveGroupConv2d`; ``in_channels`` counts image channels.

    Shape:
        ``(B, C, height, width)`` to ``(B, C', |H|, height', width')``; the weight is ``(C', C, k, k)``.

    References:
        Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 3.2
        https://arxiv.org/abs/2002.03830

    Example:
        >>> from eqzoo.groups import P4
        >>> AttentiveLiftingConv2d(P4, 3, 8, kernel_size=3, padding=1)(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 8, 4, 16, 16])
    """

    in_field = "trivial"


class AttentiveGroupConv2d(_AttentiveConv2d):
    """Group convolution with attention on the responses of its filters to each channel and pose, or on its input.

    ``out(h) = Σ_c Σ_h' (1 − α(h, h', c)) f̃(h, h', c) + b`` with the responses
    ``f̃(h, h', c) = f(c, h') ⋆ (h·ψ)(c, h')``. With ``attention``

    * ``"full"``: ``α = α^C α^X``. The channel attention
      ``α^C(h, h', c) = σ(φ(mean_x f̃) + φ(max_x f̃))`` is a perceptron ``φ = W₂(h⁻¹h') ReLU(W₁(h⁻¹h') ·)`` over c for
      every h and h'; the spatial one is ``α^X(x, h, h') = σ(Σ (h·ψ^X)(h') ⋆ [mean_c, max_c](α^C f̃))``. Each output
      field has its own attention weights.
    * ``"channel"``: ``α = α^C``. ``"spatial"``: ``α = α^X``, computed from f̃.
    * ``"input"`` and ``"pose"``: `InputAttention2d`, followed by an ordinary group convolution.

    α suppresses: where it is 0, the layer is the group convolution. The layer is equivariant with each attention.

    Args:
        group: The point group H; it must map the pixel grid onto itself.
        in_channels: The number of input fields, C.
        out_channels: The number of output fields, C'.
        kernel_size: The side of the square filter, in pixels, odd or even.
        stride: The step between outputs, in pixels.
        padding: The zeros added to each side, in pixels.
        dilation: The step between filter taps, in pixels.
        bias: Whether to add a bias, one per field.
        exact: Whether sizes at which the stride breaks equivariance raise ValueError; False allows them.
        attention: ``"full"``, ``"channel"``, ``"spatial"``, ``"input"`` or ``"pose"``.
        hidden_channels: The hidden width of the channel attention; by default half of C, at least 1.
        attention_size: The side of the filters of the spatial attention, n, in pixels, odd.
        attention_dilation: The dilation of the filters of the spatial attention, in pixels.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C', |H|, height', width')``. The weight is ``(C', C·|H|, k, k)``; on
        responses W₁ is ``(C', hidden, C, |H|)``, W₂ ``(C', C, hidden, |H|)`` and ψ^X ``(C', 2·|H|, n, n)``.

    Raises:
        SizeError: If the stride samples other pixels of a rotated input, see `GroupConv2d`.

    References:
        Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 3.2, equations 16 to 19, and
        section 3.3
        https://arxiv.org/abs/2002.03830

    Example:
        >>> from eqzoo.groups import P4M
        >>> conv = AttentiveGroupConv2d(P4M, 4, 2, kernel_size=3, attention="channel")
        >>> conv(torch.zeros(2, 4, 8, 16, 16)).shape
        torch.Size([2, 2, 8, 14, 14])
    """

    in_field = "regular"


class _FusedInputAttention(nn.Module):
    """Fused `InputAttention2d`, on planes."""

    reduce: Tensor | None
    expand: Tensor | None
    spatial: Tensor

    def __init__(self, attention: InputAttention2d) -> None:
        super().__init__()
        self.poses = attention.poses
        self.dilation = attention.attention_dilation
        for name, bank in zip(("reduce", "expand", "spatial"), attention.banks(), strict=True):
            self.register_buffer(name, None if bank is None else bank.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return attend_input(x, self.reduce, self.expand, self.spatial, self.poses, self.dilation)


class _FusedAttentiveConv(nn.Module):
    """Fused convolution with attention on responses, on planes."""

    filters: Tensor
    reduce: Tensor | None
    expand: Tensor | None
    spatial: Tensor | None
    bias: Tensor | None

    def __init__(self, conv: _AttentiveConv2d) -> None:
        super().__init__()
        assert isinstance(conv.attention, _ResponseAttention)
        self.sampling = conv._sampling()
        names = ("filters", "reduce", "expand", "spatial", "bias")
        for name, bank in zip(names, (conv.filters(), *conv.attention.banks(), conv.expanded_bias()), strict=True):
            self.register_buffer(name, None if bank is None else bank.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = attentive_conv(x, self.filters, self.reduce, self.expand, self.spatial, *self.sampling)
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]


def _filter_bank(weight: Tensor, index: Tensor) -> Tensor:
    """The orbits of filters: ``(C', C·S, k, k)`` and an index ``(|H|, S·k·k)`` to ``(C'·|H|, C·S, k, k)``."""
    out, planes, *sides = weight.shape
    order, length = index.shape
    return expand_filters(weight.reshape(out, -1, length), index, order).reshape(out * order, planes, *sides)


def _matrix_bank(weight: Tensor, index: Tensor) -> Tensor:
    """The orbits of matrices over poses: ``(C', M, N, S)`` and an index ``(|H|, S)`` to ``(C'·|H|, S, M, N)``."""
    order, poses = index.shape
    bank = weight.index_select(3, index.flatten()).unflatten(3, (order, poses))
    return bank.permute(0, 3, 4, 1, 2).flatten(0, 1)


def _draw(weight: Tensor) -> None:
    bound = 1 / math.sqrt(weight[0].numel())
    nn.init.uniform_(weight, -bound, bound)
