"""What a published checkpoint consists of besides its weights: config.json, model card, curves, tables."""

from .card import distilled, full_size_accuracies, render_card
from .checkpoint import check_loads, check_weights, published_config, weights_dtype
from .curves_svg import draw_rotation_curve, draw_training_curve
from .repository import (
    CARD_NAME,
    ONNX_NAME,
    REPO_FILES,
    check_name,
    edited_card,
    evaluated_weights,
    export_beside,
    is_repo_folder,
    license_of_start,
    make_repo,
    push_repo,
    read_results,
    repo_texts,
    with_label_names,
)
from .tables import render_summary, render_table

__all__ = [
    "CARD_NAME",
    "ONNX_NAME",
    "REPO_FILES",
    "check_loads",
    "check_name",
    "check_weights",
    "distilled",
    "draw_rotation_curve",
    "draw_training_curve",
    "edited_card",
    "evaluated_weights",
    "export_beside",
    "full_size_accuracies",
    "is_repo_folder",
    "license_of_start",
    "make_repo",
    "published_config",
    "push_repo",
    "read_results",
    "render_card",
    "render_summary",
    "render_table",
    "repo_texts",
    "weights_dtype",
    "with_label_names",
]
