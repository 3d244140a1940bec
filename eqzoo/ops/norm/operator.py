"""Batch normalization of fields, whose poses share statistics, with the sum and the ReLU that follow it."""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compile
from .._compile import WITH_BFLOAT16
from .._dispatch import Operator, check_shape, has_memory, is_observed, is_transformed, plain
from .._dtypes import accumulation_dtype
from .._layout import FIRST, LAST, follow, is_last

_POSES_FASTEST = (2, 1, 4, 3, 0)  # a third order of a field's axes, from the fastest in memory to the slowest


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Normalizes each field with its mean and variance over batch, group and space.

    ``y = relu((x − E[x]) / √(Var[x] + eps) · γ + β + residual)``; sum and ReLU are left out unless asked for. All of it
    is one pass over memory behind that of the statistics, and the backward pass keeps x and, with the ReLU, y.

    Args:
        x: The field, ``(B, C, |H|, height, width)``.
        running_mean: ``(C,)``; updated in training, used otherwise.
        running_var: ``(C,)``, likewise.
        weight: γ, ``(C,)``; None for 1.
        bias: β, ``(C,)``; None for 0.
        training: Whether mean and variance are those of x.
        momentum: The weight of x in the running statistics.
        eps: Added to the variance.
        residual: A field to add, of the shape of x.
        relu: Whether negative numbers become 0.

    Returns:
        The field, of the shape and type of x, and with its strides.

    Raises:
        ValueError: If the residual has another shape than x, or training has one number a field.

    References:
        Batch Normalization (Ioffe and Szegedy, 2015), section 3, https://arxiv.org/abs/1502.03167

    Example:
        >>> x = torch.tensor([-1.0, 1.0]).reshape(1, 1, 1, 1, 2)
        >>> batch_norm(x, None, None, training=True, eps=0.0, residual=x, relu=True).flatten()
        tensor([0., 2.])
    """
    check_shape("residual", residual, *x.shape)
    if running_var is not None and running_var.dtype != x.dtype:  # torch takes vectors of one type
        weight, bias = (v if v is None else v.to(running_var.dtype) for v in (weight, bias))
    own = _has_kernel(x, weight, bias, running_mean, running_var)
    # Torch says what is missing.
    own = own and (x.numel() > x.shape[1] if training else running_mean is not None and running_var is not None)
    if not own or (residual is not None and (residual.dtype, residual.device) != (x.dtype, x.device)):
        norm = batch_norm if own else _by_torch
        y = norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        y = y if residual is None else y + residual
        return F.relu(y) if relu else y
    mean, var = (None, None) if training else (running_mean, running_var)
    as_operator = torch.compiler.is_compiling() or is_observed()
    run = _batch_norm if as_operator else _Eager.apply if torch.is_grad_enabled() else _forward
    y, stats = run(x, residual, weight, bias, mean, var, eps, relu)
    if training and running_mean is not None and running_var is not None:
        batch_mean, _, batch_var = stats.detach().unbind()
        running_mean.lerp_(batch_mean, momentum)
        running_var.lerp_(batch_var, momentum)
    return y


def _has_kernel(x: Tensor, *vectors: Tensor | None) -> bool:
    """Whether the C++ kernel does it; else it is torch's batch norm."""
    if not x.is_cpu or x.dtype not in WITH_BFLOAT16:
        return False
    dtype = accumulation_dtype(x.dtype)
    for vector in vectors:
        if vector is not None and not (vector.dtype == dtype and vector.is_cpu and vector.is_contiguous()):
            return False
    if any(vector is not None and vector.shape != x.shape[1:2] for vector in vectors):
        return False  # torch says what is wrong
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting() and _compile.is_built("norm/cpu", "batch_norm")
    if type(x) is not Tensor or plain() or x.numel() == 0 or is_transformed():
        return False
    return _compile.cpu_function("norm/cpu", "batch_norm", x, scalars=WITH_BFLOAT16) is not None


def _by_torch(x: Tensor, *args: Any) -> Tensor:
    if not torch.compiler.is_compiling() and is_last(x):
        return F.batch_norm(x.permute(0, 1, 3, 4, 2), *args).permute(0, 1, 4, 2, 3)
    return F.batch_norm(x, *args)


def _shape(x: Tensor) -> tuple[int, ...] | None:
    """What the kernel has to know of a field's memory; None where it has gaps or another order."""
    batch, fields, order, height, width = x.shape
    pixels = height * width
    if follow(x, FIRST):
        # Few pixels are taken with the poses: then they are long rows, and no short runs.
        return (
            (batch, fields, order * pixels, 1, 1, 1)
            if pixels < 64 <= batch * 4
            else (batch, fields, order, pixels, 0, 0)
        )
    if follow(x, LAST):
        return batch, fields, order, pixels, 1, 0
    if follow(x, _POSES_FASTEST):
        return batch, fields, order, pixels, 1, 1
    return None


def _definition(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """The field, and mean, 1 / deviation and unbiased variance of its numbers, ``(3, C)``."""
    upcast = x.to(accumulation_dtype(x.dtype))
    if mean is None or var is None:
        var, mean = torch.var_mean(upcast, (0, 2, 3, 4), correction=0)
    inverse = (var + eps).rsqrt()
    count = x.numel() // x.shape[1]
    shape = (1, -1, 1, 1, 1)
    y = (upcast - mean.view(shape)) * inverse.view(shape)
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    y = y if residual is None else y + residual
    y = F.relu(y) if relu else y
    return y.to(x.dtype), torch.stack([mean, inverse, var * (count / max(1, count - 1))]).detach()


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """`_definition`, by the kernel; the field has the strides of x."""
    function = _compile.cpu_function("norm/cpu", "batch_norm", x, scalars=WITH_BFLOAT16)
    if function is None:  # it was there when the graph was made
        y, stats = _definition(x, residual, weight, bias, mean, var, eps, relu)
        return _like(y, x), stats
    dense, shape = _dense(x)
    y = torch.empty_like(dense)
    stats = x.new_empty((3, x.shape[1]), dtype=accumulation_dtype(x.dtype))
    residual = None if residual is None else _like(residual, dense)
    _launch(function, (dense, residual, y, weight, bias, mean, var, stats), *shape, relu, float(eps))
    return _like(y, x), stats


def _backward(
    grad: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, stats: Tensor, training: bool, residual: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, residual, weight and bias; that of the residual is empty unless it is asked for.

    With g the gradient behind sum and ReLU (where y > 0), N numbers a field and x̂ = (x − E[x]) / √(Var[x] + eps):
    ``γ / √(Var[x] + eps) · (g − Σ g / N − x̂ Σ g x̂ / N)``, ``g``, ``Σ g x̂`` and ``Σ g``; with running statistics the
    first one is without the sums.
    """
    function = _compile.cpu_function("norm/cpu", "batch_norm_backward", x, scalars=WITH_BFLOAT16)
    dense, shape = _dense(x)
    grad, y = _like(grad, dense), None if y is None else _like(y, dense)
    grad_x, grad_residual = torch.empty_like(dense), torch.empty_like(dense) if residual else x.new_empty(0)
    grad_weight, grad_bias = stats.new_empty(x.shape[1]), stats.new_empty(x.shape[1])
    if function is None:
        axes, places = (0, 2, 3, 4), (1, -1, 1, 1, 1)
        mean, inverse = stats[0].view(places), stats[1].view(places)
        g = _behind_relu(grad.to(stats.dtype), y)
        normal = (x - mean) * inverse
        grad_weight, grad_bias = (g * normal).sum(axes), g.sum(axes)
        scale = inverse if weight is None else inverse * weight.view(places)
        sums = (grad_bias.view(places) + normal * grad_weight.view(places)) / (x.numel() // x.shape[1])
        grad_x.copy_(scale * (g - sums if training else g))
        grad_residual = grad_residual.copy_(g) if residual else grad_residual
    else:
        to = grad_residual if residual else None
        _launch(function, (grad, dense, y, grad_x, to, weight, stats, grad_weight, grad_bias), *shape, training)
    grad_residual = _like(grad_residual, x) if residual else grad_residual
    return _like(grad_x, x), grad_residual, grad_weight, grad_bias


def _dense(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A field in an order that the kernel reads, itself or a copy, and what the kernel has to know of its memory."""
    shape = _shape(x)
    if shape is not None:
        return x, shape
    x = x.clone(memory_format=torch.contiguous_format)
    shape = _shape(x)
    assert shape is not None
    return x, shape


def _like(x: Tensor, other: Tensor) -> Tensor:
    """A field with the strides of another one, itself or a copy."""
    return x if x.stride() == other.stride() else torch.empty_like(other).copy_(x)


def _launch(function: Any, tensors: tuple[Tensor | None, ...], *values: int | float) -> None:
    # `launch` takes contiguous tensors alone; and types that are said once make a call a quarter as long.
    if function.argtypes is None:
        kinds = [ctypes.c_double if isinstance(value, float) else ctypes.c_int64 for value in values]
        function.restype, function.argtypes = None, [*[ctypes.c_void_p] * len(tensors), *kinds, ctypes.c_int64]
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    function(*pointers, *values, torch.get_num_threads())


class _Eager(torch.autograd.Function):
    """The kernels in eager torch, where an operator of torch's would take four times as long to call."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        y, stats = _forward(*args)
        _save(ctx, args, (y, stats))
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return y, stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 8
        if torch.is_grad_enabled() or not has_memory(grads[0]):  # it is to be differentiated, or mapped over many
            with torch.enable_grad():
                return _by_definition(ctx, grads[0])
        return _gradients(ctx, grads[0], _backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, bias, mean, var, ctx.eps, ctx.relu = inputs
    y, stats = output
    ctx.training, ctx.has_residual = mean is None, residual is not None
    ctx.save_for_backward(x, y if ctx.relu else None, weight, bias, mean, var, stats)


def _gradients(ctx: Any, grad: Tensor, backward: Any) -> tuple[Tensor | None, ...]:
    x, y, weight, bias, *_, stats = ctx.saved_tensors
    # Without a ReLU the gradient of the sum is that of both.
    own = ctx.relu and ctx.has_residual and ctx.needs_input_grad[1]
    grad_x, grad_residual, grad_weight, grad_bias = backward(grad, x, y, weight, stats, ctx.training, own)
    grad_residual = grad_residual if own else grad if ctx.has_residual and not ctx.relu else None
    grads = (grad_x, grad_residual, None if weight is None else grad_weight, None if bias is None else grad_bias)
    return *grads, None, None, None, None


def _behind_relu(grad: Tensor, y: Tensor | None) -> Tensor:
    """The gradient where a ReLU with the output y lets it through, also an infinite one; all of it without a ReLU."""
    return grad if y is None else torch.where(y > 0, grad, torch.zeros_like(grad))


def _by_definition(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients as functions that can be differentiated in turn."""
    x, y, weight, bias, mean, var, _ = ctx.saved_tensors
    grad_residual = grad = _behind_relu(grad, y)
    given = {0: x, 2: weight, 3: bias}
    inputs: dict[int, Tensor] = {place: given[place] for place in given if ctx.needs_input_grad[place]}
    grads: list[Tensor | None] = [None] * 8
    if inputs:
        out, _ = _definition(x, None, weight, bias, mean, var, ctx.eps, False)
        found = torch.autograd.grad(out, list(inputs.values()), grad, create_graph=True)
        for place, value in zip(inputs, found, strict=True):
            grads[place] = value
    grads[1] = grad_residual if ctx.needs_input_grad[1] else None
    return tuple(grads)


# The same for torch.compile and dispatch modes, which take operators as they are.


def _empty(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((3, x.shape[1]), dtype=accumulation_dtype(x.dtype))


def _empty_gradients(
    grad: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, stats: Tensor, training: bool, residual: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vectors = stats.new_empty(x.shape[1]), stats.new_empty(x.shape[1])
    return torch.empty_like(x), torch.empty_like(x) if residual else x.new_empty(0), *vectors


_batch_norm = Operator(
    "batch_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, float eps, "
    "bool relu) -> (Tensor, Tensor)",
    _forward,
    _empty,
    any_strides=True,
)
_batch_norm_backward = Operator(
    "batch_norm_backward(Tensor grad, Tensor x, Tensor? y, Tensor? weight, Tensor stats, bool training, "
    "bool residual) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _empty_gradients,
    any_strides=True,
)
_batch_norm.op.register_autograd(
    lambda ctx, grad, _: _gradients(ctx, grad, _batch_norm_backward),
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs, output),
)
