"""Upsampling of images and regular fields, for decoders of dense predictions."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import Group
from ._layout import from_planes, is_channels_last, to_planes


class Upsample2d(nn.Module):
    """Bilinear interpolation of an image or regular field to larger sides, equivariant at every size.

    Each element of the group axis is interpolated as an image of its own, ``align_corners=False``: the centers of the
    output's pixels lie symmetrically in the image, whatever the sides.

    Args:
        group: The point group H under which the layer is equivariant.
        factor: The sides of the output over those of the input, a whole number.

    Shape:
        ``(B, ..., height, width)`` to ``(B, ..., factor·height, factor·width)``, or to sides that are given, such as
        those of the features that a decoder joins it with: ``forward(x, size=(height', width'))``, or one number for
        both.

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> field = torch.zeros(2, 16, 4, 7, 9)
        >>> Upsample2d(P4)(field).shape, Upsample2d(P4)(field, (15, 19)).shape
        (torch.Size([2, 16, 4, 14, 18]), torch.Size([2, 16, 4, 15, 19]))
    """

    def __init__(self, group: Group, factor: int = 2) -> None:
        super().__init__()
        self.group = group
        self.factor = factor

    def forward(self, x: Tensor, size: Sequence[int] | int | None = None) -> Tensor:
        sides = [self.factor * side for side in x.shape[-2:]] if size is None else size
        y = F.interpolate(to_planes(x), sides, mode="bilinear", align_corners=False)
        return from_planes(y, x.shape[1], x.shape[2], is_channels_last(x)) if x.ndim == 5 else y

    def extra_repr(self) -> str:
        return f"{self.group.name}, factor={self.factor}"
