"""Depthwise correlations with filters that are generated at every pixel, of E4 layers."""

from .dynamic import dynamic_depthwise
from .generated import generated_depthwise

__all__ = ["dynamic_depthwise", "generated_depthwise"]
