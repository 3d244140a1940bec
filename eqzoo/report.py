"""How good a classifier is, class by class and at every turn: as numbers, as text and as pictures."""

import json
import os
import platform
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from .count import multiply_adds
from .data import AnySplit, batches, normalise
from .equivariance import equivariance_error
from .files import atomic
from .groups import P4, transform
from .models import EquivariantNet
from .recipe import Recipe
from .turns import turn_curve
from .viz import plot_confusion, plot_turn_curve

__all__ = [
    "ANGLES",
    "command",
    "config",
    "machine",
    "markdown",
    "measured",
    "results",
    "scores",
    "throughput",
    "write_figures",
]

ANGLES = range(0, 360, 15)
CURVE_PICTURES = 1_000  # whose turns are tried, at most: 24 angles take as long as 24 times as many pictures
BATCH = 250
SPEED_BATCH, SPEED_ROUNDS = 64, 7  # pictures at once, and how often, where speed is measured
_OPTIONS = {  # of eqzoo finetune, by the setting of a recipe that each gives
    "epochs": "--epochs",
    "batch_size": "--batch-size",
    "lr": "--lr",
    "layer_decay": "--layer-decay",
    "patience": "--patience",
    "ema_decay": "--ema",
    "augment": "--augment",
    "seed": "--seed",
}
_SPEED_SECONDS = 10  # after which no further round is begun
_WIDEST = 20  # classes of the largest matrix that is printed as text
_CONFUSED = 20  # pairs of classes that are listed instead


def scores(labels: Tensor, answers: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """The scores of a classifier, in percent.

    Args:
        labels: The true classes, ``(n,)``.
        answers: The classes that it answered, ``(n,)``.
        names: The names of the classes.

    Returns:
        ``accuracy``; ``balanced_accuracy``, the mean recall of the classes that there are pictures of; ``macro_f1``,
        the mean F1 of the same; ``classes``, for each its precision, recall, F1 and number of pictures, None where
        there is nothing to divide by; and ``confusion``, counts by true class and answer.

    Example:
        >>> scores(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), "ab")["confusion"]
        [[1, 1], [0, 1]]
    """
    count = len(names)
    matrix = torch.bincount(labels.cpu() * count + answers.cpu(), minlength=count * count).view(count, count)
    right, there, answered = matrix.diagonal().double(), matrix.sum(1), matrix.sum(0)
    classes: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        precision = _percent(right[i], answered[i])
        recall = _percent(right[i], there[i])
        f1 = _percent(2 * right[i], answered[i] + there[i])
        classes.append({"name": name, "precision": precision, "recall": recall, "f1": f1, "pictures": int(there[i])})
    present = [row for row in classes if row["pictures"]]
    return {
        "accuracy": _percent(right.sum(), matrix.sum()),
        "balanced_accuracy": round(sum(row["recall"] for row in present) / len(present), 3),
        "macro_f1": round(sum(row["f1"] for row in present) / len(present), 3),
        "classes": classes,
        "confusion": matrix.tolist(),
    }


@torch.no_grad()
def measured(model: nn.Module, split: AnySplit, names: Sequence[str], workers: int = 0) -> dict[str, Any]:
    """What `scores` says of a network on a split, and how it bears turns.

    Args:
        model: The network, in evaluation mode; its ``pretrained_cfg`` says how pictures are standardised.
        split: The pictures.
        names: The names of the classes.
        workers: The processes that read pictures that are not in memory.

    Returns:
        The scores; ``accuracy_of_turned_copies``, at the four quarter turns; ``same_class_at_all_quarter_turns``, the
        share of the pictures; and ``turn_curve``, the accuracy at `ANGLES` on at most 1,000 pictures drawn at random.
        All in percent.
    """
    parts = [
        torch.stack([model(transform(x, P4, g, "trivial")).argmax(1).cpu() for g in P4.elements])
        for x in _inputs(model, split, workers)
    ]
    turned, labels = torch.cat(parts, 1), split.labels.cpu()
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:CURVE_PICTURES].sort().values
    drawn = split[order]
    assert not isinstance(drawn, Tensor)
    images = torch.cat(list(_inputs(model, drawn, workers)))
    curve = turn_curve(model, images, drawn.labels.to(images.device), ANGLES, BATCH)
    right = (turned == labels).double().mean(1)
    return scores(labels, turned[0], names) | {
        "accuracy_of_turned_copies": [round(100 * share, 3) for share in right.tolist()],
        "same_class_at_all_quarter_turns": round(100 * (turned == turned[0]).all(0).double().mean().item(), 3),
        "turn_curve": {
            "angles": list(ANGLES),
            "accuracy": [round(value, 2) for value in curve],
            "pictures": len(drawn),
        },
    }


def markdown(report: dict[str, Any], figures: Sequence[str] = ()) -> str:
    """A report as a page.

    Args:
        report: What `eqzoo.finetune` reports.
        figures: The names of the pictures beside it.
    """
    pictures = report["pictures"]
    counts = ", ".join(f"{count:,} to {use}" for use, count in pictures.items() if count)
    lines = [
        f"# {report['model']} on {report['data']}",
        "",
        f"Started from {report['start'] or 'random weights'}. {report['classes_count']} classes; pictures of "
        f"{' x '.join(map(str, report['input_size']))} (channels, height, width): {counts}. Epoch "
        f"{report['selected_epoch']} of {report['epochs']} was kept. The numbers are of the {report['measured_on']}.",
        "",
        *(f"{note}\n" for note in report["notes"]),
        "| | |",
        "|---|---|",
        f"| accuracy | {report['accuracy']:.2f} % |",
        f"| mean recall of the classes | {report['balanced_accuracy']:.2f} % |",
        f"| mean F1 of the classes | {report['macro_f1']:.2f} % |",
        f"| same answer at all quarter turns | {report['same_class_at_all_quarter_turns']:.2f} % of the pictures |",
        f"| equivariance error, own group {report['group']} | {report['equivariance_error']:.1e} |",
        "",
        "## Classes",
        "",
        "| class | precision | recall | F1 | pictures |",
        "|---|---|---|---|---|",
    ]
    for row in report["classes"]:
        cells = [_shown(row[key]) for key in ("precision", "recall", "f1")]
        lines.append(f"| {_cell(row['name'])} | {' | '.join(cells)} | {row['pictures']} |")
    lines += ["", "## What is taken for what", "", *_confusion(report)]
    curve = report["turn_curve"]
    lines += ["", "## Turned pictures", "", f"The accuracy on {curve['pictures']:,} of the pictures, turned."]
    lines += ["", "| degrees | accuracy |", "|---|---|"]
    lines += [f"| {angle} | {value:.2f} % |" for angle, value in zip(curve["angles"], curve["accuracy"], strict=True)]
    for name in figures:
        lines += ["", f"![{Path(name).stem.replace('_', ' ')}]({name})"]
    return "\n".join(lines) + "\n"


def write_figures(report: dict[str, Any], folder: Path) -> list[str]:
    """Draws turn curve and confusion matrix into a folder; returns their names, none where matplotlib is missing."""
    curve = report["turn_curve"]
    try:
        figures = {
            "confusion.png": plot_confusion(report["confusion"], [row["name"] for row in report["classes"]]),
            "turn_curve.png": plot_turn_curve({report["model"]: curve["accuracy"]}, curve["angles"]),
        }
    except ImportError:
        return []
    for name, figure in figures.items():
        atomic(folder / name, lambda path, figure=figure: figure.savefig(path, format="png", dpi=130))  # type: ignore[misc]
    return list(figures)


def config(model: EquivariantNet, recipe: Recipe, settings: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """The config.json that timm's ``local-dir:`` and ``hf-hub:`` build the network from."""
    keys = ("input_size", "mean", "std")
    drop = ("architecture", "label_names", "state_dict", "hf_hub_id", "file", "url", "source", "tag")
    cfg = {k: v for k, v in model.pretrained_cfg.items() if v is not None and k not in drop}
    cfg |= {key: settings[key] for key in keys} | {"num_classes": model.num_classes, "tag": settings["data"]}
    pool = model.global_pool
    return {
        "architecture": recipe.model,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": getattr(pool, "reduce", pool),
        "label_names": settings["label_names"],
        "model_args": recipe.model_args,
        "pretrained_cfg": cfg,
        "eqzoo": {"group": model.group.name, "weights_dtype": "float32", "weights_sha256": digest},
    }


def results(
    model: EquivariantNet,
    recipe: Recipe,
    counts: Mapping[str, int],
    settings: Mapping[str, Any],
    report: Mapping[str, Any],
    best: Mapping[str, Any],
    digest: str,
    made_by: str,
) -> dict[str, Any]:
    """The results.json that training/publish.py makes a Hub repo's folder and a card from."""
    valid = best["valid_accuracy"]
    errors = [round(100 - value, 3) for value in report["accuracy_of_turned_copies"]]
    found = {
        "checkpoint": f"{recipe.model}.{recipe.dataset}",
        "group": model.group.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "multiply_adds": multiply_adds(model, tuple(settings["input_size"])),
        "throughput": throughput(model, tuple(settings["input_size"])),
        "dataset": {"name": recipe.dataset} | dict(counts),
        "seeds": 1,
        "command": made_by,
        "recipe": asdict(recipe),
        "selected_epoch": best["epoch"],
        "valid_error": None if valid is None else round(100 - valid, 3),
        "test_error": errors[0],
        "test_error_of_turned_copies": errors,
        "same_class_at_all_quarter_turns": report["same_class_at_all_quarter_turns"],
        "turn_curve": report["turn_curve"],
        "equivariance_error": report["equivariance_error"],
        "equivariance_error_p4": equivariance_error(model, group=P4),
        "training_seconds": report["training_seconds"],
        "machine": machine(next(model.parameters()).device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            "eqzoo": import_module(__package__).__version__,
        },
        "weights_dtype": "float32",
        "weights_sha256": digest,
    }
    found |= {key: settings[key] for key in ("label_names", "input_size", "mean", "std")}
    return found | ({"base_model": settings["base_model"]} if settings["base_model"] else {})


def command(name: str, data: str, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """The command that makes a fine-tuned network.

    Args:
        name: What was fine-tuned.
        data: The pictures.
        options: Values of options that are no settings of a recipe, by their names; False and None are left out, True
            and lists stand for words after the option or none.
        recipe: The settings of the recipe that are not the command's own.
    """
    words, more = ["eqzoo", "finetune", name, data, "--output", "DIR"], list[str]()
    for key, value in recipe.items():
        if key in _OPTIONS and value is not None:
            words += [_OPTIONS[key], str(value)]
        else:
            more.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    for key, value in options.items():
        if value is not None and value is not False:
            values = [] if value is True else list(value) if isinstance(value, list | tuple) else [value]
            words += [f"--{key}", *map(str, values)]
    return shlex.join([*words, "--set", *more] if more else words)


@torch.inference_mode()
def throughput(
    model: nn.Module, input_size: tuple[int, ...], batch_size: int = SPEED_BATCH, rounds: int = SPEED_ROUNDS
) -> dict[str, Any]:
    """Pictures a second in evaluation mode: the median of some batches, of which the first does not count.

    Args:
        model: The network; its mode is restored.
        input_size: The size of a picture, ``(C, height, width)``.
        batch_size: Pictures at once.
        rounds: The batches, at least 2; slow networks get fewer.

    Returns:
        ``images_per_second``, ``batch_size``, and ``machine`` with the number of threads.
    """
    parameter = next(model.parameters())
    x = torch.randn(batch_size, *input_size, dtype=parameter.dtype, device=parameter.device)
    was_training, seconds = model.training, list[float]()
    model.eval()
    for _ in range(rounds):
        began = time.perf_counter()
        model(x)
        if parameter.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if len(seconds) > 1 and sum(seconds) > _SPEED_SECONDS:
            break
    model.train(was_training)
    return {
        "images_per_second": round(batch_size / statistics.median(seconds[1:]), 1),
        "batch_size": batch_size,
        "machine": f"{machine(parameter.device)}, {torch.get_num_threads()} threads",
    }


def machine(device: torch.device) -> str:
    """What numbers are made on: the accelerator, or the processor and its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _inputs(model: nn.Module, split: AnySplit, workers: int) -> Iterator[Tensor]:
    """The pictures of a split, a batch at a time, as the network takes them."""
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    like = next(model.parameters())
    for images in batches(split, torch.arange(len(split)).split(BATCH), workers):
        yield normalise(images.to(like.device), cfg["mean"], cfg["std"], like.dtype)


def _percent(part: Tensor, whole: Tensor) -> float | None:
    return round(100 * float(part) / float(whole), 3) if whole else None


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} %"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _confusion(report: dict[str, Any]) -> list[str]:
    """The matrix as a table, or of many classes the pairs that are confused most often."""
    names, matrix = [_cell(row["name"]) for row in report["classes"]], report["confusion"]
    if len(names) <= _WIDEST:
        heading = ["| true class | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        return heading + [f"| {name} | {' | '.join(map(str, row))} |" for name, row in zip(names, matrix, strict=True)]
    pairs = [(matrix[i][j], names[i], names[j]) for i in range(len(names)) for j in range(len(names)) if i != j]
    most = [pair for pair in sorted(pairs, key=lambda pair: -pair[0])[:_CONFUSED] if pair[0]]
    return ["| true class | answer | pictures |", "|---|---|---|"] + [f"| {a} | {b} | {n} |" for n, a, b in most]
