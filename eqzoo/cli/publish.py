"""`eqzoo publish`: checks the folder of a fine-tuned network, completes its card, and uploads it if asked to."""

import argparse
from pathlib import Path
from typing import Any

from ..cards import CARD_NAME, edited_card, export_beside, push_folder, read_checkpoint, restate
from ..export.programs import ExportError
from ..hub import shipped_folder
from ._answer import Answer


def run(args: argparse.Namespace) -> Answer:
    """Checks the folder, and uploads it with --push OWNER."""
    folder = Path(args.folder)
    if (args.private or args.replace) and not args.push:
        raise ValueError("--private and --replace are for --push OWNER; leave them out, or add that")
    if folder.resolve().parent == shipped_folder().resolve():
        raise ValueError(f"{folder} is a checkpoint of eqzoo itself, which training/publish.py publishes")
    before = read_checkpoint(folder).config["pretrained_cfg"].get("license")
    if args.checkpoint or args.license or args.base_model or args.label_names:
        restate(folder, args.checkpoint, args.license, args.base_model, args.label_names or ())
    checkpoint = read_checkpoint(folder)
    repo_id = f"{args.push}/{checkpoint.name}" if args.push else None
    data: dict[str, Any] = {"folder": str(folder), "repo": repo_id, "uploaded": []}
    license_name = checkpoint.config["pretrained_cfg"].get("license")
    lines = [f"{folder} is whole{'' if license_name else '; it has no license: --license names one'}"]
    if args.onnx:
        try:
            lines.append(export_beside(folder))
        except ExportError as error:
            why = f"no ONNX file was written{' and nothing uploaded' if repo_id else ''}: {error}"
            return Answer("\n".join([*lines, why]), data | {"reason": why}, 1)
    if before and license_name != before:
        lines.append(f"its license is {license_name} in place of {before}; terms of the weights it started from stay")
    if (split_by := checkpoint.training.get("split_by")) not in (None, "folder", "listed"):
        lines.append(f"what it publishes has --split-by {split_by!r}: see that this names no patient")
    if card := edited_card(folder, checkpoint):
        stated = [f"# {checkpoint.name}", *[f"license: {license_name}"] * bool(license_name)]
        missing = [repr(line) for line in stated if line not in card.splitlines()]
        lines.append(f"{folder / CARD_NAME} was edited, and is taken as it is")
        lines += [f"it does not say {' or '.join(missing)}: add that"] * bool(missing)
    if repo_id:
        data["uploaded"] = push_folder(folder, repo_id, args.replace, args.private)
        done = f"uploaded {', '.join(data['uploaded'])} to {repo_id}"
        lines.append(done if data["uploaded"] else f"{repo_id} has all of it; nothing was uploaded")
    return Answer("\n".join(lines), data)
