"""Entries of the table of recipes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eqzoo.engine import Recipe

# What our recipes with Muon on CIFAR-10, land and cells share; parameters that are not matrices have 0.3 of its rate.
MUON: dict[str, Any] = {
    "optimizer": "nmuon",
    "optimizer_args": {"fallback_lr_scale": 0.3},
    "weight_decay": 1e-2,
    "label_smoothing": 0.1,
}


@dataclass(frozen=True)
class Entry:
    """A recipe and its description.

    Args:
        recipe: The recipe.
        text: A paragraph for the model card, which says what follows the paper and what does not.
    """

    recipe: Recipe
    text: str


def family(models: Iterable[str], dataset: str, text: str, variant: str = "", **values: Any) -> dict[str, Entry]:
    """The same recipe for several networks, named ``<model>.<data set>[_<variant>]``."""
    name = f"{dataset}_{variant}" if variant else dataset
    return {f"{model}.{name}": Entry(Recipe(model=model, dataset=dataset, **values), text) for model in models}
