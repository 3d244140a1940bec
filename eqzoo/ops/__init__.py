"""Neighbourhood operations under the layers: plain functions of tensors, no parameters."""

from .dynamic_depthwise import dynamic_depthwise

__all__ = ["dynamic_depthwise"]
