"""Attention on the input of a convolution, one pass over the field each way: channel statistics and suppression."""

from typing import Any

import torch
from torch import Tensor

from . import _backend
from ._higher_derivatives import derivative_of_gradients

__all__ = ["eager_statistics", "eager_suppress", "field_statistics", "suppress"]


def eager_statistics(x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and maximum over channels of the attended field, and the first channel that reaches the maximum.

    Args:
        x: The field, ``(B, C, S, height, width)``.
        alpha: The channel attention, ``(B, C, S)``, of the same type.

    Returns:
        ``(B, 2·S, height, width)`` with the means first, and ``(B, S, height, width)`` int32.
    """
    attended = x * alpha[..., None, None]
    peak, which = attended.max(1)
    return torch.cat((attended.mean(1), peak), 1), which.int()


def eager_suppress(x: Tensor, alpha: Tensor | None, weight: Tensor) -> Tensor:
    """``x (1 − α^C α^X)``.

    Args:
        x: The field, ``(B, C, S, height, width)``.
        alpha: The channel attention ``α^C``, ``(B, C, S)``, or None for ones.
        weight: The spatial attention ``α^X``, ``(B, S, height, width)``; all are of one type.
    """
    attended = x if alpha is None else x * alpha[..., None, None]
    return x - attended * weight.unsqueeze(1)


field_statistics = _backend.operator("field_statistics", eager_statistics)
suppress = _backend.operator("suppress", eager_suppress)


def _eager_statistics_backward(grad: Tensor, x: Tensor, alpha: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    mean, peak = (part.unsqueeze(1) for part in grad.chunk(2, 1))
    grad_attended = (mean / x.shape[1]).expand_as(x).scatter_add(1, which.unsqueeze(1).long(), peak)
    return grad_attended * alpha[..., None, None], (grad_attended * x).sum((3, 4))


def _eager_suppress_backward(
    grad: Tensor, x: Tensor, alpha: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    place, both = weight.unsqueeze(1), grad * x
    if alpha is None:
        return grad - grad * place, x.new_empty(0), -both.sum(1)
    factor = alpha[..., None, None]
    return grad - grad * (factor * place), -(both * place).sum((3, 4)), -(both * factor).sum(1)


_statistics_backward = _backend.operator("field_statistics_backward", _eager_statistics_backward)
_suppress_backward = _backend.operator("suppress_backward", _eager_suppress_backward)


@_backend.register(field_statistics, "cpu", eager_statistics)
def _native_statistics(x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    x, alpha = x.contiguous(), alpha.contiguous()
    function = _backend.cpu_function("input_attention", "field_statistics", x, alpha)
    if function is None:
        return NotImplemented
    statistics, which = _statistics_fake(x, alpha)
    _backend.launch(function, x, alpha, statistics, which, *_sizes(x))
    return statistics, which


@_backend.register(_statistics_backward, "cpu", _eager_statistics_backward)
def _native_statistics_backward(grad: Tensor, x: Tensor, alpha: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    grad, x, alpha = grad.contiguous(), x.contiguous(), alpha.contiguous()
    function = _backend.cpu_function("input_attention", "field_statistics_backward", grad, x, alpha)
    if function is None:
        return NotImplemented
    grad_x, grad_alpha = torch.empty_like(x), torch.empty_like(alpha)
    _backend.launch(function, x, alpha, which, grad, grad_x, grad_alpha, *_sizes(x))
    return grad_x, grad_alpha


@_backend.register(suppress, "cpu", eager_suppress)
def _native_suppress(x: Tensor, alpha: Tensor | None, weight: Tensor) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    alpha = None if alpha is None else alpha.contiguous()
    function = _backend.cpu_function("input_attention", "suppress", x, weight, *([] if alpha is None else [alpha]))
    if function is None:
        return NotImplemented
    y = torch.empty_like(x)
    _backend.launch(function, x, alpha, weight, y, *_sizes(x))
    return y


@_backend.register(_suppress_backward, "cpu", _eager_suppress_backward)
def _native_suppress_backward(
    grad: Tensor, x: Tensor, alpha: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    alpha = None if alpha is None else alpha.contiguous()
    tensors = [grad, x, weight] + ([] if alpha is None else [alpha])
    function = _backend.cpu_function("input_attention", "suppress_backward", *tensors)
    if function is None:
        return NotImplemented
    grads = _suppress_backward_fake(grad, x, alpha, weight)
    wanted = grads[0], None if alpha is None else grads[1], grads[2]
    _backend.launch(function, x, alpha, weight, grad, *wanted, *_sizes(x))
    return grads


@field_statistics.register_fake
def _statistics_fake(x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, poses, height, width = x.shape
    which = x.new_empty(batch, poses, height, width, dtype=torch.int32)
    return x.new_empty(batch, 2 * poses, height, width), which


@_statistics_backward.register_fake
def _statistics_backward_fake(grad: Tensor, x: Tensor, alpha: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), alpha.new_empty(alpha.shape)


@suppress.register_fake
def _suppress_fake(x: Tensor, alpha: Tensor | None, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_suppress_backward.register_fake
def _suppress_backward_fake(
    grad: Tensor, x: Tensor, alpha: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (0,) if alpha is None else alpha.shape
    return x.new_empty(x.shape), x.new_empty(shape), weight.new_empty(weight.shape)


def _save_for_statistics(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _statistics_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return _statistics_backward(grad.contiguous(), *ctx.saved_tensors)


def _save_for_suppress(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _suppress_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    grad_x, grad_alpha, grad_weight = _suppress_backward(grad.contiguous(), *ctx.saved_tensors)
    return grad_x, grad_alpha if ctx.needs_input_grad[1] else None, grad_weight


def _save_all(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


# Second derivatives, through the eager forms: too rare for kernels.


def _statistics_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    grad, x, alpha, _ = ctx.saved_tensors
    found = derivative_of_gradients(lambda x, alpha: eager_statistics(x, alpha)[0], [grad], [x, alpha], cotangents)
    return *found, None


def _suppress_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    grad, *inputs = ctx.saved_tensors
    return derivative_of_gradients(eager_suppress, [grad], inputs, cotangents)


field_statistics.register_autograd(_statistics_gradient, setup_context=_save_for_statistics)
suppress.register_autograd(_suppress_gradient, setup_context=_save_for_suppress)
_statistics_backward.register_autograd(_statistics_twice, setup_context=_save_all)
_suppress_backward.register_autograd(_suppress_twice, setup_context=_save_all)


def _sizes(x: Tensor) -> tuple[int, ...]:
    return *x.shape[:3], x.shape[3] * x.shape[4]
