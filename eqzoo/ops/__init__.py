"""The neighbourhood operations under the layers: plain functions of tensors, no parameters."""

from ._backend import use_backend
from .affine_attention import AffineBank, AffineBanks, affine_attention, affine_map
from .attentive_conv import attend_input, attentive_conv
from .dynamic_depthwise import dynamic_depthwise
from .generated_depthwise import generated_depthwise
from .group_self_attention import group_self_attention, inside, windows
from .local_group_attention import local_group_attention

__all__ = [
    "AffineBank",
    "AffineBanks",
    "affine_attention",
    "affine_map",
    "attend_input",
    "attentive_conv",
    "dynamic_depthwise",
    "generated_depthwise",
    "group_self_attention",
    "inside",
    "local_group_attention",
    "use_backend",
    "windows",
]
