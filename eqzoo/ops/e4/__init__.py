"""Depthwise correlations with filters that are generated at every pixel, of E4 layers."""

from .operator import generated_depthwise

__all__ = ["generated_depthwise"]
