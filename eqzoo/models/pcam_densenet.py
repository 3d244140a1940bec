"""DenseNets for PatchCamelyon, plain and attentive, for any group that maps the pixel grid onto itself.

Convolutions have no padding. A 3 x 3 lifting convolution to g fields; five dense layers of batch norm, ReLU and a 3 x 3
convolution, whose g new fields are concatenated before the input fields cropped by one pixel; after each of the first
four, a transition of batch norm, ReLU, a 1 x 1 convolution and a 2 x 2 mean; then batch norm, ReLU, a 1 x 1 convolution
as the classifier, and the mean over group and space. The sides are 94, 92, 46, 44, 22, 20, 10, 8, 4 and 2 on 96 x 96
images.

| model                | group | g  | attention α  | parameters |
|----------------------|-------|----|--------------|------------|
| z2_densenet          | Z2    | 26 |              | 130,598    |
| p4_densenet          | P4    | 13 |              | 129,649    |
| p4_alpha_f_densenet  | P4    | 13 | on the input | 140,453    |
| p4m_densenet         | P4M   | 9  |              | 124,209    |
| p4m_alpha_f_densenet | P4M   | 9  | on the input | 141,221    |

The attention, in all convolutions, has 2 hidden fields, in the first as many as the image has channels, and these
spatial filters:

| at                              | filter | dilation   |
|---------------------------------|--------|------------|
| lifting                         | 7 x 7  | 4          |
| dense layers 0 to 3             | 7 x 7  | 4, 4, 3, 2 |
| transitions 0 to 3              | 7 x 7  | 4, 4, 3, 1 |
| dense layer 4                   | 5 x 5  | 1          |
| classifier                      | 3 x 3  | 1          |

References:
    Rotation Equivariant CNNs for Digital Pathology (Veeling et al., 2018)
    https://arxiv.org/abs/1806.03962
    Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 4.3 and table 3
    https://arxiv.org/abs/2002.03830
"""

from collections import OrderedDict
from typing import Any

import torch
from timm.models import register_model
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import P4, P4M, Z2, Group
from ..layers import Dropout, GroupBatchNorm2d, SpatialPool2d
from ..layers._fused import FusedSequential, norm_act
from ..layers.attentive import Attention
from ..layers.pool import Reduce
from .attention import fresh_where_sizes_differ, group_conv, lifting_conv
from .base import EquivariantNet
from .builder import build, configs

HIDDEN = 2
DENSE = ((7, 4), (7, 4), (7, 3), (7, 2), (5, 1))  # size and dilation of the spatial attention
TRANSITION = ((7, 4), (7, 4), (7, 3), (7, 1))


class PCamDenseNet(EquivariantNet):
    """DenseNet of five dense layers with transitions between them.

    Args:
        group: The point group.
        growth: The number of fields that each dense layer adds, g.
        attention: The attention of the convolutions, see `eqzoo.layers.AttentiveGroupConv2d`, or None.
        num_classes: The number of classes; with 0 the network returns its pooled features, ``(B, 6g)``.
        in_chans: The number of image channels.
        drop_rate: The dropout before the classifier; the paper has none.
        global_pool: How logits are pooled over group and space: ``"avg"`` or ``"max"``.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides are multiples of 16 and at least 80.

    References:
        Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 4.3
        https://arxiv.org/abs/2002.03830

    Example:
        >>> import torch
        >>> PCamDenseNet(P4, growth=2)(torch.zeros(2, 3, 96, 96)).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        group: Group = P4M,
        growth: int = 9,
        attention: Attention | None = None,
        num_classes: int = 2,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        global_pool: Reduce = "avg",
    ) -> None:
        super().__init__(group, num_classes, in_chans, num_features=6 * growth)
        self.attention = attention
        self.drop_rate = drop_rate
        self.stem = lifting_conv(group, in_chans, growth, 3, attention=attention, attention_dilation=4)
        blocks = []
        for place, reach in enumerate(DENSE):
            width = (place + 1) * growth
            layers: OrderedDict[str, nn.Module] = OrderedDict(dense=_DenseLayer(group, width, growth, attention, reach))
            if place < len(TRANSITION):
                layers["transition"] = _transition(group, width + growth, attention, TRANSITION[place])
            blocks.append(nn.Sequential(layers))
        self.blocks = nn.Sequential(*blocks)
        self.feature_info = [{"num_chs": growth * group.order, "reduction": 1, "module": "stem"}] + [
            {"num_chs": (i + 2) * growth * group.order, "reduction": min(2 ** (i + 1), 16), "module": f"blocks.{i}"}
            for i in range(5)
        ]
        self.norm = GroupBatchNorm2d(group, self.num_features, eps=2e-5)
        self.act = nn.ReLU()
        self.head_drop = Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        x = norm_act(self.norm, self.act, x)
        pooled: Tensor = self.global_pool(x if pre_logits else self.head(self.head_drop(x)))
        return pooled

    def build_classifier(self, num_classes: int) -> nn.Module:
        """A new classifier for one or more classes."""
        return _conv(self.group, self.num_features, num_classes, 1, self.attention, (3, 1))


class _DenseLayer(nn.Module):
    """Concatenates the new fields ``conv(ReLU(norm(x)))`` and x cropped by one pixel on each side."""

    def __init__(
        self, group: Group, in_width: int, growth: int, attention: Attention | None, reach: tuple[int, int]
    ) -> None:
        super().__init__()
        self.norm = GroupBatchNorm2d(group, in_width, eps=2e-5)
        self.act = nn.ReLU()
        self.conv = _conv(group, in_width, growth, 3, attention, reach)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.conv(norm_act(self.norm, self.act, x)), x[..., 1:-1, 1:-1]), 1)


def _transition(group: Group, width: int, attention: Attention | None, reach: tuple[int, int]) -> nn.Sequential:
    return FusedSequential(
        OrderedDict(
            norm=GroupBatchNorm2d(group, width, eps=2e-5),
            act=nn.ReLU(),
            conv=_conv(group, width, width, 1, attention, reach),
            pool=SpatialPool2d(group, 2, reduce="avg"),
        )
    )


def _conv(
    group: Group, in_width: int, width: int, kernel_size: int, attention: Attention | None, reach: tuple[int, int]
) -> nn.Module:
    size, dilation = reach
    options = {"hidden_channels": HIDDEN, "attention_size": size, "attention_dilation": dilation}
    return group_conv(group, in_width, width, kernel_size, attention=attention, **options)


_NAMES = ("z2_densenet", "p4_densenet", "p4_alpha_f_densenet", "p4m_densenet", "p4m_alpha_f_densenet")

default_cfgs = configs(
    {f"{name}.{dataset}": CATALOG[dataset].cfg() for dataset in ("pcam", "chula_rbc12") for name in _NAMES},
    first_conv="stem",
    classifier="head",
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], **args: Any) -> EquivariantNet:
    options: dict[str, Any] = {"feature_indices": (0, 1, 2, 3, 5), "pretrained_filter_fn": fresh_where_sizes_differ}
    return build(PCamDenseNet, variant, pretrained, **(options | args | kwargs))


@register_model
def z2_densenet(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The plain DenseNet for PatchCamelyon, growth 26: the translation-equivariant baseline (130,598 parameters)."""
    return _create("z2_densenet", pretrained, kwargs, group=Z2, growth=26)


@register_model
def p4_densenet(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 DenseNet for PatchCamelyon, growth 13: exact for 90° rotations (129,649 parameters)."""
    return _create("p4_densenet", pretrained, kwargs, group=P4, growth=13)


@register_model
def p4_alpha_f_densenet(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 DenseNet with attention on the input of each convolution (140,453 parameters)."""
    return _create("p4_alpha_f_densenet", pretrained, kwargs, group=P4, growth=13, attention="input")


@register_model
def p4m_densenet(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4m DenseNet for PatchCamelyon, growth 9: exact for 90° rotations and reflections (124,209 parameters)."""
    return _create("p4m_densenet", pretrained, kwargs, group=P4M, growth=9)


@register_model
def p4m_alpha_f_densenet(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4m DenseNet with attention on the input of each convolution (141,221 parameters)."""
    return _create("p4m_alpha_f_densenet", pretrained, kwargs, group=P4M, growth=9, attention="input")
