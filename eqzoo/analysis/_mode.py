"""Evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sets a model to evaluation mode, and gives every module its own mode back at the end, also after an error.

    ``model.train(was_training)`` would set all modules alike, and frozen norms would train.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(1).eval(), nn.ReLU())
        >>> with evaluation_mode(model):
        ...     print(model[1].training)
        False
        >>> [module.training for module in model.modules()]
        [True, False, True]
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training  # train() would reach the modules inside, and warn of deployed networks
