"""Training: recipes, the loop and its state, the folder of a run."""

from typing import TYPE_CHECKING

from .._common import lazy_names

if TYPE_CHECKING:
    from .loop import train
    from .recipe import Recipe, best_row, build_network, is_finished
    from .run import RunDirectory

__all__ = ["Recipe", "RunDirectory", "best_row", "build_network", "is_finished", "train"]

# Imported when they are used: evaluation needs no packages of the training.
_MODULES = {
    "loop": ("train",),
    "recipe": ("Recipe", "best_row", "build_network", "is_finished"),
    "run": ("RunDirectory",),
}
__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
