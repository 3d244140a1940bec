"""Equivariant layers, one mechanism a file."""

from .conv import GroupConv2d, LiftingConv2d
from .e4 import E4Layer2d
from .norm import GroupBatchNorm2d
from .pool import GlobalPool, GroupPool, SpatialAdaptiveAvgPool2d, SpatialPool2d

__all__ = [
    "E4Layer2d",
    "GlobalPool",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupPool",
    "LiftingConv2d",
    "SpatialAdaptiveAvgPool2d",
    "SpatialPool2d",
]
