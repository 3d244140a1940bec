"""Fields of irreducible representations of p4m: what octic layers take and give."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..groups import P4M, transform

# Signs of A1, A2, B1, B2 under a rotation by 90° and under a reflection.
_ROTATED = (1.0, 1.0, -1.0, -1.0)
_REFLECTED = (1.0, -1.0, 1.0, -1.0)


class Irreps(NamedTuple):
    r"""A field of width C: C/8 channels of each of the four one-dimensional irreps of p4m, and C/4 of the other one.

    ========== =============== ==========
    irrep      rotation by 90° reflection
    ========== =============== ==========
    A1         \+              \+
    A2         \+              −
    B1         −               \+
    B2         −               −
    E = (a, b) (−b, a)         (−a, b)
    ========== =============== ==========

    Args:
        ab: A1, A2, B1 and B2, ``(4, B, N, C/8)`` over N tokens or ``(4, B, height, width, C/8)`` over places.
        e: The two components of E, ``(2, B, N, C/4)`` or ``(2, B, height, width, C/4)``.

    References:
        Flopping for FLOPs: Leveraging Equivariance for Computational Efficiency (Bökman, Nordström and Kahl, 2025),
        section 3. https://arxiv.org/abs/2502.05169
    """

    ab: Tensor
    e: Tensor

    @property
    def width(self) -> int:
        """The number of channels in all, C."""
        return 8 * self.ab.shape[-1]


def check_widths(*widths: int) -> None:
    """Raises ValueError unless each number of channels is a multiple of 8: four irreps of C/8, and E of twice C/4."""
    for width in widths:
        if width < 8 or width % 8:
            raise ValueError(f"widths of octic layers are multiples of 8, got {width}")


def channels_of(x: Irreps) -> Tensor:
    """The field as one tensor, ``(..., C)``: A1, A2, B1, B2, and the components of E one after the other."""
    return torch.cat([*x.ab.unbind(0), *x.e.unbind(0)], -1)


def transform_irreps(x: Irreps, g: int) -> Irreps:
    """Applies an element of p4m: to the channels, and, where the field has rows and columns, to the places.

    Args:
        x: The field.
        g: The element, numbered as in `eqzoo.P4M`.

    Example:
        >>> x = Irreps(torch.ones(4, 1, 1, 1), torch.tensor([1.0, 2.0]).view(2, 1, 1, 1).expand(2, 1, 1, 2))
        >>> y = transform_irreps(x, 1)  # a rotation by 90°
        >>> y.ab.flatten().tolist(), y.e[:, 0, 0, 0].tolist()
        ([1.0, 1.0, -1.0, -1.0], [-2.0, 1.0])
    """
    rotations, reflected = P4M.quarter_rotations(g)
    ab, e = x
    if reflected:
        ab, e = _signed(ab, _REFLECTED), _signed(e, (-1.0, 1.0))
    for _ in range(rotations):
        ab, e = _signed(ab, _ROTATED), torch.stack([-e[1], e[0]])
    if ab.ndim == 5:
        ab, e = (transform(y.movedim(-1, 2), P4M, g, "trivial").movedim(2, -1) for y in (ab, e))
    return Irreps(ab, e)


def _signed(x: Tensor, signs: tuple[float, ...]) -> Tensor:
    return x * torch.tensor(signs, dtype=x.dtype, device=x.device).view(-1, *[1] * (x.ndim - 1))


class OcticLayer(nn.Module):
    """A layer on fields of irreps of p4m; the base of all of them.

    It states its law, which shapes do not tell: ``layer(transform_field(x, g)) = transform_field(layer(x), g)``.
    """

    group = P4M

    @staticmethod
    def transform_field(x: Any, g: int) -> Any:
        """How an element of p4m acts on what the layer takes and gives.

        Images ``(B, C, height, width)`` are moved, fields of irreps as `transform_irreps` says, and invariant tokens
        ``(B, N, C)`` stay.
        """
        if isinstance(x, Irreps):
            return transform_irreps(x, g)
        return transform(x, P4M, g, "trivial") if x.ndim == 4 else x
