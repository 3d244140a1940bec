"""What results.json holds of a network besides its metrics: size, cost, equivariance, and how it was trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._common import __version__
from ..analysis.cost import machine, multiply_adds, versions
from ..engine.recipe import best_row
from ..equivariance import equivariance_error, equivariance_report
from ..evaluation import Predictor
from ..evaluation.metrics import DIGITS
from ..groups import P4


def network_results(model: nn.Module, x: Tensor | None = None) -> dict[str, Any]:
    """Group, parameters, multiply-adds and equivariance errors of a network.

    Args:
        model: The network with its weights, in evaluation mode.
        x: Normalized images, ``(B, C, height, width)``, on which the equivariance error is measured where noise gives
            no features, and so no error relative to them; None for noise alone.
    """
    predictor = Predictor.of(model)
    size = predictor.input_size
    try:
        report = equivariance_report(model)
        x = None
    except ValueError:
        if x is None:
            raise
        report = equivariance_report(model, x)
    return {
        "group": predictor.group.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "multiply_adds": multiply_adds(model, size),
        "equivariance_error": report.largest,
        "equivariance_error_p4": equivariance_error(model, x, P4),
    }


def training_results(rows: Sequence[Mapping[str, Any]], model: nn.Module) -> dict[str, Any]:
    """Epochs, validation accuracy, time, machine and versions of a run.

    The machine and the versions of Python, torch and timm are those of the training, where the rows have them.

    Args:
        rows: The rows of log.jsonl.
        model: The network that was trained.
    """
    best = best_row([dict(row) for row in rows])
    accuracy = best["valid_accuracy"]
    return {
        "epochs": len(rows),  # patience may end a run before those of its recipe
        "selected_epoch": best["epoch"],
        "valid_accuracy": None if accuracy is None else round(accuracy, DIGITS),
        **({"penalty": best["penalty"]} if "penalty" in best else {}),  # of a classifier that was fitted at once
        "training_seconds": round(sum(row["seconds"] for row in rows)),
        "machine": _of_epochs(rows, "machine") or machine(next(model.parameters()).device),
        "versions": {name: _of_epochs(rows, name) or current for name, current in versions().items()}
        | {"eqzoo": __version__},
    }


def _of_epochs(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Where, or with what, the epochs were trained."""
    return " and ".join(dict.fromkeys(row[key] for row in rows if key in row))
