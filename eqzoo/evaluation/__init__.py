"""Evaluation: predictors, metrics, thresholds, accuracy over rotations, tables of predictions."""

from .metrics import top1
from .predictor import Predictor, check_device, load_predictor
from .results import Results, evaluate, measure
from .rotation import rotate, rotation_curve, sample

__all__ = [
    "Predictor",
    "Results",
    "check_device",
    "evaluate",
    "load_predictor",
    "measure",
    "rotate",
    "rotation_curve",
    "sample",
    "top1",
]
