"""Facts about networks from the registry, without building them."""

from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg

from ..groups import Z2, Group
from ..hub import RESULTS_NAME, WEIGHTS_NAME, WeightsNotFoundError, find_weights, read_config, shipped_folder


def registered_tags(model: str) -> dict[str, PretrainedCfg]:
    """The configurations of a network by data set, with or without weights."""
    names = timm.list_models(model, include_tags=True)
    return {name.partition(".")[2]: timm.get_pretrained_cfg(name) for name in names if "." in name}


def group_name(model: str) -> str:
    """The name of the group that a network is named after; z2 (translations alone) if its first word is no group."""
    try:
        return Group.from_name(model.partition("_")[0]).name
    except ValueError:
        return Z2.name


def count_parameters(model: torch.nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def results_beside(weights: Path) -> dict[str, Any] | None:
    """The results.json beside the weights of a checkpoint, or None where there is none."""
    file = weights.with_name(RESULTS_NAME)
    return read_config(file) if file.is_file() else None


def weights_and_results(name: str) -> tuple[Path | None, dict[str, Any] | None]:
    """Where the weights of a checkpoint are on this machine, and its results.

    Where they are not here, as those of more than 2 MB in an installed package, the results are those of its card.
    """
    try:
        path = find_weights(name, None)  # without a Hub repo, nothing is fetched
    except WeightsNotFoundError:
        return None, results_beside(shipped_folder() / name / WEIGHTS_NAME)
    return path, results_beside(path)
