"""ResNet-18 for CIFAR with efficient equivariant (E⁴) layers, for any group that maps the pixel grid onto itself.

A 3 x 3 lifting convolution; four stages of two basic blocks with C, 2C, 4C and 8C fields; the maximum over the group
and the mean over space; a linear classifier. In the E⁴ networks, the second convolution of each block is an E⁴ layer.

| model              | group | fields C | second layer of a block | CIFAR-10   | CIFAR-100  |
|--------------------|-------|----------|-------------------------|------------|------------|
| z2_resnet18        | Z2    | 64       | 3 x 3 convolution       | 11,173,962 | 11,220,132 |
| p4_resnet18        | P4    | 32       | 3 x 3 convolution       | 11,165,738 | 11,188,868 |
| p4m_resnet18       | P4M   | 22       | 3 x 3 convolution       | 10,552,992 | 10,568,922 |
| p4_e4_resnet18     | P4    | 32       | E⁴, 3 x 3, r = 2        | 6,340,298  | 6,363,428  |
| p4m_e4_resnet18    | P4M   | 22       | E⁴, 3 x 3, r = 2        | 5,804,952  | 5,820,882  |

The paper prints 5.8M and 6.0M for the two E⁴ networks. The settings here are those of the authors' code, with two
channels per slice; with its norm, ``kernel_norm_affine="per_element"``, they have 6,343,178 and 5,809,572 parameters.

The p4 and p4m networks halve the sides by a 2 x 2 max pool after a convolution with stride 1, as in the authors' code,
which is exact on even sides; the plain network uses stride 2, as ResNet does.

References:
    Efficient Equivariant Network (He et al., 2021), section 5.2 and table 4
    https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf
    Deep Residual Learning for Image Recognition (He et al., 2015), section 3
    https://arxiv.org/abs/1512.03385
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from timm.models import register_model
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import P4, P4M, Z2, Group
from ..layers import Dropout, E4Layer2d, GroupBatchNorm2d, GroupConv2d, GroupPool, LiftingConv2d, SpatialPool2d
from ..layers._fused import FusedSequential
from ..layers.e4 import KernelNormAffine
from ..layers.pool import Reduce
from .base import EquivariantNet
from .builder import build, configs, stage_indices

Mechanism = Literal["conv", "e4"]
Downsample = Literal["pool", "stride"]


class E4ResNet(EquivariantNet):
    """ResNet of basic blocks whose second layer is a group convolution or an E⁴ layer.

    Args:
        group: The point group.
        width: The number of fields of the first stage, C; it doubles with each further stage.
        depths: The number of blocks of each stage.
        mechanism: The second layer of each block: ``"conv"``, a 3 x 3 group convolution, or ``"e4"``.
        slice_channels: The number of consecutive channels that share a generated filter, ``C/s``.
        reduction: The ratio of input fields to hidden fields in the kernel generators, r.
        kernel_size: The side of the generated filters, in pixels, odd.
        kernel_norm_affine: ``"tied"``, which is exact, or ``"per_element"``, as in the authors' code, which is not.
        downsample: ``"pool"``: stride 1 and a 2 x 2 max pool on both branches, which is exact on even sides;
            ``"stride"``: stride 2, which is only approximate on even sides.
        num_classes: The number of classes; with 0 the network returns its pooled features, ``(B, 8C)``.
        in_chans: The number of image channels.
        drop_rate: The dropout probability after the first convolution of each block.
        global_pool: How features are pooled over the group, before the mean over space: ``"max"`` or ``"avg"``.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; with ``"pool"``, sides are multiples of 8.

    Raises:
        ValueError: If slice_channels or reduction does not divide a width, or a stage has no block.
        KeyError: If mechanism or downsample is unknown.

    References:
        Efficient Equivariant Network (He et al., 2021), section 5.2
        https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf

    Example:
        >>> import torch
        >>> E4ResNet(P4, width=4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    blocks_are_stages = True

    def __init__(
        self,
        group: Group = P4,
        width: int = 32,
        depths: tuple[int, ...] = (2, 2, 2, 2),
        mechanism: Mechanism = "e4",
        slice_channels: int = 2,
        reduction: int = 2,
        kernel_size: int = 3,
        kernel_norm_affine: KernelNormAffine = "tied",
        downsample: Downsample = "pool",
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.2,
        global_pool: Reduce = "max",
    ) -> None:
        if min(depths) < 1:
            raise ValueError(f"depths are the numbers of blocks of the stages, 1 or more each, got {depths}")
        widths = [width * 2**stage for stage in range(len(depths))]
        super().__init__(group, num_classes, in_chans, num_features=widths[-1])
        self.faster_channels_last = {"conv": True, "e4": False}[mechanism]

        def second_layer(channels: int) -> nn.Module:
            if mechanism == "conv":
                return GroupConv2d(group, channels, channels, 3, padding=1, bias=False)
            if channels % slice_channels:
                raise ValueError(f"slice_channels must divide all widths, {widths}; got {slice_channels}")
            slices = channels // slice_channels
            return E4Layer2d(group, channels, channels, kernel_size, slices, reduction, kernel_norm_affine)

        block = partial(_BasicBlock, group, second_layer=second_layer, downsample=downsample, drop_rate=drop_rate)
        lift = LiftingConv2d(group, in_chans, width, 3, padding=1, bias=False)
        self.stem = FusedSequential(OrderedDict(conv=lift, norm=GroupBatchNorm2d(group, width), act=nn.ReLU()))
        stages = []
        channels = width
        for stage, (out_channels, depth) in enumerate(zip(widths, depths, strict=True)):
            first = block(in_channels=channels, out_channels=out_channels, halve=stage > 0)
            rest = (block(in_channels=out_channels, out_channels=out_channels, halve=False) for _ in range(depth - 1))
            stages.append(nn.Sequential(first, *rest))
            channels = out_channels
        self.blocks = nn.Sequential(*stages)
        self.feature_info = [{"num_chs": width * group.order, "reduction": 1, "module": "stem"}] + [
            {"num_chs": c * group.order, "reduction": 2**stage, "module": f"blocks.{stage}"}
            for stage, c in enumerate(widths)
        ]
        for module in self.modules():
            if isinstance(module, (LiftingConv2d, GroupConv2d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        self.reset_classifier(num_classes, global_pool)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        pooled: Tensor = self.group_pool(x).mean((2, 3))
        return pooled if pre_logits else self.head(pooled)

    def set_pool(self, global_pool: str) -> None:
        """Sets the global pooling."""
        self.global_pool = global_pool
        self.group_pool = GroupPool(self.group, global_pool)  # type: ignore[arg-type]


_RELU = nn.ReLU()  # it has no state, and the blocks have no module for it


class _BasicBlock(nn.Module):
    """Convolution, dropout, norm, ReLU, second layer, norm; plus the input, or its 1 x 1 projection; ReLU."""

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        halve: bool,
        second_layer: Callable[[int], nn.Module],
        downsample: Downsample,
        drop_rate: float,
    ) -> None:
        super().__init__()

        def project(kernel_size: int) -> OrderedDict[str, nn.Module]:
            stride = {"pool": 1, "stride": 2}[downsample] if halve else 1
            conv = GroupConv2d(
                group,
                in_channels,
                out_channels,
                kernel_size,
                stride,
                padding=kernel_size // 2,
                bias=False,
                exact=downsample != "stride",
            )
            pool = {"pool": SpatialPool2d(group, 2)} if halve and downsample == "pool" else {}
            return OrderedDict(conv=conv, **pool)

        norm = partial(GroupBatchNorm2d, group, out_channels)
        self.main = FusedSequential(
            project(3)
            | OrderedDict(drop=Dropout(drop_rate), norm=norm(), act=nn.ReLU())
            | OrderedDict(second=second_layer(out_channels), second_norm=norm())
        )
        same = in_channels == out_channels and not halve
        self.shortcut = nn.Identity() if same else nn.Sequential(project(1) | OrderedDict(norm=norm()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.main(x, self.shortcut(x), _RELU)
        return y


default_cfgs = configs(
    {
        f"{model}.{dataset}": CATALOG[dataset].cfg()
        for model in ("z2_resnet18", "p4_resnet18", "p4m_resnet18", "p4_e4_resnet18", "p4m_e4_resnet18")
        for dataset in ("cifar10", "cifar100")
    },
    first_conv="stem.conv",
    classifier="head",
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], **args: Any) -> EquivariantNet:
    stages = stage_indices(kwargs.get("depths", (2, 2, 2, 2)))
    return build(E4ResNet, variant, pretrained, feature_indices=stages, **(args | kwargs))


@register_model
def z2_resnet18(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The plain ResNet-18 for CIFAR, the translation-equivariant baseline (11,173,962 parameters)."""
    return _create("z2_resnet18", pretrained, kwargs, group=Z2, width=64, mechanism="conv", downsample="stride")


@register_model
def p4_resnet18(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-18 of p4 convolutions, 32 fields: exact for 90° rotations (11,165,738 parameters)."""
    return _create("p4_resnet18", pretrained, kwargs, group=P4, width=32, mechanism="conv")


@register_model
def p4m_resnet18(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-18 of p4m convolutions, 22 fields: exact for 90° rotations and reflections (10,552,992 parameters)."""
    return _create("p4m_resnet18", pretrained, kwargs, group=P4M, width=22, mechanism="conv")


@register_model
def p4_e4_resnet18(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-18 of p4 convolutions and E⁴ layers, 32 fields: exact for 90° rotations (6,340,298 parameters)."""
    return _create("p4_e4_resnet18", pretrained, kwargs, group=P4, width=32, mechanism="e4")


@register_model
def p4m_e4_resnet18(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-18 of p4m convolutions and E⁴ layers, 22 fields: exact with reflections too (5,804,952 parameters)."""
    return _create("p4m_e4_resnet18", pretrained, kwargs, group=P4M, width=22, mechanism="e4")
