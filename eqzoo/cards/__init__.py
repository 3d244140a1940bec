"""The folder of a checkpoint as its Hub repo: results.json, model card, tables of results, upload."""

from .card import render_card
from .checkpoint import CARD_NAME, Checkpoint, read_checkpoint
from .figures import write_figures
from .push import REPO_FILES, edited_card, export_beside, push_folder, restate, write_card
from .results import network_results, training_results

__all__ = [
    "CARD_NAME",
    "REPO_FILES",
    "Checkpoint",
    "edited_card",
    "export_beside",
    "network_results",
    "push_folder",
    "read_checkpoint",
    "render_card",
    "restate",
    "training_results",
    "write_card",
    "write_figures",
]
