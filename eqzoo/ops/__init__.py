"""The neighbourhood operations under the layers: plain functions of tensors."""

from .affine_attention import AffineBank, AffineBanks, affine_attention, affine_map

__all__ = ["AffineBank", "AffineBanks", "affine_attention", "affine_map"]
