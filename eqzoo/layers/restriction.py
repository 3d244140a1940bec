"""Restriction of fields to a subgroup: networks whose later layers are equivariant under fewer elements."""

import numpy as np
from torch import Tensor, nn

from ..groups import Group, transform
from ._checks import check_field
from ._layout import laid_out_as
from ._planes import Planes
from ._tables import KeepsTables


class GroupRestriction(KeepsTables):
    """Regular fields of a group G, read as fields of its subgroup H: ``|G|/|H|`` times as many.

    ``out(c·|G|/|H| + j, h, x) = f(c, h t_j, x)``, where the cosets ``H t_j`` divide G. Under an element k of H,
    ``(k f)(h t_j, x) = f(k⁻¹ h t_j, k⁻¹ x)``, so the output transforms as regular fields of H. No value is changed or
    lost. The layers behind it share their weights over H alone: they tell apart what rotations or reflections in G, but
    not in H, exchange, so the network as a whole is equivariant under H.

    It is for images whose small patterns have every orientation while the whole has a canonical one, such as
    photographs, or whose reflections matter at large scales alone.

    Args:
        group: The group G of the input.
        subgroup: The group H of the output.

    Shape:
        ``(B, C, |G|, height, width)`` to ``(B, C·|G|/|H|, |H|, height, width)``.

    Raises:
        ValueError: If an element of ``subgroup`` is not in ``group``.

    References:
        General E(2)-Equivariant Steerable CNNs (Weiler and Cesa, 2019), on group restrictions
        https://arxiv.org/abs/1911.08251

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4, P4M
        >>> GroupRestriction(P4M, P4)(torch.zeros(2, 16, 8, 7, 7)).shape
        torch.Size([2, 32, 4, 7, 7])
    """

    poses: Tensor

    def __init__(self, group: Group, subgroup: Group) -> None:
        super().__init__()
        elements = [group.element(subgroup.matrix(h)) for h in subgroup.elements]
        if None in elements:
            raise ValueError(f"{subgroup.name} is no subgroup of {group.name}")
        self.source = group
        self.group = subgroup
        poses: list[int] = []  # coset after coset, H t for the first t that is in none of those before
        for t in group.elements:
            if t not in poses:
                poses += [group.product(h, t) for h in elements if h is not None]
        self.register_table("poses", np.array(poses))

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, None, self.source.order)
        if self.poses.device != x.device:  # without weights of its own, load_state_dict(assign=True) moves it nowhere
            self.init_non_persistent_buffers(x.device)
        # The poses in the order of the cosets, each coset a field of its own.
        return laid_out_as(x, x.index_select(2, self.poses).unflatten(2, (-1, self.group.order)).flatten(1, 2))

    def transform_field(self, x: Tensor, g: int) -> Tensor:
        """The element g of the subgroup, applied to an input or output, told apart by the number of poses."""
        if x.shape[2] == self.group.order:
            return transform(x, self.group, g, "regular")
        element = self.source.element(self.group.matrix(g))
        assert element is not None
        return transform(x, self.source, element, "regular")

    def fuse(self) -> nn.Module:
        """The equivalent layer on planes, ``(B, C·|G|, height, width)``, which it permutes."""
        return Planes(self, self.source.order)

    def extra_repr(self) -> str:
        return f"{self.source.name}, {self.group.name}"
