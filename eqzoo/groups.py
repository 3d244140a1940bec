"""Finite point groups of the plane: cyclic (rotations) and dihedral (rotations and reflections).

An element is an integer ``i = m·n + r`` that stands for ``R^r M^m``: reflect if m is 1, then rotate by ``r·2π/n``.
Rotations are counter-clockwise as displayed, the reflection flips the width axis, and pixel (0, 0) is top left.

A group acts on feature fields by ``(g f)(x) = ρ(g) f(g⁻¹ x)``:

* ``"trivial"``: images, ``(..., height, width)``; ρ is the identity.
* ``"regular"``: ``(..., |H|, height, width)``; ρ permutes the group axis, ``(g f)(h, x) = f(g⁻¹ h, g⁻¹ x)``.

A filter transforms like the field that it is correlated with, so `transform` serves both.

References:
    Group Equivariant Convolutional Networks (Cohen and Welling, 2016), sections 4 and 6
    https://arxiv.org/abs/1602.07576
"""

import math
import operator
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "P4",
    "P4M",
    "Z2",
    "Z2M",
    "Field",
    "Group",
    "cyclic",
    "dihedral",
    "orbit",
    "orbit_array",
    "permutation",
    "transform",
]

Field = Literal["trivial", "regular"]


@dataclass(frozen=True)
class Group:
    """A finite group of rotations by multiples of ``2π/n``, with or without reflections.

    Args:
        rotations: The number of rotations, n.
        reflections: Whether the group contains reflections; it then has ``2n`` elements instead of n.

    Raises:
        ValueError: If ``rotations`` is smaller than 1.
        TypeError: If ``rotations`` is no integer.

    References:
        Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 4
        https://arxiv.org/abs/1602.07576

    Example:
        >>> P4M.order, P4M.name, P4M.product(1, 4) == P4M.product(4, 3)  # R M = M R^-1
        (8, 'p4m', True)
    """

    rotations: int
    reflections: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotations", operator.index(self.rotations))  # numpy's integers are others
        object.__setattr__(self, "reflections", bool(self.reflections))
        if self.rotations < 1:
            raise ValueError(f"a group needs at least one rotation (the identity), got rotations={self.rotations}")

    @classmethod
    def from_name(cls, name: str) -> "Group":
        """The group of a name, the inverse of `name`; ``r1`` and ``r4`` are other names of ``z2`` and ``p4``.

        Raises:
            ValueError: If it is the name of no group.

        Example:
            >>> Group.from_name("p4m") == P4M, Group.from_name("r8")
            (True, Group(rotations=8, reflections=False))
        """
        match = re.fullmatch(r"(?:(z2)|(p4)|r([1-9]\d*))(m?)", name, re.ASCII)
        if match is None:
            raise ValueError(
                f"no group is named {name!r}; names are z2, p4 and r<number of rotations>, with an m for reflections: "
                "z2m, p4m, r2, r8m"
            )
        return cls(1 if match[1] else 4 if match[2] else int(match[3]), bool(match[4]))

    @property
    def order(self) -> int:
        """The number of elements, ``|H|``."""
        return self.rotations * (1 + self.reflections)

    @property
    def name(self) -> str:
        """The group's name: ``z2`` and ``p4``, else ``r<n>``, with an ``m`` appended for reflections."""
        return {1: "z2", 4: "p4"}.get(self.rotations, f"r{self.rotations}") + "m" * self.reflections

    @property
    def elements(self) -> range:
        """The elements 0 to ``order − 1``; 0 is the identity."""
        return range(self.order)

    @property
    def grid_elements(self) -> tuple[int, ...]:
        """The elements that map the pixel grid onto itself: rotations by multiples of 90°, reflected or not."""
        return tuple(g for g in self.elements if 4 * (g % self.rotations) % self.rotations == 0)

    @property
    def of_grid(self) -> "Group":
        """The subgroup of the `grid_elements`: ``Group(8).of_grid`` is p4, ``Group(3).of_grid`` z2."""
        return Group(math.gcd(self.rotations, 4), self.reflections)

    @property
    def on_grid(self) -> bool:
        """Whether every element maps the pixel grid onto itself."""
        return len(self.grid_elements) == self.order

    def _split(self, g: int) -> tuple[int, int]:
        if not 0 <= g < self.order:
            raise ValueError(f"element {g} is not in {self.name}: its elements are 0 to {self.order - 1}")
        return divmod(g, self.rotations)

    def product(self, g: int, h: int) -> int:
        """The element ``g h`` (h acts first): ``R^r M^m · R^s M^k = R^(r ± s) M^(m + k)``, with minus if m is 1."""
        (m, r), (k, s) = self._split(g), self._split(h)
        return ((m + k) % 2) * self.rotations + (r + (-s if m else s)) % self.rotations

    def inverse(self, g: int) -> int:
        """The element ``g⁻¹``; every reflection is its own inverse."""
        m, r = self._split(g)
        return g if m else -r % self.rotations

    def matrix(self, g: int) -> Tensor:
        """The action on positions: the orthogonal matrix of g on ``(row, column)`` vectors, ``(2, 2)`` float64.

        ``R(θ) = [[cos θ, −sin θ], [sin θ, cos θ]]`` and ``M = diag(1, −1)``; 90° rotations are exact integers.
        """
        return torch.tensor(self.matrix_rows(g), dtype=torch.float64, device="cpu")

    def matrix_rows(self, g: int) -> list[list[float]]:
        """The two rows of `matrix` as Python numbers, which need no memory where tensors are fake."""
        m, r = self._split(g)
        cos, sin = _cos_sin(r, self.rotations)
        flip = -1.0 if m else 1.0
        return [[cos, -sin * flip], [sin, cos * flip]]

    def quarter_rotations(self, g: int) -> tuple[int, bool]:
        """The action on the pixel grid: the number of 90° rotations, and whether the width axis is flipped before them.

        Raises:
            ValueError: If g does not map the pixel grid onto itself.
        """
        m, r = self._split(g)
        quarters, rest = divmod(4 * r, self.rotations)
        if rest:
            raise ValueError(
                f"element {g} of {self.name} rotates by {360 * r / self.rotations:g} degrees, which does not map the "
                f"pixel grid onto itself; the elements that do are {self.grid_elements}"
            )
        return quarters, bool(m)

    def describe(self, g: int) -> str:
        """What an element does to an image, in English.

        Example:
            >>> P4M.describe(0), P4M.describe(5)
            ('as it is', 'reflected, rotated by 90°')
        """
        m, r = self._split(g)
        words = ["reflected"] * m + [f"rotated by {360 * r / self.rotations:g}°"] * (r > 0)
        return ", ".join(words) or "as it is"

    def element(self, matrix: Tensor) -> int | None:
        """The element with this matrix (see `matrix`), or None; it embeds a subgroup in a larger group."""
        matches = (g for g in self.elements if torch.allclose(self.matrix(g), matrix.double(), atol=1e-9))
        return next(matches, None)


def cyclic(rotations: int) -> Group:
    """The cyclic group of rotations by multiples of ``2π/rotations``."""
    return Group(rotations)


def dihedral(rotations: int) -> Group:
    """The dihedral group: the rotations of `cyclic` and as many reflections, ``2·rotations`` elements in all."""
    return Group(rotations, reflections=True)


Z2 = cyclic(1)
Z2M = dihedral(1)
P4 = cyclic(4)
P4M = dihedral(4)


def transform(x: Tensor, group: Group, g: int, field: Field) -> Tensor:
    """Applies an element of the group to a field or filter: ``(g f)(x) = ρ(g) f(g⁻¹ x)``.

    Args:
        x: ``(..., height, width)`` for a trivial field, ``(..., |H|, height, width)`` for a regular one.
        group: The group.
        g: The element.
        field: ``"trivial"`` or ``"regular"``.

    Returns:
        The transformed field; a 90° rotation swaps height and width.

    Raises:
        ValueError: If g does not map the pixel grid onto itself, the field is unknown, or the group axis is not |H|.
        TypeError: If the group is not a `Group`.

    Example:
        >>> import torch
        >>> transform(torch.tensor([[1, 2], [3, 4]]), P4, 1, "trivial")  # a 90° rotation, counter-clockwise
        tensor([[2, 4],
                [1, 3]])
    """
    if not isinstance(group, Group):
        raise TypeError(
            f"group is an eqzoo.Group such as eqzoo.P4, got {group!r}; Group.from_name finds one by its name"
        )
    quarters, reflected = group.quarter_rotations(g)
    if field == "regular":
        if x.ndim < 3 or x.shape[-3] != group.order:
            raise ValueError(
                f"a regular field of {group.name} is (..., {group.order}, height, width), got {tuple(x.shape)}"
            )
        x = x.index_select(-3, permutation(group, g).to(x.device))
    elif field != "trivial":
        raise ValueError(f"field is 'trivial' or 'regular', got {field!r}")
    return torch.rot90(x.flip(-1) if reflected else x, quarters, (-2, -1))


def permutation(group: Group, g: int) -> Tensor:
    """The permutation of the group axis of a regular field under g: entry h is ``g⁻¹ h``, ``(|H|,)`` int64."""
    return torch.tensor(_permuted(group, g), device="cpu")


def _permuted(group: Group, g: int) -> list[int]:
    inverse = group.inverse(g)
    return [group.product(inverse, h) for h in group.elements]


def orbit(group: Group, kernel_size: int, field: Field) -> Tensor:
    """The gather index that expands a flattened filter to its orbit, all its transformed copies.

    Entry ``[g, j]`` is the index in the flattened filter at which entry j of the flattened ``g·filter`` is read.

    Args:
        group: The group.
        kernel_size: The side of the square filter, in pixels.
        field: What the filter is correlated with: ``"trivial"`` or ``"regular"``.

    Returns:
        ``(|H|, k·k)`` for a trivial field, ``(|H|, |H|·k·k)`` for a regular one, int64.

    Raises:
        ValueError: If the group does not act on the pixel grid.
    """
    return torch.as_tensor(orbit_array(group, kernel_size, field).copy(), device="cpu")


@cache
def orbit_array(group: Group, kernel_size: int, field: Field) -> np.ndarray[Any, Any]:
    """`orbit` as an array, by the law of `transform`: a tensor that is kept might be one of a trace, without values."""
    if not group.on_grid:
        raise ValueError(
            f"{group.name} does not map the pixel grid onto itself, so its filters have no exact orbit; "
            "use z2, z2m, r2, r2m, p4 or p4m, or lifting and group self-attention, norms, pools over the group and "
            "PointwiseConv2d, which take any group"
        )
    if field not in ("regular", "trivial"):
        raise ValueError(f"field is 'regular' or 'trivial', got {field!r}")
    shape = (kernel_size, kernel_size) if field == "trivial" else (group.order, kernel_size, kernel_size)
    places = np.arange(math.prod(shape)).reshape(shape)

    def moved(g: int) -> np.ndarray[Any, Any]:
        quarters, reflected = group.quarter_rotations(g)
        x = places if field == "trivial" else places[_permuted(group, g)]
        return np.rot90(x[..., ::-1] if reflected else x, quarters, (-2, -1)).reshape(-1)

    index = np.stack([moved(g) for g in group.elements])
    index.setflags(write=False)  # it is kept
    return index


def _cos_sin(r: int, n: int) -> tuple[float, float]:
    """Cosine and sine of ``2π r/n``, computed from an angle of at most 45°.

    They are exact at multiples of 90°, and matrices of elements that differ by a 90° rotation or a reflection have the
    same entries up to order and sign, bit for bit.
    """
    quarter, rest = divmod(4 * r, n)  # the angle is (quarter + rest / n) · π/2
    eighth = math.pi / 2 * min(rest, n - rest) / n
    cos, sin = (math.cos(eighth), math.sin(eighth)) if 2 * rest != n else (math.sqrt(0.5), math.sqrt(0.5))
    if 2 * rest > n:
        cos, sin = sin, cos
    return ((cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos))[quarter % 4]
