"""Group self-attention."""

from .operator import local_group_attention

__all__ = ["local_group_attention"]
