"""Equivariant layers, one mechanism a file."""

from .affine_self_conv import AffineSelfConv2d, SimpleAffineSelfConv2d, StandAloneSelfAttention2d
from .attentive_conv import AttentiveGroupConv2d, AttentiveLiftingConv2d, InputAttention2d
from .conv import GroupConv2d, LiftingConv2d
from .dilation_attention import DilationSelfAttention2d, LiftingDilationSelfAttention2d
from .e4 import E4Layer2d
from .norm import GroupBatchNorm2d, GroupLayerNorm2d
from .pointwise import PointwiseConv2d
from .pool import GlobalPool, GroupPool, HalvingPool2d, SpatialAdaptiveAvgPool2d, SpatialPool2d
from .self_attention import GroupSelfAttention2d, LiftingSelfAttention2d
from .squeeze_excite import GroupSqueezeExcite

__all__ = [
    "AffineSelfConv2d",
    "AttentiveGroupConv2d",
    "AttentiveLiftingConv2d",
    "DilationSelfAttention2d",
    "E4Layer2d",
    "GlobalPool",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupLayerNorm2d",
    "GroupPool",
    "GroupSelfAttention2d",
    "GroupSqueezeExcite",
    "HalvingPool2d",
    "InputAttention2d",
    "LiftingConv2d",
    "LiftingDilationSelfAttention2d",
    "LiftingSelfAttention2d",
    "PointwiseConv2d",
    "SimpleAffineSelfConv2d",
    "SpatialAdaptiveAvgPool2d",
    "SpatialPool2d",
    "StandAloneSelfAttention2d",
]
