"""The report of a fine-tuning: as a Markdown page with figures, and the command that makes it."""

import json
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._common import atomic, setting_text
from ..viz import plot_confusion, plot_rotation_curve

__all__ = ["command", "markdown", "write_figures"]

_OPTIONS = {  # of eqzoo finetune, by the key of the recipe
    "epochs": "--epochs",
    "batch_size": "--batch-size",
    "lr": "--lr",
    "layer_decay": "--layer-decay",
    "patience": "--patience",
    "ema_decay": "--ema",
    "augment": "--augment",
    "precision": "--precision",
    "seed": "--seed",
}
_MATRIX_CLASSES = 20  # in the largest confusion matrix that is printed as a table
_CONFUSED_PAIRS = 20  # of classes that are listed instead
_AUGMENTED = {  # what happens to the images of a network to compare with
    "shifts": "shifted",
    "rotations_shifts": "rotated by any angle and shifted",
    "affine": "rotated by any angle, reflected and shifted",
    "affine_color": "rotated by any angle, reflected, shifted and changed in contrast, brightness and tint",
}


def markdown(report: dict[str, Any], figures: Sequence[str] = ()) -> str:
    """A report as a Markdown page.

    Args:
        report: The report of `eqzoo.finetune`.
        figures: The file names of its figures.
    """
    images = report["images"]
    counts = ", ".join(f"{count:,} to {use}" for use, count in images.items() if count)
    lines = [
        f"# {report['model']} on {report['data']}",
        "",
        f"Started from {report['start'] or 'random weights'}. {report['classes_count']} classes; images of "
        f"{' x '.join(map(str, report['input_size']))} (channels, height, width): {counts}. Epoch "
        f"{report['selected_epoch']} of {report['epochs']} was kept. Evaluated on the {report['evaluated_on']}.",
        "",
        *(f"{note}\n" for note in report["notes"]),
        *(f"Advice: {line}.\n" for line in report["advice"]),
        "| | |",
        "|---|---|",
        f"| accuracy | {report['accuracy']:.2f} % |",
        "| 95 % confidence interval of it, as if each image stood alone | {} to {} % |".format(
            *report["accuracy_interval"]
        ),
        f"| accuracy of the kept epoch on the validation images | {_shown(report['valid_accuracy'], 2)} |",
        f"| mean recall of the classes | {report['balanced_accuracy']:.2f} % |",
        f"| mean F1 of the classes | {report['macro_f1']:.2f} % |",
        f"| mean area under the ROC curve, each class against the others | {_shown(report['macro_auc'], 2)} |",
        f"| images with the same prediction at all 90° rotations "
        f"| {report['same_class_at_all_quarter_rotations']:.2f} % |",
        f"| equivariance error, own group {report['group']} | {report['equivariance_error']:.1e} |",
        "",
        "## Classes",
        "",
        "| class | precision | recall | F1 | AUC | images |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["classes"]:
        cells = [_shown(row[key]) for key in ("precision", "recall", "f1", "auc")]
        lines.append(f"| {_cell(row['name'])} | {' | '.join(cells)} | {row['images']} |")
    lines += ["", "## Confusion matrix", "", *_confusion(report)]
    curve = report["rotation_curve"]
    lines += ["", "## Rotated images", "", f"Accuracy on {curve['images']:,} of these images, rotated."]
    lines += ["", "| angle | accuracy |", "|---|---|"]
    lines += [f"| {angle}° | {value:.2f} % |" for angle, value in zip(curve["angles"], curve["accuracy"], strict=True)]
    if "against" in report:
        lines += ["", *_comparison(report)]
    lines += ["", "## Settings", "", "| setting | value |", "|---|---|"]
    lines += [f"| {key} | {_cell(setting_text(value))} |" for key, value in report["settings"].items()]
    for name in figures:
        lines += ["", f"![{Path(name).stem.replace('_', ' ')}]({name})"]
    return "\n".join(lines) + "\n"


def write_figures(report: dict[str, Any], folder: Path) -> list[str]:
    """Draws the rotation curve and the confusion matrix; returns the file names, none if matplotlib is missing."""
    curve = report["rotation_curve"]
    curves = {report["model"]: curve["accuracy"]}
    if "against" in report:  # which may be the same network, from other weights
        curves[_other_name(report)] = report["against"]["rotation_curve"]["accuracy"]
    try:
        figures = {
            "confusion.png": plot_confusion(report["confusion"], [row["name"] for row in report["classes"]]),
            "rotation_curve.png": plot_rotation_curve(curves, curve["angles"]),
        }
    except ImportError:
        return []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # names of classes in any script
        for name, figure in figures.items():
            atomic(folder / name, lambda path, figure=figure: figure.savefig(path, format="png", dpi=130))  # type: ignore[misc]
    return list(figures)


def command(name: str, data: str, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """The `eqzoo finetune` command of a fine-tuning.

    Args:
        name: The network.
        data: The images.
        options: Values of options that are no keys of a recipe, by option; False and None are left out, True gives the
            option alone, a list its words.
        recipe: The keys of the recipe that are not at the command's defaults.
    """
    words, more = ["eqzoo", "finetune", name, data, "--output", "DIR"], list[str]()
    for key, value in recipe.items():
        if key == "channels_last" and value is not None:
            words.append("--channels-last" if value else "--no-channels-last")
        elif key in _OPTIONS and value is not None:
            words += [_OPTIONS[key], str(value)]
        else:
            more.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    for key, value in options.items():
        if value is not None and value is not False:
            values = [] if value is True else list(value) if isinstance(value, list | tuple) else [value]
            words += [f"--{key}", *map(str, values)]
    return shlex.join([*words, "--set", *more] if more else words)


def _other_name(report: dict[str, Any]) -> str:
    """What the network that was trained in the same time is called beside this one."""
    return f"against {report['against']['model']}"


def _comparison(report: dict[str, Any]) -> list[str]:
    """The network beside the one that was trained in the same time."""
    other = report["against"]
    lines = [
        f"## Against {other['model']}",
        "",
        f"{other['model']} was trained on the same images for the number of epochs that comes nearest to the same "
        f"time: from {other['start'] or 'random weights'}, with AdamW, learning rate {other['lr']:g}, on images that "
        f"are {_AUGMENTED[other['augment']]} at random. Both are evaluated on the same images.",
    ]
    if teachers := report["settings"].get("teachers"):
        lines[-1] += f" {report['model']} learned from {', '.join(teachers)} as well, {other['model']} from no network."
    averaged = other.get("averaged") or {"copies": 1}  # a report of before has none
    if (copies := averaged["copies"]) > 1:
        lines[-1] += (
            f" In the last column the probabilities are the mean over the {copies} rotated or reflected copies of each "
            f"image (test-time augmentation): {copies} times as expensive, and as invariant as an equivariant network."
        )
    names = [report["model"], _other_name(report), *[f"{_other_name(report)}, {copies} copies averaged"] * (copies > 1)]
    lines += ["", f"| | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    columns = [report, other, averaged][: len(names)]
    for title, key in (("accuracy", "accuracy"), ("mean F1 of the classes", "macro_f1")):
        lines.append(f"| {title} | {' | '.join(f'{column[key]:.2f} %' for column in columns)} |")
    rest = " |" * (len(names) - 2)
    lowest = [min(row["rotation_curve"]["accuracy"]) for row in (report, other)]
    lines.append(f"| lowest accuracy over the angles | {lowest[0]:.2f} % | {lowest[1]:.2f} % |{rest}")
    lines.append(f"| epochs | {report['epochs']} | {other['epochs']} |{rest}")
    return [*lines, f"| training, seconds | {report['training_seconds']} | {other['training_seconds']} |{rest}"]


def _shown(value: float | None, digits: int = 1) -> str:
    return "none" if value is None else f"{value:.{digits}f} %"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _confusion(report: dict[str, Any]) -> list[str]:
    """The matrix as a table, or for many classes the most frequent confusions."""
    names, matrix = [_cell(row["name"]) for row in report["classes"]], report["confusion"]
    if len(names) <= _MATRIX_CLASSES:
        heading = ["| true class | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        return heading + [f"| {name} | {' | '.join(map(str, row))} |" for name, row in zip(names, matrix, strict=True)]
    pairs = [(matrix[i][j], names[i], names[j]) for i in range(len(names)) for j in range(len(names)) if i != j]
    most = [pair for pair in sorted(pairs, key=lambda pair: -pair[0])[:_CONFUSED_PAIRS] if pair[0]]
    return ["| true class | predicted | images |", "|---|---|---|"] + [f"| {a} | {b} | {n} |" for n, a, b in most]
