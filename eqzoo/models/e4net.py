"""E⁴-Net, the efficient equivariant network for rotated MNIST, for any group that maps the pixel grid onto itself.

A 3 x 3 lifting convolution and six E⁴ layers of equal width, each followed by batch norm and ReLU; dropout after the
last five; 2 x 2 max pools after the first and the third E⁴ layer; the maximum over group and space, and a linear
classifier. The sides are 28, 14 and 7 on 28 x 28 images.

| model            | group | fields C | slices s | reduction r | kernel k | parameters |
|------------------|-------|----------|----------|-------------|----------|------------|
| p4_e4net         | P4    | 16       | 2        | 1           | 5        | 18,118     |
| p4_e4net_large   | P4    | 24       | 3        | 1           | 5        | 39,988     |
| p4m_e4net (ours) | P4M   | 12       | 2        | 1           | 5        | 18,274     |

The paper prints 18.8K and 41.1K. The norm of the kernel generator in the authors' code has a scale and shift for each
group element, which is not equivariant once it is trained; here it is tied over the group. With
``kernel_norm_affine="per_element"`` the networks have 18,694 and 40,852 parameters.

References:
    Efficient Equivariant Network (He et al., 2021), section 5.1 and tables 1 to 3
    https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf
"""

from collections import OrderedDict
from typing import Any

from timm.models import register_model
from torch import nn

from ..data import CATALOG
from ..groups import P4, P4M, Group
from ..layers import Dropout, E4Layer2d, GroupBatchNorm2d, LiftingConv2d, SpatialPool2d
from ..layers._fused import FusedSequential
from ..layers.e4 import KernelNormAffine
from ..layers.pool import Reduce
from .base import EquivariantNet
from .builder import build, configs


class E4Net(EquivariantNet):
    """E⁴-Net: a lifting convolution, six E⁴ layers, and a linear classifier of the pooled features.

    Args:
        group: The point group.
        width: The number of fields of each layer, C.
        slices: The number of filters per pixel in each E⁴ layer, s; it divides C.
        reduction: The ratio of input fields to hidden fields in the kernel generators, r; it divides C.
        kernel_size: The side of the generated filters, in pixels, odd.
        kernel_norm_affine: ``"tied"``, which is exact, or ``"per_element"``, as in the authors' code, which is not.
        num_classes: The number of classes; with 0 the network returns its pooled features, ``(B, C)``.
        in_chans: The number of image channels.
        drop_rate: The dropout probability.
        global_pool: How features are pooled over group and space: ``"max"`` or ``"avg"``.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides are multiples of 4.

    References:
        Efficient Equivariant Network (He et al., 2021), section 5.1
        https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf

    Example:
        >>> import torch
        >>> E4Net(P4)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        group: Group = P4,
        width: int = 16,
        slices: int = 2,
        reduction: int = 1,
        kernel_size: int = 5,
        kernel_norm_affine: KernelNormAffine = "tied",
        num_classes: int = 10,
        in_chans: int = 1,
        drop_rate: float = 0.2,
        global_pool: Reduce = "max",
    ) -> None:
        super().__init__(group, num_classes, in_chans, num_features=width)
        self.drop_rate = drop_rate

        def e4(drop: bool = False, pool: bool = False) -> nn.Sequential:
            layer = E4Layer2d(group, width, width, kernel_size, slices, reduction, kernel_norm_affine)
            return self._stage(OrderedDict(e4=layer), drop, pool)

        lift = LiftingConv2d(group, in_chans, width, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(lift.weight, nonlinearity="relu")
        self.stem = self._stage(OrderedDict(conv=lift))
        self.blocks = nn.Sequential(
            e4(pool=True), e4(drop=True), e4(drop=True, pool=True), *(e4(drop=True) for _ in range(3))
        )
        planes = width * group.order
        self.feature_info = [
            {"num_chs": planes, "reduction": factor, "module": f"blocks.{i - 1}" if i else "stem"}
            for i, factor in enumerate((1, 2, 2, 4, 4, 4, 4))
        ]
        self.reset_classifier(num_classes, global_pool)

    def _stage(self, layers: OrderedDict[str, nn.Module], drop: bool = False, pool: bool = False) -> nn.Sequential:
        layers |= OrderedDict(norm=GroupBatchNorm2d(self.group, self.num_features), act=nn.ReLU(inplace=True))
        if drop:
            layers["drop"] = Dropout(self.drop_rate)
        if pool:
            layers["pool"] = SpatialPool2d(self.group, 2)
        return FusedSequential(layers)


_NAMES = ("p4_e4net", "p4_e4net_large", "p4m_e4net")

default_cfgs = configs(
    {f"{name}.rotmnist": CATALOG["rotmnist"].cfg() for name in _NAMES}, first_conv="stem.conv", classifier="head"
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], **args: Any) -> EquivariantNet:
    return build(E4Net, variant, pretrained, feature_indices=tuple(range(7)), **(args | kwargs))


@register_model
def p4_e4net(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """E⁴-Net for p4 with 16 fields in 2 slices: exact for 90° rotations (18,118 parameters)."""
    return _create("p4_e4net", pretrained, kwargs, group=P4, width=16, slices=2)


@register_model
def p4_e4net_large(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The large E⁴-Net for p4, 24 fields in 3 slices: exact for 90° rotations (39,988 parameters)."""
    return _create("p4_e4net_large", pretrained, kwargs, group=P4, width=24, slices=3)


@register_model
def p4m_e4net(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """E⁴-Net for p4m with 12 fields in 2 slices: exact for 90° rotations and reflections (18,274 parameters)."""
    return _create("p4m_e4net", pretrained, kwargs, group=P4M, width=12, slices=2)
