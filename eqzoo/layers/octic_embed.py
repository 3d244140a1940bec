"""From an image to a field of irreps over its patches, and learnt positions that keep p4m."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._plain import plain_conv2d
from .irreps import Irreps, OcticLayer, check_widths


def unfold_quarters(quarters: Tensor) -> tuple[Tensor, Tensor]:
    """Squares that transform as the irreps of p4m, from a free quarter of each.

    With ``w_k`` the quarter rotated by k·90°, A1, A2, B1 and B2 are ``P ± flip(P)`` with ``P = [[w, ±w_3], [±w_1,
    w_2]]``, minus inside P for B1 and B2, minus before the flip of the width for A2 and B2. Component 0 of E is
    ``[[w, −flip(w)], [flip_height(w), −flip_both(w)]]``, component 1 that rotated by 90°.

    Args:
        quarters: Top left quarters of A1, A2, B1, B2, and two of E, ``(6, ..., q, q)``.

    Returns:
        A1, A2, B1, B2 as ``(4, ..., 2q, 2q)``, and E as (component, which of the two) ``(2, 2, ..., 2q, 2q)``.
    """
    w, v = quarters.split((4, 2))
    inside, outside = (
        torch.tensor(signs, dtype=w.dtype, device=w.device).view(4, *[1] * (w.ndim - 1))
        for signs in ((1.0, 1.0, -1.0, -1.0), (1.0, -1.0, 1.0, -1.0))
    )
    w1, w2, w3 = (torch.rot90(w, k, (-2, -1)) for k in (1, 2, 3))
    half = _quarters(w, inside * w3, inside * w1, w2)
    component = _quarters(v, -v.flip(-1), v.flip(-2), -v.flip(-2, -1))
    return half + outside * half.flip(-1), torch.stack([component, torch.rot90(component, 1, (-2, -1))])


def fold_quarters(ab: Tensor, e: Tensor) -> Tensor:
    """Quarters that `unfold_quarters` makes these squares of."""
    q = ab.shape[-1] // 2
    # Of A1 to B2 the quarter of a square is the sum of w and its reflection, so half of it unfolds to the same.
    return torch.cat([ab[..., :q, :q] / 2, e[0, ..., :q, :q]])


def _quarters(top_left: Tensor, top_right: Tensor, bottom_left: Tensor, bottom_right: Tensor) -> Tensor:
    return torch.cat([torch.cat([top_left, top_right], -1), torch.cat([bottom_left, bottom_right], -1)], -2)


class OcticPatchEmbed2d(OcticLayer):
    """A convolution of p x p filters with stride p, whose filters transform as the irreps of p4m.

    Every filter is made of a free quarter by `unfold_quarters`, with the factor √2/4, of E 1/2.

    Args:
        in_channels: The number of image channels.
        width: The width C, a multiple of 8.
        patch_size: The side p of a patch, even, in pixels.

    Shape:
        ``(B, in_channels, height, width)``, with sides that are multiples of 2p, to `Irreps` over
        ``(height/p, width/p)`` places.

    Raises:
        ValueError: If p is odd, or a side is no multiple of 2p.

    References:
        Octic Vision Transformers: Quicker ViTs Through Equivariance (Nordström, Edstedt, Kahl and Bökman, 2025),
        section 3. https://arxiv.org/abs/2505.15441

    Example:
        >>> OcticPatchEmbed2d(3, 64, 4)(torch.zeros(1, 3, 16, 24)).ab.shape
        torch.Size([4, 1, 4, 6, 8])
    """

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        if patch_size % 2:
            raise ValueError(f"patch_size is even, because filters are made of quarters; got {patch_size}")
        check_widths(width)
        self.patch_size = patch_size
        side = patch_size // 2
        self.weight = nn.Parameter(torch.empty(6 * (width // 8), in_channels, side, side))
        self.bias = nn.Parameter(torch.empty(width // 8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the quarters from a truncated normal distribution of deviation 2/(√in_channels·p); bias is 0."""
        # A number of a filter has a quarter of the variance of those that it is made of.
        nn.init.trunc_normal_(self.weight, std=2 / (self.weight.shape[1] ** 0.5 * self.patch_size))
        nn.init.zeros_(self.bias)

    def filters(self) -> Tensor:
        """The filters of the convolution, ``(C, in_channels, p, p)``: A1, A2, B1, B2, and the components of E."""
        ab, e = unfold_quarters(self.weight.unflatten(0, (6, -1)))
        return torch.cat([ab.flatten(0, 1) * (2**0.5 / 4), e.flatten(0, 2) / 2])

    def _bias(self) -> Tensor:
        """The bias of all filters, ``(C,)``: that of A1, and zeros."""
        return F.pad(self.bias, (0, 7 * self.bias.shape[0]))

    def forward(self, x: Tensor) -> Irreps:
        _check_sides(x, self.patch_size)
        return _as_irreps(F.conv2d(x, self.filters(), self._bias(), stride=self.patch_size))

    def fuse(self) -> nn.Module:
        """The same with a plain convolution, its filters written out."""
        conv = plain_conv2d(self.filters(), self._bias(), self.patch_size)
        return _PlainPatchEmbed(conv).train(self.training)

    def extra_repr(self) -> str:
        """The sizes, for printing."""
        return f"{self.weight.shape[1]}, {8 * self.bias.shape[0]}, patch_size={self.patch_size}"


class _PlainPatchEmbed(OcticLayer):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Irreps:
        _check_sides(x, int(self.conv.kernel_size[0]))
        return _as_irreps(self.conv(x))


def _check_sides(x: Tensor, patch: int) -> None:
    step = 2 * patch
    for name, side in zip(("height", "width"), x.shape[-2:], strict=True):
        if side % step or not side:
            near = [s for s in (side // step * step, (side // step + 1) * step) if s]
            raise ValueError(
                f"octic patches of {patch} pixels need sides that are multiples of {step}, an even number of patches; "
                f"got {name} {side}, and {' or '.join(map(str, near))} would do"
            )


def _as_irreps(planes: Tensor) -> Irreps:
    ab, e = planes.movedim(1, -1).tensor_split(2, -1)
    return Irreps(*(x.unflatten(-1, (n, -1)).movedim(-2, 0) for x, n in ((ab, 4), (e, 2))))


class OcticPosition2d(OcticLayer):
    """Adds learnt positions to the tokens of an image, a field of irreps that p4m leaves as it is.

    Positions are free on a quarter of the grid, see `unfold_quarters`. To grids of other sizes they are interpolated
    (bicubic).

    Args:
        width: The width C.
        grid: The number of patches a side, even.

    Shape:
        `Irreps` over ``(rows, columns)`` places to the same.

    Raises:
        ValueError: If the grid is odd, or the width no multiple of 8.
    """

    def __init__(self, width: int, grid: int) -> None:
        super().__init__()
        check_widths(width)
        if grid % 2:
            raise ValueError(
                f"the grid of patches has an even side, got {grid}: make the image a multiple of 2 patches"
            )
        self.weight = nn.Parameter(torch.empty(6, grid // 2, grid // 2, width // 8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the positions from a truncated normal distribution of deviation 0.02."""
        nn.init.trunc_normal_(self.weight, std=0.02)

    def positions(self) -> Irreps:
        """The whole field, ``(4, grid, grid, C/8)`` and ``(2, grid, grid, C/4)``."""
        ab, e = unfold_quarters(self.weight.movedim(-1, 1))
        return Irreps(ab.movedim(1, -1), e.flatten(1, 2).movedim(1, -1))

    def forward(self, x: Irreps) -> Irreps:
        return _moved_by(x, self.positions())

    def fuse(self) -> nn.Module:
        """The same with the whole field written out."""
        return _PlainPosition(self.positions()).train(self.training)


class _PlainPosition(OcticLayer):
    def __init__(self, positions: Irreps) -> None:
        super().__init__()
        self.ab, self.e = (nn.Parameter(x.detach().contiguous()) for x in positions)

    def forward(self, x: Irreps) -> Irreps:
        return _moved_by(x, Irreps(self.ab, self.e))


def _moved_by(x: Irreps, positions: Irreps) -> Irreps:
    grid = tuple(x.ab.shape[2:4])
    resized = (_resized(p.movedim(-1, 1), grid).movedim(1, -1) for p in positions)
    return Irreps(*(y + p[:, None] for y, p in zip(x, resized, strict=True)))


def resize_quarters(quarters: Tensor, grid: int) -> Tensor:
    """The weight of `OcticPosition2d` for another grid, by bicubic interpolation of the field: ``(6, q, q, C/8)``."""
    ab, e = unfold_quarters(quarters.movedim(-1, 1))
    ab, e = (_resized(x.flatten(0, -4), (grid, grid)).unflatten(0, x.shape[:-3]) for x in (ab, e))
    return fold_quarters(ab, e).movedim(1, -1).contiguous()


def _resized(planes: Tensor, grid: tuple[int, ...]) -> Tensor:
    if planes.shape[-2:] == grid:
        return planes
    return F.interpolate(planes, size=grid, mode="bicubic", align_corners=False)
