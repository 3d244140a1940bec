"""ResNets of basic blocks that are fast on a CPU: patches of 4 x 4 pixels, then three stages of regular fields.

The stem is two 4 x 4 convolutions with stride 2, so that the stages have a quarter, an eighth and a sixteenth of the
image's sides, and fields N, 2N and 4N; means over 2 x 2 pixels halve the sides between them. A basic block is two 3 x 3
convolutions and a shortcut. A 1 x 1 convolution widens the last features to 32N fields before they are pooled over the
group and space.

| model        | group | N  | blocks  | parameters |
|--------------|-------|----|---------|------------|
| p4m_resnet_s | P4M   | 16 | 1, 1, 1 | 993,528    |
| p4m_resnet_m | P4M   | 16 | 2, 2, 2 | 1,768,120  |
| p4m_resnet_l | P4M   | 24 | 2, 2, 2 | 3,899,312  |
| p4_resnet_m  | P4    | 24 | 2, 2, 2 | 2,028,464  |
| z2_resnet_m  | Z2    | 64 | 2, 2, 2 | 3,745,928  |

The last two have the time of a training step of p4m_resnet_m, at 64 x 64 pixels on one core. The parameters are those
for 200 classes.

References:
    Group Equivariant Convolutional Networks (Cohen and Welling, 2016), https://arxiv.org/abs/1602.07576
    Deep Residual Learning for Image Recognition (He et al., 2016), section 3, https://arxiv.org/abs/1512.03385
    Bag of Tricks for Image Classification with Convolutional Neural Networks (He et al., 2019), section 4.2, for the
    means on the shortcuts, https://arxiv.org/abs/1812.01187
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import P4, P4M, Z2, Group
from ..layers import GroupBatchNorm2d, GroupConv2d, HalvingPool2d, LiftingConv2d
from ..layers._fused import FusedSequential
from ..layers.pool import Reduce
from .base import EquivariantNet
from .builder import build, configs, stage_indices

_HEAD = 8  # fields before the pool, as a multiple of those of the last stage


class GroupResNet(EquivariantNet):
    """ResNet of basic blocks on patches, for any group that maps the pixel grid onto itself.

    Args:
        group: The point group.
        width: The number of fields of the first stage, N, even.
        depths: The number of blocks of each stage; each stage has twice the fields of the one before.
        num_classes: The number of classes; with 0 the network returns its pooled features.
        in_chans: The number of image channels.
        drop_rate: The dropout probability of the pooled features.
        global_pool: How features are pooled over the group and space: ``"avg"`` or ``"max"``.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides are multiples of 4 and at least 16 pixels.

    References:
        Deep Residual Learning for Image Recognition (He et al., 2016), section 3
        https://arxiv.org/abs/1512.03385

    Example:
        >>> import torch
        >>> GroupResNet(P4, width=4, depths=(1, 1, 1))(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    blocks_are_stages = True

    def __init__(
        self,
        group: Group = P4M,
        width: int = 16,
        depths: tuple[int, ...] = (2, 2, 2),
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        global_pool: Reduce = "avg",
    ) -> None:
        widths = [width * 2**stage for stage in range(len(depths))]
        super().__init__(group, num_classes, in_chans, num_features=_HEAD * widths[-1])
        self.drop_rate = drop_rate
        stem = {
            "conv1": LiftingConv2d(group, in_chans, width // 2, 4, stride=2, padding=1, bias=False),
            "norm1": GroupBatchNorm2d(group, width // 2),
            "act1": nn.ReLU(),
            "conv2": GroupConv2d(group, width // 2, width, 4, stride=2, padding=1, bias=False),
            "norm2": GroupBatchNorm2d(group, width),
            "act2": nn.ReLU(),
        }
        self.stem = FusedSequential(OrderedDict(stem))
        self.blocks = nn.Sequential()
        self.feature_info = [{"num_chs": width * group.order, "reduction": 4, "module": "stem"}]
        fields = width
        for stage, (out_fields, depth) in enumerate(zip(widths, depths, strict=True)):
            blocks = [BasicBlock(group, fields, out_fields, halve=stage > 0)]
            blocks += [BasicBlock(group, out_fields, out_fields) for _ in range(depth - 1)]
            self.blocks.append(nn.Sequential(*blocks))
            fields = out_fields
            info = {"num_chs": fields * group.order, "reduction": 4 * 2**stage, "module": f"blocks.{stage}"}
            self.feature_info.append(info)
        conv_head = {
            "conv": GroupConv2d(group, fields, self.num_features, 1, bias=False),
            "norm": GroupBatchNorm2d(group, self.num_features),
            "act": nn.ReLU(),
        }
        self.conv_head = FusedSequential(OrderedDict(conv_head))
        self.reset_classifier(num_classes, global_pool)
        self.init_weights()

    def init_weights(self) -> None:
        """Draws convolutions from He's normal distribution; the last norm of each block has scale 0."""
        for module in self.modules():
            if isinstance(module, (LiftingConv2d, GroupConv2d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            elif isinstance(module, BasicBlock):
                nn.init.zeros_(module.branch.norm2.weight)  # type: ignore[union-attr, arg-type]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        pooled: Tensor = self.global_pool(self.conv_head(x))
        if pre_logits:
            return pooled
        logits: Tensor = self.head(F.dropout(pooled, self.drop_rate, self.training))
        return logits

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the blocks after the last requested feature, and the head; returns the indices of the features."""
        if prune_head:
            self.conv_head = nn.Identity()  # type: ignore[assignment]
        return super().prune_intermediate_layers(indices, prune_norm, prune_head)


class BasicBlock(nn.Module):
    """``ReLU(branch(x) + shortcut(x))``: two 3 x 3 convolutions with batch norms.

    Args:
        group: The point group.
        in_fields: The number of input fields.
        out_fields: The number of output fields.
        halve: Whether a mean over 2 x 2 pixels halves the sides first.
    """

    def __init__(self, group: Group, in_fields: int, out_fields: int, halve: bool = False) -> None:
        super().__init__()
        self.pool = HalvingPool2d(group, reduce="avg") if halve else nn.Identity()
        branch = {
            "conv1": GroupConv2d(group, in_fields, out_fields, 3, padding=1, bias=False),
            "norm1": GroupBatchNorm2d(group, out_fields),
            "act1": nn.ReLU(),
            "conv2": GroupConv2d(group, out_fields, out_fields, 3, padding=1, bias=False),
            "norm2": GroupBatchNorm2d(group, out_fields),
        }
        self.branch = FusedSequential(OrderedDict(branch))
        self.shortcut = nn.Sequential()
        if in_fields != out_fields:
            self.shortcut.add_module("conv", GroupConv2d(group, in_fields, out_fields, 1, bias=False))
            self.shortcut.add_module("norm", GroupBatchNorm2d(group, out_fields))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x)
        y: Tensor = self.branch(x, self.shortcut(x), self.act)
        return y


_NAMES = ("p4m_resnet_s", "p4m_resnet_m", "p4m_resnet_l", "p4_resnet_m", "z2_resnet_m")

# Fine-tuned weights: the data set, the side of its images in pixels, and the networks.
_TUNED = (
    ("eurosat", 64, ("p4m_resnet_m",)),
    ("eurosat", 96, ("p4m_resnet_l",)),
    ("pbc", 64, ("p4m_resnet_s", "p4m_resnet_m")),
    ("chula_rbc12", 64, ("p4m_resnet_m",)),
    ("lc25000", 96, ("p4m_resnet_s", "p4m_resnet_m")),
    ("radio", 64, ("p4m_resnet_s", "p4m_resnet_m")),
    ("ucmerced", 96, ("p4m_resnet_m",)),
)

default_cfgs = configs(
    {f"{name}.tiny_imagenet": CATALOG["tiny_imagenet"].cfg() for name in _NAMES}
    | {
        f"{model}.{name}": CATALOG[name].cfg(input_size=(CATALOG[name].input_size[0], side, side))
        for name, side, models in _TUNED
        for model in models
    }
    # Of weights that learned from no image of ImageNet.
    | {
        "p4m_resnet_s.eurosat": CATALOG["eurosat"].cfg(license="mit"),
        "p4m_resnet_s.chula_rbc12": CATALOG["chula_rbc12"].cfg(input_size=(3, 64, 64), license="mit"),
    },
    first_conv="stem.conv1",
    classifier="head",
    license="cc-by-nc-4.0",
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], **args: Any) -> EquivariantNet:
    stages = stage_indices(kwargs.get("depths", (2, 2, 2)))
    return build(GroupResNet, variant, pretrained, feature_indices=stages, **(args | kwargs))


@register_model
def p4m_resnet_s(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The small p4m ResNet, one block a stage (993,528 parameters)."""
    return _create("p4m_resnet_s", pretrained, kwargs, group=P4M, width=16, depths=(1, 1, 1))


@register_model
def p4m_resnet_m(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The medium p4m ResNet, two blocks a stage (1,768,120 parameters)."""
    return _create("p4m_resnet_m", pretrained, kwargs, group=P4M, width=16)


@register_model
def p4m_resnet_l(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The large p4m ResNet, of half as many fields again (3,899,312 parameters)."""
    return _create("p4m_resnet_l", pretrained, kwargs, group=P4M, width=24)


@register_model
def p4_resnet_m(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The p4 ResNet with the time of a step of p4m_resnet_m (2,028,464 parameters)."""
    return _create("p4_resnet_m", pretrained, kwargs, group=P4, width=24)


@register_model
def z2_resnet_m(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The plain ResNet with about the time of a step of p4m_resnet_m (3,745,928 parameters)."""
    return _create("z2_resnet_m", pretrained, kwargs, group=Z2, width=64)
