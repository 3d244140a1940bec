"""Equivariant layers, one mechanism a file."""

from .conv import GroupConv2d, LiftingConv2d
from .dilation_attention import DilationSelfAttention2d, LiftingDilationSelfAttention2d
from .norm import GroupBatchNorm2d, GroupLayerNorm2d
from .pointwise import PointwiseConv2d
from .pool import GlobalPool, GroupPool, HalvingPool2d, SpatialAdaptiveAvgPool2d, SpatialPool2d
from .self_attention import GroupSelfAttention2d, LiftingSelfAttention2d

__all__ = [
    "DilationSelfAttention2d",
    "GlobalPool",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupLayerNorm2d",
    "GroupPool",
    "GroupSelfAttention2d",
    "HalvingPool2d",
    "LiftingConv2d",
    "LiftingDilationSelfAttention2d",
    "LiftingSelfAttention2d",
    "PointwiseConv2d",
    "SpatialAdaptiveAvgPool2d",
    "SpatialPool2d",
]
