"""Attentive group convolutions: attention on the responses of filters, or on the input."""

from .operator import attend_input, attentive_conv

__all__ = ["attend_input", "attentive_conv"]
