"""Training: recipes, the loop and its state, the folder of a run."""

from typing import TYPE_CHECKING

from .._common import lazy_names

if TYPE_CHECKING:
    from .epochs import best_row, is_finished
    from .loop import train
    from .recipe import Recipe, build_network
    from .run import FinishedRun, RunDirectory

__all__ = ["FinishedRun", "Recipe", "RunDirectory", "best_row", "build_network", "is_finished", "train"]

# Imported when they are used: evaluation needs no packages of the training.
_MODULES = {
    "epochs": ("best_row", "is_finished"),
    "loop": ("train",),
    "recipe": ("Recipe", "build_network"),
    "run": ("FinishedRun", "RunDirectory"),
}
__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
