"""Equivariant layers, one mechanism per file.

Layers take a `eqzoo.Group`, not its name, and one number for height and width.
"""

from ._checks import SizeError
from ._fused import FusedSequential, norm_act
from .asc import AffineSelfConv2d, SimpleAffineSelfConv2d, StandAloneSelfAttention2d
from .attentive import AttentiveGroupConv2d, AttentiveLiftingConv2d, InputAttention2d
from .depthwise import DepthwiseGroupConv2d
from .dropout import Dropout
from .e4 import E4Layer2d
from .field_norm import FieldLayerNorm2d, FieldLayerScale2d
from .group_conv import GroupConv2d, LiftingConv2d
from .gsa import GroupSelfAttention2d, LiftingSelfAttention2d
from .irreps import Irreps, OcticLayer, channels_of, transform_irreps
from .norm import GroupBatchNorm2d, GroupLayerNorm2d
from .octic import OcticGELU, OcticInvariants, OcticLayerNorm, OcticLinear, OcticParts, OcticResidual
from .octic_block import OcticAttention, OcticBlock, OcticMlp
from .octic_embed import OcticPatchEmbed2d, OcticPosition2d
from .pointwise import PointwiseConv2d
from .pool import GlobalPool, GroupPool, HalvingPool2d, SpatialAdaptiveAvgPool2d, SpatialPool2d
from .restriction import GroupRestriction
from .squeeze_excite import GroupSqueezeExcite
from .upsample import Upsample2d

__all__ = [
    "AffineSelfConv2d",
    "AttentiveGroupConv2d",
    "AttentiveLiftingConv2d",
    "DepthwiseGroupConv2d",
    "Dropout",
    "E4Layer2d",
    "FieldLayerNorm2d",
    "FieldLayerScale2d",
    "FusedSequential",
    "GlobalPool",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupLayerNorm2d",
    "GroupPool",
    "GroupRestriction",
    "GroupSelfAttention2d",
    "GroupSqueezeExcite",
    "HalvingPool2d",
    "InputAttention2d",
    "Irreps",
    "LiftingConv2d",
    "LiftingSelfAttention2d",
    "OcticAttention",
    "OcticBlock",
    "OcticGELU",
    "OcticInvariants",
    "OcticLayer",
    "OcticLayerNorm",
    "OcticLinear",
    "OcticMlp",
    "OcticParts",
    "OcticPatchEmbed2d",
    "OcticPosition2d",
    "OcticResidual",
    "PointwiseConv2d",
    "SimpleAffineSelfConv2d",
    "SizeError",
    "SpatialAdaptiveAvgPool2d",
    "SpatialPool2d",
    "StandAloneSelfAttention2d",
    "Upsample2d",
    "channels_of",
    "norm_act",
    "transform_irreps",
]
