"""Dropout of single numbers."""

from torch import Tensor, nn

from ..ops import dropout


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` by `eqzoo.ops.dropout`, which draws its mask faster and does not keep it.

    It treats poses and places alike, but for the draws: a network that trains is equivariant in expectation.

    Args:
        p: The probability of dropping a number.

    Shape:
        Any to the same.

    Example:
        >>> import torch
        >>> Dropout(0.3).eval()(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return dropout(input, self.p, self.training)
