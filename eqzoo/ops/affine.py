"""Local self-attention whose queries, keys and values pass through affine maps first."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _backend, reference
from ._chunks import chunks
from ._dtypes import accumulation_dtype
from ._higher_derivatives import derivative_of_gradients
from ._layout import empty, is_last, laid_out, stored
from .reference import AffineBank, AffineBanks

__all__ = ["AffineBank", "AffineBanks", "affine_attention", "affine_map"]

_ORDERS = (1, 2, 4, 8)  # |H| of the groups of the pixel grid, which kernels are compiled for


def affine_map(x: Tensor, bank: AffineBank, kernel_size: int) -> Tensor:
    """Maps the neighbors of every place, for every output element.

    ``out(c, P, d, x) = Σ_R f(c, R, x + d) ψ(c, P, R, d) + β(c, P, d)``; neighbors outside of the image are 0 and are
    mapped to β.

    Args:
        x: The field f, ``(B, C, |H|, height, width)``.
        bank: ψ and β.
        kernel_size: The side k of the neighborhood, in pixels, odd.

    Returns:
        ``(B, C, |H|, k², height·width)``.

    References:
        Affine Self Convolution (Diaconu and Worrall, 2019), equations 10 and 21, https://arxiv.org/abs/1911.07704
    """
    if _backend.forced("reference"):
        return reference.affine_map(x, bank, kernel_size)
    return _mapped(x, bank, kernel_size)


def _mapped(x: Tensor, bank: AffineBank, kernel_size: int) -> Tensor:
    """`affine_map` as a convolution, also inside of an operator that is differentiated by torch.func."""
    channels, order, height, width = x.shape[1:]
    margin, taps = kernel_size // 2, kernel_size**2
    if bank.psi is None:
        seen = F.unfold(x.flatten(1, 2), kernel_size, padding=margin).unflatten(1, (channels, order, taps))
        return seen if bank.beta is None else seen + bank.beta.to(x.dtype).unsqueeze(-1)
    # Each pixel is mapped for all offsets at which it is a neighbor, and the results are shifted into place.
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
    """Attends from every place and output element to the neighbors of the place.

    Mapped neighbors, scores and weights are not stored: peak memory beyond inputs and output does not grow with the
    neighborhood.

    With q, k, v the mapped queries, keys and values (`affine_map`), for every head:
    ``α(P, x, d) = softmax_d(scale · Σ_{c in head} q(c, P, x) k(c, P, d, x))`` and
    ``out(c, P, x) = Σ_d α(P, x, d) v(c, P, d, x)``. A head has contiguous channels.

    Args:
        query: The queries before their map, ``(B, C, |H|, height, width)``.
        key: The keys before their map, of the same shape.
        value: The values before their map, of the same shape; ignored where ``banks.value`` is None.
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
    if any(field.shape != query.shape for field in fields) or query.shape[1] % num_heads:
        shapes = ", ".join(str(tuple(field.shape)) for field in fields)
        raise ValueError(
            f"queries, keys and values have one shape, and num_heads divides their channels; got {shapes} and "
            f"{num_heads} heads"
        )
    if min(query.shape[-2:]) < 1:
        raise ValueError(f"an image has at least one pixel, got {tuple(query.shape)}")
    _check_maps(query, kernel_size, banks)
    if _backend.forced("reference"):
        return reference.affine_attention(query, key, value, banks, kernel_size, num_heads, scale)
    if _backend.plain():
        return _eager(query, key, value, banks, kernel_size, num_heads, scale)
    maps = [_complete(key, banks.query, 1), _complete(key, banks.key, kernel_size)]
    if len(fields) == 3 and banks.value is not None:
        maps.append(_complete(key, banks.value, kernel_size))
    dtype = torch.promote_types(query.dtype, key.dtype)
    tensors = [*(field.to(dtype) for field in fields), *(part for bank in maps for part in bank)]
    out: Tensor = _attend(tensors, kernel_size, num_heads, scale)
    return out


def _check_maps(query: Tensor, kernel_size: int, banks: AffineBanks) -> None:
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size is odd, so that windows have a center pixel, got {kernel_size}")
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
    """The exported form: the mapped neighbors of all images at once, by one grouped convolution."""
    heads = (num_heads, query.shape[1] // num_heads)
    queries = scale * _mapped(query, banks.query, 1).unflatten(1, heads)
    keys = _mapped(key, banks.key, kernel_size).unflatten(1, heads)
    weights = (queries * keys).sum(2).softmax(3).unsqueeze(2)
    if value is None or banks.value is None:
        values = keys
    else:
        values = _mapped(value, banks.value, kernel_size).unflatten(1, heads)
    out = (weights.to(values.dtype) * values).sum(4)
    return out.flatten(1, 2).unflatten(-1, query.shape[-2:])


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
    out = _empty_field(tensors[0])
    for part in _image_chunks(tensors[0], kernel_size):
        out[part] = _from_list(kernel_size, num_heads, scale, *_of_images(tensors, part))
    return out


def _chunked_backward(
    grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float
) -> list[Tensor]:
    grads = [g.zero_() for g in _empty_gradients(tensors)]
    for part in _image_chunks(tensors[0], kernel_size):
        # Autograd is off inside an operator; torch.func is not.
        forward = partial(_from_list, kernel_size, num_heads, scale)
        vjp = torch.func.vjp(forward, *_of_images(tensors, part))[1]
        for total, found in zip(_of_images(grads, part), vjp(grad[part]), strict=True):
            total += found
    return grads


_attend = _backend.operator("affine_attention", _chunked)
_attend_backward = _backend.operator("affine_attention_backward", _chunked_backward)


@_backend.register(_attend, "cpu", _chunked)
def _native(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    query, last = tensors[0], is_last(tensors[0])
    inputs = _for_kernels(tensors)
    function = _cpu_function("affine_attention", inputs)
    if function is None:
        return NotImplemented
    out = torch.empty_like(inputs[0])
    arguments = _stored([*_with_gaps(inputs), out], last)
    _backend.launch(function, *arguments, *query.shape, kernel_size, num_heads, scale, last)
    return out.to(query.dtype)


@_backend.register(_attend_backward, "cpu", _chunked_backward)
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
    _backend.launch(function, *arguments, *query.shape, kernel_size, num_heads, scale, last)
    return [g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]


@_backend.register(_attend, "cuda", _chunked)
def _triton(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    if not (_backend.on_cuda(*tensors) and tensors[0].shape[2] in _ORDERS):
        return NotImplemented
    from .triton import affine_attention as kernels
    from .triton import affine_attention_half as half

    if half.fits(tensors[0], num_heads):
        out = half.forward(tensors, kernel_size, num_heads, scale)
    else:
        out = kernels.forward([t.contiguous() for t in tensors], kernel_size, num_heads, scale)
    return laid_out(out, is_last(tensors[0]))


@_backend.register(_attend_backward, "cuda", _chunked_backward)
def _triton_backward(
    grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float
) -> list[Tensor]:
    if not (_backend.on_cuda(grad, *tensors) and tensors[0].shape[2] in _ORDERS):
        return NotImplemented
    from .triton import affine_attention as kernels
    from .triton import affine_attention_half as half

    if half.fits(tensors[0], num_heads):
        grads = half.backward(grad, tensors, kernel_size, num_heads, scale)
    else:
        grads = kernels.backward(grad.contiguous(), [t.contiguous() for t in tensors], kernel_size, num_heads, scale)
    return [laid_out(g, g.ndim == 5 and is_last(tensors[0])) for g in grads]


@_attend.register_fake
def _(tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> Tensor:
    return _empty_field(tensors[0])


@_attend_backward.register_fake
def _(grad: Tensor, tensors: Sequence[Tensor], kernel_size: int, num_heads: int, scale: float) -> list[Tensor]:
    return _empty_gradients(tensors)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, *ctx.numbers = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None, None, None]:
    return _attend_backward(grad, ctx.saved_tensors, *ctx.numbers), None, None, None


def _keep_twice(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    grad, tensors, *ctx.numbers = inputs
    ctx.save_for_backward(grad, *tensors)


def _gradients_twice(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
    """Second derivatives, through the eager form: too rare for a kernel."""
    grad, *tensors = ctx.saved_tensors
    of_grad, *rest = derivative_of_gradients(partial(_from_list, *ctx.numbers), [grad], tensors, cotangents)
    return of_grad, rest, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)
_attend_backward.register_autograd(_gradients_twice, setup_context=_keep_twice)


def _cpu_function(name: str, inputs: Sequence[Tensor]) -> Any:
    if inputs[0].shape[2] not in _ORDERS or not all(t.is_cpu for t in inputs):
        return None
    fields = inputs[: len(inputs) // 3]
    return _backend.cpu_function("affine_attention", name, *fields, scalars=_backend.WITH_BFLOAT16)


# The fields that an operator returns, and those that its kernel reads, have the layout of the queries.


def _empty_field(query: Tensor) -> Tensor:
    return empty(query, query.shape[1], *query.shape[3:])


def _stored(tensors: Sequence[Tensor | None], last: bool) -> list[Tensor | None]:
    """Views of fields with their axes in the order of memory; maps, and what is missing, as they are."""
    return [t if t is None or t.ndim != 5 else stored(t, last) for t in tensors]


def _empty_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    fields = len(tensors) // 3
    maps = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors[fields:]]
    return [*(_empty_field(tensors[0]) for _ in range(fields)), *maps]


def _for_kernels(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fields in the layout of the queries, of a type that kernels read, and maps of the type that it is computed in."""
    fields, query = len(tensors) // 3, tensors[0]
    dtype = query.dtype if query.dtype in _backend.WITH_BFLOAT16 else accumulation_dtype(query.dtype)
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
    return _eager(query, key, value[0] if value else None, banks, kernel_size, num_heads, scale)


def _image_chunks(query: Tensor, kernel_size: int) -> Iterator[slice]:
    return chunks(len(query), query[:1].numel() * kernel_size**2, query.device)


def _of_images(tensors: Sequence[Tensor], part: slice) -> list[Tensor]:
    fields = len(tensors) // 3
    return [*(t[part] for t in tensors[:fields]), *tensors[fields:]]
