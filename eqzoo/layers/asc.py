"""Affine self convolution, its simple variant, and stand-alone self-attention."""

from typing import cast

import torch
from torch import Tensor, nn

from ..groups import Group, orbit_array
from ..ops import AffineBank, AffineBanks, affine_attention
from ._cache import CachesFilters, cached
from ._checks import check_field
from ._layout import laid_out_as
from ._tables import KeepsTables
from .group_conv import GroupConv2d

_IDENTITY = AffineBank(None, None)


class AffineMap(KeepsTables, CachesFilters):
    """The parameters ψ and β of one affine map, and their orbits.

    Args:
        group: The point group H.
        channels: The number of regular fields, C.
        kernel_size: The side k of the neighborhood, in pixels.
    """

    psi_index: Tensor
    beta_index: Tensor

    def __init__(self, group: Group, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.group = group
        self.psi = nn.Parameter(torch.empty(channels, group.order, kernel_size, kernel_size))
        self.beta = nn.Parameter(torch.empty(channels, 1, kernel_size, kernel_size))
        self.register_table("psi_index", orbit_array(group, kernel_size, "regular").flatten())
        self.register_table("beta_index", orbit_array(group, kernel_size, "trivial").flatten())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws ψ and β from the standard normal distribution."""
        nn.init.normal_(self.psi)
        nn.init.normal_(self.beta)

    @cached
    def bank(self) -> AffineBank:
        """``(P·ψ)(R, d)`` and ``(P·β)(d)`` for all elements P: ``(C, |H|, |H|, k²)`` and ``(C, |H|, k²)``."""
        order = self.group.order
        psi = self.psi.flatten(1).index_select(1, self.psi_index)
        beta = self.beta.flatten(1).index_select(1, self.beta_index)
        return AffineBank(psi.unflatten(1, (order, order, -1)), beta.unflatten(1, (order, -1)))

    def extra_repr(self) -> str:
        return f"{self.group.name}, {self.psi.shape[0]}, kernel_size={self.psi.shape[-1]}"


class _SelfConv2d(nn.Module):
    """Base class of the variants: heads, output projection and fusing."""

    head_multiple = 1  # divides the channels of a head

    def __init__(self, group: Group, channels: int, kernel_size: int = 5, num_heads: int = 8) -> None:
        super().__init__()
        if channels % (multiple := self.head_multiple * num_heads):
            raise ValueError(f"with num_heads={num_heads} channels are a multiple of {multiple}, got {channels}")
        self.group = group
        self.channels = channels
        self.kernel_size = kernel_size
        self.num_heads = num_heads
        self.score_factor = 1 / channels  # of all heads, as the paper prints it (1/d_k)
        self.project = GroupConv2d(group, channels, channels, 1, bias=False)

    def embeddings(self) -> tuple[GroupConv2d, GroupConv2d, GroupConv2d | None]:
        """The 1 x 1 convolutions of queries, keys and values; the last is None if the mapped keys are the values."""
        raise NotImplementedError

    def banks(self) -> AffineBanks:
        """The affine maps applied to the embeddings."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, self.channels, self.group.order)
        to_query, to_key, to_value = self.embeddings()
        key = to_key(x)
        query = key if to_query is to_key else to_query(x)
        value = to_value(x) if to_value is not None else None
        y = affine_attention(query, key, value, self.banks(), self.kernel_size, self.num_heads, self.score_factor)
        out: Tensor = self.project(laid_out_as(x, y))
        return out

    def fuse(self) -> nn.Module:
        """The equivalent layer on planes ``(B, C·|H|, height, width)``, with all filter banks stored."""
        return _PlaneSelfConv2d(self)

    def extra_repr(self) -> str:
        return f"{self.group.name}, {self.channels}, kernel_size={self.kernel_size}, num_heads={self.num_heads}"


class AffineSelfConv2d(_SelfConv2d):
    """Affine self convolution: local self-attention whose queries, keys and values pass through affine maps.

    Q, K and V are 1 x 1 group convolutions of f, P is the output element, ``P·`` its action on filters, and d the
    offset of a neighbor::

        q(P, x)    = Σ_R Q(R, x) ψ_Q(P⁻¹R) + β_Q
        k(P, x, d) = Σ_R K(R, x + d) (P·ψ_K)(R, d) + (P·β_K)(d)        and v likewise, with V
        α(P, x, d) = softmax_d(1/C Σ_{c in head} q_c(P, x) k_c(P, x, d))
        out(P, x)  = W_O Σ_d α(P, x, d) v(P, x, d)

    ψ is a function on the group and the offsets, β a function on the offsets alone. Embeddings are padded with zeros,
    so a neighbor outside the image has the key ``P·β_K`` and takes part in the softmax. If ψ_Q, β_Q and β_V are zero
    and W_O is the identity, the layer is the group convolution of each field of V by itself with the filter
    ``ψ_V / k²``.

    Args:
        group: The point group H; it must map the pixel grid onto itself.
        channels: The number of input and output fields, C.
        kernel_size: The side k of the neighborhood, in pixels, odd.
        num_heads: The number of heads; it divides C, and each head has C/num_heads consecutive channels.

    Shape:
        ``(B, C, |H|, height, width)`` to the same; every ψ is ``(C, |H|, k, k)`` and every β ``(C, 1, k, k)``, with
        ``k = 1`` for the queries.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), sections 3.1 and 3.2, equations 9 to 13, 20 to 24 and 33
        https://arxiv.org/abs/1911.07704

    Example:
        >>> from eqzoo.groups import P4
        >>> AffineSelfConv2d(P4, 8)(torch.zeros(2, 8, 4, 16, 16)).shape
        torch.Size([2, 8, 4, 16, 16])
    """

    def __init__(self, group: Group, channels: int, kernel_size: int = 5, num_heads: int = 8) -> None:
        super().__init__(group, channels, kernel_size, num_heads)
        self.query, self.key, self.value = (GroupConv2d(group, channels, channels, 1) for _ in range(3))
        self.query_map = AffineMap(group, channels, 1)
        self.key_map = AffineMap(group, channels, kernel_size)
        self.value_map = AffineMap(group, channels, kernel_size)

    def embeddings(self) -> tuple[GroupConv2d, GroupConv2d, GroupConv2d | None]:
        return self.query, self.key, self.value

    def banks(self) -> AffineBanks:
        return AffineBanks(self.query_map.bank(), self.key_map.bank(), self.value_map.bank())


class SimpleAffineSelfConv2d(_SelfConv2d):
    """Affine self convolution with one embedding and one affine map for queries, keys and values.

    E is a 1 x 1 group convolution of f. ``t(P, x, d) = Σ_R E(R, x + d) (P·ψ)(R, d) + (P·β)(d)`` are the keys and the
    values, and ``t(P, x, 0)`` is the query; all else is as in `AffineSelfConv2d`. It has about half its parameters.

    The arguments are those of `AffineSelfConv2d`.

    Shape:
        ``(B, C, |H|, height, width)`` to the same; ψ is ``(C, |H|, k, k)`` and β ``(C, 1, k, k)``.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), equations 7, 15 and 16, https://arxiv.org/abs/1911.07704

    Example:
        >>> from eqzoo.groups import P4
        >>> SimpleAffineSelfConv2d(P4, 8)(torch.zeros(2, 8, 4, 16, 16)).shape
        torch.Size([2, 8, 4, 16, 16])
    """

    def __init__(self, group: Group, channels: int, kernel_size: int = 5, num_heads: int = 8) -> None:
        super().__init__(group, channels, kernel_size, num_heads)
        self.embed = GroupConv2d(group, channels, channels, 1)
        self.map = AffineMap(group, channels, kernel_size)

    def embeddings(self) -> tuple[GroupConv2d, GroupConv2d, GroupConv2d | None]:
        return self.embed, self.embed, None

    def banks(self) -> AffineBanks:
        bank = self.map.bank()
        center = slice(self.kernel_size**2 // 2, self.kernel_size**2 // 2 + 1)
        at_center = AffineBank(*(None if part is None else part[..., center] for part in bank))
        return AffineBanks(at_center, bank, None)


class StandAloneSelfAttention2d(KeepsTables, _SelfConv2d):
    """Stand-alone self-attention: local self-attention with a factorized embedding of relative positions in the keys.

    Q, K and V are 1 x 1 group convolutions of f. For each head,
    ``α(P, x, d) = softmax_d(Q(P, x)·(K(P, x + d) + (P·e)(d))/C)`` and
    ``out(P, x) = W_O Σ_d α(P, x, d) V(P, x + d)``. In each head e depends only on the row of d in the first half of the
    channels, and only on its column in the second half.

    The paper defines the layer for translations. Here the output element P acts on the embedding (a 90° rotation maps
    rows to columns), which makes it exact for every group of the pixel grid.

    Args:
        group: The point group H; it must map the pixel grid onto itself.
        channels: The number of input and output fields, C.
        kernel_size: The side k of the neighborhood, in pixels, odd.
        num_heads: The number of heads; each has an even number of consecutive channels.

    Shape:
        ``(B, C, |H|, height, width)`` to the same; e is stored as rows ``(C/2, 1, k, 1)`` and columns
        ``(C/2, 1, 1, k)``.

    References:
        Stand-Alone Self-Attention in Vision Models (Ramachandran et al., 2019), section 3.1
        https://arxiv.org/abs/1906.05909
        Affine Self Convolution (Diaconu and Worrall, 2019), section 4, https://arxiv.org/abs/1911.07704

    Example:
        >>> from eqzoo.groups import Z2
        >>> StandAloneSelfAttention2d(Z2, 16)(torch.zeros(2, 16, 1, 16, 16)).shape
        torch.Size([2, 16, 1, 16, 16])
    """

    head_multiple = 2
    embedding_index: Tensor

    def __init__(self, group: Group, channels: int, kernel_size: int = 5, num_heads: int = 8) -> None:
        super().__init__(group, channels, kernel_size, num_heads)
        self.query, self.key, self.value = (GroupConv2d(group, channels, channels, 1) for _ in range(3))
        self.rows = nn.Parameter(torch.empty(channels // 2, 1, kernel_size, 1))
        self.columns = nn.Parameter(torch.empty(channels // 2, 1, 1, kernel_size))
        self.register_table("embedding_index", orbit_array(group, kernel_size, "trivial").flatten())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the embeddings from the standard normal distribution."""
        nn.init.normal_(self.rows)
        nn.init.normal_(self.columns)

    def embeddings(self) -> tuple[GroupConv2d, GroupConv2d, GroupConv2d | None]:
        return self.query, self.key, self.value

    def banks(self) -> AffineBanks:
        k = self.kernel_size
        halves = [part.expand(-1, 1, k, k).unflatten(0, (self.num_heads, -1)) for part in (self.rows, self.columns)]
        embedding = torch.cat(halves, 1).reshape(self.channels, k * k)
        beta = embedding.index_select(1, self.embedding_index).unflatten(1, (self.group.order, -1))
        return AffineBanks(_IDENTITY, AffineBank(None, beta), _IDENTITY)


class _PlaneSelfConv2d(nn.Module):
    """A fused self convolution on planes: plain 1 x 1 convolutions, and the affine maps as buffers.

    The affine map of the queries is folded into their convolution.
    """

    key_psi: Tensor | None
    key_beta: Tensor | None
    value_psi: Tensor | None
    value_beta: Tensor | None

    def __init__(self, layer: _SelfConv2d) -> None:
        super().__init__()
        self.order = layer.group.order
        self.kernel_size = layer.kernel_size
        self.num_heads = layer.num_heads
        self.score_factor = layer.score_factor
        to_query, to_key, to_value = layer.embeddings()
        with torch.no_grad():
            banks = layer.banks()
            self.query = _fold(cast(nn.Conv2d, to_query.fuse()), banks.query)
        self.key = to_key.fuse()
        self.value = to_value.fuse() if to_value is not None else None
        self.project = layer.project.fuse()
        self.own_values = banks.value is not None
        for name, bank in (("key", banks.key), ("value", banks.value or _IDENTITY)):
            self.register_buffer(f"{name}_psi", bank.psi)
            self.register_buffer(f"{name}_beta", bank.beta)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self._field(self.query(x)), self._field(self.key(x))
        value = self._field(self.value(x)) if self.value is not None else None
        values = AffineBank(self.value_psi, self.value_beta) if self.own_values else None
        banks = AffineBanks(_IDENTITY, AffineBank(self.key_psi, self.key_beta), values)
        y = affine_attention(query, key, value, banks, self.kernel_size, self.num_heads, self.score_factor)
        out: Tensor = self.project(y.flatten(1, 2))
        return out

    def _field(self, planes: Tensor) -> Tensor:
        return planes.unflatten(1, (-1, self.order))

    def extra_repr(self) -> str:
        return f"order={self.order}, kernel_size={self.kernel_size}, num_heads={self.num_heads}"


def _fold(conv: nn.Conv2d, bank: AffineBank) -> nn.Conv2d:
    """Folds the 1 x 1 affine map of the queries into the convolution before it, in place."""
    if bank.psi is None or bank.beta is None or conv.bias is None:
        return conv
    psi, fields = bank.psi.squeeze(-1), (bank.psi.shape[0], bank.psi.shape[1])
    weight = torch.einsum("cpr,cri->cpi", psi, conv.weight.flatten(1).unflatten(0, fields))
    bias = torch.einsum("cpr,cr->cp", psi, conv.bias.unflatten(0, fields)) + bank.beta.squeeze(-1)
    conv.weight.copy_(weight.reshape(conv.weight.shape))
    conv.bias.copy_(bias.flatten())
    return conv
