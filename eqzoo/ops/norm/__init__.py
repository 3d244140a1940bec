"""Batch normalization of fields."""

from .operator import batch_norm

__all__ = ["batch_norm"]
