"""Group self-attention in windows of a field: neighbours are read where they lie, and are never gathered."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ._backend import cpu_function, launch, on_cuda, plain
from ._local_group_attention import Problem, Window, attend, attend_backward

__all__ = ["local_group_attention"]

_Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
_CHUNK = {"cpu": 2**21}  # numbers in work at a time, in eager torch: about a cache of them
_CHUNK_ELSEWHERE = 2**26


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

    Places outside of the picture are left out. A window of ``2·height − 1`` by ``2·width − 1`` is the whole picture.
    Kernels keep nothing but their inputs for the backward pass. Beside them they need room for one head of
    one picture, and for the gradients of the positions from every head and picture.

    Args:
        qkv: Queries, keys and values of the field, ``(B, 3, heads, d, |G|, height, width)``. The first channels of
            queries are compared with positions, the last ones with poses.
        position: The encoded positions of the window's taps, row by row, ``(p, |V|, rows·columns)``.
        pose: The encoded relative poses, ``(e, |G|, |G|)``, of query and key; None for none.
        log_measure: The logarithm of the weight of each pose of the keys, ``(|G|,)``, a constant; None for equal
            weights.
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
    # From this number the backward pass draws again what the forward pass drew.
    seed = torch.randint(2**62, (1,), device=device) if dropout else None
    if plain():
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
        raise ValueError(f"windows have odd sides and a step of 1 or more, got {kernel_size} and step {dilation}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability below 1, got {dropout}")
    if qkv.ndim != 7 or qkv.shape[1] != 3:
        raise ValueError(f"qkv is (B, 3, heads, d, |G|, height, width), got {tuple(qkv.shape)}")
    channels, order = qkv.shape[3:5]
    if position.ndim != 3 or position.shape[0] > channels or position.shape[2] != rows * columns:
        raise ValueError(f"position is (p, |V|, {rows * columns}) with p <= {channels}, got {tuple(position.shape)}")
    if pose is not None and (pose.ndim != 3 or pose.shape[0] > channels or tuple(pose.shape[1:]) != (order, order)):
        raise ValueError(f"pose is (e, {order}, {order}) with e <= {channels}, got {tuple(pose.shape)}")
    if log_measure is not None and tuple(log_measure.shape) != (order,):
        raise ValueError(f"log_measure is ({order},), got {tuple(log_measure.shape)}")


@torch.library.custom_op("eqzoo::local_group_attention", mutates_args=())
def _attention(
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
    window = Window(rows, columns, dilation)
    if on_cuda(qkv):
        from .triton import local_group_attention as kernels

        return kernels.forward(*_contiguous(qkv, position, pose, log_measure, seed), window, scale, dropout)
    out = _empty(qkv, position)
    given = _precise(qkv, position, pose, log_measure, seed)
    function = cpu_function("local_group_attention", "local_group_attention", *given[:2])
    if function is not None:
        result = torch.empty_like(out, dtype=given[0].dtype)
        launch(function, *given, result, *_sizes(qkv, position, pose), *window, scale, dropout)
        return result.to(out.dtype)
    with torch.autocast(qkv.device.type, enabled=False):
        for part, chunk in _chunks(*given, window, scale, dropout):
            out[part] = attend(chunk)
    return out


@_attention.register_fake
def _(
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
    return _empty(qkv, position)


@torch.library.custom_op("eqzoo::local_group_attention_backward", mutates_args=())
def _attention_backward(
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
    window = Window(rows, columns, dilation)
    if on_cuda(qkv):
        from .triton import local_group_attention as kernels

        given = _contiguous(qkv, position, pose, log_measure, seed)
        return kernels.backward(grad.contiguous(), *given, window, scale, dropout)
    given = _precise(qkv, position, pose, log_measure, seed)
    precise = given[0].dtype
    grad = grad.to(precise).contiguous()
    grad_qkv = torch.empty_like(given[0])
    grad_pose = qkv.new_zeros(_pose_shape(qkv, pose), dtype=precise)
    function = cpu_function("local_group_attention", "local_group_attention_backward", *given[:2])
    if function is not None:
        heads = qkv.shape[0] * qkv.shape[2]
        grads = [grad.new_empty(heads, *t.shape) for t in (position, grad_pose)]
        launch(function, grad, *given, grad_qkv, *grads, *_sizes(qkv, position, pose), *window, scale, dropout)
        grad_position, grad_pose = (t.sum(0) for t in grads)
    else:
        grad_position = torch.zeros_like(position, dtype=precise)
        with torch.autocast(qkv.device.type, enabled=False):
            for part, chunk in _chunks(*given, window, scale, dropout):
                fields, codes, poses = attend_backward(chunk, grad[part])
                grad_qkv[part[0], :, part[1]] = fields
                grad_position += codes
                if poses is not None:
                    grad_pose += poses
    return grad_qkv.to(qkv.dtype), grad_position.to(position.dtype), grad_pose.to(qkv.dtype)


@_attention_backward.register_fake
def _(
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
    grad_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return grad_qkv, torch.empty_like(position), qkv.new_empty(_pose_shape(qkv, pose))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ctx.save_for_backward(*inputs[:5])
    ctx.constants = inputs[5:]


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    qkv, position, pose, log_measure, seed = ctx.saved_tensors
    grads = _attention_backward(grad, qkv, position, pose, log_measure, seed, *ctx.constants)
    return (*grads[:2], None if pose is None else grads[2], *[None] * 7)


_attention.register_autograd(_backward, setup_context=_setup_context)


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


def _precise(
    qkv: Tensor, position: Tensor, pose: Tensor | None, log_measure: Tensor | None, seed: Tensor | None
) -> _Given:
    """The same in single precision at least, which is what the CPU computes in."""
    dtype = torch.promote_types(qkv.dtype, torch.float32)
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
    """The problem in pieces of some heads of one picture."""
    batch, _, heads, channels, order, height, width = qkv.shape
    neighbours = height * width if window.covers(height, width) else window.rows * window.columns
    size = height * width * neighbours * order * (2 * order + 2 * position.shape[1] + channels)
    step = max(1, min(heads, _CHUNK.get(qkv.device.type, _CHUNK_ELSEWHERE) // max(size, 1)))
    numbers = torch.arange(batch * heads, device=qkv.device).view(batch, heads)
    for sample in range(batch):
        for head in range(0, heads, step):
            part = (slice(sample, sample + 1), slice(head, head + step))
            given = (qkv[part[0], :, part[1]], position, pose, log_measure, seed)
            yield part, Problem(*given, numbers[part], window, scale, dropout)
