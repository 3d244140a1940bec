"""Octic vision transformers: invariant under p4m, and cheaper than their plain twins.

The first half of the blocks works on fields of irreps of p4m, where a linear layer takes 12/64 of the multiplications
of a dense one. Half way the invariants of the field are taken, and ordinary blocks follow. The hybrids mix the irreps
there instead, and promise no group.

| model                         | width | blocks | heads | patch | parameters  |
|-------------------------------|-------|--------|-------|-------|-------------|
| p4m_octic_vit_tiny_patch16_224  | 192 | 12     | 3     | 16    | 3,264,280   |
| p4m_octic_vit_small_patch16_224 | 384 | 12     | 6     | 16    | 12,554,824  |
| p4m_octic_vit_base_patch16_224  | 768 | 12     | 12    | 16    | 49,217,704  |
| p4m_octic_vit_large_patch16_224 | 1024 | 24    | 16    | 16    | 172,107,240 |
| p4m_octic_vit_huge_patch14_224  | 1280 | 32    | 16    | 14    | 357,007,720 |
| p4m_octic_vit_huge_patch16_224  | 1280 | 32    | 16    | 16    | 355,755,520 |
| octic_vit_large_patch16_224   | 1024  | 24     | 16    | 16    | 171,319,784 |
| octic_vit_huge_patch14_224    | 1280  | 32     | 16    | 14    | 355,777,640 |
| octic_vit_huge_patch16_224    | 1280  | 32     | 16    | 16    | 354,525,440 |

Their authors released weights of the large and huge ones, trained on ImageNet-1K by the recipes of DeiT III and DINOv2;
`eqzoo.models.octic_conversion` reads them. Those of DINOv2, and the huge ones with patches of 16, have no classifier.
The widths of the tiny, small and base ones are DeiT's; of these there are no weights.

References:
    Octic Vision Transformers: Quicker ViTs Through Equivariance (Nordström, Edstedt, Kahl and Bökman, 2025)
    https://arxiv.org/abs/2505.15441
    Flopping for FLOPs: Leveraging Equivariance for Computational Efficiency (Bökman, Nordström and Kahl, 2025)
    https://arxiv.org/abs/2502.05169
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from timm.models import register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from ..data import IMAGENET
from ..groups import P4M, Z2
from ..layers.irreps import Irreps, channels_of
from ..layers.octic import OcticInvariants, OcticParts
from ..layers.octic_block import OcticBlock
from ..layers.octic_embed import OcticPatchEmbed2d, OcticPosition2d, resize_quarters
from .base import EquivariantNet
from .builder import build, configs


class OcticStem(nn.Module):
    """Patches, their positions, and a class token in front of them.

    The class token is a vector of A1 alone. Its other parts are zero, and no parameters, so that nothing moves them.

    Args:
        in_chans: The number of image channels.
        width: The width C.
        patch_size: The side of a patch, in pixels.
        grid: The number of patches a side that positions are learnt for.

    Shape:
        ``(B, in_chans, height, width)`` to `Irreps` over the class token and the patches, row by row.
    """

    def __init__(self, in_chans: int, width: int, patch_size: int, grid: int) -> None:
        super().__init__()
        self.patch = OcticPatchEmbed2d(in_chans, width, patch_size)
        self.pos = OcticPosition2d(width, grid)
        self.class_token = nn.Parameter(torch.empty(1, 1, width // 8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the class token from a truncated normal distribution of deviation 0.02."""
        nn.init.trunc_normal_(self.class_token, std=0.02)

    def forward(self, x: Tensor) -> Irreps:
        ab, e = (y.flatten(2, 3) for y in self.pos(self.patch(x)))
        token = F.pad(self.class_token[None], (0, 0, 0, 0, 0, 0, 0, 3)).to(ab.dtype)
        return Irreps(torch.cat([token.expand(-1, ab.shape[1], -1, -1), ab], 2), F.pad(e, (0, 0, 1, 0)))


class OcticViT(EquivariantNet):
    """A vision transformer whose first half works on fields of irreps of p4m.

    ``forward_features`` gives the normed tokens, ``(B, 1 + patches, C)``, the class token first. Those of the patches
    are invariant maps: a rotation of the image moves them and leaves their channels.

    Args:
        num_classes: The number of classes; with 0 the network gives its pooled features, ``(B, C)``.
        in_chans: The number of image channels.
        img_size: The side of the images that positions are learnt for, in pixels, a multiple of two patches. Others are
            taken too, with interpolated positions.
        patch_size: The side of a patch, even, in pixels.
        embed_dim: The width C, a multiple of 8 times the number of heads.
        depth: The number of blocks; the first half of them, rounded down, are octic.
        num_heads: The number of heads.
        mlp_ratio: The width of the perceptron over C.
        invariant: Whether invariants are taken half way, or the irreps mixed, which ends the group.
        init_values: The first values of layer scale; 0 or None for none (`timm.create_model` takes None for the
            default).
        drop_rate: The probability of dropping a feature before the classifier.
        drop_path_rate: The probability that an image goes without a branch of the last block; from 0 in the first one.
        global_pool: ``"token"`` for the class token or ``"avg"`` for the mean over the patches.

    Shape:
        ``(B, in_chans, height, width)`` to ``(B, num_classes)``; sides are multiples of two patches.

    References:
        Octic Vision Transformers: Quicker ViTs Through Equivariance (Nordström, Edstedt, Kahl and Bökman, 2025)
        https://arxiv.org/abs/2505.15441

    Example:
        >>> net = OcticViT(10, img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2)
        >>> net(torch.zeros(2, 3, 32, 40)).shape
        torch.Size([2, 10])
    """

    planes_are_fields: ClassVar[bool] = (
        False  # those of the octic half are of irreps, those of the plain half invariant
    )

    def __init__(
        self,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | Sequence[int] = 224,
        patch_size: int = 16,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        invariant: bool = True,
        init_values: float | None = 1e-4,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        global_pool: str = "token",
    ) -> None:
        super().__init__(P4M if invariant else Z2, num_classes, in_chans, num_features=embed_dim)
        hidden = round(embed_dim * mlp_ratio)
        if hidden % 8:
            raise ValueError(
                "the perceptron's width, embed_dim times mlp_ratio, is a multiple of 8 in octic layers; "
                f"got {embed_dim} times {mlp_ratio:g}"
            )
        init_values = init_values or None
        self.embed_dim = embed_dim
        self.patch_size = patch_size
        self.octic_depth = depth // 2
        self.stem = OcticStem(in_chans, embed_dim, patch_size, _grid(img_size, patch_size))
        rates = [drop_path_rate * i / max(1, depth - 1) for i in range(depth)]
        plain = partial(nn.LayerNorm, eps=1e-6)
        blocks: list[nn.Module] = []
        for i, rate in enumerate(rates):
            sizes = (embed_dim, num_heads, (hidden + 0.5) / embed_dim)  # of which blocks round the width down
            if i < self.octic_depth:
                blocks.append(OcticBlock(*sizes, init_values=init_values, drop_path=rate))
            else:
                options = {"qkv_bias": True, "init_values": init_values, "drop_path": rate, "norm_layer": plain}
                blocks.append(Block(*sizes, **options))
                blocks[-1].apply(_initialize)
        self.blocks = nn.Sequential(*blocks)
        self.middle = OcticInvariants(embed_dim) if invariant else OcticParts()
        self.norm = plain(embed_dim)
        self.head_drop = nn.Dropout(drop_rate)
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": name}
            for name in ("stem", *(f"blocks.{i}" for i in range(depth)))
        ]
        self.global_pool = global_pool
        self.reset_classifier(num_classes, global_pool)

    def forward_features(self, x: Tensor) -> Tensor:
        """The normed tokens ``(B, 1 + patches, C)``, the class token first."""
        field = self._checkpointed(self.blocks[: self.octic_depth], self.stem(x))
        tokens: Tensor = self.norm(self._checkpointed(self.blocks[self.octic_depth :], self.middle(field)))
        return tokens

    def feature_field(self, x: Tensor) -> Tensor:
        """The last features of the patches as invariant maps, ``(B, C, height', width')``."""
        return self._planes(self.forward_features(x), x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits ``(B, num_classes)`` of the normed tokens, or with ``pre_logits`` the pooled features."""
        pooled = x[:, 1:].mean(1) if self.global_pool == "avg" else x[:, 0]
        pooled = self.head_drop(pooled)
        logits: Tensor = pooled if pre_logits else self.head(pooled)
        return logits

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The features of the patches after the stem and each block, see `EquivariantNet.forward_intermediates`.

        They are maps ``(B, C, height', width')``. Those of the octic half are the channels of
        `eqzoo.layers.channels_of`: A1, A2, B1, B2 and both components of E; ``norm`` applies the last norm to those of
        plain blocks. The last features are the normed tokens, of a stop in the octic half its `Irreps`.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is 'NCHW', maps (B, C, height, width); got {output_fmt!r}")
        wanted, highest = feature_take_indices(len(self.blocks) + 1, indices)
        last = highest if stop_early or intermediates_only else len(self.blocks)
        found, y = [], cast(Any, x)
        for place, stage in enumerate([self.stem, *self.blocks][: last + 1]):
            y = self.middle(y) if place == self.octic_depth + 1 else y
            y = self._checkpointed([stage], y) if place else stage(y)
            if place in wanted:
                octic = isinstance(y, Irreps)
                found.append(self._planes(channels_of(y) if octic else self.norm(y) if norm else y, x))
        if intermediates_only:
            return found
        return cast(Tensor, y if isinstance(y, Irreps) else self.norm(y)), found

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes what is behind the last requested feature, and the head; returns the indices of the features."""
        wanted = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if max(wanted) <= self.octic_depth:
            self.middle = nn.Identity()  # type: ignore[assignment]
        return wanted

    def _planes(self, tokens: Tensor, x: Tensor) -> Tensor:
        """The tokens of the patches of images x as maps."""
        return tokens[:, 1:].mT.unflatten(2, tuple(side // self.patch_size for side in x.shape[-2:]))

    def set_pool(self, global_pool: str) -> None:
        """Sets the global pooling."""
        if global_pool not in ("token", "avg"):
            raise ValueError(f"global_pool is 'token' or 'avg', got {global_pool!r}")
        self.global_pool = global_pool

    def build_classifier(self, num_classes: int) -> nn.Module:
        """A new classifier for one or more classes."""
        head = nn.Linear(self.embed_dim, num_classes)
        _initialize(head)
        return head

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How timm groups parameters by depth; the way out of the octic half goes with the block behind it."""
        if coarse:
            return {"stem": r"^stem", "blocks": r"^blocks|^middle"}
        layers = [(r"^blocks\.(\d+)", None), (r"^middle", (self.octic_depth,)), (r"^norm", (99999,))]
        return {"stem": r"^stem", "blocks": layers}

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave undecayed besides biases and norms: positions and class token."""
        return {"stem.pos.weight", "stem.class_token"}


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def _grid(img_size: int | Sequence[int], patch_size: int) -> int:
    sides = {img_size} if isinstance(img_size, int) else set(img_size)
    side = max(sides)
    if len(sides) > 1 or side % (2 * patch_size) or side < 1:
        raise ValueError(
            "positions are learnt on square images whose side is a multiple of two patches (others are taken all the "
            f"same); got img_size={img_size} with patches of {patch_size}"
        )
    return side // patch_size


def resize_positions(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict whose positions are of the grid of a network, by bicubic interpolation where they are of another."""
    key, found = "stem.pos.weight", dict(state)
    own = model.get_parameter(key)
    if key in found and found[key].shape[1:3] != own.shape[1:3]:
        found[key] = resize_quarters(found[key], 2 * own.shape[1])
    return found


_DINOV2: dict[str, Any] = {"num_classes": 0, "crop_pct": 0.875}
default_cfgs = configs(
    {
        "p4m_octic_vit_tiny_patch16_224.in1k": IMAGENET.cfg(),
        "p4m_octic_vit_small_patch16_224.in1k": IMAGENET.cfg(),
        "p4m_octic_vit_base_patch16_224.in1k": IMAGENET.cfg(),
        "p4m_octic_vit_large_patch16_224.deit3_in1k": IMAGENET.cfg(),
        "p4m_octic_vit_large_patch16_224.dinov2_in1k": IMAGENET.cfg() | _DINOV2,
        "p4m_octic_vit_huge_patch14_224.deit3_in1k": IMAGENET.cfg(),
        "p4m_octic_vit_huge_patch16_224.dinov2_in1k": IMAGENET.cfg() | _DINOV2,
        "octic_vit_large_patch16_224.deit3_in1k": IMAGENET.cfg(),
        "octic_vit_large_patch16_224.dinov2_in1k": IMAGENET.cfg() | _DINOV2,
        "octic_vit_huge_patch14_224.deit3_in1k": IMAGENET.cfg(),
        "octic_vit_huge_patch16_224.dinov2_in1k": IMAGENET.cfg() | _DINOV2,
    },
    first_conv="stem.patch",
    classifier="head",
)

_LARGE: dict[str, Any] = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
_HUGE: dict[str, Any] = {"embed_dim": 1280, "depth": 32, "num_heads": 16}


def _create(
    variant: str, pretrained: bool, kwargs: dict[str, Any], invariant: bool = True, **args: Any
) -> EquivariantNet:
    options = args | kwargs
    if kwargs.get("invariant", invariant) != invariant:
        other = "p4m_octic_vit_large_patch16_224" if kwargs["invariant"] else "octic_vit_large_patch16_224"
        raise ValueError(
            f"{variant} has invariant={invariant}; {other} has invariant={kwargs['invariant']}, and takes other sizes "
            "by embed_dim, depth and num_heads"
        )
    options["invariant"] = invariant
    depth = options["depth"]
    if options.get("features_only"):  # after each quarter of the blocks; fewer of less than four
        options.setdefault("out_indices", sorted({depth * i // 4 for i in range(1, 5)}))
    blocks = tuple(range(depth + 1))
    return build(
        OcticViT, variant, pretrained, feature_indices=blocks, **({"pretrained_filter_fn": resize_positions} | options)
    )


@register_model
def p4m_octic_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The octic ViT of DeiT-Tiny's width, invariant under p4m (3,264,280 parameters)."""
    return _create("p4m_octic_vit_tiny_patch16_224", pretrained, kwargs, embed_dim=192, depth=12, num_heads=3)


@register_model
def p4m_octic_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The octic ViT of DeiT-Small's width, invariant under p4m (12,554,824 parameters)."""
    return _create("p4m_octic_vit_small_patch16_224", pretrained, kwargs, embed_dim=384, depth=12, num_heads=6)


@register_model
def p4m_octic_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The octic ViT of DeiT-Base's width, invariant under p4m (49,217,704 parameters)."""
    return _create("p4m_octic_vit_base_patch16_224", pretrained, kwargs, embed_dim=768, depth=12, num_heads=12)


@register_model
def p4m_octic_vit_large_patch16_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The octic ViT-L, invariant under p4m (172,107,240 parameters)."""
    return _create("p4m_octic_vit_large_patch16_224", pretrained, kwargs, **_LARGE)


@register_model
def p4m_octic_vit_huge_patch14_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The octic ViT-H with patches of 14 pixels, invariant under p4m (357,007,720 parameters)."""
    return _create("p4m_octic_vit_huge_patch14_224", pretrained, kwargs, patch_size=14, **_HUGE)


@register_model
def p4m_octic_vit_huge_patch16_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The octic ViT-H with patches of 16 pixels, invariant under p4m, without classifier (355,755,520 parameters)."""
    return _create("p4m_octic_vit_huge_patch16_224", pretrained, kwargs, **_HUGE)


@register_model
def octic_vit_large_patch16_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The hybrid octic ViT-L, which ends the group half way and promises none (171,319,784 parameters)."""
    return _create("octic_vit_large_patch16_224", pretrained, kwargs, invariant=False, **_LARGE)


@register_model
def octic_vit_huge_patch14_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The hybrid octic ViT-H with patches of 14 pixels, which promises no group (355,777,640 parameters)."""
    return _create("octic_vit_huge_patch14_224", pretrained, kwargs, patch_size=14, invariant=False, **_HUGE)


@register_model
def octic_vit_huge_patch16_224(pretrained: bool = False, **kwargs: Any) -> EquivariantNet:
    """The hybrid octic ViT-H with patches of 16 pixels, without group and classifier (354,525,440 parameters)."""
    return _create("octic_vit_huge_patch16_224", pretrained, kwargs, invariant=False, **_HUGE)
