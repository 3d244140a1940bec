"""Bottleneck ResNets for CIFAR with affine self convolutions, and their baselines.

A 3 x 3 stem with N fields, then three stages of n bottlenecks, with N, 2N and 4N fields inside and four times as many
outside, on sides 32, 16 and 8; the depth is ``9n + 2``. A bottleneck is a 1 x 1 convolution, the middle layer and a
1 x 1 convolution, each with batch norm, optionally followed by squeeze and excitation (SE). The middle layer is a 3 x 3
convolution or a self-attention over 5 x 5 neighbors with 8 heads (6 heads for p4m, where 6 divides the fields).

| model, 10 classes      | group | N  | middle     | SE reduction | resnet29 | resnet83 |
|------------------------|-------|----|------------|--------------|----------|----------|
| z2_resnet*             | Z2    | 16 | conv       |              | 313,114  | 869,530  |
| z2_se_resnet*          | Z2    | 16 | conv       | 16           | 346,798  | 970,582  |
| z2_sasa_resnet*        | Z2    | 16 | sasa       |              | 235,162  | 635,674  |
| z2_simple_asc_resnet*  | Z2    | 16 | simple_asc |              | 217,354  | 582,250  |
| z2_asc_resnet*         | Z2    | 16 | asc        |              | 267,754  | 733,450  |
| z2_asc_se_resnet*      | Z2    | 16 | asc        | 16           | 301,438  | 834,502  |
| p4_resnet*             | P4    | 8  | conv       |              | 309,138  | 861,522  |
| p4_se_resnet*          | P4    | 8  | conv       | 4            | 342,234  | 960,810  |
| p4_asc_resnet*         | P4    | 8  | asc        |              | 271,842  | 749,634  |
| p4_simple_asc_resnet29 | P4    | 8  | simple_asc |              | 217,410  |          |
| p4_asc_se_resnet29     | P4    | 8  | asc        | 4            | 304,938  |          |
| p4m_resnet29           | P4M   | 6  | conv       |              | 346,288  |          |
| p4m_se_resnet29        | P4M   | 6  | conv       | 2            | 383,332  |          |
| p4m_asc_resnet29       | P4M   | 6  | asc        |              | 313,780  |          |

The last five are not in the paper. The counts of the other ResNet-29s round to those that it prints, except for
p4_resnet29, for which it prints 310k; it shows the ResNet-83s in a figure without counts.

References:
    Affine Self Convolution (Diaconu and Worrall, 2019), section 4 and appendices B and C
    https://arxiv.org/abs/1911.07704
    Deep Residual Learning for Image Recognition (He et al., 2016), section 4.2, https://arxiv.org/abs/1512.03385
"""

from collections import OrderedDict
from typing import Any, Literal

import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import P4, P4M, Z2, Group
from ..layers import (
    AffineSelfConv2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupSqueezeExcite,
    LiftingConv2d,
    SimpleAffineSelfConv2d,
    SpatialPool2d,
    StandAloneSelfAttention2d,
)
from ..layers._fused import FusedSequential
from ..layers.pool import Reduce
from .base import EquivariantNet
from .builder import build, configs

Middle = Literal["conv", "sasa", "simple_asc", "asc"]
Downsample = Literal["pool", "stride"]

_EXPANSION = 4
_ATTENTION = {"asc": AffineSelfConv2d, "simple_asc": SimpleAffineSelfConv2d, "sasa": StandAloneSelfAttention2d}


class ASCResNet(EquivariantNet):
    """Bottleneck ResNet for small images, with convolutions or self-attention as the middle layers.

    Initialization: convolutions from He's normal distribution, affine maps of self-attention from the standard normal
    distribution, and the scale of the last norm of each bottleneck is 0.

    Args:
        group: The point group.
        depth: The number of layers, ``9n + 2`` for n bottlenecks a stage.
        width: The number of fields of the stem and inside the first stage, N.
        middle: The middle layer of a bottleneck: ``"conv"`` (3 x 3), ``"sasa"``, ``"simple_asc"`` or ``"asc"``.
        se_reduction: The ratio of fields to hidden units in squeeze and excitation; None for none.
        num_heads: The number of heads of self-attention.
        kernel_size: The side of the neighborhood of self-attention, in pixels.
        downsample: How the first bottlenecks of stages two and three halve the sides. ``"pool"``: 2 x 2 means on both
            branches, exact on even sides. ``"stride"``: convolutions with stride 2, as in plain ResNets, and pools
            after self-attention, as in the paper; this is only approximate on even sides.
        num_classes: The number of classes; with 0 the network returns its pooled features, ``(B, 16·N)``.
        in_chans: The number of image channels.
        drop_rate: The dropout probability of the pooled features.
        global_pool: How features are pooled over the group and space: ``"avg"`` or ``"max"``.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides are multiples of 4.

    Raises:
        ValueError: If depth is not 9n + 2, num_heads or se_reduction does not divide the fields, or the sides of an
            image are not multiples of 4.
        KeyError: If middle or downsample is unknown.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), section 4 and appendix C
        https://arxiv.org/abs/1911.07704

    Example:
        >>> import torch
        >>> ASCResNet(P4, depth=11)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    faster_channels_last = True
    blocks_are_stages = True

    def __init__(
        self,
        group: Group = P4,
        depth: int = 29,
        width: int = 8,
        middle: Middle = "asc",
        se_reduction: int | None = None,
        num_heads: int = 8,
        kernel_size: int = 5,
        downsample: Downsample = "pool",
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        global_pool: Reduce = "avg",
    ) -> None:
        super().__init__(group, num_classes, in_chans, num_features=4 * width * _EXPANSION)
        if depth < 11 or (depth - 2) % 9:
            raise ValueError(f"depth is 9n + 2 for n bottlenecks a stage, such as 11, 20, 29 or 83; got {depth}")
        self.drop_rate = drop_rate
        attention = {"num_heads": num_heads, "kernel_size": kernel_size}
        stem = LiftingConv2d(group, in_chans, width, 3, padding=1, bias=False)
        self.stem = FusedSequential(OrderedDict(conv=stem, norm=GroupBatchNorm2d(group, width), act=nn.ReLU()))
        self.blocks = nn.Sequential()
        self.feature_info = [{"num_chs": width * group.order, "reduction": 1, "module": "stem"}]
        channels = width
        for i in range(3):
            inner = width * 2**i
            stage = nn.Sequential()
            for j in range((depth - 2) // 9):
                halve = downsample if i > 0 and j == 0 else None
                stage.append(Bottleneck(group, channels, inner, middle, se_reduction, halve, j == 0, attention))
                channels = inner * _EXPANSION
            self.blocks.append(stage)
            self.feature_info.append({"num_chs": channels * group.order, "reduction": 2**i, "module": f"blocks.{i}"})
        self.reset_classifier(num_classes, global_pool)
        self.init_weights()

    def init_weights(self) -> None:
        """Draws convolutions from He's normal distribution, N(0, 2/fan_in), fan_in = planes · k²; biases are 0."""
        for module in self.modules():
            if isinstance(module, (LiftingConv2d, GroupConv2d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.branch.norm3.weight)  # type: ignore[union-attr, arg-type]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        pooled: Tensor = self.global_pool(x)
        if pre_logits:
            return pooled
        logits: Tensor = self.head(F.dropout(pooled, self.drop_rate, self.training))
        return logits


class Bottleneck(nn.Module):
    """``relu(branch(x) + shortcut(x))``: 1 x 1, middle, 1 x 1 to four times the fields, and squeeze and excitation.

    Args:
        group: The point group.
        channels: The number of input fields.
        inner: The number of fields inside; there are four times as many output fields.
        middle: The middle layer.
        se_reduction: The ratio of fields to hidden units in squeeze and excitation; None for none.
        halve: How the sides are halved; None if they are not.
        project: Whether the shortcut is a 1 x 1 convolution and a norm instead of the identity.
        attention: The keyword arguments of self-attention.
    """

    def __init__(
        self,
        group: Group,
        channels: int,
        inner: int,
        middle: Middle,
        se_reduction: int | None,
        halve: Downsample | None,
        project: bool,
        attention: dict[str, Any],
    ) -> None:
        super().__init__()
        outer = inner * _EXPANSION
        stride = {None: 1, "pool": 1, "stride": 2}[halve]
        pool = halve == "pool" or (halve is not None and middle != "conv")
        self.branch = FusedSequential(
            OrderedDict(
                conv1=GroupConv2d(group, channels, inner, 1, bias=False),
                norm1=GroupBatchNorm2d(group, inner),
                act1=nn.ReLU(),
                middle=_middle(group, inner, middle, stride, attention),
                pool=SpatialPool2d(group, 2, reduce="avg") if pool else nn.Identity(),
                norm2=GroupBatchNorm2d(group, inner),
                act2=nn.ReLU(),
                conv3=GroupConv2d(group, inner, outer, 1, bias=False),
                norm3=GroupBatchNorm2d(group, outer),
                se=GroupSqueezeExcite(group, outer, se_reduction) if se_reduction else nn.Identity(),
            )
        )
        self.shortcut = nn.Sequential()
        if project:
            if halve == "pool":
                self.shortcut.add_module("pool", SpatialPool2d(group, 2, reduce="avg"))
            conv = GroupConv2d(group, channels, outer, 1, stride=stride, bias=False, exact=stride == 1)
            self.shortcut.add_module("conv", conv)
            self.shortcut.add_module("norm", GroupBatchNorm2d(group, outer))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.branch(x, self.shortcut(x), self.act)
        return y


def _middle(group: Group, channels: int, middle: Middle, stride: int, attention: dict[str, Any]) -> nn.Module:
    if middle == "conv":
        return GroupConv2d(group, channels, channels, 3, stride, padding=1, bias=False, exact=stride == 1)
    return _ATTENTION[middle](group, channels, **attention)


_PAPER = ["z2", "z2_se", "z2_sasa", "z2_simple_asc", "z2_asc", "z2_asc_se", "p4", "p4_se", "p4_asc"]
_OURS = ["p4_simple_asc", "p4_asc_se", "p4m", "p4m_se", "p4m_asc"]

default_cfgs = configs(
    {f"{name}_resnet29.cifar10": CATALOG["cifar10"].cfg() for name in _PAPER + _OURS}
    | {f"{name}_resnet29.cifar100": CATALOG["cifar100"].cfg() for name in _PAPER}
    | {f"{name}_resnet83.cifar10": CATALOG["cifar10"].cfg() for name in _PAPER}
    | {"p4_asc_resnet29.rotmnist": CATALOG["rotmnist"].cfg()}
    | {f"{name}_resnet29.eurosat": CATALOG["eurosat"].cfg() for name in ("z2", "p4", "p4m")}
    | {
        f"{name}_resnet29.chula_rbc12": CATALOG["chula_rbc12"].cfg() | {"input_size": (3, 40, 40)}
        for name in ("z2", "p4", "p4m")
    },
    first_conv="stem.conv",
    classifier="head",
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], **args: Any) -> EquivariantNet:
    return build(ASCResNet, variant, pretrained, feature_indices=(1, 2, 3), **(args | kwargs))


@register_model
def z2_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 16 fields with convolutions: translations only (313,114 parameters)."""
    return _create("z2_resnet29", pretrained, kwargs, group=Z2, depth=29, width=16, middle="conv")


@register_model
def z2_se_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 16 fields with convolutions and SE: translations only (346,798 parameters)."""
    return _create("z2_se_resnet29", pretrained, kwargs, group=Z2, depth=29, width=16, middle="conv", se_reduction=16)


@register_model
def z2_sasa_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 16 fields with stand-alone self-attention: translations only (235,162 parameters)."""
    return _create("z2_sasa_resnet29", pretrained, kwargs, group=Z2, depth=29, width=16, middle="sasa")


@register_model
def z2_simple_asc_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 16 fields with simple affine self convolutions: translations only (217,354 parameters)."""
    return _create("z2_simple_asc_resnet29", pretrained, kwargs, group=Z2, depth=29, width=16, middle="simple_asc")


@register_model
def z2_asc_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 16 fields with affine self convolutions: translations only (267,754 parameters)."""
    return _create("z2_asc_resnet29", pretrained, kwargs, group=Z2, depth=29, width=16, middle="asc")


@register_model
def z2_asc_se_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 16 fields with affine self convolutions and SE: translations only (301,438 parameters)."""
    return _create(
        "z2_asc_se_resnet29", pretrained, kwargs, group=Z2, depth=29, width=16, middle="asc", se_reduction=16
    )


@register_model
def p4_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 8 fields with convolutions: exact for 90° rotations (309,138 parameters)."""
    return _create("p4_resnet29", pretrained, kwargs, group=P4, depth=29, width=8, middle="conv")


@register_model
def p4_se_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 8 fields with convolutions and SE: exact for 90° rotations (342,234 parameters)."""
    return _create("p4_se_resnet29", pretrained, kwargs, group=P4, depth=29, width=8, middle="conv", se_reduction=4)


@register_model
def p4_asc_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 8 fields with affine self convolutions: exact for 90° rotations (271,842 parameters)."""
    return _create("p4_asc_resnet29", pretrained, kwargs, group=P4, depth=29, width=8, middle="asc")


@register_model
def p4_simple_asc_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 8 fields with simple affine self convolutions: exact for 90° rotations (217,410 parameters)."""
    return _create("p4_simple_asc_resnet29", pretrained, kwargs, group=P4, depth=29, width=8, middle="simple_asc")


@register_model
def p4_asc_se_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 8 fields with affine self convolutions and SE: exact for 90° rotations (304,938 parameters)."""
    return _create("p4_asc_se_resnet29", pretrained, kwargs, group=P4, depth=29, width=8, middle="asc", se_reduction=4)


@register_model
def p4m_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 6 fields with convolutions: exact for 90° rotations and reflections (346,288 parameters)."""
    return _create("p4m_resnet29", pretrained, kwargs, group=P4M, depth=29, width=6, middle="conv")


@register_model
def p4m_se_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 6 fields with convolutions and SE: exact for 90° rotations and reflections (383,332 parameters)."""
    return _create("p4m_se_resnet29", pretrained, kwargs, group=P4M, depth=29, width=6, middle="conv", se_reduction=2)


@register_model
def p4m_asc_resnet29(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-29 of 6 fields with ASC: exact for 90° rotations and reflections (313,780 parameters)."""
    return _create("p4m_asc_resnet29", pretrained, kwargs, group=P4M, depth=29, width=6, middle="asc", num_heads=6)


@register_model
def z2_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 16 fields with convolutions: translations only (869,530 parameters)."""
    return _create("z2_resnet83", pretrained, kwargs, group=Z2, depth=83, width=16, middle="conv")


@register_model
def z2_se_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 16 fields with convolutions and SE: translations only (970,582 parameters)."""
    return _create("z2_se_resnet83", pretrained, kwargs, group=Z2, depth=83, width=16, middle="conv", se_reduction=16)


@register_model
def z2_sasa_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 16 fields with stand-alone self-attention: translations only (635,674 parameters)."""
    return _create("z2_sasa_resnet83", pretrained, kwargs, group=Z2, depth=83, width=16, middle="sasa")


@register_model
def z2_simple_asc_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 16 fields with simple affine self convolutions: translations only (582,250 parameters)."""
    return _create("z2_simple_asc_resnet83", pretrained, kwargs, group=Z2, depth=83, width=16, middle="simple_asc")


@register_model
def z2_asc_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 16 fields with affine self convolutions: translations only (733,450 parameters)."""
    return _create("z2_asc_resnet83", pretrained, kwargs, group=Z2, depth=83, width=16, middle="asc")


@register_model
def z2_asc_se_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 16 fields with affine self convolutions and SE: translations only (834,502 parameters)."""
    return _create(
        "z2_asc_se_resnet83", pretrained, kwargs, group=Z2, depth=83, width=16, middle="asc", se_reduction=16
    )


@register_model
def p4_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 8 fields with convolutions: exact for 90° rotations (861,522 parameters)."""
    return _create("p4_resnet83", pretrained, kwargs, group=P4, depth=83, width=8, middle="conv")


@register_model
def p4_se_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 8 fields with convolutions and SE: exact for 90° rotations (960,810 parameters)."""
    return _create("p4_se_resnet83", pretrained, kwargs, group=P4, depth=83, width=8, middle="conv", se_reduction=4)


@register_model
def p4_asc_resnet83(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """ResNet-83 of 8 fields with affine self convolutions: exact for 90° rotations (749,634 parameters)."""
    return _create("p4_asc_resnet83", pretrained, kwargs, group=P4, depth=83, width=8, middle="asc")
