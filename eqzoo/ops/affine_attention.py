"""Local self-attention whose queries, keys and values pass through affine maps first."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _backend

__all__ = ["AffineBank", "AffineBanks", "affine_attention", "affine_map"]

_ORDERS = (1, 2, 4, 8)  # of the groups of the pixel grid; kernels are written for these


class AffineBank(NamedTuple):
    """An affine map at every output element: what it multiplies and what it adds.

    Args:
        psi: ``(C, |H|, |H|, k²)``: channel, output element P, input element R, offset; None leaves R = P as it is.
        beta: ``(C, |H|, k²)``: channel, output element, offset; None adds nothing.
    """

    psi: Tensor | None
    beta: Tensor | None


class AffineBanks(NamedTuple):
    """The affine maps of one layer.

    Args:
        query: The map of the queries, with ``k = 1``.
        key: The map of the keys.
        value: The map of the values; None makes the mapped keys the values.
    """

    query: AffineBank
    key: AffineBank
    value: AffineBank | None


def affine_map(x: Tensor, bank: AffineBank, kernel_size: int) -> Tensor:
    """Maps the neighbours of every place, seen from every output element.

    ``out(c, P, d, x) = Σ_R f(c, R, x + d) ψ(c, P, R, d) + β(c, P, d)``; neighbours outside the picture are 0, so their
    image is β. β is added once, after the sum over R.

    Args:
        x: The field f, ``(B, C, |H|, height, width)``.
        bank: ψ and β.
        kernel_size: The side k of the neighbourhood, in pixels, odd.

    Returns:
        ``(B, C, |H|, k², height·width)``.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), equations 10 and 21, https://arxiv.org/abs/1911.07704
    """
    channels, order, height, width = x.shape[1:]
    margin, taps = kernel_size // 2, kernel_size**2
    if bank.psi is None:
        seen = F.unfold(x.flatten(1, 2), kernel_size, padding=margin).unflatten(1, (channels, order, taps))
        return seen if bank.beta is None else seen + bank.beta.to(x.dtype).unsqueeze(-1)
    # Every pixel is mapped for all offsets that it is seen at, and the results are shifted into place.
    weight = bank.psi.to(x.dtype).transpose(2, 3).reshape(-1, order, 1, 1)
    bias = None if bank.beta is None else bank.beta.to(x.dtype).flatten()
    planes = F.pad(x.flatten(1, 2), (margin,) * 4)
    y = F.conv2d(planes, weight, bias, groups=channels).unflatten(1, (channels, order, taps))
    corners = [divmod(tap, kernel_size) for tap in range(taps)]
    windows = [y[:, :, :, d : d + 1, i : i + height, j : j + width] for d, (i, j) in enumerate(corners)]
    return torch.cat(windows, 3).flatten(-2)


def affine_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    banks: AffineBanks,
    kernel_size: int,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Attends from every place and output element to the neighbours of the place.

    Mapped neighbours, scores and weights are never kept: besides its inputs and its output it needs little memory,
    however large the neighbourhood.

    With q, k, v the mapped queries, keys and values (`affine_map`), for every head:
    ``α(P, x, d) = softmax_d(scale · Σ_{c in head} q(c, P, x) k(c, P, d, x))`` and
    ``out(c, P, x) = Σ_d α(P, x, d) v(c, P, d, x)``. A head owns contiguous channels.

    Args:
        query: The queries before their map, ``(B, C, |H|, height, width)``.
        key: The keys before their map, of the same shape.
        value: The values before their map, of the same shape; not read where ``banks.value`` is None.
        banks: The affine maps.
        kernel_size: The side k of the neighbourhood, in pixels, odd.
        num_heads: The number of heads; it divides C.
        scale: The factor of the scores.

    Returns:
        ``(B, C, |H|, height, width)``.

    Raises:
        ValueError: If the fields differ in shape, the heads do not divide C, the kernel is even, or a map has another
            shape.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), equations 20 to 24, https://arxiv.org/abs/1911.07704

    Example:
        >>> x = torch.zeros(2, 4, 1, 8, 8)
        >>> nothing = AffineBank(None, None)
        >>> affine_attention(x, x, x, AffineBanks(nothing, nothing, nothing), 3, num_heads=2, scale=1.0).shape
        torch.Size([2, 4, 1, 8, 8])
    """
    fields = [query, key] if banks.value is None or value is None else [query, key, value]
    if any(field.shape != query.shape for field in fields) or query.shape[1] % num_heads:
        shapes = ", ".join(str(tuple(field.shape)) for field in fields)
        raise ValueError(f"queries, keys and values need one shape and whole heads, got {shapes} and {num_heads} heads")
    _check_maps(query, kernel_size, banks)
    if _backend.plain():
        return _eager(query, key, value, banks, kernel_size, num_heads, scale)
    maps = [_whole(key, banks.query, 1), _whole(key, banks.key, kernel_size)]
    if len(fields) == 3 and banks.value is not None:
        maps.append(_whole(key, banks.value, kernel_size))
    dtype = torch.promote_types(query.dtype, key.dtype)
    tensors = [*(field.to(dtype) for field in fields), *(part for own in maps for part in own)]
    out: Tensor = _attend(tensors, kernel_size, num_heads, scale)
    return out


def _check_maps(query: Tensor, kernel_size: int, banks: AffineBanks) -> None:
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size is odd, so that a window has a centre, got {kernel_size}")
    channels, order = query.shape[1:3]
    for name, bank, taps in zip(banks._fields, banks, (1, kernel_size**2, kernel_size**2), strict=True):
        wanted = {"psi": (channels, order, order, taps), "beta": (channels, order, taps)}
        for part, shape in wanted.items():
            given = None if bank is None else getattr(bank, part)
            if given is not None and tuple(given.shape) != shape:
                raise ValueError(f"{part} of the {name} map is {shape}, got {tuple(given.shape)}")


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    banks: AffineBanks,
    kernel_size: int,
    num_heads: int,
    scale: float,
) -> Tensor:
    """The equations in torch's own operators; they hold the mapped neighbours of all pictures at once."""
    heads = (num_heads, query.shape[1] // num_heads)
    queries = scale * affine_map(query, banks.query, 1).unflatten(1, heads)
    keys = affine_map(key, banks.key, kernel_size).unflatten(1, heads)
    weights = (queries * keys).sum(2).softmax(3).unsqueeze(2)
    if value is None or banks.value is None:
        values = keys
    else:
        values = affine_map(value, banks.value, kernel_size).unflatten(1, heads)
    out = (weights.to(values.dtype) * values).sum(4)
    return out.flatten(1, 2).unflatten(-1, query.shape[-2:])


def _whole(x: Tensor, bank: AffineBank, kernel_size: int) -> tuple[Tensor, Tensor]:
    """A map with both its parts, for kernels: the identity and zeros in place of None."""
    channels, order = x.shape[1:3]
    psi, beta = bank
    if psi is None:
        psi = torch.eye(order, dtype=x.dtype, device=x.device)[None, :, :, None].expand(
            channels, -1, -1, kernel_size**2
        )
    return psi, x.new_zeros(channels, order, kernel_size**2) if beta is None else beta


# The operators take the fields (queries, keys and, where they are not the mapped keys, values) and then psi and beta of
# the map of each, all in one list, so that their gradients are such a list again.


@torch.library.custom_op("eqzoo::affine_attention", mutates_args=())
def _attend(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    query = tensors[0]
    if _triton_reads(tensors):
        from .triton import affine_attention as kernels

        return kernels.forward([t.contiguous() for t in tensors], kernel_size, num_heads, scale)
    function, inputs = _native("affine_attention", tensors)
    out = torch.empty(query.shape, dtype=inputs[0].dtype, device=query.device)
    if function is not None:
        _backend.launch(function, *_with_gaps(inputs), out, *query.shape, kernel_size, num_heads, scale)
        return out.to(query.dtype)
    for part in _parts(query, kernel_size):
        out[part] = _from_list(kernel_size, num_heads, scale, *_pick(tensors, part))
    return out


@torch.library.custom_op("eqzoo::affine_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float
) -> list[Tensor]:
    query = tensors[0]
    if _triton_reads([grad, *tensors]):
        from .triton import affine_attention as kernels

        return kernels.backward(grad.contiguous(), [t.contiguous() for t in tensors], kernel_size, num_heads, scale)
    function, inputs = _native("affine_attention_backward", tensors)
    if function is not None:
        grads = [torch.empty_like(t) for t in inputs]
        arguments = (grad.to(inputs[0].dtype).contiguous(), *_with_gaps(inputs), *_with_gaps(grads))
        _backend.launch(function, *arguments, *query.shape, kernel_size, num_heads, scale)
        return [g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
    for part in _parts(query, kernel_size):
        # Autograd rests inside an operator; torch.func does not.
        pull = torch.func.vjp(partial(_from_list, kernel_size, num_heads, scale), *_pick(tensors, part))[1]
        for to, found in zip(_pick(grads, part), pull(grad[part]), strict=True):
            to += found
    return grads


@_attend.register_fake
def _(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    return torch.empty_like(tensors[0], memory_format=torch.contiguous_format)


@_attend_backward.register_fake
def _(grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, *ctx.numbers = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None, None, None]:
    return _attend_backward(grad, ctx.saved_tensors, *ctx.numbers), None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)


def _triton_reads(tensors: Sequence[Tensor]) -> bool:
    return _backend.on_cuda(*tensors) and tensors[0].shape[2] in _ORDERS


def _native(name: str, tensors: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor]]:
    """The C++ function and what it reads, in single precision for all types but double; else None and the tensors."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    if not tensors[0].is_cpu or tensors[0].shape[2] not in _ORDERS:
        return None, tensors
    if _backend.cpu_function("affine_attention", name, torch.empty(0, dtype=dtype)) is None:
        return None, tensors
    inputs = [t.to(dtype).contiguous() for t in tensors]
    return _backend.cpu_function("affine_attention", name, *inputs), inputs


def _with_gaps(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The nine tensors of C++, with None where there are no values."""
    if len(tensors) == 9:
        return [*tensors]
    return [*tensors[:2], None, *tensors[2:], None, None]


def _from_list(kernel_size: int, num_heads: int, scale: float, *tensors: Tensor) -> Tensor:
    fields = len(tensors) // 3
    query, key, *value = tensors[:fields]
    maps = [AffineBank(*tensors[i : i + 2]) for i in range(fields, len(tensors), 2)]
    banks = AffineBanks(maps[0], maps[1], maps[2] if value else None)
    return _eager(query, key, value[0] if value else None, banks, kernel_size, num_heads, scale)


def _parts(query: Tensor, kernel_size: int) -> Iterator[slice]:
    """Parts of the batch whose mapped neighbours stay in a cache, or on other devices take some hundred megabytes."""
    numbers = query[:1].numel() * kernel_size**2
    step = max(1, (2**20 if query.is_cpu else 2**26) // max(1, numbers))
    return (slice(i, i + step) for i in range(0, query.shape[0], step))


def _pick(tensors: Sequence[Tensor], part: slice) -> list[Tensor]:
    fields = len(tensors) // 3
    return [*(t[part] for t in tensors[:fields]), *tensors[fields:]]
