"""Evaluation: predictors, metrics, thresholds, accuracy over rotations, tables of predictions."""

from .metrics import top1
from .predictor import Predictor, check_device, load_predictor
from .results import evaluate
from .rotation import accuracy_over_rotations, rotate, rotation_curve, sample

__all__ = [
    "Predictor",
    "accuracy_over_rotations",
    "check_device",
    "evaluate",
    "load_predictor",
    "rotate",
    "rotation_curve",
    "sample",
    "top1",
]
