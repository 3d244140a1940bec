"""Attention on the input of a convolution, one pass over the field each way: channel statistics and suppression."""

from typing import Any

import torch
from torch import Tensor

from .. import _compile
from .._derivatives import derivative_of_gradients
from .._dispatch import Operator
from . import eager


def _empty_statistics(x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, poses, height, width = x.shape
    return x.new_empty(batch, 2 * poses, height, width), x.new_empty(batch, poses, height, width, dtype=torch.int32)


def _empty_gradients(grad: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty((0,) if v is None else v.shape) for v in tensors)


field_statistics = Operator(
    "field_statistics(Tensor x, Tensor alpha) -> (Tensor, Tensor)", eager.statistics, _empty_statistics
)
suppress = Operator(
    "suppress(Tensor x, Tensor? alpha, Tensor weight) -> Tensor",
    eager.suppress,
    lambda x, alpha, weight: x.new_empty(x.shape),
)
_statistics_backward = Operator(
    "field_statistics_backward(Tensor grad, Tensor x, Tensor alpha, Tensor which) -> (Tensor, Tensor)",
    eager.statistics_backward,
    lambda grad, x, alpha, which: _empty_gradients(grad, x, alpha),
)
_suppress_backward = Operator(
    "suppress_backward(Tensor grad, Tensor x, Tensor? alpha, Tensor weight) -> (Tensor, Tensor, Tensor)",
    eager.suppress_backward,
    _empty_gradients,
)


@field_statistics.kernel("cpu")
def _(x: Tensor, alpha: Tensor) -> Any:
    x, alpha = x.contiguous(), alpha.contiguous()
    function = _compile.cpu_function("attentive/input", "field_statistics", x, alpha)
    if function is None:
        return NotImplemented
    statistics, which = _empty_statistics(x, alpha)
    _compile.launch(function, x, alpha, statistics, which, *_sizes(x))
    return statistics, which


@_statistics_backward.kernel("cpu")
def _(grad: Tensor, x: Tensor, alpha: Tensor, which: Tensor) -> Any:
    grad, x, alpha = grad.contiguous(), x.contiguous(), alpha.contiguous()
    function = _compile.cpu_function("attentive/input", "field_statistics_backward", grad, x, alpha)
    if function is None:
        return NotImplemented
    grads = _empty_gradients(grad, x, alpha)
    _compile.launch(function, x, alpha, which, grad, *grads, *_sizes(x))
    return grads


@suppress.kernel("cpu")
def _(*tensors: Tensor | None) -> Any:
    given = [None if v is None else v.contiguous() for v in tensors]
    function = _compile.cpu_function("attentive/input", "suppress", *(v for v in given if v is not None))
    if function is None or given[0] is None:
        return NotImplemented
    y = torch.empty_like(given[0])
    _compile.launch(function, *given, y, *_sizes(y))
    return y


@_suppress_backward.kernel("cpu")
def _(*tensors: Tensor | None) -> Any:
    grad, *given = [None if v is None else v.contiguous() for v in tensors]
    function = _compile.cpu_function(
        "attentive/input", "suppress_backward", *(v for v in (grad, *given) if v is not None)
    )
    if function is None or grad is None:
        return NotImplemented
    grads = _empty_gradients(grad, *given)
    written = [None if v is None else g for v, g in zip(given, grads, strict=True)]
    _compile.launch(function, *given, grad, *written, *_sizes(grad))
    return grads


@field_statistics.gradient(saves=(1,))
def _(ctx: Any, grad: Tensor, _: None) -> Any:
    return _statistics_backward(grad.contiguous(), *ctx.saved_tensors)


@suppress.gradient()
def _(ctx: Any, grad: Tensor) -> Any:
    return _suppress_backward(grad.contiguous(), *ctx.saved_tensors)


# Second derivatives, through the eager forms: too rare for kernels.


@_statistics_backward.gradient()
def _(ctx: Any, *cotangents: Tensor) -> Any:
    grad, x, alpha, _ = ctx.saved_tensors
    return derivative_of_gradients(lambda *v: eager.statistics(*v)[0], [grad], [x, alpha], cotangents)


@_suppress_backward.gradient()
def _(ctx: Any, *cotangents: Tensor) -> Any:
    grad, *inputs = ctx.saved_tensors
    return derivative_of_gradients(eager.suppress, [grad], inputs, cotangents)


def _sizes(x: Tensor) -> tuple[int, ...]:
    return *x.shape[:3], x.shape[3] * x.shape[4]
