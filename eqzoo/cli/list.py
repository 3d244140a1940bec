"""`eqzoo list`: the networks, or the checkpoints."""

import argparse
import sys
from typing import Any

import timm

from ..analysis.sizes import weightless
from ..cards.checkpoint import error_text
from ..models import list_models, list_pretrained
from ..models.papers import paper_of
from ._answer import Answer, table
from ._networks import count_parameters, group_name, registered_tags, weights_and_results


def run(args: argparse.Namespace) -> Answer:
    """Lists networks or checkpoints: as a table on a terminal, names alone in a pipe."""
    names = (list_pretrained if args.pretrained else list_models)(args.pattern)
    if not names:
        command = f"eqzoo list{' --pretrained' if args.pretrained else ''}"
        raise ValueError(f"nothing matches {args.pattern!r}; `{command}` shows all names")
    if not (args.long or args.parameters or args.json or sys.stdout.isatty()):
        return Answer("\n".join(names), {"names": names})
    entries = [_entry(name, args.parameters) for name in names]
    return Answer(_table(entries, args.parameters, args.pretrained), {"networks": entries})


def _entry(name: str, parameters: bool) -> dict[str, Any]:
    model, _, tag = name.partition(".")
    paper = paper_of(model)
    entry: dict[str, Any] = {
        "name": name,
        "group": group_name(model),
        "family": paper.family if paper else "user's own",
        "paper": paper.short if paper else None,
        "input_size": [*timm.get_pretrained_cfg(name).input_size],
        "checkpoints": [tag] if tag else [tag for tag, cfg in registered_tags(model).items() if cfg.has_weights],
    }
    if tag:
        results = weights_and_results(name)[1] or {}
        entry |= {"accuracy": results.get("accuracy"), "distilled": bool(results.get("distilled"))}
        entry["error"] = error_text(results, 2) if results else None
        entry["license"] = timm.get_pretrained_cfg(name).license
    return entry | {"parameters": count_parameters(weightless(name))} if parameters else entry


def _table(entries: list[dict[str, Any]], parameters: bool, checkpoints: bool) -> str:
    last = ["license", "test error"] if checkpoints else ["checkpoints"]
    heading = ["name", "group", *["parameters"] * parameters, "input", "family", *last]
    rows = [
        [
            entry["name"],
            entry["group"],
            *[f"{entry['parameters']:,}" for _ in range(parameters)],
            " x ".join(map(str, entry["input_size"])),
            entry["family"],
            *([entry["license"] or "", entry["error"] or ""] if checkpoints else [", ".join(entry["checkpoints"])]),
        ]
        for entry in entries
    ]
    return table([heading, *rows], right={2} if parameters else (), flexible=len(heading) - 1)
