"""`eqzoo publish`: makes the Hub repo folder of a fine-tuned network, and uploads it if asked to."""

import argparse
from pathlib import Path
from typing import Any

from ..cards import (
    CARD_NAME,
    check_name,
    edited_card,
    evaluated_weights,
    export_beside,
    is_repo_folder,
    license_of_start,
    make_repo,
    push_repo,
    read_results,
    with_label_names,
)
from ..export.programs import ExportError
from ..hub import PushError, shipped_folder
from ._answer import Answer

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Makes the folder, completes it, and uploads it with --push OWNER."""
    source, results = Path(args.folder), read_results(Path(args.folder))
    said = {
        key: value for key in ("checkpoint", "label_names", "license", "base_model") if (value := getattr(args, key))
    }
    if args.private and not args.push:
        raise ValueError("--private is for a repo that is made by --push OWNER; leave it out, or add that")
    if source.resolve().parent == shipped_folder().resolve():
        raise ValueError(f"{source} is a checkpoint of eqzoo itself, which training/publish.py publishes")
    finished = is_repo_folder(source)
    if finished and (said or args.output):
        given = ", ".join(f"--{key.replace('_', '-')}" for key in ([*said] or ["output"]))
        raise ValueError(f"{source} is a finished folder, and its card is written; {given} goes with the run itself")
    if finished and not (args.push or args.onnx):
        raise ValueError(
            f"{source} is a finished folder; there is nothing to do with it without --push OWNER or --onnx"
        )
    check_name(said.get("checkpoint", results["checkpoint"]), "--checkpoint")
    if "label_names" in said:
        results = with_label_names(results, said.pop("label_names"))
    if (start := results.get("base_model")) and said.get("base_model", start) != start:
        raise ValueError(f"the run started from {start}, so --base-model {said['base_model']} does not go with it")
    results |= license_of_start(source, results) | said
    repo_id = f"{args.push}/{results['checkpoint']}" if args.push else None
    folder = source if finished else Path(args.output or results["checkpoint"])
    lines, data = list[str](), dict[str, Any](folder=str(folder), repo=repo_id, uploaded=[])
    if not finished:
        if folder.resolve() == source.resolve():
            raise ValueError(f"{folder} is the folder of the run itself; name another one with --output DIR")
        make_repo(evaluated_weights(source, results), folder, results, repo_id, args.replace)
        lines.append(f"made {folder}{'' if results['license'] else ', without a license; --license names one'}")
    if args.onnx:
        try:
            lines.append(export_beside(folder))
        except ExportError as error:
            why = f"no ONNX file was written{' and nothing uploaded' if repo_id else ''}: {error}"
            return Answer("\n".join([*lines, why]), data | {"reason": why}, 1)
    if repo_id:
        try:
            data["uploaded"] = push_repo(folder, repo_id, args.replace, args.private)
            if edited_card(folder, repo_id):
                lines.append(f"{folder / CARD_NAME} was edited, or is of an earlier version, and was taken as it is")
        except PushError as error:
            raise ValueError(f"{error}; {folder} is as it was") from error
        done = f"uploaded {', '.join(data['uploaded'])} to {repo_id}"
        lines.append(done if data["uploaded"] else f"{repo_id} has all of it; nothing was uploaded")
    return Answer("\n".join(lines), data)
