"""Training recipes by name: one for each checkpoint here and one for each network and data set of the papers.

A name is ``<model>.<data set>[_<variant>]``. The recipe without variant is that of the checkpoint, if there is one; the
paper's then has the variant ``paper``. The variant ``first`` is the run with whose weights the recipe without a variant
goes on, and ``aug`` has the paper's augmentation.
"""

from . import asc, attentive, e4, gsa, land_and_cells, rotmnist, tiny_imagenet
from ._entry import Entry

__all__ = ["RECIPES", "Entry"]

RECIPES: dict[str, Entry] = {}
for _module in (rotmnist, attentive, asc, e4, gsa, land_and_cells, tiny_imagenet):
    for _name, _entry in _module.RECIPES.items():
        assert _name not in RECIPES, f"two recipes are named {_name}"
        assert _name.startswith(f"{_entry.recipe.model}.{_entry.recipe.dataset}"), _name
        RECIPES[_name] = _entry
