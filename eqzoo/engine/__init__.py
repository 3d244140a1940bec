"""Training: recipes, the loop and its state, run directories, fine-tuning, metrics, results and reports."""

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise ImportError(f"training needs accelerate: pip install 'eqzoo[train]' ({error})") from error

from .epochs import best_row, is_finished
from .finetuning import FineTuned, finetune
from .loop import check_device, train
from .metrics import predictions, top1
from .recipe import Recipe, build_network
from .results import checkpoint_config, checkpoint_results
from .run_directory import FinishedRun, RunDirectory
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
    "evaluate_run",
    "finetune",
    "is_finished",
    "predictions",
    "top1",
    "train",
]
