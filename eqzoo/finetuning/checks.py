"""What can be wrong in a call of `finetune` before its images are read."""

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from ..engine.recipe import Recipe
from ..evaluation.predictor import check_device
from .rules import with_rules

__all__ = ["check_call", "check_values"]

# Keys of a recipe that follow from other arguments, or that choose images of a data set in training/train.py.
_OTHERS = {"model", "dataset", "freeze", "class_weights", "start", "samples_per_class", "valid_size"}


def check_call(output: str | os.PathLike[str], data: object, recipe: Mapping[str, Any], device: str | None) -> None:
    """Raises TypeError or ValueError for unknown settings, and for an output or data that cannot be meant.

    Args:
        output: The folder to write.
        data: The images, as `eqzoo.finetune` takes them.
        recipe: The keys of a recipe that were given.
        device: The device that was asked for.
    """
    known = {item.name for item in fields(Recipe)} - _OTHERS
    for key in recipe.keys() - known:
        near = get_close_matches(key, known, n=3) or sorted(known)
        raise ValueError(f"fine-tuning has no setting {key!r}; near it are {', '.join(near)}")
    check_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("fine-tuning runs in one process; training/train.py trains in several")
    if not isinstance(data, Mapping | str | os.PathLike):
        raise TypeError(
            "the data is a folder, a .npz file, the name of a data set or a dictionary of splits such as "
            f"{{'train': Split(images, labels)}}, got {type(data).__name__}"
        )
    folder = Path(output).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{output} is a file; name a new folder")
    if not isinstance(data, Mapping):
        images = Path(cast(str, data)).resolve()
        if images.is_dir() and folder.is_relative_to(images):
            raise ValueError(
                f"{output} is inside the images {data}, where it would be read as a class; name another folder"
            )


def check_values(
    recipe: Mapping[str, Any], balance: bool, minutes: float | None, valid: float | None, test: float | None
) -> None:
    """Raises ValueError for values that are invalid for any images, before images are read."""
    shares = [share for share in (valid, test) if share is not None]
    if shares and (min(shares) < 0 or sum(shares) >= 1):
        got = " and ".join(map(str, shares))
        raise ValueError(f"the fractions valid and test are at least 0 and together less than 1, got {got}")
    if valid == 0 and (patience := recipe.get("patience")) is not None:
        raise ValueError(
            f"patience is a number of epochs without a better one on validation images, and valid 0 holds none out: "
            f"leave one of the two out, got patience {patience}"
        )
    if isinstance(lr := recipe.get("lr"), int | float) and not 0 < lr < float("inf"):
        raise ValueError(f"lr is a finite number above 0, got {lr}")
    if minutes is not None and (recipe.get("epochs") is not None or not 0 < minutes < float("inf")):
        epochs = recipe.get("epochs")
        raise ValueError(f"minutes is a time above 0, instead of a number of epochs; got {minutes} and {epochs}")
    values = {key: v for key, v in recipe.items() if v is not None}
    later = {} if "epochs" in values else {"epochs": sys.maxsize, "warmup_epochs": 0}  # they depend on the images
    values = with_rules(later | values)
    if values.get("augment") == "missing":
        values["augment"] = "none"
    Recipe("", "", class_weights=(1.0,) if balance else (), **values)
