"""All-CNN-C for CIFAR-10, plain and attentive, for any group that maps the pixel grid onto itself.

Dropout on the image, then nine convolutions, each with batch norm and ReLU, of N, N, N, 2N, 2N, 2N, 2N, 2N fields and,
in the last, one field per class; they are 3 x 3 except for the last two, which are 1 x 1. After the third and the sixth
there are a 2 x 2 max pool, in place of a stride, which would not be equivariant, and dropout. The sides are 32, 16 and
8 on 32 x 32 images. The logits are means over group and space.

| model               | group | N  | attention α             | parameters |
|---------------------|-------|----|-------------------------|------------|
| z2_allcnn           | Z2    | 96 |                         | 1,370,996  |
| p4_allcnn           | P4    | 48 |                         | 1,370,372  |
| p4_alpha_f_allcnn   | P4    | 48 | on the input            | 1,400,120  |
| p4_alpha_allcnn     | P4    | 48 | on the responses        | 3,642,388  |
| p4m_allcnn          | P4M   | 32 |                         | 1,219,252  |
| p4m_alpha_f_allcnn  | P4M   | 32 | on the input            | 1,249,192  |

The spatial attention has 7 x 7 filters; the channel attention has a sixteenth as many hidden fields as input fields,
in the first layer as many.

References:
    Striving for Simplicity: The All Convolutional Net (Springenberg et al., 2014), table 1
    https://arxiv.org/abs/1412.6806
    Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 8.2
    https://arxiv.org/abs/1602.07576
    Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), section 4.2 and appendix B.3.1
    https://arxiv.org/abs/2002.03830
"""

from collections import OrderedDict
from typing import Any, Literal

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

REDUCTION = 16


class AllCNN(EquivariantNet):
    """All-CNN-C: nine lifting and group convolutions, the last of which is the classifier.

    Args:
        group: The point group.
        width: The number of fields of the first three layers, N; the next five have twice as many.
        attention: The attention of the convolutions, see `eqzoo.layers.AttentiveGroupConv2d`, or None.
        num_classes: The number of classes; with 0 the network returns its pooled features, ``(B, 2N)``.
        in_chans: The number of image channels.
        drop_rate: The dropout probability after the third and the sixth layer.
        input_drop_rate: The dropout probability of the image.
        global_pool: How logits are pooled over group and space: ``"avg"`` or ``"max"``.
        downsample: ``"pool"``, which is exact, or ``"stride"``, stride 2 in the third and the sixth convolution, which
            is only approximate on even sides.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides are multiples of 4.

    References:
        Attentive Group Equivariant Convolutional Networks (Romero et al., 2020), appendix B.3.1
        https://arxiv.org/abs/2002.03830

    Example:
        >>> import torch
        >>> AllCNN(P4, width=4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        group: Group = P4,
        width: int = 48,
        attention: Attention | None = None,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.5,
        input_drop_rate: float = 0.2,
        global_pool: Reduce = "avg",
        downsample: Literal["pool", "stride"] = "pool",
    ) -> None:
        super().__init__(group, num_classes, in_chans, num_features=2 * width)
        self.attention = attention
        self.faster_channels_last = attention is None
        self.drop_rate = drop_rate
        self.stride = {"pool": 1, "stride": 2}[downsample]
        lift = lifting_conv(group, in_chans, width, 3, padding=1, attention=attention)
        self.stem = FusedSequential(
            OrderedDict(drop=Dropout(input_drop_rate), conv=lift, norm=self._norm(width), act=nn.ReLU())
        )
        self.blocks = nn.Sequential(
            self._stage(width, width),
            self._stage(width, width, down=True),
            self._stage(width, 2 * width),
            self._stage(2 * width, 2 * width),
            self._stage(2 * width, 2 * width, down=True),
            self._stage(2 * width, 2 * width),
            self._stage(2 * width, 2 * width, kernel_size=1),
        )
        fields = zip((1, 1, 1, 2, 2, 2, 2, 2), (1, 1, 2, 2, 2, 4, 4, 4), strict=True)
        self.feature_info = [
            {"num_chs": n * width * group.order, "reduction": r, "module": f"blocks.{i - 1}" if i else "stem"}
            for i, (n, r) in enumerate(fields)
        ]
        self.reset_classifier(num_classes, global_pool)

    def _norm(self, width: int) -> nn.Module:
        return GroupBatchNorm2d(self.group, width, eps=2e-5)

    def _stage(self, in_width: int, width: int, kernel_size: int = 3, down: bool = False) -> nn.Sequential:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv"] = self._conv(in_width, width, kernel_size, self.stride if down else 1)
        if down and self.stride == 1:
            layers["pool"] = SpatialPool2d(self.group, 2)
        layers["norm"] = self._norm(width)
        layers["act"] = nn.ReLU()
        if down:
            layers["drop"] = Dropout(self.drop_rate)
        return FusedSequential(layers)

    def _conv(self, in_width: int, width: int, kernel_size: int, stride: int = 1) -> nn.Module:
        padding, hidden = kernel_size // 2, max(1, in_width // REDUCTION)
        return group_conv(
            self.group, in_width, width, kernel_size, padding, stride, self.attention, hidden_channels=hidden
        )

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        pooled: Tensor = self.global_pool(x if pre_logits else self.head(x))
        return pooled

    def build_classifier(self, num_classes: int) -> nn.Module:
        """A new classifier for one or more classes."""
        conv = self._conv(self.num_features, num_classes, 1)
        return nn.Sequential(OrderedDict(conv=conv, norm=self._norm(num_classes), act=nn.ReLU()))


_NAMES = ("z2_allcnn", "p4_allcnn", "p4_alpha_f_allcnn", "p4_alpha_allcnn", "p4m_allcnn", "p4m_alpha_f_allcnn")

default_cfgs = configs(
    {f"{name}.cifar10": CATALOG["cifar10"].cfg() for name in _NAMES}, first_conv="stem.conv", classifier="head.conv"
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], **args: Any) -> EquivariantNet:
    options: dict[str, Any] = {"feature_indices": (1, 4, 7), "pretrained_filter_fn": fresh_where_sizes_differ}
    return build(AllCNN, variant, pretrained, **(options | args | kwargs))


@register_model
def z2_allcnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The plain All-CNN, 96 and 192 fields: the translation-equivariant baseline (1,370,996 parameters)."""
    return _create("z2_allcnn", pretrained, kwargs, group=Z2, width=96)


@register_model
def p4_allcnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 All-CNN, 48 and 96 fields: exact for 90° rotations (1,370,372 parameters)."""
    return _create("p4_allcnn", pretrained, kwargs, group=P4, width=48)


@register_model
def p4_alpha_f_allcnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 All-CNN with attention on the input of each convolution (1,400,120 parameters)."""
    return _create("p4_alpha_f_allcnn", pretrained, kwargs, group=P4, width=48, attention="input")


@register_model
def p4_alpha_allcnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 All-CNN with attention on all responses, 72 GB per batch in the paper (3,642,388 parameters)."""
    return _create("p4_alpha_allcnn", pretrained, kwargs, group=P4, width=48, attention="full")


@register_model
def p4m_allcnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4m All-CNN, 32 and 64 fields: exact for 90° rotations and reflections (1,219,252 parameters)."""
    return _create("p4m_allcnn", pretrained, kwargs, group=P4M, width=32)


@register_model
def p4m_alpha_f_allcnn(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4m All-CNN with attention on the input of each convolution (1,249,192 parameters)."""
    return _create("p4m_alpha_f_allcnn", pretrained, kwargs, group=P4M, width=32, attention="input")
