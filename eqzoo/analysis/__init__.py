"""Equivariance checks and their diagnosis, input sizes, multiply-adds and speed."""

from .check import EquivarianceCheck, check_equivariance
from .cost import instructions, machine, multiply_adds, throughput
from .diagnosis import diagnose, stride_mismatch
from .sizes import check_side, weightless

__all__ = [
    "EquivarianceCheck",
    "check_equivariance",
    "check_side",
    "diagnose",
    "instructions",
    "machine",
    "stride_mismatch",
    "multiply_adds",
    "throughput",
    "weightless",
]
