"""`eqzoo list`: the networks, or the checkpoints."""

import argparse
import sys
from typing import Any

import timm

from ..analysis.sizes import weightless
from ..models import list_models, list_pretrained
from ..models.papers import paper_of
from ..models.registry import module_of
from ._answer import Answer, table
from ._networks import count_parameters, group_name, published_tags

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Lists networks or checkpoints: as a table on a terminal, names alone in a pipe."""
    names = (list_pretrained if args.pretrained else list_models)(args.pattern)
    if not names:
        raise ValueError(f"nothing matches {args.pattern!r}; `eqzoo list` shows all names")
    if not (args.long or args.parameters or args.json or sys.stdout.isatty()):
        return Answer("\n".join(names), {"names": names})
    entries = [_entry(name, args.parameters) for name in names]
    return Answer(_table(entries, args.parameters), {"networks": entries})


def _entry(name: str, parameters: bool) -> dict[str, Any]:
    model, _, tag = name.partition(".")
    paper = paper_of(model, module_of(model))
    entry = {
        "name": name,
        "group": group_name(model),
        "family": paper.family if paper else "user's own",
        "paper": paper.short if paper else None,
        "input_size": [*timm.get_pretrained_cfg(name).input_size],
        "checkpoints": [tag] if tag else published_tags(model),
    }
    return entry | {"parameters": count_parameters(weightless(name))} if parameters else entry


def _table(entries: list[dict[str, Any]], parameters: bool) -> str:
    heading = ["name", "group", *["parameters"] * parameters, "input", "family", "checkpoints"]
    rows = [
        [
            entry["name"],
            entry["group"],
            *[f"{entry['parameters']:,}" for _ in range(parameters)],
            " x ".join(map(str, entry["input_size"])),
            entry["family"],
            ", ".join(entry["checkpoints"]),
        ]
        for entry in entries
    ]
    last = len(heading) - 1
    return table([heading, *rows], right={2} if parameters else (), flexible={last})
