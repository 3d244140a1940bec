"""Group self-attention in windows of a field, without gathering the neighborhoods."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _compile, _dispatch, reference
from .._chunks import chunk_size
from .._derivatives import derivative_of_gradients
from .._dispatch import Operator, check_pixels, check_shape, check_window
from .._dtypes import accumulation_dtype
from .eager import Problem, Window, attend, attend_backward


def local_group_attention(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None = None,
    *,
    kernel_size: tuple[int, int],
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """Attends from each pose and place of a field to all poses of the places in a window around it.

    ``out(v, i) = Σ_g Σ_(m, j) softmax_(m, j)[shared + placed] val(m, j)`` with queries ``(g, i)``, keys ``(m, j)``,
    output poses v, and the scores of `reference.group_attention_weights`.

    Places outside of the image are left out. A window of ``2·height − 1`` by ``2·width − 1`` is the whole image.
    The kernels keep their inputs alone for the backward pass; their peak memory beyond that is one head of one image,
    and the gradients of the positions for every head and image.

    Args:
        qkv: Queries, keys and values of the field, ``(B, 3, heads, d, |G|, height, width)``. The first channels of
            queries are compared with positions, the last ones with poses.
        position: The encoded positions of the window's taps, row by row, ``(p, |V|, rows·columns)``.
        pose: The encoded relative poses, ``(e, |G|, |G|)``, of query and key; None for none.
        kernel_size: The rows and columns of the window, in pixels, odd.
        scale: What the scores are multiplied by.
        dropout: The probability of dropping a pose and place of the keys for a query, the same for all output poses.

    Returns:
        ``(B, heads, d, |V|, height, width)``.

    Raises:
        ValueError: If the shapes do not fit, a side of the window is even, or dropout is not in [0, 1).

    References:
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), section 5.2, equation 16
        https://arxiv.org/abs/2010.00977

    Example:
        >>> qkv = torch.randn(2, 3, 9, 6, 4, 8, 8)  # 9 heads of 6 channels, 4 poses, 8 x 8 places
        >>> local_group_attention(qkv, torch.randn(4, 4, 25), torch.randn(2, 4, 4), kernel_size=(5, 5)).shape
        torch.Size([2, 9, 6, 4, 8, 8])
    """
    _check(qkv, position, pose, kernel_size, dropout)
    dtype, device = qkv.dtype, qkv.device
    position = position.to(dtype)
    pose = None if pose is None else pose.to(dtype)
    if _dispatch.forced("reference"):
        return reference.local_group_attention(
            qkv, position, pose, kernel_size=kernel_size, scale=scale, dropout=dropout
        )
    # The backward pass repeats the draws of the forward pass from this seed.
    seed = torch.randint(2**62, (1,), device=device) if dropout else None
    window = Window(*kernel_size)
    if _dispatch.plain():
        heads = torch.arange(qkv.shape[0] * qkv.shape[2], device=device).view(qkv.shape[0], qkv.shape[2])
        return attend(Problem(qkv, position, pose, seed, heads, window, scale, dropout))
    out: Tensor = _attention(qkv, position, pose, seed, window, scale, dropout)
    return out


def _check(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    kernel_size: tuple[int, int],
    dropout: float,
) -> None:
    rows, columns = kernel_size
    check_window(rows, columns)
    check_shape("qkv", qkv, None, 3, *[None] * 5)
    check_pixels(qkv)
    channels, order = qkv.shape[3:5]
    check_shape("position", position, min(len(position), channels), None, rows * columns)
    check_shape("pose", pose, None if pose is None else min(len(pose), channels), order, order)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability below 1, got {dropout}")


def _chunked(*inputs_and_options: Any) -> Tensor:
    """Eager torch on some heads of one image at a time, in float32 at least."""
    *tensors, window, scale, dropout = inputs_and_options
    inputs = _upcast(*tensors)
    out = _empty(*tensors)
    with torch.autocast(out.device.type, enabled=False):
        for part, chunk in _chunks(inputs, Window(*window), scale, dropout):
            out[part] = attend(chunk)
    return out


def _chunked_backward(grad: Tensor, *inputs_and_options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv, position and pose; that of no pose is empty."""
    *tensors, window, scale, dropout = inputs_and_options
    inputs = _upcast(*tensors)
    grads = [torch.zeros_like(x) for x in _empty_gradients(grad, *inputs)]
    with torch.autocast(grad.device.type, enabled=False):
        for part, chunk in _chunks(inputs, Window(*window), scale, dropout):
            of_qkv, *of_codes = attend_backward(chunk, grad[part].to(inputs[0].dtype))
            grads[0][part[0], :, part[1]] = of_qkv
            for total, found in zip(grads[1:], of_codes, strict=False):
                total += found
    return _in_types_of(grads, tensors)


def _empty(qkv: Tensor, position: Tensor, *_: Any) -> Tensor:
    batch, heads, channels = qkv.shape[0], *qkv.shape[2:4]
    return qkv.new_empty(batch, heads, channels, position.shape[1], *qkv.shape[-2:])


def _empty_gradients(
    grad: Tensor, qkv: Tensor, position: Tensor, pose: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return grad_qkv, position.new_empty(position.shape), qkv.new_empty(_pose_shape(qkv, pose))


_ARGUMENTS = "Tensor qkv, Tensor position, Tensor? pose, Tensor? seed, SymInt[] window, float scale, float dropout"
_attention = Operator(f"local_group_attention({_ARGUMENTS}) -> Tensor", _chunked, _empty, any_strides=True)
_attention_backward = Operator(
    f"local_group_attention_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _chunked_backward,
    _empty_gradients,
    any_strides=True,
)


@_attention.kernel("cpu")
def _(*inputs_and_options: Any) -> Tensor:
    *tensors, window, scale, dropout = inputs_and_options
    inputs = _upcast(*tensors)
    function = _compile.cpu_function("gsa/cpu", "local_group_attention", *inputs[:2])
    if function is None:
        return NotImplemented
    out = _empty(*inputs)
    _compile.launch(function, *inputs, out, *_sizes(*inputs[:3]), *window, scale, dropout)
    return out.to(tensors[0].dtype)


@_attention_backward.kernel("cpu")
def _(grad: Tensor, *inputs_and_options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, window, scale, dropout = inputs_and_options
    inputs = _upcast(*tensors)
    function = _compile.cpu_function("gsa/cpu", "local_group_attention_backward", *inputs[:2])
    if function is None:
        return NotImplemented
    qkv, position, pose, *_ = inputs
    grad, grad_qkv = grad.to(qkv.dtype).contiguous(), torch.empty_like(qkv)
    heads = qkv.shape[0] * qkv.shape[2]
    grads = [grad.new_empty(heads, *shape) for shape in (position.shape, _pose_shape(qkv, pose))]
    sizes = _sizes(qkv, position, pose)
    _compile.launch(function, grad, *inputs, grad_qkv, *grads, *sizes, *window, scale, dropout)
    return _in_types_of([grad_qkv, *(g.sum(0) for g in grads)], tensors)


@_attention.kernel("cuda")
def _(*inputs_and_options: Any) -> Tensor:
    *tensors, window, scale, dropout = inputs_and_options
    if not _dispatch.on_cuda(tensors[0]):
        return NotImplemented
    from . import cuda

    return cuda.forward(*_contiguous(*tensors), window, scale, dropout)


@_attention_backward.kernel("cuda")
def _(grad: Tensor, *inputs_and_options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, window, scale, dropout = inputs_and_options
    if not _dispatch.on_cuda(tensors[0]):
        return NotImplemented
    from . import cuda

    return cuda.backward(grad.contiguous(), *_contiguous(*tensors), window, scale, dropout)


@_attention.gradient()
def _(ctx: Any, grad: Tensor) -> Any:
    return _attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)


@_attention_backward.gradient()
def _(ctx: Any, *cotangents: Tensor) -> Any:
    """Second derivatives, through the eager form: too rare for a kernel."""
    grad, *inputs = ctx.saved_tensors
    window, scale, dropout = ctx.numbers

    def composed(*differentiated: Tensor | None) -> Tensor:
        parts = list(_chunks((*differentiated, *inputs[3:]), Window(*window), scale, dropout))
        images = [[attend(chunk) for place, chunk in parts if place[0].start == i] for i in range(len(grad))]
        return torch.cat([torch.cat(heads, 1) for heads in images])

    return derivative_of_gradients(composed, [grad], inputs[:3], cotangents)


def _pose_shape(qkv: Tensor, pose: Tensor | None) -> tuple[int, ...]:
    return (0, qkv.shape[4], qkv.shape[4]) if pose is None else tuple(pose.shape)


def _contiguous(*inputs: Tensor | None) -> tuple[Any, Any, Any, Any]:
    qkv, position, pose, seed = (None if t is None else t.contiguous() for t in inputs)
    return qkv, position, pose, seed


def _upcast(*inputs: Tensor | None) -> tuple[Any, Any, Any, Any]:
    """Contiguous tensors of the type that the CPU computes in; the seed keeps its own."""
    *floats, seed = inputs
    assert floats[0] is not None
    dtype = accumulation_dtype(floats[0].dtype)
    return _contiguous(*(None if t is None else t.to(dtype) for t in floats), seed)


def _in_types_of(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv, position and pose in the types of the inputs."""
    return grads[0].to(inputs[0].dtype), grads[1].to(inputs[1].dtype), grads[2].to(inputs[0].dtype)


def _sizes(qkv: Tensor, position: Tensor, pose: Tensor | None) -> tuple[int, ...]:
    batch, _, heads, channels, order, height, width = qkv.shape
    posed = 0 if pose is None else pose.shape[0]
    return batch, heads, channels, order, position.shape[1], position.shape[0], posed, height, width


def _chunks(inputs: Any, window: Window, scale: float, dropout: float) -> Iterator[tuple[tuple[slice, slice], Problem]]:
    """The problem in chunks of some heads of one image."""
    qkv, position, pose, seed = inputs
    batch, _, heads, channels, order, height, width = qkv.shape
    neighbors = height * width if window.covers(height, width) else window.rows * window.columns
    elements = height * width * neighbors * order * (2 * order + 2 * position.shape[1] + channels)
    step = min(heads, chunk_size(elements, qkv.device))
    numbers = torch.arange(batch * heads, device=qkv.device).view(batch, heads)
    for sample in range(batch):
        for head in range(0, heads, step):
            part = (slice(sample, sample + 1), slice(head, head + step))
            given = (qkv[part[0], :, part[1]], position, pose, seed)
            yield part, Problem(*given, numbers[part], window, scale, dropout)
