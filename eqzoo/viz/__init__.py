"""Visualization of attention, feature fields, filters, equivariance errors and rotation curves.

Functions that draw return a `matplotlib.figure.Figure` and need matplotlib, ``pip install 'eqzoo[viz]'``; those that
return the values behind the figures do not.
"""

from ._responses import InputWeights, ResponseWeights, input_weights, response_weights
from ._windows import GroupWeights, WindowWeights, group_weights, window_weights
from .attention_weights import Attention, attention, attention_layers
from .figures import attention_maps, equivariance_map, feature_rings, filter_orbit, plot_rotation_curve
from .measures import ErrorMaps, error_maps, orbit_filters
from .scores import plot_confusion

__all__ = [
    "Attention",
    "ErrorMaps",
    "GroupWeights",
    "InputWeights",
    "ResponseWeights",
    "WindowWeights",
    "attention",
    "attention_layers",
    "attention_maps",
    "equivariance_map",
    "error_maps",
    "feature_rings",
    "filter_orbit",
    "group_weights",
    "input_weights",
    "orbit_filters",
    "plot_confusion",
    "plot_rotation_curve",
    "response_weights",
    "window_weights",
]
