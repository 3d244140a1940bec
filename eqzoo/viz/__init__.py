"""Looks inside networks: attention, feature fields, filters, equivariance errors and turn curves, drawn and as numbers.

Figures need matplotlib, ``pip install 'eqzoo[viz]'``; the numbers behind them do not. A figure is a
`matplotlib.figure.Figure` that belongs to the caller: ``figure.savefig("attention.png")``.
"""

from ._responses import InputWeights, ResponseWeights, input_weights, response_weights
from ._windows import GroupWeights, WindowWeights, group_weights, window_weights
from .attention import Attention, attention, attention_layers
from .figures import attention_maps, equivariance_map, feature_rings, filter_orbit, plot_turn_curve
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
    "plot_turn_curve",
    "response_weights",
    "window_weights",
]
