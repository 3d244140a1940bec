"""Reductions of the responses of a group convolution, ``f̃(o, s, c)``, without storing the responses.

`response_peak` is their maximum over pixels, `response_sum` their attended sum over input channels and poses. The C++
and Triton kernels reduce each response as it is computed, eager torch those of a few images at a time; gradients
compute the responses again.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _compile, _dispatch
from .._derivatives import derivative_of_gradients
from .._dispatch import Operator
from .._layout import output_side
from . import eager


def _empty_gradients(grad: Tensor, *tensors: Any) -> list[Tensor]:
    """Gradients of x, filters, alpha and spatial filters without their values, empty for None."""
    return [grad.new_empty((0,) if v is None else v.shape) for v in tensors[:4]]


response_peak = Operator(
    "response_peak(Tensor x, Tensor filters, SymInt[] numbers) -> (Tensor, Tensor)",
    eager.response_peak,
    eager.empty_peak,
)
response_sum = Operator(
    "response_sum(Tensor x, Tensor filters, Tensor? alpha, Tensor? spatial, SymInt[] numbers) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    eager.response_sum,
    eager.empty_sum,
)
_peak_backward = Operator(
    "response_peak_backward(Tensor grad, Tensor x, Tensor filters, Tensor places, SymInt[] numbers) "
    "-> (Tensor, Tensor)",
    eager.response_peak_backward,
    lambda grad, x, filters, *_: (x.new_empty(x.shape), filters.new_empty(filters.shape)),
)
_sum_backward = Operator(
    "response_sum_backward(Tensor grad, Tensor x, Tensor filters, Tensor? alpha, Tensor? spatial, Tensor sums, "
    "Tensor peaks, Tensor which, SymInt[] numbers) -> Tensor[]",
    eager.response_sum_backward,
    _empty_gradients,
)


@response_peak.kernel("cpu")
def _(x: Tensor, filters: Tensor, numbers: list[int]) -> Any:
    x, filters = x.contiguous(), filters.contiguous()
    function = _compile.cpu_function("attentive/cpu", "response_peak", x, filters)
    if function is None:
        return NotImplemented
    peak, where = eager.empty_peak(x, filters, numbers)
    _compile.launch(function, x, filters, peak, where, *_sizes(x, filters, None, numbers))
    return peak, where


@_peak_backward.kernel("cpu")
def _(grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, numbers: list[int]) -> Any:
    grad, x, filters = grad.contiguous(), x.contiguous(), filters.contiguous()
    function = _compile.cpu_function("attentive/cpu", "response_peak_backward", grad, x, filters)
    if function is None:
        return NotImplemented
    grads = torch.empty_like(x), torch.empty_like(filters)
    _compile.launch(function, x, filters, where, grad, *grads, *_sizes(x, filters, None, numbers))
    return grads


@response_sum.kernel("cpu")
def _(x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, numbers: list[int]) -> Any:
    inputs = _contiguous(x, filters, alpha, spatial)
    function = _compile.cpu_function("attentive/cpu", "response_sum", *_given(*inputs))
    if function is None:
        return NotImplemented
    out = eager.empty_sum(*inputs, numbers)
    kept = out[1:] if out[1].numel() else (None, None, None)
    _compile.launch(function, *inputs, out[0], *kept, *_sizes(x, filters, spatial, numbers))
    return out


@_sum_backward.kernel("cpu")
def _(grad: Tensor, *tensors_and_numbers: Any) -> Any:
    *tensors, sums, peaks, which, numbers = tensors_and_numbers
    grad, inputs = grad.contiguous(), _contiguous(*tensors)
    function = _compile.cpu_function("attentive/cpu", "response_sum_backward", *_given(grad, *inputs))
    if function is None:
        return NotImplemented
    grads = _empty_gradients(grad, *inputs)
    written = [None if v is None else g for v, g in zip(inputs, grads, strict=True)]
    _compile.launch(
        function, *inputs, sums, peaks, which, grad, *written, *_sizes(inputs[0], inputs[1], inputs[3], numbers)
    )
    return grads


@response_peak.kernel("cuda")
def _(x: Tensor, filters: Tensor, numbers: list[int]) -> Any:
    if not _dispatch.on_cuda(x, filters):
        return NotImplemented
    from . import cuda as kernels

    peak, where = eager.empty_peak(x, filters, numbers)
    kernels.response_peak(x.contiguous(), filters.contiguous(), peak, where, *numbers)
    return peak, where


@_peak_backward.kernel("cuda")
def _(grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, numbers: list[int]) -> Any:
    if not _dispatch.on_cuda(grad, x, filters):
        return NotImplemented
    from . import cuda as kernels

    return kernels.response_peak_backward(grad.contiguous(), x.contiguous(), filters.contiguous(), where, *numbers)


@response_sum.kernel("cuda")
def _(x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, numbers: list[int]) -> Any:
    if not _dispatch.on_cuda(*_given(x, filters, alpha, spatial)):
        return NotImplemented
    from . import cuda as kernels

    inputs = _contiguous(x, filters, alpha, spatial)
    out = eager.empty_sum(*inputs, numbers)
    kernels.response_sum(*inputs, out[0], *numbers[:5])
    return out


@_sum_backward.kernel("cuda")
def _(grad: Tensor, *tensors_and_numbers: Any) -> Any:
    inputs, numbers = _contiguous(*tensors_and_numbers[:4]), tensors_and_numbers[-1]
    if not _dispatch.on_cuda(*_given(grad, *inputs)):
        return NotImplemented
    from . import cuda as kernels

    grads = kernels.response_sum_backward(grad.contiguous(), *inputs, *numbers[:5])
    return [grad.new_empty(0) if v is None else g for v, g in zip(inputs, grads, strict=True)]


@response_peak.gradient(saves=(1,))
def _(ctx: Any, grad: Tensor, _: None) -> Any:
    return _peak_backward(grad, *ctx.saved_tensors, *ctx.numbers)


@response_sum.gradient(saves=(1, 2, 3))
def _(ctx: Any, grad: Tensor, *_: None) -> Any:
    return _sum_backward(grad, *ctx.saved_tensors, *ctx.numbers)


# Second derivatives, through the eager forms: too rare for kernels.


@_peak_backward.gradient()
def _(ctx: Any, *cotangents: Tensor) -> Any:
    grad, x, filters, _ = ctx.saved_tensors

    def peak(x: Tensor, filters: Tensor) -> Tensor:
        return eager.peaks(x, filters, *ctx.numbers)[0]

    return derivative_of_gradients(peak, [grad], [x, filters], cotangents)


@_sum_backward.gradient()
def _(ctx: Any, cotangents: list[Tensor]) -> Any:
    grad, *inputs = ctx.saved_tensors[:5]
    return derivative_of_gradients(partial(eager.sums, numbers=ctx.numbers[0]), [grad], inputs, cotangents)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [v for v in tensors if v is not None]


def _contiguous(*tensors: Tensor | None) -> tuple[Any, Any, Any, Any]:
    x, filters, alpha, spatial = (None if v is None else v.contiguous() for v in tensors)
    return x, filters, alpha, spatial


def _sizes(x: Tensor, filters: Tensor, spatial: Tensor | None, numbers: Sequence[int]) -> tuple[int, ...]:
    """The shape arguments of the C++ functions, in their order."""
    (batch, planes, *sides), (out, _, k, _) = x.shape, filters.shape
    poses, *window = numbers[:4]
    rows, columns = (output_side(side, k, *window) for side in sides)
    n, attention_dilation = (1, 1) if spatial is None else (spatial.shape[-1], numbers[4])
    return batch, planes // poses, poses, out, k, *sides, rows, columns, *window, n, attention_dilation
