"""The neighbourhood operations under the layers: plain functions of tensors, no parameters."""

from .affine_attention import AffineBank, AffineBanks, affine_attention, affine_map
from .attentive_conv import attend_input, attentive_conv
from .dynamic_depthwise import dynamic_depthwise

__all__ = [
    "AffineBank",
    "AffineBanks",
    "affine_attention",
    "affine_map",
    "attend_input",
    "attentive_conv",
    "dynamic_depthwise",
]
