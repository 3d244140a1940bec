"""Training: recipes, the loop and its state, run directories, fine-tuning, metrics, results and reports."""

from typing import TYPE_CHECKING

from .._common import lazy_names

if TYPE_CHECKING:
    from .epochs import best_row, is_finished
    from .evaluation import evaluate
    from .finetuning import FineTuned, finetune
    from .loop import train
    from .metrics import predictions, top1
    from .processor import check_device
    from .recipe import Recipe, build_network
    from .results import checkpoint_config, checkpoint_results
    from .run import FinishedRun, RunDirectory
    from .run_evaluation import best_run, evaluate_run

__all__ = [
    "FineTuned",
    "FinishedRun",
    "Recipe",
    "RunDirectory",
    "best_row",
    "best_run",
    "build_network",
    "check_device",
    "checkpoint_config",
    "checkpoint_results",
    "evaluate",
    "evaluate_run",
    "finetune",
    "is_finished",
    "predictions",
    "top1",
    "train",
]

# Imported when they are used: evaluation needs no packages of the training.
_MODULES = {
    "epochs": ("best_row", "is_finished"),
    "evaluation": ("evaluate",),
    "finetuning": ("FineTuned", "finetune"),
    "loop": ("train",),
    "metrics": ("predictions", "top1"),
    "processor": ("check_device",),
    "recipe": ("Recipe", "build_network"),
    "results": ("checkpoint_config", "checkpoint_results"),
    "run": ("FinishedRun", "RunDirectory"),
    "run_evaluation": ("best_run", "evaluate_run"),
}
__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
