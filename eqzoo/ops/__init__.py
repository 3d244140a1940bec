"""The neighbourhood operations under the layers: plain functions of tensors."""

from .group_self_attention import group_self_attention, inside, windows

__all__ = ["group_self_attention", "inside", "windows"]
