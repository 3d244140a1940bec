"""Group equivariant CNNs for rotated MNIST, plain and attentive, for any group that maps the pixel grid onto itself.

The network of Cohen and Welling as the attentive paper trains it: seven convolutions without padding, 3 x 3 except for
the last, a 4 x 4 classifier. The first six are followed by batch norm and ReLU, then the second by a 2 x 2 max pool and
the other five by dropout. The sides are 26, 24 (12 after the pool), 10, 8, 6, 4 and 1 on 28 x 28 images.

| model     | group | fields N | parameters |
|-----------|-------|----------|------------|
| z2_cnn    | Z2    | 20       | 21,620     |
| p4_cnn    | P4    | 10       | 24,610     |
| p4_cnn_w* | P4    | 11 15 19 | 29,051 · 50,415 · 77,539 |
| p4m_cnn   | P4M   | 7        | 26,747     |

The attentive networks are p4_cnn with attention in all seven convolutions. The spatial attention has 7 x 7 filters,
dilated by 4 in the first layer of p4_alpha_f_cnn; the channel attention has half as many hidden fields as input fields,
in the first layer as many.

| model           | attention α              | parameters |
|-----------------|--------------------------|------------|
| p4_alpha_cnn    | channel and spatial      | 73,130     |
| p4_alpha_ch_cnn | channel                  | 48,630     |
| p4_alpha_sp_cnn | spatial                  | 49,110     |
| p4_alpha_f_cnn  | both, on the input       | 29,462     |
| p4_alpha_rh_cnn | over poses, on the input | 24,851     |

References:
    Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 8.1
    https://arxiv.org/abs/1602.07576
    Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 4.1 and table 1
    https://arxiv.org/abs/2002.03830
"""

from collections import OrderedDict
from typing import Any

from timm.models import register_model
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import P4, P4M, Z2, Group
from ..layers import Dropout, GroupBatchNorm2d, SpatialPool2d
from ..layers._fused import FusedSequential
from ..layers.attentive import Attention
from ..layers.pool import Reduce
from .attention import fresh_where_sizes_differ, group_conv, lifting_conv
from .base import EquivariantNet
from .builder import build, configs


class GroupCNN(EquivariantNet):
    """Group CNN: seven lifting and group convolutions, the last of which is the classifier.

    Args:
        group: The point group.
        width: The number of fields of each layer, N.
        num_classes: The number of classes; with 0 the network returns its pooled features, ``(B, N)``.
        in_chans: The number of image channels.
        drop_rate: The dropout probability.
        global_pool: How logits are pooled over the group and, for images larger than 28 x 28, over space: ``"max"`` or
            ``"avg"``.
        attention: The attention of the convolutions, see `eqzoo.layers.AttentiveGroupConv2d`, or None.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides are even and at least 28 pixels.

    References:
        Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 4.1
        https://arxiv.org/abs/2002.03830

    Example:
        >>> import torch
        >>> GroupCNN(P4)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        group: Group = P4,
        width: int = 10,
        num_classes: int = 10,
        in_chans: int = 1,
        drop_rate: float = 0.3,
        global_pool: Reduce = "max",
        attention: Attention | None = None,
    ) -> None:
        super().__init__(group, num_classes, in_chans, num_features=width)
        self.drop_rate = drop_rate
        self.attention = attention
        self.faster_channels_last = attention is None
        lift = lifting_conv(
            group, in_chans, width, 3, attention=attention, attention_dilation=4 if attention == "input" else 1
        )
        self.stem = self._stage(lift, drop=True)
        self.blocks = nn.Sequential(
            self._stage(group_conv(group, width, width, 3, attention=attention), pool=True),
            *(self._stage(group_conv(group, width, width, 3, attention=attention), drop=True) for _ in range(4)),
        )
        planes = width * group.order
        self.feature_info = [{"num_chs": planes, "reduction": 1, "module": "stem"}] + [
            {"num_chs": planes, "reduction": 2, "module": f"blocks.{i}"} for i in range(5)
        ]
        self.reset_classifier(num_classes, global_pool)

    def _stage(self, conv: nn.Module, drop: bool = False, pool: bool = False) -> nn.Sequential:
        layers = OrderedDict(conv=conv, norm=GroupBatchNorm2d(self.group, self.num_features), act=nn.ReLU())
        if drop:
            layers["drop"] = Dropout(self.drop_rate)
        if pool:
            layers["pool"] = SpatialPool2d(self.group, 2)
        return FusedSequential(layers)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        pooled: Tensor = self.global_pool(x if pre_logits else self.head(x))
        return pooled

    def build_classifier(self, num_classes: int) -> nn.Module:
        """A new classifier for one or more classes."""
        return group_conv(self.group, self.num_features, num_classes, 4, attention=self.attention)


_PLAIN = ("z2_cnn", "p4_cnn", "p4_cnn_w11", "p4_cnn_w15", "p4_cnn_w19", "p4m_cnn")
_ATTENTIVE = ("p4_alpha_cnn", "p4_alpha_ch_cnn", "p4_alpha_sp_cnn", "p4_alpha_f_cnn", "p4_alpha_rh_cnn")

default_cfgs = configs(
    {f"{name}.rotmnist": CATALOG["rotmnist"].cfg() for name in _PLAIN + _ATTENTIVE},
    first_conv="stem.conv",
    classifier="head",
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], **args: Any) -> EquivariantNet:
    options: dict[str, Any] = {"feature_indices": (0, 1, 2, 3, 4, 5), "pretrained_filter_fn": fresh_where_sizes_differ}
    return build(GroupCNN, variant, pretrained, **(options | args | kwargs))


@register_model
def z2_cnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The plain CNN for rotated MNIST, 20 fields: the translation-equivariant baseline (21,620 parameters)."""
    return _create("z2_cnn", pretrained, kwargs, group=Z2, width=20)


@register_model
def p4_cnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN for rotated MNIST, 10 fields: exact for 90° rotations (24,610 parameters)."""
    return _create("p4_cnn", pretrained, kwargs, group=P4, width=10)


@register_model
def p4_cnn_w11(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN with 11 fields, BIG11 of attentive group convolutions (29,051 parameters)."""
    return _create("p4_cnn_w11", pretrained, kwargs, group=P4, width=11)


@register_model
def p4_cnn_w15(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN with 15 fields, BIG15 of attentive group convolutions (50,415 parameters)."""
    return _create("p4_cnn_w15", pretrained, kwargs, group=P4, width=15)


@register_model
def p4_cnn_w19(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN with 19 fields, BIG19 of attentive group convolutions (77,539 parameters)."""
    return _create("p4_cnn_w19", pretrained, kwargs, group=P4, width=19)


@register_model
def p4m_cnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4m CNN with 7 fields, not in the papers: exact for 90° rotations and reflections (26,747 parameters)."""
    return _create("p4m_cnn", pretrained, kwargs, group=P4M, width=7)


@register_model
def p4_alpha_cnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN with channel and spatial attention on all responses (73,130 parameters)."""
    return _create("p4_alpha_cnn", pretrained, kwargs, group=P4, width=10, attention="full")


@register_model
def p4_alpha_ch_cnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN with channel attention on all responses (48,630 parameters)."""
    return _create("p4_alpha_ch_cnn", pretrained, kwargs, group=P4, width=10, attention="channel")


@register_model
def p4_alpha_sp_cnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN with spatial attention on all responses (49,110 parameters)."""
    return _create("p4_alpha_sp_cnn", pretrained, kwargs, group=P4, width=10, attention="spatial")


@register_model
def p4_alpha_f_cnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN with channel and spatial attention on the input of each convolution (29,462 parameters)."""
    return _create("p4_alpha_f_cnn", pretrained, kwargs, group=P4, width=10, attention="input")


@register_model
def p4_alpha_rh_cnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 CNN with attention over the poses of the input of each convolution (24,851 parameters)."""
    return _create("p4_alpha_rh_cnn", pretrained, kwargs, group=P4, width=10, attention="pose")
