"""Local self-attention whose queries, keys and values pass through affine maps first."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _compile, _dispatch, reference
from .._chunks import chunks
from .._compile import WITH_BFLOAT16
from .._derivatives import derivative_of_gradients
from .._dispatch import Operator, check_pixels, check_shape, check_window
from .._dtypes import accumulation_dtype
from .._layout import empty, is_last, laid_out, stored
from ..reference import AffineBank, AffineBanks
from .eager import attend

__all__ = ["AffineBank", "AffineBanks", "affine_attention"]

_ORDERS = (1, 2, 4, 8)  # |H| of the groups of the pixel grid, which kernels are compiled for


def affine_attention(
    query: Tensor, key: Tensor, value: Tensor | None, banks: AffineBanks, kernel_size: int, num_heads: int, scale: float
) -> Tensor:
    """Attends from every place and output element to the neighbors of the place.

    Mapped neighbors, scores and weights are not stored: peak memory beyond inputs and output does not grow with the
    neighborhood.

    With q, k, v the mapped queries, keys and values (`reference.affine_map`), for every head:
    ``α(P, x, d) = softmax_d(scale · Σ_{c in head} q(c, P, x) k(c, P, d, x))`` and
    ``out(c, P, x) = Σ_d α(P, x, d) v(c, P, d, x)``. A head has contiguous channels.

    Args:
        query: The queries before their map, ``(B, C, |H|, height, width)``.
        key: The keys before their map, of the same shape.
        value: The values before their map, of the same shape. Where it or ``banks.value`` is None, the mapped keys are
            the values.
        banks: The affine maps.
        kernel_size: The side k of the neighborhood, in pixels, odd.
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
    channels, order = query.shape[1:3]
    for name, field in zip(banks._fields, fields, strict=False):
        check_shape(name, field, query.shape[0], channels // num_heads * num_heads, *query.shape[2:])
    check_pixels(query)
    check_window(kernel_size)
    for name, bank, taps in zip(banks._fields, banks, (1, kernel_size**2, kernel_size**2), strict=True):
        if bank is not None:
            check_shape(f"psi of the {name} map", bank.psi, channels, order, order, taps)
            check_shape(f"beta of the {name} map", bank.beta, channels, order, taps)
    if _dispatch.forced("reference"):
        return reference.affine_attention(query, key, value, banks, kernel_size, num_heads, scale)
    if _dispatch.plain():
        return attend(query, key, value, banks, kernel_size, num_heads, scale)
    maps = [_complete(key, banks.query, 1), _complete(key, banks.key, kernel_size)]
    if len(fields) == 3 and banks.value is not None:
        maps.append(_complete(key, banks.value, kernel_size))
    dtype = torch.promote_types(query.dtype, key.dtype)
    tensors = [*(field.to(dtype) for field in fields), *(part for bank in maps for part in bank)]
    out: Tensor = _attend(tensors, kernel_size, num_heads, scale)
    return out


def _complete(x: Tensor, bank: AffineBank, kernel_size: int) -> tuple[Tensor, Tensor]:
    """The two parts as tensors, for kernels: the identity and zeros in place of None."""
    channels, order = x.shape[1:3]
    psi, beta = bank
    if psi is None:
        psi = torch.eye(order, dtype=x.dtype, device=x.device)[None, :, :, None].expand(
            channels, -1, -1, kernel_size**2
        )
    return psi, x.new_zeros(channels, order, kernel_size**2) if beta is None else beta


# The operators take one list, so that their gradients are such a list: the fields (queries, keys and, where they are
# not the mapped keys, values), then psi and beta of the map of each.


def _chunked(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    """Eager torch on a few images at a time."""
    out = _empty_field(tensors)
    for part in _image_chunks(tensors[0], kernel_size):
        out[part] = _from_list(kernel_size, num_heads, scale, *_of_images(tensors, part))
    return out


def _chunked_backward(
    grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float
) -> list[Tensor]:
    grads = [g.zero_() for g in _empty_gradients(grad, tensors)]
    for part in _image_chunks(tensors[0], kernel_size):
        # Autograd is off inside an operator; torch.func is not.
        forward = partial(_from_list, kernel_size, num_heads, scale)
        vjp = torch.func.vjp(forward, *_of_images(tensors, part))[1]
        for total, found in zip(_of_images(grads, part), vjp(grad[part]), strict=True):
            total += found
    return grads


def _empty_field(tensors: Sequence[Tensor], *_: Any) -> Tensor:
    query = tensors[0]
    return empty(query, query.shape[1], *query.shape[3:])


def _empty_gradients(grad: Tensor, tensors: Sequence[Tensor], *_: Any) -> list[Tensor]:
    fields = len(tensors) // 3
    maps = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors[fields:]]
    return [*(_empty_field(tensors) for _ in range(fields)), *maps]


_attend = Operator(
    "affine_attention(Tensor[] tensors, SymInt kernel_size, SymInt num_heads, float scale) -> Tensor",
    _chunked,
    _empty_field,
)
_attend_backward = Operator(
    "affine_attention_backward(Tensor grad, Tensor[] tensors, SymInt kernel_size, SymInt num_heads, float scale) "
    "-> Tensor[]",
    _chunked_backward,
    _empty_gradients,
)


@_attend.gradient()
def _(ctx: Any, grad: Tensor) -> tuple[list[Tensor]]:
    return (_attend_backward(grad, ctx.saved_tensors, *ctx.numbers),)


@_attend_backward.gradient()
def _(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
    """Second derivatives, through the eager form: too rare for a kernel."""
    grad, *tensors = ctx.saved_tensors
    of_grad, *rest = derivative_of_gradients(partial(_from_list, *ctx.numbers), [grad], tensors, cotangents)
    return of_grad, rest


@_attend.kernel("cpu")
def _native(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    query, last = tensors[0], is_last(tensors[0])
    inputs = _for_kernels(tensors)
    function = _cpu_function("affine_attention", inputs)
    if function is None:
        return NotImplemented
    out = torch.empty_like(inputs[0])
    arguments = _stored([*_with_gaps(inputs), out], last)
    _compile.launch(function, *arguments, *query.shape, kernel_size, num_heads, scale, last)
    return out.to(query.dtype)


@_attend_backward.kernel("cpu")
def _native_backward(
    grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float
) -> list[Tensor]:
    query, last = tensors[0], is_last(tensors[0])
    if not len(query):  # whose memory is at no address, which the kernel takes for no values
        return [torch.zeros_like(t) for t in tensors]
    inputs = _for_kernels(tensors)
    function = _cpu_function("affine_attention_backward", inputs)
    if function is None:
        return NotImplemented
    grads = [torch.empty_like(t) for t in inputs]
    grad = laid_out(grad.to(inputs[0].dtype), last)
    arguments = _stored([grad, *_with_gaps(inputs), *_with_gaps(grads)], last)
    _compile.launch(function, *arguments, *query.shape, kernel_size, num_heads, scale, last)
    return [g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]


@_attend.kernel("cuda")
def _triton(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    if not (_dispatch.on_cuda(*tensors) and tensors[0].shape[2] in _ORDERS):
        return NotImplemented
    from . import cuda as kernels
    from . import cuda_half as half

    if half.fits(tensors[0], num_heads):
        out = half.forward(tensors, kernel_size, num_heads, scale)
    else:
        out = kernels.forward([t.contiguous() for t in tensors], kernel_size, num_heads, scale)
    return laid_out(out, is_last(tensors[0]))


@_attend_backward.kernel("cuda")
def _triton_backward(
    grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float
) -> list[Tensor]:
    if not (_dispatch.on_cuda(grad, *tensors) and tensors[0].shape[2] in _ORDERS):
        return NotImplemented
    from . import cuda as kernels
    from . import cuda_half as half

    if half.fits(tensors[0], num_heads):
        grads = half.backward(grad, tensors, kernel_size, num_heads, scale)
    else:
        grads = kernels.backward(grad.contiguous(), [t.contiguous() for t in tensors], kernel_size, num_heads, scale)
    return [laid_out(g, g.ndim == 5 and is_last(tensors[0])) for g in grads]


def _cpu_function(name: str, inputs: Sequence[Tensor]) -> Any:
    if inputs[0].shape[2] not in _ORDERS or not all(t.is_cpu for t in inputs):
        return None
    fields = inputs[: len(inputs) // 3]
    return _compile.cpu_function("asc/cpu", name, *fields, scalars=WITH_BFLOAT16)


# Fields that an operator returns, and those that its kernel reads, have the layout of the queries.


def _stored(tensors: Sequence[Tensor | None], last: bool) -> list[Tensor | None]:
    """Views of fields with their axes in the order of memory; maps, and what is missing, as they are."""
    return [t if t is None or t.ndim != 5 else stored(t, last) for t in tensors]


def _for_kernels(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fields in the layout of the queries, of a type that kernels read, and maps of the type that it is computed in."""
    fields, query = len(tensors) // 3, tensors[0]
    dtype = query.dtype if query.dtype in WITH_BFLOAT16 else accumulation_dtype(query.dtype)
    maps = [t.to(accumulation_dtype(dtype)).contiguous() for t in tensors[fields:]]
    return [*(laid_out(t.to(dtype), is_last(query)) for t in tensors[:fields]), *maps]


def _with_gaps(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The nine tensor arguments of C++, None where there are no values."""
    if len(tensors) == 9:
        return [*tensors]
    return [*tensors[:2], None, *tensors[2:], None, None]


def _from_list(kernel_size: int, num_heads: int, scale: float, *tensors: Tensor) -> Tensor:
    fields = len(tensors) // 3
    query, key, *value = tensors[:fields]
    maps = [AffineBank(*tensors[i : i + 2]) for i in range(fields, len(tensors), 2)]
    banks = AffineBanks(maps[0], maps[1], maps[2] if value else None)
    return attend(query, key, value[0] if value else None, banks, kernel_size, num_heads, scale)


def _image_chunks(query: Tensor, kernel_size: int) -> Iterator[slice]:
    return chunks(len(query), query[:1].numel() * kernel_size**2, query.device)


def _of_images(tensors: Sequence[Tensor], part: slice) -> list[Tensor]:
    fields = len(tensors) // 3
    return [*(t[part] for t in tensors[:fields]), *tensors[fields:]]
