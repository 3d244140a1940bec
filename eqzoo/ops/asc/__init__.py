"""Affine self convolution: local self-attention with affine maps."""

from .operator import AffineBank, AffineBanks, affine_attention

__all__ = ["AffineBank", "AffineBanks", "affine_attention"]
