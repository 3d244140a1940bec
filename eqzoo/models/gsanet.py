"""Group self-attention networks: lifting self-attention, blocks of group self-attention, and a linear classifier.

A block is ``y = crop(drop(act(norm(SA(act(norm(x))))))) + crop(W x)``, ``z = y + norm(W₂ act(norm(W₁ y)))``, with
group self-attention SA, layer norms over the field, swish, and linear maps W, W₁, W₂ of the channels; W is the identity
if the number of fields does not change. SA has 5 x 5 neighborhoods and 9 heads, each with half the output fields as
channels.

| data set | lifting | blocks: fields (crop)                | norm, act after blocks | sides                       |
|----------|---------|--------------------------------------|------------------------|-----------------------------|
| rotmnist | 20      | 20 (2), 20 (0)* 20 (2), 20 (1) x 2   | no                     | 28 24 24, 12 8 6 4          |
| pcam     | 12*     | 24 (0)* 48 (2), 48 (1)* 96 (1)*      | yes                    | 96, 48 48, 24 20 18, 9 7, 3 |
| cifar10  | 96      | 96 (0) x 2* 192 (0) x 2* 192 (0) x 2 | yes                    | 32 32 32, 16 16 16, 8 8 8   |

A star is a 2 x 2 max pool; the numbers in parentheses are the pixels cropped from each edge.

| model                     | parameters                                   |
|---------------------------|----------------------------------------------|
| z2 r4 r8 r12 r16_gsanet_t | 44,368 · 44,428 · 44,508 · 44,588 · 44,668   |
| z2 r4 r8 r4m_gsanet_s     | 206,926 · 207,034 · 207,178 · 207,178        |
| z2 z2m_gsanet_b           | 3,001,648 · 3,001,808                        |

The paper prints one count for all groups of a data set: 44.67K, 205.66K and 2.99M. The counts differ by the embeddings
of relative poses, which have |H| rows in each layer. r8, r12 and r16 are exact for 90° rotations and approximate for
the others.

No other weight depends on the group, so weights can be transferred to another one: given ``group``,
``pretrained=True`` interpolates the embeddings. ``create_model("r4_gsanet_t", pretrained=True, group=cyclic(8))`` is a
network for 8 rotations, initialized from the weights for 4.

References:
    Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), section 6 and appendix F
    https://arxiv.org/abs/2010.00977
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, cast

import torch
from timm.models import register_model
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import P4, P4M, Z2, Z2M, Group, cyclic, transform
from ..layers import (
    Dropout,
    GroupLayerNorm2d,
    GroupPool,
    GroupSelfAttention2d,
    HalvingPool2d,
    LiftingSelfAttention2d,
    PointwiseConv2d,
    SizeError,
)
from ..layers.gsa import Neighborhood, init_linear_maps
from .base import EquivariantNet
from .builder import build, configs

ReadOut = Literal["max_avg", "sum_max"]

_FIRST = "stem.attention.qkv.weight"  # of the layer that sees the image
_norm = functools.partial(GroupLayerNorm2d, eps=1e-12)  # as in the released code


class Stage(NamedTuple):
    """Blocks at one resolution: the fields of each, the pixels cropped from each edge, and whether a pool follows."""

    widths: tuple[int, ...]
    crops: tuple[int, ...]
    pool: bool = True


ROTMNIST_STAGES = (Stage((20, 20), (2, 0)), Stage((20, 20, 20), (2, 1, 1), pool=False))
PCAM_STAGES = (Stage((24,), (0,)), Stage((48, 48), (2, 1)), Stage((96,), (1,)))
CIFAR_STAGES = (Stage((96, 96), (0, 0)), Stage((192, 192), (0, 0)), Stage((192, 192), (0, 0), pool=False))


class Crop(nn.Module):
    """Crops the same number of pixels from each edge, which is equivariant."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if min(height, width) <= 2 * self.pixels:
            least = 2 * self.pixels + 1
            raise SizeError(
                f"{self.pixels} pixels are cropped from each edge, which leaves nothing of {height} x {width} pixels",
                f"It takes {least} x {least} pixels or more",
            )
        return x[..., self.pixels : height - self.pixels, self.pixels : width - self.pixels]

    def extra_repr(self) -> str:
        return f"{self.pixels}"


class SelfAttentionBlock(nn.Module):
    """Group self-attention and a pointwise two-layer network, both with residual connections.

    ``y = crop(drop(act(norm(SA(act(norm(x))))))) + crop(W x)``, ``z = y + norm(W₂ act(norm(W₁ y)))``. W is
    the identity if the number of fields does not change; W₁ halves it.

    Args:
        attention: The self-attention layer SA.
        crop: The number of pixels cropped from each edge.
        value_drop: The dropout probability after the attention.

    Shape:
        ``(B, C, |H|, height, width)`` to ``(B, C', |H|, height − 2·crop, width − 2·crop)``.
    """

    def __init__(self, attention: GroupSelfAttention2d, crop: int, value_drop: float) -> None:
        super().__init__()
        group, in_channels, channels = attention.group, attention.in_channels, attention.out_channels
        self.group = group
        self.attention = nn.Sequential(
            OrderedDict[str, nn.Module](
                norm=_norm(group, in_channels),
                act=nn.SiLU(),
                attention=attention,
                norm_out=_norm(group, channels),
                act_out=nn.SiLU(),
                drop=Dropout(value_drop),
            )
        )
        self.shortcut = nn.Identity() if in_channels == channels else PointwiseConv2d(group, in_channels, channels)
        self.crop = Crop(crop)
        self.mlp = nn.Sequential(
            OrderedDict[str, nn.Module](
                fc1=PointwiseConv2d(group, channels, channels // 2),
                norm=_norm(group, channels // 2),
                act=nn.SiLU(),
                fc2=PointwiseConv2d(group, channels // 2, channels),
                norm_out=_norm(group, channels),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.crop(self.attention(x)) + self.crop(self.shortcut(x))
        z: Tensor = y + self.mlp(y)
        return z

    def transform_field(self, x: Tensor, g: int) -> Tensor:
        """How an element of the group acts on fields, or on the planes that a deployed block takes."""
        if x.ndim == 4:
            return self.transform_field(x.unflatten(1, (-1, self.group.order)), g).flatten(1, 2)
        return transform(x, self.group, g, "regular")


class GSANet(EquivariantNet):
    """A group self-attention network.

    Args:
        group: The point group, with any number of rotations.
        width: The number of fields of the lifting attention.
        stages: The blocks of each resolution.
        stem_pool: Whether to halve the sides after the lifting attention.
        block_norm: Whether each block is followed by a norm and an activation.
        kernel_size: The side of all neighborhoods, in pixels, odd; ``"global"`` for the whole image.
        num_heads: The number of heads of each attention.
        num_classes: The number of classes; with 0 the network returns its pooled features, ``(B, C)``.
        in_chans: The number of image channels.
        drop_rate: The dropout probability before the pool of each stage.
        in_drop_rate: The dropout probability of the image.
        attn_drop_rate: The dropout probability of the attention weights.
        value_drop_rate: The dropout probability after each attention.
        init_scale: Weights are drawn from ``N(0, init_scale²/fan_in)``; √2 is He's initialization.
        global_pool: ``"max_avg"``, as in the paper: the maximum over the group, then the mean over space; or
            ``"sum_max"``, as in the authors' code: the sum over space, then the maximum over the group.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides even or odd, large enough for the crops.

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), figure F.1
        https://arxiv.org/abs/2010.00977

    Example:
        >>> import torch
        >>> GSANet(P4)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        group: Group = P4,
        width: int = 20,
        stages: tuple[Stage, ...] = ROTMNIST_STAGES,
        stem_pool: bool = False,
        block_norm: bool = False,
        kernel_size: Neighborhood = 5,
        num_heads: int = 9,
        num_classes: int = 10,
        in_chans: int = 1,
        drop_rate: float = 0.0,
        in_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.1,
        value_drop_rate: float = 0.1,
        init_scale: float = 1.0,
        global_pool: ReadOut = "max_avg",
    ) -> None:
        stages = _stages(stages)
        super().__init__(group, num_classes, in_chans, num_features=stages[-1].widths[-1])
        self.init_scale = init_scale
        self.drop_rate = drop_rate
        self.block_norm = block_norm
        shared: dict[str, Any] = {"kernel_size": kernel_size, "num_heads": num_heads, "attn_drop": attn_drop_rate}
        lift = LiftingSelfAttention2d(group, in_chans, width, **shared)
        self.stem = nn.Sequential(
            OrderedDict[str, nn.Module](drop=Dropout(in_drop_rate), attention=lift)
            | self._norm_act(width)
            | (OrderedDict(pool=HalvingPool2d(group)) if stem_pool else OrderedDict())
        )
        reduction = 1 + stem_pool
        self.feature_info = [{"num_chs": width * group.order, "reduction": reduction, "module": "stem"}]
        blocks = []
        for stage in stages:
            for place, (channels, crop) in enumerate(zip(stage.widths, stage.crops, strict=True), 1):
                attention = GroupSelfAttention2d(group, width, channels, **shared)
                pool = stage.pool and place == len(stage.widths)
                blocks.append(self._stage(SelfAttentionBlock(attention, crop, value_drop_rate), channels, pool))
                width, reduction = channels, reduction * (1 + pool)
                info = {"num_chs": width * group.order, "reduction": reduction, "module": f"blocks.{len(blocks) - 1}"}
                self.feature_info.append(info)
        self.blocks = nn.Sequential(*blocks)
        init_linear_maps(self, init_scale)
        self.reset_classifier(num_classes, global_pool)

    def convert_group(self, state: dict[str, Tensor], source: Group | None) -> dict[str, Tensor]:
        """Weights for the group of the network, of another group or, if it is unknown, of the one it is named after.

        The embeddings of relative poses are linearly interpolated in the angle; rows of elements that both groups have
        are copied. Where only the new group has reflections, R^r M takes the row of R^r, unless the old group is
        unknown.
        """
        is_known, target = source is not None, self.group
        source = source or Group.from_name(self.pretrained_cfg["architecture"].partition("_")[0])
        if source == target:
            return state
        angles = torch.arange(target.rotations, device="cpu") * source.rotations  # in 2π / (both numbers of rotations)
        before, after = angles // target.rotations, (angles // target.rotations + 1) % source.rotations
        fraction = (angles % target.rotations / target.rotations)[:, None]

        def interpolated(name: str, table: Tensor) -> Tensor:
            if not name.endswith(".pose.weight") or len(table) != source.order:
                return table
            rows = table.unflatten(0, (-1, source.rotations))
            if is_known and target.reflections > source.reflections:
                rows = rows.expand(2, -1, -1)
            rows = rows[: 1 + target.reflections]
            weight = fraction.to(table)
            return ((1 - weight) * rows[:, before] + weight * rows[:, after]).flatten(0, 1)

        return {name: interpolated(name, value) for name, value in state.items()}

    def _stage(self, block: nn.Module, channels: int, pool: bool) -> nn.Sequential:
        layers = OrderedDict(block=block)
        if self.block_norm:
            layers |= self._norm_act(channels)
        if pool:
            layers["drop"] = Dropout(self.drop_rate)
            layers["pool"] = HalvingPool2d(self.group)
        return nn.Sequential(layers)

    def _norm_act(self, channels: int) -> "OrderedDict[str, nn.Module]":
        return OrderedDict[str, nn.Module](norm=_norm(self.group, channels), act=nn.SiLU())

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the last features, or with ``pre_logits`` the pooled features."""
        x = x if pre_logits else self.head(x)
        # Space is last in fields and in planes, so this also works in fused networks.
        if self.global_pool == "max_avg":
            pooled: Tensor = self.group_pool(x).mean((-2, -1))
        else:
            pooled = self.group_pool(x.sum((-2, -1), keepdim=True)).flatten(1)
        return pooled

    def set_pool(self, global_pool: str) -> None:
        """Sets the global pooling."""
        if global_pool not in ("max_avg", "sum_max"):
            raise ValueError(f"global_pool is 'max_avg' or 'sum_max', got {global_pool!r}")
        self.global_pool = global_pool
        self.group_pool = GroupPool(self.group, "max")

    def build_classifier(self, num_classes: int) -> nn.Module:
        """A new classifier for one or more classes."""
        head = PointwiseConv2d(self.group, self.num_features, num_classes, bias=False)
        init_linear_maps(head, self.init_scale)
        return head


_GROUPS_S = ("z2", "r4", "r8", "r4m")
default_cfgs = configs(
    {f"{group}_gsanet_t.rotmnist": CATALOG["rotmnist"].cfg() for group in ("z2", "r4", "r8", "r12", "r16")}
    | {f"{group}_gsanet_s.pcam": CATALOG["pcam"].cfg() for group in _GROUPS_S}
    | {f"{group}_gsanet_s.chula_rbc12": CATALOG["chula_rbc12"].cfg(input_size=(3, 56, 56)) for group in _GROUPS_S}
    | {f"{group}_gsanet_b.cifar10": CATALOG["cifar10"].cfg() for group in ("z2", "z2m")},
    first_conv=_FIRST.removesuffix(".weight"),
    classifier="head",
)


def _scaled_queries(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict whose queries of an image fit another number of channels, by whose root scores are divided."""
    before, channels = state[_FIRST].shape[1], cast(GSANet, model).in_chans
    if before == channels:
        return state
    state = dict(state)
    for name in (_FIRST, _FIRST.replace("weight", "bias")):
        query, *others = state[name].chunk(3)
        state[name] = torch.cat([query * math.sqrt(channels / before), *others])
    return state


def _stages(given: Iterable[Iterable[Any]]) -> tuple[Stage, ...]:
    """Stages, also from what JSON makes of them, lists."""
    return tuple(Stage(*stage) for stage in given)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any], group: Group, **args: Any) -> EquivariantNet:
    features = 1 + sum(len(stage.widths) for stage in _stages((args | kwargs)["stages"]))
    options: dict[str, Any] = {"feature_indices": tuple(range(features)), "pretrained_filter_fn": _scaled_queries}
    return build(GSANet, variant, pretrained, **(options | {"group": group} | args | kwargs))


def _create_t(variant: str, pretrained: bool, kwargs: dict[str, Any], group: Group) -> EquivariantNet:
    return _create(variant, pretrained, kwargs, group, width=20, stages=ROTMNIST_STAGES)


def _create_s(variant: str, pretrained: bool, kwargs: dict[str, Any], group: Group) -> EquivariantNet:
    args = {"width": 12, "stages": PCAM_STAGES, "stem_pool": True, "block_norm": True}
    args |= {"init_scale": math.sqrt(2)}
    return _create(variant, pretrained, kwargs, group, **args)


def _create_b(variant: str, pretrained: bool, kwargs: dict[str, Any], group: Group) -> EquivariantNet:
    args = {"width": 96, "stages": CIFAR_STAGES, "block_norm": True}
    args |= {"in_drop_rate": 0.3, "drop_rate": 0.2, "init_scale": math.sqrt(2)}
    return _create(variant, pretrained, kwargs, group, **args)


@register_model
def z2_gsanet_t(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The self-attention baseline for rotated MNIST, equivariant under translations only (44,368 parameters)."""
    return _create_t("z2_gsanet_t", pretrained, kwargs, Z2)


@register_model
def r4_gsanet_t(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """GSA-Net with 4 rotations for rotated MNIST: exact for 90° rotations (44,428 parameters)."""
    return _create_t("r4_gsanet_t", pretrained, kwargs, P4)


@register_model
def r8_gsanet_t(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """GSA-Net with 8 rotations for rotated MNIST: exact for 90°, approximate for 45° (44,508 parameters)."""
    return _create_t("r8_gsanet_t", pretrained, kwargs, cyclic(8))


@register_model
def r12_gsanet_t(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """GSA-Net with 12 rotations for rotated MNIST: exact for 90°, approximate for 30° (44,588 parameters)."""
    return _create_t("r12_gsanet_t", pretrained, kwargs, cyclic(12))


@register_model
def r16_gsanet_t(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """GSA-Net with 16 rotations for rotated MNIST: exact for 90°, approximate for 22.5° (44,668 parameters)."""
    return _create_t("r16_gsanet_t", pretrained, kwargs, cyclic(16))


@register_model
def z2_gsanet_s(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The self-attention baseline for PatchCamelyon, equivariant under translations only (206,926 parameters)."""
    return _create_s("z2_gsanet_s", pretrained, kwargs, Z2)


@register_model
def r4_gsanet_s(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """GSA-Net with 4 rotations for PatchCamelyon: exact for 90° rotations (207,034 parameters)."""
    return _create_s("r4_gsanet_s", pretrained, kwargs, P4)


@register_model
def r8_gsanet_s(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """GSA-Net with 8 rotations for PatchCamelyon: exact for 90°, approximate for 45° (207,178 parameters)."""
    return _create_s("r8_gsanet_s", pretrained, kwargs, cyclic(8))


@register_model
def r4m_gsanet_s(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """GSA-Net with 4 rotations and reflections for PatchCamelyon: exact for both (207,178 parameters)."""
    return _create_s("r4m_gsanet_s", pretrained, kwargs, P4M)


@register_model
def z2_gsanet_b(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The self-attention baseline for CIFAR-10, equivariant under translations only (3,001,648 parameters)."""
    return _create_b("z2_gsanet_b", pretrained, kwargs, Z2)


@register_model
def z2m_gsanet_b(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """GSA-Net with left-right reflections for CIFAR-10: exact for them (3,001,808 parameters)."""
    return _create_b("z2m_gsanet_b", pretrained, kwargs, Z2M)
