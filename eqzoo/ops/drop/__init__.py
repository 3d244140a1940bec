"""Dropout."""

from .operator import dropout

__all__ = ["dropout"]
