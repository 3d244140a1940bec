"""Equivariance checks and their diagnosis, input sizes, multiply-adds and speed, accuracy over rotations."""

from .check import EquivarianceCheck, check_equivariance
from .cost import instructions, machine, multiply_adds, throughput
from .diagnosis import diagnose, stride_mismatch
from .rotation import accuracy_over_rotations, rotate, rotation_curve, sample
from .sizes import check_side, refusal, weightless

__all__ = [
    "EquivarianceCheck",
    "accuracy_over_rotations",
    "check_equivariance",
    "check_side",
    "diagnose",
    "instructions",
    "machine",
    "stride_mismatch",
    "multiply_adds",
    "refusal",
    "rotate",
    "rotation_curve",
    "sample",
    "throughput",
    "weightless",
]
