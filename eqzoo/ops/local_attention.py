"""Group self-attention in windows of a field, without gathering the neighborhoods."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _backend, reference
from ._chunks import chunk_size
from ._dtypes import accumulation_dtype
from ._higher_derivatives import derivative_of_gradients
from ._local_attention_eager import Problem, Window, attend, attend_backward

__all__ = ["local_group_attention"]

_Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def local_group_attention(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None = None,
    log_measure: Tensor | None = None,
    *,
    kernel_size: tuple[int, int],
    dilation: int = 1,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """`group_self_attention` from each pose and place of a field to all poses of the places in a window around it.

    Places outside of the image are left out. A window of ``2·height − 1`` by ``2·width − 1`` is the whole image.
    The kernels keep their inputs alone for the backward pass; their peak memory beyond that is one head of one image,
    and the gradients of the positions for every head and image. Windows with gaps (``dilation`` above 1) have the eager
    form alone, a few heads at a time.

    Args:
        qkv: Queries, keys and values of the field, ``(B, 3, heads, d, |G|, height, width)``. The first channels of
            queries are compared with positions, the last ones with poses.
        position: The encoded positions of the window's taps, row by row, ``(p, |V|, rows·columns)``.
        pose: The encoded relative poses, ``(e, |G|, |G|)``, of query and key; None for none.
        log_measure: The logarithm of the weight of each pose of the keys, ``(|G|,)``, without a gradient; None for
            equal weights.
        kernel_size: The rows and columns of the window, in taps, odd.
        dilation: The step between taps, in pixels.
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
    _check(qkv, position, pose, log_measure, kernel_size, dilation, dropout)
    dtype, device = qkv.dtype, qkv.device
    position = position.to(dtype)
    pose = None if pose is None else pose.to(dtype)
    log_measure = None if log_measure is None else log_measure.detach().to(dtype)
    if _backend.forced("reference"):
        return reference.local_group_attention(
            qkv,
            position,
            pose,
            log_measure,
            kernel_size=kernel_size,
            dilation=dilation,
            scale=scale,
            dropout=dropout,
        )
    # The backward pass repeats the draws of the forward pass from this seed.
    seed = torch.randint(2**62, (1,), device=device) if dropout else None
    if _backend.plain():
        heads = torch.arange(qkv.shape[0] * qkv.shape[2], device=device).view(qkv.shape[0], qkv.shape[2])
        window = Window(*kernel_size, dilation)
        return attend(Problem(qkv, position, pose, log_measure, seed, heads, window, scale, dropout))
    return _attention(qkv, position, pose, log_measure, seed, *kernel_size, dilation, scale, dropout)


def _check(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    log_measure: Tensor | None,
    kernel_size: tuple[int, int],
    dilation: int,
    dropout: float,
) -> None:
    rows, columns = kernel_size
    if rows % 2 == 0 or columns % 2 == 0 or min(rows, columns, dilation) < 1:
        raise ValueError(
            f"windows have odd sides and a dilation of 1 or more, got {kernel_size} and dilation {dilation}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability below 1, got {dropout}")
    if qkv.ndim != 7 or qkv.shape[1] != 3:
        raise ValueError(f"qkv is (B, 3, heads, d, |G|, height, width), got {tuple(qkv.shape)}")
    if min(qkv.shape[-2:]) < 1:
        raise ValueError(f"an image has at least one pixel, got {tuple(qkv.shape)}")
    channels, order = qkv.shape[3:5]
    if position.ndim != 3 or position.shape[0] > channels or position.shape[2] != rows * columns:
        raise ValueError(f"position is (p, |V|, {rows * columns}) with p <= {channels}, got {tuple(position.shape)}")
    if pose is not None and (pose.ndim != 3 or pose.shape[0] > channels or tuple(pose.shape[1:]) != (order, order)):
        raise ValueError(f"pose is (e, {order}, {order}) with e <= {channels}, got {tuple(pose.shape)}")
    if log_measure is not None and tuple(log_measure.shape) != (order,):
        raise ValueError(f"log_measure is ({order},), got {tuple(log_measure.shape)}")


def _chunked(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    log_measure: Tensor | None,
    seed: Tensor | None,
    rows: int,
    columns: int,
    dilation: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Eager torch on some heads of one image at a time, in float32 at least."""
    out = _empty(qkv, position)
    given = _upcast_all(qkv, position, pose, log_measure, seed)
    with torch.autocast(qkv.device.type, enabled=False):
        for part, chunk in _chunks(*given, Window(rows, columns, dilation), scale, dropout):
            out[part] = attend(chunk)
    return out


def _chunked_backward(
    grad: Tensor,
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    log_measure: Tensor | None,
    seed: Tensor | None,
    rows: int,
    columns: int,
    dilation: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv, position and pose; that of no pose is empty."""
    given = _upcast_all(qkv, position, pose, log_measure, seed)
    grad = grad.to(given[0].dtype)
    grad_qkv, grad_position = torch.empty_like(given[0]), torch.zeros_like(given[1])
    grad_pose = given[0].new_zeros(_pose_shape(qkv, pose))
    with torch.autocast(qkv.device.type, enabled=False):
        for part, chunk in _chunks(*given, Window(rows, columns, dilation), scale, dropout):
            of_qkv, of_position, of_pose = attend_backward(chunk, grad[part])
            grad_qkv[part[0], :, part[1]] = of_qkv
            grad_position += of_position
            if of_pose is not None:
                grad_pose += of_pose
    return grad_qkv.to(qkv.dtype), grad_position.to(position.dtype), grad_pose.to(qkv.dtype)


_attention = _backend.operator("local_group_attention", _chunked, any_strides=True)
_attention_backward = _backend.operator("local_group_attention_backward", _chunked_backward, any_strides=True)


@_backend.register(_attention, "cpu", _chunked)
def _native(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    log_measure: Tensor | None,
    seed: Tensor | None,
    rows: int,
    columns: int,
    dilation: int,
    scale: float,
    dropout: float,
) -> Tensor:
    given = _upcast_all(qkv, position, pose, log_measure, seed)
    function = _backend.cpu_function("local_group_attention", "local_group_attention", *given[:2])
    if function is None or dilation > 1:
        return NotImplemented
    out = _empty(given[0], position)
    _backend.launch(function, *given, out, *_sizes(qkv, position, pose), rows, columns, scale, dropout)
    return out.to(qkv.dtype)


@_backend.register(_attention_backward, "cpu", _chunked_backward)
def _native_backward(
    grad: Tensor,
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    log_measure: Tensor | None,
    seed: Tensor | None,
    rows: int,
    columns: int,
    dilation: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given = _upcast_all(qkv, position, pose, log_measure, seed)
    function = _backend.cpu_function("local_group_attention", "local_group_attention_backward", *given[:2])
    if function is None or dilation > 1:
        return NotImplemented
    grad = grad.to(given[0].dtype).contiguous()
    grad_qkv, heads = torch.empty_like(given[0]), qkv.shape[0] * qkv.shape[2]
    grads = [grad.new_empty(heads, *shape) for shape in (position.shape, _pose_shape(qkv, pose))]
    sizes = _sizes(qkv, position, pose)
    _backend.launch(function, grad, *given, grad_qkv, *grads, *sizes, rows, columns, scale, dropout)
    return grad_qkv.to(qkv.dtype), grads[0].sum(0).to(position.dtype), grads[1].sum(0).to(qkv.dtype)


@_backend.register(_attention, "cuda", _chunked)
def _triton(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    log_measure: Tensor | None,
    seed: Tensor | None,
    rows: int,
    columns: int,
    dilation: int,
    scale: float,
    dropout: float,
) -> Tensor:
    if not _backend.on_cuda(qkv) or dilation > 1:
        return NotImplemented
    from .triton import local_group_attention as kernels

    return kernels.forward(*_contiguous(qkv, position, pose, log_measure, seed), (rows, columns), scale, dropout)


@_backend.register(_attention_backward, "cuda", _chunked_backward)
def _triton_backward(
    grad: Tensor,
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    log_measure: Tensor | None,
    seed: Tensor | None,
    rows: int,
    columns: int,
    dilation: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _backend.on_cuda(qkv) or dilation > 1:
        return NotImplemented
    from .triton import local_group_attention as kernels

    given = _contiguous(qkv, position, pose, log_measure, seed)
    return kernels.backward(grad.contiguous(), *given, (rows, columns), scale, dropout)


@_attention.register_fake
def _(qkv: Tensor, position: Tensor, *_: Any) -> Tensor:
    return _empty(qkv, position)


@_attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, position: Tensor, pose: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return grad_qkv, position.new_empty(position.shape), qkv.new_empty(_pose_shape(qkv, pose))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.constants = inputs[5:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    qkv, position, pose, log_measure, seed = ctx.saved_tensors
    grads = _attention_backward(grad, qkv, position, pose, log_measure, seed, *ctx.constants)
    return (*grads[:2], None if pose is None else grads[2], *[None] * 7)


def _setup_twice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.constants = inputs[6:]


def _backward_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    """Second derivatives, through the eager form: too rare for a kernel."""
    grad, qkv, position, pose, log_measure, seed = ctx.saved_tensors
    rows, columns, dilation, scale, dropout = ctx.constants

    def composed(qkv: Tensor, position: Tensor, pose: Tensor | None) -> Tensor:
        given = (qkv, position, pose, log_measure, seed)
        parts = list(_chunks(*given, Window(rows, columns, dilation), scale, dropout))
        images = [[attend(chunk) for place, chunk in parts if place[0].start == i] for i in range(len(qkv))]
        return torch.cat([torch.cat(heads, 1) for heads in images])

    found = derivative_of_gradients(composed, [grad], [qkv, position, pose], cotangents)
    return *found, *[None] * 7


_attention.register_autograd(_backward, setup_context=_setup_context)
_attention_backward.register_autograd(_backward_twice, setup_context=_setup_twice)


def _empty(qkv: Tensor, position: Tensor) -> Tensor:
    batch, _, heads, channels = qkv.shape[:4]
    return qkv.new_empty(batch, heads, channels, position.shape[1], *qkv.shape[-2:])


def _pose_shape(qkv: Tensor, pose: Tensor | None) -> tuple[int, ...]:
    return (0, qkv.shape[4], qkv.shape[4]) if pose is None else tuple(pose.shape)


def _contiguous(
    qkv: Tensor, position: Tensor, pose: Tensor | None, log_measure: Tensor | None, seed: Tensor | None
) -> _Given:
    pose, log_measure, seed = (None if t is None else t.contiguous() for t in (pose, log_measure, seed))
    return qkv.contiguous(), position.contiguous(), pose, log_measure, seed


def _upcast_all(
    qkv: Tensor, position: Tensor, pose: Tensor | None, log_measure: Tensor | None, seed: Tensor | None
) -> _Given:
    """Contiguous tensors of the type that the CPU computes in; the seed keeps its own."""
    dtype = accumulation_dtype(qkv.dtype)
    pose, log_measure = (None if t is None else t.to(dtype) for t in (pose, log_measure))
    return _contiguous(qkv.to(dtype), position.to(dtype), pose, log_measure, seed)


def _sizes(qkv: Tensor, position: Tensor, pose: Tensor | None) -> tuple[int, ...]:
    batch, _, heads, channels, order, height, width = qkv.shape
    posed = 0 if pose is None else pose.shape[0]
    return batch, heads, channels, order, position.shape[1], position.shape[0], posed, height, width


def _chunks(
    qkv: Tensor,
    position: Tensor,
    pose: Tensor | None,
    log_measure: Tensor | None,
    seed: Tensor | None,
    window: Window,
    scale: float,
    dropout: float,
) -> Iterator[tuple[tuple[slice, slice], Problem]]:
    """The problem in chunks of some heads of one image."""
    batch, _, heads, channels, order, height, width = qkv.shape
    neighbors = height * width if window.covers(height, width) else window.rows * window.columns
    elements = height * width * neighbors * order * (2 * order + 2 * position.shape[1] + channels)
    step = min(heads, chunk_size(elements, qkv.device))
    numbers = torch.arange(batch * heads, device=qkv.device).view(batch, heads)
    for sample in range(batch):
        for head in range(0, heads, step):
            part = (slice(sample, sample + 1), slice(head, head + step))
            given = (qkv[part[0], :, part[1]], position, pose, log_measure, seed)
            yield part, Problem(*given, numbers[part], window, scale, dropout)
