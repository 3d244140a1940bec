"""Training recipes by name: one for each row of the papers' tables, and shorter ones.

A name is ``<model>.<data set>[_<variant>]``. The recipe without variant is the default of this zoo. If it differs from
the recipe of the paper, that has the variant ``paper``: for the networks on rotated MNIST, and for some on CIFAR-10.
The variant ``first`` is the run with whose weights the recipe without a variant goes on, or the variant ``second``
where there is one. The variant ``aug`` has the paper's augmentation, and ``short`` takes minutes on a GPU.
"""

from . import asc, attentive, e4, gsa, land_and_cells, rotmnist, short
from ._entry import Entry

__all__ = ["RECIPES", "Entry"]

RECIPES: dict[str, Entry] = {}
for _module in (rotmnist, attentive, asc, e4, gsa, land_and_cells, short):
    for _name, _entry in _module.RECIPES.items():
        assert _name not in RECIPES, f"two recipes are named {_name}"
        assert _name.startswith(f"{_entry.recipe.model}.{_entry.recipe.dataset}"), _name
        RECIPES[_name] = _entry
