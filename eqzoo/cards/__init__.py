"""What a published checkpoint consists of besides its weights: config.json, model card, curves, tables."""

from .card import distilled, full_size_accuracies, render_card, render_table
from .checkpoint import check_loads, check_weights, published_config, weights_dtype
from .curves_svg import draw_rotation_curve, draw_training_curve

__all__ = [
    "check_loads",
    "check_weights",
    "distilled",
    "draw_rotation_curve",
    "draw_training_curve",
    "full_size_accuracies",
    "published_config",
    "render_card",
    "render_table",
    "weights_dtype",
]
