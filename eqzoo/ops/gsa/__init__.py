"""Group self-attention."""

from .attention import group_self_attention
from .operator import local_group_attention

__all__ = ["group_self_attention", "local_group_attention"]
