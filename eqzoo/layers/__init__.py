"""Equivariant layers, one mechanism a file."""

from .attentive_conv import AttentiveGroupConv2d, AttentiveLiftingConv2d, InputAttention2d
from .conv import GroupConv2d, LiftingConv2d
from .norm import GroupBatchNorm2d
from .pool import GlobalPool, GroupPool, SpatialAdaptiveAvgPool2d, SpatialPool2d

__all__ = [
    "AttentiveGroupConv2d",
    "AttentiveLiftingConv2d",
    "GlobalPool",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupPool",
    "InputAttention2d",
    "LiftingConv2d",
    "SpatialAdaptiveAvgPool2d",
    "SpatialPool2d",
]
