"""The neighbourhood operations under the layers: plain functions of tensors."""

from .attentive_conv import attend_input, attentive_conv

__all__ = ["attend_input", "attentive_conv"]
