"""The operations under the layers: functions of tensors, without parameters. `reference` has their formulas."""

from . import reference
from ._dispatch import use_backend
from .asc import AffineBank, AffineBanks, affine_attention
from .attentive import attend_input, attentive_conv
from .drop import dropout
from .e4 import generated_depthwise
from .group_conv import expand_filters, group_conv2d
from .gsa import local_group_attention
from .norm import batch_norm
from .octic import octic_gelu, octic_norm, split_heads, stack_heads
from .reference import inside, windows

__all__ = [
    "AffineBank",
    "AffineBanks",
    "affine_attention",
    "attend_input",
    "attentive_conv",
    "batch_norm",
    "dropout",
    "expand_filters",
    "generated_depthwise",
    "group_conv2d",
    "inside",
    "local_group_attention",
    "octic_gelu",
    "octic_norm",
    "reference",
    "split_heads",
    "stack_heads",
    "use_backend",
    "windows",
]
