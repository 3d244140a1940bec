"""Derivatives of gradients, for operators whose gradients are operators too."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def derivative_of_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The derivative of ``(grads, inputs) -> gradients of function at inputs``, through the formula of the function.

    Second derivatives are too rare for a kernel. Where autograd records them (``create_graph=True``), the results have
    derivatives themselves, of any order.

    Args:
        function: A function of the inputs, made of operators with derivatives of the order that is wanted.
        grads: The gradients of its outputs, each shaped as its output.
        inputs: Where it was differentiated; the function also takes those that are None.
        cotangents: The gradients with respect to the gradients of the inputs, each shaped as its input; those of None
            are not read.

    Returns:
        The gradients with respect to grads and to inputs, each shaped as these; None where there is no dependence.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        # Each is a node of its own: one of them may depend on another.
        leaves = [
            None if x is None else x.view_as(x) if recorded and x.requires_grad else x.detach().requires_grad_()
            for x in (*grads, *inputs)
        ]
        given = [x for x in leaves if x is not None]
        outputs, at = given[: len(grads)], given[len(grads) :]
        first = torch.autograd.grad(function(*leaves[len(grads) :]), at, outputs, create_graph=True)
    wanted = [cotangent for cotangent, x in zip(cotangents, inputs, strict=True) if x is not None]
    found = iter(torch.autograd.grad(first, given, wanted, create_graph=recorded, allow_unused=True))
    return tuple(None if x is None else next(found) for x in leaves)
