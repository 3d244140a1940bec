"""The figures beside a card: accuracy over the angle and over the epochs, and the confusion matrix."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .._common import atomic
from ..engine.run import RunDirectory
from ..hub import RESULTS_NAME
from ..viz import plot_confusion, plot_rotation_curve
from ..viz._draw import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figures(folder: Path) -> None:
    """Draws the figures of a checkpoint from its results.json and log.jsonl.

    Without matplotlib none is drawn, and earlier ones that show the name or the classes, which may be others now, are
    removed.
    """
    results = json.loads((folder / RESULTS_NAME).read_text(encoding="utf-8"))
    rows = RunDirectory(folder).rows()
    accuracies = {row["epoch"]: row["valid_accuracy"] for row in rows if not row.get("half_size")}
    curve, figures = results["rotation_curve"], dict[str, "Figure"]()
    try:
        figures["rotation_curve.png"] = plot_rotation_curve({results["checkpoint"]: curve["accuracy"]}, curve["angles"])
        if len(accuracies) > 1 and None not in accuracies.values():
            figures["training_curve.png"] = _training_curve(accuracies, results["selected_epoch"])
        if results.get("confusion"):
            names = [row["name"] for row in results["classes"]]
            figures["confusion.png"] = plot_confusion(results["confusion"], names)
    except ImportError:
        for name in ("rotation_curve.png", "confusion.png"):
            (folder / name).unlink(missing_ok=True)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # names of classes in any script
        for name, figure in figures.items():
            save = figure.savefig
            atomic(folder / name, lambda path, save=save: save(path, format="png", dpi=100))  # type: ignore[misc]


def _training_curve(accuracies: Mapping[int, float], kept: int) -> "Figure":
    """The validation accuracy in percent over the epochs, with a mark at the one that was kept."""
    figure = new_figure(7, 3.0)
    axes = figure.subplots()
    axes.plot(list(accuracies), list(accuracies.values()), color="#1f77b4")
    axes.plot([kept], [accuracies[kept]], "o", color="#d62728", label=f"kept, epoch {kept}")
    axes.set(xlabel="epoch", ylabel="validation accuracy in percent")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.legend(frameon=False)
    return figure
