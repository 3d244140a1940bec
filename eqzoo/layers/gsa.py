"""Lifting and group self-attention, in which the group acts on relative positions.

Positions are continuous, so groups with any number of rotations are possible without interpolation. A layer is exact
for the elements that map the pixel grid onto itself, ``group.grid_elements``, and approximate for the others.

For output pose v, key j has relative to query i the position ``p_v = A_v⁻¹ (x_j − x_i)``, where ``A_v`` is the matrix
of v on (row, column). A key of pose m has relative to a query of pose g the pose ``g⁻¹ m``. Both are invariant if one
element acts on all poses and positions, which makes the layers equivariant.
"""

import math
from collections import OrderedDict
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..groups import Group
from ..ops import local_group_attention
from ._checks import check_field
from ._planes import Planes
from ._tables import KeepsTables

Neighborhood = int | Literal["global"]


def init_linear_maps(module: nn.Module, scale: float) -> None:
    """Draws the weights of all linear layers and convolutions from ``N(0, scale²/fan_in)``; biases are 0."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Conv2d):
            nn.init.normal_(child.weight, std=scale / math.sqrt(child.weight[0].numel()))
            if child.bias is not None:
                nn.init.zeros_(child.bias)


class PositionEncoder2d(nn.Module):
    """Encodes the relative positions of a window, transformed by each element of the group.

    ``out(v, Δ) = [ρ_row(p_v), ρ_column(p_v)]`` with ``p_v = A_v⁻¹ Δ`` in units of half the window, so that p is in
    [−1, 1] along the axes. Each ρ is a network of one scalar: linear to 16, layer norm, swish, linear to d.
    Positions are computed in float64 and then rounded to the type of the parameters.

    The layer norm has the eps of the authors' code, 1e-12. Where a coordinate is 0, its input is constant while the
    first bias is 0, as at the start, and the gradient of this bias is some 10⁴ times that of other weights. Adam and
    Muon adapt to it; one step of SGD can flatten the encoding for good, and clipping the norm of all gradients leaves
    next to nothing of the others.

    Args:
        group: The point group H.
        channels: The length of the encoding of a row or a column, d.
        hidden: The hidden width of ρ.

    Shape:
        A window ``(rows, columns)`` with odd sides to ``(2·d, |H|, rows·columns)``.

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), sections 4.2 and 5.1
        https://arxiv.org/abs/2010.00977

    Example:
        >>> from eqzoo.groups import cyclic
        >>> PositionEncoder2d(cyclic(8), channels=3)((5, 5)).shape
        torch.Size([6, 8, 25])
    """

    def __init__(self, group: Group, channels: int, hidden: int = 16) -> None:
        super().__init__()
        self.row = self._encoder(hidden, channels)
        self.column = self._encoder(hidden, channels)
        # Python numbers, because a buffer would be cast with the model, and p would lose its precision.
        matrices = [group.matrix_rows(group.inverse(v)) for v in group.elements]
        self.row_action = [matrix[0] for matrix in matrices]
        self.column_action = [matrix[1] for matrix in matrices]

    @staticmethod
    def _encoder(hidden: int, channels: int) -> nn.Sequential:
        layers = OrderedDict[str, nn.Module](
            expand=nn.Linear(1, hidden), norm=nn.LayerNorm(hidden, eps=1e-12), act=nn.SiLU()
        )
        layers["project"] = nn.Linear(hidden, channels)
        return nn.Sequential(layers)

    def positions(self, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The row and column coordinates of p, each ``(|H|, rows·columns)`` float64."""
        device = cast(nn.LayerNorm, self.row.norm).weight.device
        unit = max(*window, 3) // 2
        where = "cpu" if device.type == "mps" else device  # Apple's GPUs have no float64
        rows, columns = ((torch.arange(side, dtype=torch.float64, device=where) - side // 2) / unit for side in window)
        row, column = torch.meshgrid(rows, columns, indexing="ij")
        return _act(self.row_action, row, column), _act(self.column_action, row, column)

    def forward(self, window: tuple[int, int]) -> Tensor:
        weight = cast(nn.LayerNorm, self.row.norm).weight  # a quantized `expand` has none
        row, column = (position[..., None].to(weight) for position in self.positions(window))
        codes = [self.row(row), self.column(column)]
        return torch.cat(codes, -1).permute(2, 0, 1)


def _act(action: list[list[float]], row: Tensor, column: Tensor) -> Tensor:
    """One coordinate of the transformed positions, for all elements."""
    return torch.stack([(a * row + b * column).flatten() for a, b in action])


class _SelfAttention2d(nn.Module):
    """Base class of lifting and group self-attention: pointwise linear maps, neighborhoods and encoded positions."""

    lifts: ClassVar[bool]

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: Neighborhood,
        num_heads: int,
        head_channels: int | None,
        attn_drop: float,
    ) -> None:
        super().__init__()
        self.group = group
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.num_heads = num_heads
        self.head_channels = out_channels // 2 if head_channels is None else head_channels
        self.attn_drop = attn_drop
        self.in_order = None if self.lifts else group.order
        query_parts = 2 if self.lifts else 3  # row, column and, with input poses, pose
        if self.head_channels < query_parts:
            raise ValueError(
                f"{type(self).__name__} needs at least {query_parts} channels a head, one for each part of the query, "
                f"got {self.head_channels}; give head_channels, or {2 * query_parts} output channels"
            )
        self.qkv = nn.Conv2d(in_channels, 3 * num_heads * self.head_channels, 1)
        self.proj = nn.Conv2d(num_heads * self.head_channels, out_channels, 1)
        self.position = PositionEncoder2d(group, self.head_channels // query_parts)

    def forward(self, x: Tensor) -> Tensor:
        window = self._window(x.shape[-2], x.shape[-1])
        y = local_group_attention(
            self.split(x),
            self.position(window),
            self.encode_poses(),
            kernel_size=window,
            scale=self.scale,
            dropout=self.dropout,
        )
        return self.merge(y)

    def encode_poses(self) -> Tensor | None:
        """The encoded relative poses of queries g and keys m, ``(d, |H|, |H|)``; None without input poses."""
        return None

    def split(self, x: Tensor) -> Tensor:
        """Queries, keys and values of a field or an image, ``(B, 3, heads, d, poses, height, width)``."""
        check_field(self, x, self.in_channels, self.in_order)
        # Poses and rows are merged into one axis: a 1 x 1 kernel does not cross its borders.
        heads: Tensor = self.qkv(x.flatten(2, 3) if x.ndim == 5 else x)
        heads = heads.unflatten(1, (3, self.num_heads, self.head_channels))
        return heads.unflatten(4, (self.in_order or 1, x.shape[-2]))

    def merge(self, y: Tensor) -> Tensor:
        """The output field for the outputs of the heads, ``(B, heads, d, poses, height, width)``."""
        field: Tensor = self.proj(y.flatten(1, 2).flatten(2, 3))
        return field.unflatten(2, (self.group.order, y.shape[-2]))

    @property
    def scale(self) -> float:
        """The factor of the scores, ``1/√C``."""
        return 1 / math.sqrt(self.in_channels)

    @property
    def dropout(self) -> float:
        """The dropout probability in the current mode."""
        return self.attn_drop if self.training else 0.0

    def reset_parameters(self, scale: float = math.sqrt(2)) -> None:
        """Draws weights from ``N(0, scale²/fan_in)``, where √2 is He's initialization; biases are 0."""
        init_linear_maps(self, scale)

    def _window(self, height: int, width: int) -> tuple[int, int]:
        """The rows and columns of the neighborhood; if it is global, of all offsets between two pixels."""
        if self.kernel_size == "global":
            return 2 * height - 1, 2 * width - 1
        return self.kernel_size, self.kernel_size

    def extra_repr(self) -> str:
        return (
            f"{self.group.name}, kernel_size={self.kernel_size!r}, {self.in_channels}, {self.out_channels}, "
            f"num_heads={self.num_heads}, head_channels={self.head_channels}, attn_drop={self.attn_drop}"
        )


class LiftingSelfAttention2d(_SelfAttention2d):
    """Lifting self-attention: pixels attend to their neighbors, once for each transformed copy of the positions.

    For each head, ``out(v, i) = Σ_j softmax_j[(⟨q_i, k_j⟩ + ⟨q_i, ρ(A_v⁻¹ (x_j − x_i))⟩)/√C] val_j``, and a linear
    map combines the heads into a regular field. q, k and val are linear maps of the pixel. The first half of a query is
    compared with the encoding of the row, the second with that of the column; all heads share the encodings.

    The arguments are those of `GroupSelfAttention2d`; ``in_channels`` counts image channels.

    Shape:
        ``(B, C, height, width)`` to ``(B, C', |H|, height, width)``.

    Raises:
        ValueError: If a head has fewer than 2 channels.

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), section 5.2, equation 14
        https://arxiv.org/abs/2010.00977

    Example:
        >>> from eqzoo.groups import cyclic
        >>> LiftingSelfAttention2d(cyclic(8), 3, 20)(torch.zeros(2, 3, 9, 9)).shape
        torch.Size([2, 20, 8, 9, 9])
    """

    lifts = True

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: Neighborhood = 5,
        num_heads: int = 9,
        head_channels: int | None = None,
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__(group, in_channels, out_channels, kernel_size, num_heads, head_channels, attn_drop)
        self.reset_parameters()

    def fuse(self) -> nn.Module:
        """The equivalent layer from images to planes, ``(B, C'·|H|, height, width)``."""
        return Planes(self, None)


class GroupSelfAttention2d(KeepsTables, _SelfAttention2d):
    """Group self-attention over the poses and positions of a regular field, once for each output pose.

    For each head::

        out(v, i) = Σ_g Σ_(m, j) softmax_(m, j)[s(v, g, i, m, j)] val(m, j)
        s = (⟨q(g, i), k(m, j)⟩ + ⟨q(g, i), ρ(A_v⁻¹ (x_j − x_i))⟩ + ⟨q(g, i), E(g⁻¹ m)⟩)/√C

    with the softmax over all poses m and neighbors j; a linear map combines the heads. q, k and val are linear maps of
    the channels. Three parts of a query are compared with the encodings of the row and of the column, and with the
    embedding E of the relative pose; all heads share the encodings.

    Args:
        group: The point group H, with any number of rotations.
        in_channels: The number of input fields, C.
        out_channels: The number of output fields, C'.
        kernel_size: The side of the square neighborhood, in pixels, odd; ``"global"`` for the whole image. Neighbors
            outside the image are excluded.
        num_heads: The number of heads.
        head_channels: The number of channels of a head; by default half of C'.
        attn_drop: The dropout probability of the attention weights; one mask for all output poses.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C', |H|, height, width)``.

    Raises:
        ValueError: If a head has fewer than 3 channels.

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), section 5.2, equation 16.
        The relative poses of the paper, ``v⁻¹ g⁻¹ m``, and of its code are not invariant; ``g⁻¹ m`` is.
        https://arxiv.org/abs/2010.00977

    Example:
        >>> from eqzoo.groups import P4
        >>> GroupSelfAttention2d(P4, 20, 20)(torch.zeros(2, 20, 4, 9, 9)).shape
        torch.Size([2, 20, 4, 9, 9])
    """

    lifts = False
    pose_table: Tensor

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: Neighborhood = 5,
        num_heads: int = 9,
        head_channels: int | None = None,
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__(group, in_channels, out_channels, kernel_size, num_heads, head_channels, attn_drop)
        self.pose = nn.Embedding(group.order, self.head_channels - 2 * (self.head_channels // 3))
        products = [[group.product(group.inverse(g), m) for m in group.elements] for g in group.elements]
        self.register_table("pose_table", np.array(products))  # [g, m] is g⁻¹ m
        self.reset_parameters()

    def reset_parameters(self, scale: float = math.sqrt(2)) -> None:
        """Draws weights from ``N(0, scale²/fan_in)`` and the embeddings of poses from N(0, 1); biases are 0."""
        super().reset_parameters(scale)
        self.pose.reset_parameters()

    def encode_poses(self) -> Tensor:
        """The embeddings of the relative poses, ``[:, g, m]`` that of ``g⁻¹ m``."""
        embeddings: Tensor = self.pose(self.pose_table)
        return embeddings.movedim(-1, 0)

    def fuse(self) -> nn.Module:
        """The equivalent layer on planes, ``(B, C·|H|, height, width)``."""
        return Planes(self, self.group.order)
