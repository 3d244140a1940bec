"""ResNet-44 for CIFAR-10, plain and attentive, for any group that maps the pixel grid onto itself.

A 3 x 3 lifting convolution; three stages of seven pre-activation blocks of two 3 x 3 convolutions, at sides 32, 16 and
8; batch norm, ReLU, the mean over space, a 1 x 1 convolution as the classifier, and the mean over the group. The first
blocks of the second and third stage halve the sides by 2 x 2 max pools, after their first convolution and after the
1 x 1 convolution of their shortcut.

| model                | group | fields       | attention α  | parameters |
|----------------------|-------|--------------|--------------|------------|
| z2_resnet44          | Z2    | 32, 64, 128  |              | 2,636,064  |
| p4m_resnet44         | P4M   | 11, 23, 45   |              | 2,621,683  |
| p4m_alpha_f_resnet44 | P4M   | 11, 23, 45   | on the input | 2,693,911  |

The attention, in all convolutions, has 7 x 7 spatial filters and 2 hidden fields, in the first as many as the image has
channels.

References:
    Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 8.2
    https://arxiv.org/abs/1602.07576
    Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 4.2 and appendix B.3.2; table 2
    prints 2.70M for p4m_alpha_f_resnet44
    https://arxiv.org/abs/2002.03830
"""

from typing import Any, Literal

from timm.models import register_model
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import P4M, Z2, Group
from ..layers import Dropout, GroupBatchNorm2d, SpatialAdaptiveAvgPool2d, SpatialPool2d
from ..layers._fused import norm_act
from ..layers.attentive import Attention
from ..layers.pool import Reduce
from .attention import fresh_where_sizes_differ, group_conv, lifting_conv
from .base import EquivariantNet
from .builder import build, configs

HIDDEN = 2


class ResNet44(EquivariantNet):
    """ResNet of three stages of pre-activation blocks.

    Args:
        group: The point group.
        widths: The number of fields of each stage.
        depth: The number of blocks of each stage.
        attention: The attention of the convolutions, see `eqzoo.layers.AttentiveGroupConv2d`, or None.
        num_classes: The number of classes; with 0 the network returns its pooled features.
        in_chans: The number of image channels.
        drop_rate: The dropout before the classifier; the paper has none.
        global_pool: How logits are pooled over the group: ``"avg"`` or ``"max"``.
        downsample: ``"pool"``, which is exact, or ``"stride"``, stride 2 in the convolutions, which is only approximate
            on even sides.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides are multiples of 4.

    References:
        Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), appendix B.3.2
        https://arxiv.org/abs/2002.03830

    Example:
        >>> import torch
        >>> ResNet44(P4M, widths=(2, 2, 2), depth=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        group: Group = P4M,
        widths: tuple[int, int, int] = (11, 23, 45),
        depth: int = 7,
        attention: Attention | None = None,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        global_pool: Reduce = "avg",
        downsample: Literal["pool", "stride"] = "pool",
    ) -> None:
        super().__init__(group, num_classes, in_chans, num_features=widths[-1])
        self.attention = attention
        self.faster_channels_last = attention is None
        self.drop_rate = drop_rate
        self.stem = lifting_conv(group, in_chans, widths[0], 3, padding=1, attention=attention)
        blocks: list[nn.Module] = []
        self.feature_info = [{"num_chs": widths[0] * group.order, "reduction": 1, "module": "stem"}]
        width = widths[0]
        for stage, out_width in enumerate(widths):
            for block in range(depth):
                down = downsample if stage and not block else None
                self.feature_info.append(
                    {"num_chs": out_width * group.order, "reduction": 2**stage, "module": f"blocks.{len(blocks)}"}
                )
                blocks.append(_Block(group, width, out_width, attention, down))
                width = out_width
        self.blocks = nn.Sequential(*blocks)
        self.norm = GroupBatchNorm2d(group, width, eps=2e-5)
        self.act = nn.ReLU()
        self.head_drop = Dropout(drop_rate)
        self.space_pool = SpatialAdaptiveAvgPool2d(1)
        self.reset_classifier(num_classes, global_pool)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        x = self.space_pool(norm_act(self.norm, self.act, x))
        pooled: Tensor = self.global_pool(x if pre_logits else self.head(self.head_drop(x)))
        return pooled

    def build_classifier(self, num_classes: int) -> nn.Module:
        """A new classifier for one or more classes."""
        return _conv(self.group, self.num_features, num_classes, 1, self.attention)


class _Block(nn.Module):
    """``x + conv(ReLU(norm(conv(ReLU(norm(x))))))``, with halved sides unless ``downsample`` is None."""

    def __init__(
        self, group: Group, in_width: int, width: int, attention: Attention | None, downsample: str | None
    ) -> None:
        super().__init__()
        stride = {None: 1, "pool": 1, "stride": 2}[downsample]
        self.norm1 = GroupBatchNorm2d(group, in_width, eps=2e-5)
        self.act1 = nn.ReLU()
        self.conv1 = _conv(group, in_width, width, 3, attention, stride)
        self.pool = SpatialPool2d(group, 2) if downsample == "pool" else nn.Identity()
        self.norm2 = GroupBatchNorm2d(group, width, eps=2e-5)
        self.act2 = nn.ReLU()
        self.conv2 = _conv(group, width, width, 3, attention)
        self.shortcut = _conv(group, in_width, width, 1, attention, stride) if downsample else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.conv1(norm_act(self.norm1, self.act1, x)))
        y = self.conv2(norm_act(self.norm2, self.act2, y))
        shortcut: Tensor = self.pool(self.shortcut(x))
        return y + shortcut


def _conv(
    group: Group, in_width: int, width: int, kernel_size: int, attention: Attention | None, stride: int = 1
) -> nn.Module:
    padding = kernel_size // 2
    return group_conv(group, in_width, width, kernel_size, padding, stride, attention, hidden_channels=HIDDEN)


_NAMES = ("z2_resnet44", "p4m_resnet44", "p4m_alpha_f_resnet44")

default_cfgs = configs(
    {f"{name}.cifar10": CATALOG["cifar10"].cfg() for name in _NAMES}, first_conv="stem", classifier="head"
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], **args: Any) -> EquivariantNet:
    depth, widths = kwargs.get("depth", 7), (args | kwargs)["widths"]
    ends = tuple(depth * stage for stage in range(1, len(widths) + 1))
    options: dict[str, Any] = {"feature_indices": ends, "pretrained_filter_fn": fresh_where_sizes_differ}
    return build(ResNet44, variant, pretrained, **(options | args | kwargs))


@register_model
def z2_resnet44(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The plain ResNet-44, 32, 64 and 128 fields: the translation-equivariant baseline (2,636,064 parameters)."""
    return _create("z2_resnet44", pretrained, kwargs, group=Z2, widths=(32, 64, 128))


@register_model
def p4m_resnet44(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4m ResNet-44, 11, 23 and 45 fields: exact for 90° rotations and reflections (2,621,683 parameters)."""
    return _create("p4m_resnet44", pretrained, kwargs, group=P4M, widths=(11, 23, 45))


@register_model
def p4m_alpha_f_resnet44(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4m ResNet-44 with attention on the input of each convolution (2,693,911 parameters)."""
    return _create("p4m_alpha_f_resnet44", pretrained, kwargs, group=P4M, widths=(11, 23, 45), attention="input")
