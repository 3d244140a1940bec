"""Operations on fields of irreps of p4m, of octic layers."""

from .eager import eight_parts, regular_matrix, split_heads, stack_heads
from .operator import octic_gelu, octic_norm

__all__ = ["eight_parts", "octic_gelu", "octic_norm", "regular_matrix", "split_heads", "stack_heads"]
