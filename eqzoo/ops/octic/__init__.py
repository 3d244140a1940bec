"""Operations on fields of irreps of p4m, of octic layers."""

from .eager import eight_parts, regular_matrix
from .operator import octic_gelu, octic_norm, split_heads, stack_heads

__all__ = ["eight_parts", "octic_gelu", "octic_norm", "regular_matrix", "split_heads", "stack_heads"]
