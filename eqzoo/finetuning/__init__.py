"""Fine-tuning on the user's images: images, rules, training, evaluation, advice."""

from .run import FineTuned, finetune

__all__ = ["FineTuned", "finetune"]
