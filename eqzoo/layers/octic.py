"""Layers on fields of irreps of p4m: a linear map, layer norm, GELU, residuals, and the ways out of the group.

References:
    Octic Vision Transformers: Quicker ViTs Through Equivariance (Nordström, Edstedt, Kahl and Bökman, 2025), section 3
    https://arxiv.org/abs/2505.15441
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import octic_gelu, octic_norm
from ..ops._dispatch import exporting
from ..ops.octic import eight_parts
from .irreps import Irreps, OcticLayer, check_widths


class OcticLinear(OcticLayer):
    """A linear map of fields of irreps: one matrix for each irrep, by Schur's lemma.

    A1, A2, B1 and B2 have a matrix each, E one for both components: 12/64 of the multiplications of a dense map, in two
    products. Only A1 may have a bias.

    ``y_i = x_i W_i`` with ``weight`` ``(4, C/8, C'/8)`` for A1, A2, B1 and B2, and ``y = W x`` with ``weight_e``
    ``(C'/4, C/4)`` for E.

    Args:
        in_features: The width C, a multiple of 8.
        out_features: The width C', a multiple of 8.
        bias: Whether A1 has a bias.

    Shape:
        `Irreps` of width C to `Irreps` of width C'.

    Example:
        >>> layer = OcticLinear(16, 32)
        >>> layer(Irreps(torch.zeros(4, 1, 5, 2), torch.zeros(2, 1, 5, 4))).width
        32
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        check_widths(in_features, out_features)
        self.in_features, self.out_features = in_features, out_features
        # Of the four, the way in which the product of a batch of matrices is fastest.
        self.weight = nn.Parameter(torch.empty(4, in_features // 8, out_features // 8))
        self.weight_e = nn.Parameter(torch.empty(out_features // 4, in_features // 4))
        self.bias = nn.Parameter(torch.empty(out_features // 8)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weights so that the variance is that of timm's dense layers, whose weights have a deviation of 0.02."""
        nn.init.trunc_normal_(self.weight, std=0.02 * 8**0.5)
        nn.init.trunc_normal_(self.weight_e, std=0.02 * 4**0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Irreps) -> Irreps:
        rows = x.ab.flatten(1, -2)
        if self.bias is None:
            ab = torch.bmm(rows, self.weight)
        elif torch.is_grad_enabled() or torch.compiler.is_compiling() or exporting():
            ab = torch.baddbmm(F.pad(self.bias[None], (0, 0, 0, 3))[:, None], rows, self.weight)
        else:
            ab = torch.bmm(rows, self.weight)
            ab[0] += self.bias  # a quarter of what there is to write, where nothing is recorded
        return Irreps(ab.unflatten(1, x.ab.shape[1:-1]), F.linear(x.e, self.weight_e))

    def extra_repr(self) -> str:
        """The widths, for printing."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class OcticLayerNorm(OcticLayer):
    """Layer norm of a field of irreps, `eqzoo.ops.octic_norm`: one scale a token, a mean for each component.

    Args:
        width: The width C, a multiple of 8.
        eps: What is added to the variance.
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_widths(width)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(6 * (width // 8)))
        self.bias = nn.Parameter(torch.empty(width // 8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weight to 1 and bias to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Irreps) -> Irreps:
        return Irreps(*octic_norm(x.ab, x.e, self.weight, self.bias, self.eps))


class OcticGELU(OcticLayer):
    """GELU of the regular representation, `eqzoo.ops.octic_gelu`."""

    def forward(self, x: Irreps) -> Irreps:
        return Irreps(*octic_gelu(x.ab, x.e))


class OcticResidual(nn.Module):
    """Adds a branch, ``x + γ·y``: layer scale, a factor for each channel, and drop path, for all parts of an image.

    Args:
        width: The width C.
        init_values: The first γ, or None for no layer scale.
        drop_path: The probability that an image goes without the branch in training.
    """

    def __init__(self, width: int, init_values: float | None = None, drop_path: float = 0.0) -> None:
        super().__init__()
        check_widths(width)
        self.drop_path = drop_path
        self.init_values = init_values
        self.weight = None if init_values is None else nn.Parameter(torch.empty(6 * (width // 8)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the factors to ``init_values``."""
        if self.weight is not None and self.init_values is not None:
            nn.init.constant_(self.weight, self.init_values)

    def forward(self, x: Irreps, y: Irreps) -> Irreps:
        factors: list[Any] = [None, None]
        if self.weight is not None:
            split = 2 * self.weight.shape[0] // 3
            factors = [self.weight[:split].view(4, *[1] * (y.ab.ndim - 2), -1), self.weight[split:]]
        if self.drop_path and self.training:
            keep = 1 - self.drop_path
            kept = y.ab.new_empty(y.ab.shape[1], *[1] * (y.ab.ndim - 2)).bernoulli_(keep) / (keep or 1)
            factors = [kept if factor is None else factor * kept for factor in factors]
        return Irreps(*(_add(a, b, factor) for a, b, factor in zip(x, y, factors, strict=True)))


def _add(x: Tensor, y: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:
        return x + y
    if x.dtype != y.dtype:  # under autocast
        return x + y * factor
    return torch.addcmul(x, y, factor)


class OcticInvariants(OcticLayer):
    """The way out of an equivariant half: ``A1, |A2|, |B1|, |B2|`` and ``‖E‖``, mapped to C plain channels.

    Args:
        width: The width C.

    Shape:
        `Irreps` of tokens to invariant tokens ``(B, N, C)``.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        check_widths(width)
        self.proj = nn.Linear(6 * (width // 8), width)
        nn.init.trunc_normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Irreps) -> Tensor:
        kept, *signed = x.ab.unbind(0)
        e = x.e.to(torch.promote_types(x.e.dtype, torch.float32))
        # Clamped because the gradient of the root is infinite at 0.
        lengths = e.square().sum(0).clamp_min(torch.finfo(e.dtype).tiny).sqrt().to(x.e.dtype)
        return self.proj(torch.cat([kept, *(part.abs() for part in signed), lengths], -1))


class OcticParts(nn.Module):
    """The way out of the group: the eight parts of a field as plain channels, which then mix; ``(B, N, C)``."""

    breaks_group = "which hands irreps of p4m on as plain channels, on purpose"

    def forward(self, x: Irreps) -> Tensor:
        return torch.cat(eight_parts(x.ab, x.e).unbind(0), -1)
