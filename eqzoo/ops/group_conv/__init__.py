"""Group convolutions of regular fields."""

from .choice import through_irreps
from .eager import expand_filters
from .operator import group_conv2d

__all__ = ["expand_filters", "group_conv2d", "through_irreps"]
