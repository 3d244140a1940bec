"""The recipes: one for every row of the papers' tables, and shorter ones, by name.

A name is ``<model>.<data set>[_<variant>]``. Without variant it is how this zoo trains the network. Where that is not
its paper's way, ``_paper`` is: for the networks that a paper trains on rotated MNIST, and five ResNet-29 on CIFAR-10.
``_aug`` is with the paper's augmentation, ``_short`` takes minutes on a GPU.
"""

from . import asc, attentive, e4, gsa, rotmnist, short
from ._entry import Entry

__all__ = ["RECIPES", "Entry"]

RECIPES: dict[str, Entry] = {}
for _module in (rotmnist, attentive, asc, e4, gsa, short):
    for _name, _entry in _module.RECIPES.items():
        assert _name not in RECIPES, f"two recipes {_name}"
        assert _name.startswith(f"{_entry.recipe.model}.{_entry.recipe.dataset}"), _name
        RECIPES[_name] = _entry
