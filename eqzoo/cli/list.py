"""`eqzoo list`: the networks, or the checkpoints."""

import argparse
import sys
from pathlib import Path
from typing import Any

import timm

from ..analysis.sizes import weightless
from ..hub import WeightsNotFoundError, find_weights
from ..models import list_models, list_pretrained
from ..models.papers import paper_of
from ..models.registry import module_of
from ._answer import Answer, table
from ._networks import count_parameters, error_text, group_name, published_tags, results_beside

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Lists networks or checkpoints: as a table on a terminal, names alone in a pipe."""
    names = (list_pretrained if args.pretrained else list_models)(args.pattern)
    if not names:
        raise ValueError(f"nothing matches {args.pattern!r}; `eqzoo list` shows all names")
    if not (args.long or args.parameters or args.json or sys.stdout.isatty()):
        return Answer("\n".join(names), {"names": names})
    entries = [_entry(name, args.parameters) for name in names]
    return Answer(_table(entries, args.parameters, args.pretrained), {"networks": entries})


def _entry(name: str, parameters: bool) -> dict[str, Any]:
    model, _, tag = name.partition(".")
    paper = paper_of(model, module_of(model))
    entry: dict[str, Any] = {
        "name": name,
        "group": group_name(model),
        "family": paper.family if paper else "user's own",
        "paper": paper.short if paper else None,
        "input_size": [*timm.get_pretrained_cfg(name).input_size],
        "checkpoints": [tag] if tag else published_tags(model),
    }
    if tag:
        results = _results(name) or {}
        entry |= {"test_error": results.get("test_error"), "distilled": bool(results.get("distilled"))}
    return entry | {"parameters": count_parameters(weightless(name))} if parameters else entry


def _results(name: str) -> dict[str, Any] | None:
    """The results of a checkpoint, where its weights are on this machine."""
    try:
        return results_beside(Path(find_weights(name, None)))  # without a Hub repo, nothing is fetched
    except WeightsNotFoundError:
        return None


def _table(entries: list[dict[str, Any]], parameters: bool, checkpoints: bool) -> str:
    last = "test error" if checkpoints else "checkpoints"
    heading = ["name", "group", *["parameters"] * parameters, "input", "family", last]
    rows = [
        [
            entry["name"],
            entry["group"],
            *[f"{entry['parameters']:,}" for _ in range(parameters)],
            " x ".join(map(str, entry["input_size"])),
            entry["family"],
            _error(entry) if checkpoints else ", ".join(entry["checkpoints"]),
        ]
        for entry in entries
    ]
    return table([heading, *rows], right={2} if parameters else (), flexible={len(heading) - 1})


def _error(entry: dict[str, Any]) -> str:
    return "" if entry["test_error"] is None else error_text(entry)
