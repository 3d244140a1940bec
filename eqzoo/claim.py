"""The folder of a fine-tuned network: whose it is, and what tells one run from another."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .data import AnySplit, Split
from .files import atomic

__all__ = ["SETTINGS_NAME", "WORDS", "claim", "digest_of", "unused", "write_json"]

SETTINGS_NAME, RECIPE_NAME = "finetune.json", "recipe.json"
WORDS = {"train": "training", "valid": "validation", "test": "test"}  # what the pictures of a part are called


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes finetune.json, or raises ValueError if the folder holds another run or other things."""
    path = folder / SETTINGS_NAME
    if unused(folder):
        (folder / RECIPE_NAME).unlink(missing_ok=True)
    elif path.is_file():
        if said := "; ".join(_differences(json.loads(path.read_text()), settings)):
            raise ValueError(f"{folder} holds a run on other pictures or weights ({said}); name another folder")
        return
    else:
        found = ", ".join(_held(folder)[:5])
        raise ValueError(f"{folder} holds other things ({found}); name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


def _held(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []


def unused(folder: Path) -> bool:
    """Whether there is nothing in a folder but what a run leaves that ended before its first epoch."""
    return set(_held(folder)) in (set(), {SETTINGS_NAME}, {SETTINGS_NAME, RECIPE_NAME})


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What two finetune.json do not share, in words."""
    for key in here:
        before, now = there.get(key), here[key]
        if key == "data_sha256":
            yield from _other_pictures(before or {}, now)
        elif before != now:
            yield f"{key} was {before!r} and is {now!r}"


def _other_pictures(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for part, word in WORDS.items():
        if part not in there and part in here:
            yield f"there are {word} pictures, and there were none"
        elif part in there and part not in here:
            yield f"there are no {word} pictures, and there were some"
        elif there.get(part) != here.get(part):
            yield f"the {word} pictures differ"


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file, whole or not at all."""
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def digest_of(split: AnySplit) -> str:
    """What tells pictures from others: the bytes of those in memory, else their number and classes."""
    digest = hashlib.sha256(split.labels.cpu().numpy().tobytes())
    if isinstance(split, Split):
        digest.update(split.images.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
