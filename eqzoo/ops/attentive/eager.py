"""Eager forms of the operators of attentive convolutions, and their gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._chunks import chunks
from .._layout import output_side
from ..reference import responses, spatial_attention


def attended_sum(response: Tensor, alpha: Tensor | None, spatial: Tensor | None, attention_dilation: int) -> Tensor:
    """``Σ_s α^X Σ_c α^C f̃`` of stored responses ``(B, C, S, O, height, width)``; an attention that is None is 1.

    Args:
        response: The responses.
        alpha: The channel attention, ``(B, S, C, O)``.
        spatial: The filters of the spatial attention.
        attention_dilation: The step between their taps.
    """
    attended = response if alpha is None else response * alpha.transpose(1, 2)[..., None, None]
    total = attended.sum(1)
    if spatial is None:
        return total.sum(1)
    weight = spatial_attention(total / attended.shape[1], attended.amax(1), spatial, attention_dilation)
    return (total * weight).sum(1)


# The numbers of responses: the poses S, stride, padding, dilation; those of sums: the dilation of the attention too.


def peaks(x: Tensor, filters: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The maxima of stored responses and their pixels."""
    values, places = responses(x, filters, *numbers).permute(0, 2, 1, 3, 4, 5).flatten(4).max(-1)
    return values, places.int()


def sums(x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, numbers: Sequence[int]) -> Tensor:
    """`attended_sum` of the responses."""
    return attended_sum(responses(x, filters, *numbers[:4]), alpha, spatial, numbers[4])


def response_peak(x: Tensor, filters: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor]:
    """The maximum over pixels of every response, ``(B, S, C, O)``, and the pixel where it is first reached."""
    peak, where = empty_peak(x, filters, numbers)
    for some in _images(x, filters):
        peak[some], where[some] = peaks(x[some], filters, numbers)
    return peak, where


def response_peak_backward(
    grad: Tensor, x: Tensor, filters: Tensor, where: Tensor, numbers: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of input and filters."""

    def values(x: Tensor, filters: Tensor) -> Tensor:
        return peaks(x, filters, numbers)[0]

    grads = _gradients(values, grad, [x, filters], batched=(0,))
    return grads[0], grads[1]


def response_sum(
    x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, numbers: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``Σ_s α^X Σ_c α^C f̃``, ``(B, O, height', width')``, and intermediate results for its gradient.

    Args:
        x: The input, ``(B, C·S, height, width)``.
        filters: The filters, ``(O, C·S, k, k)``; all tensors are of one type.
        alpha: The channel attention, ``(B, S, C, O)``, or None for ones.
        spatial: The filters of the spatial attention, ``(O, 2·S, n, n)``, or None for an attention of ones.
        numbers: As above, followed by whether a gradient will be computed.

    Returns:
        The sum; then, for the gradient through the spatial attention alone and otherwise empty, the sums and the
        maxima over channels and the channels of the maxima, each ``(B, S, height', width', O)``.
    """
    out = empty_sum(x, filters, alpha, spatial, numbers)
    for some in _images(x, filters):
        out[0][some] = sums(x[some], filters, None if alpha is None else alpha[some], spatial, numbers)
    return out


def response_sum_backward(
    grad: Tensor, x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, *kept_and_numbers: Any
) -> list[Tensor]:
    """The gradients of x, filters, alpha and spatial filters, empty for None."""
    function = partial(sums, numbers=kept_and_numbers[-1])
    return _gradients(function, grad, [x, filters, alpha, spatial], batched=(0, 2))


def empty_peak(x: Tensor, filters: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The results of `response_peak` without their values."""
    shape = (x.shape[0], numbers[0], x.shape[1] // numbers[0], filters.shape[0])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


def empty_sum(
    x: Tensor, filters: Tensor, alpha: Tensor | None, spatial: Tensor | None, numbers: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `response_sum` without their values."""
    poses, stride, padding, dilation, _, keep = numbers
    height, width = (output_side(side, filters.shape[-1], stride, padding, dilation) for side in x.shape[2:])
    batch, out = len(x), len(filters)
    # The Triton kernels compute them again, which is cheaper than keeping them; eager torch does not need them.
    keep = keep and spatial is not None and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    kept = (batch, poses, height, width, out) if keep else (0,)
    which = x.new_empty(kept, dtype=torch.int16)
    return x.new_empty(batch, out, height, width), x.new_empty(kept), x.new_empty(kept), which


def _gradients(
    function: Callable[..., Tensor], grad: Tensor, arguments: Sequence[Tensor | None], batched: tuple[int, ...]
) -> list[Tensor]:
    """The gradients of a function, a few images at a time, empty for None; ``batched`` arguments have an image axis."""
    given = {i: v for i, v in enumerate(arguments) if v is not None}
    totals = {i: torch.zeros_like(v, memory_format=torch.contiguous_format) for i, v in given.items()}

    def call(*tensors: Tensor) -> Tensor:
        values = dict(zip(given, tensors, strict=True))
        return function(*(values.get(i) for i in range(len(arguments))))

    for some in _images(given[0], given[1]):
        # Autograd is off inside an operator; torch.func is not.
        vjp = torch.func.vjp(call, *(v[some] if i in batched else v for i, v in given.items()))[1]
        for i, found in zip(given, vjp(grad[some]), strict=True):
            (totals[i][some] if i in batched else totals[i]).add_(found)
    return [totals[i] if i in totals else grad.new_empty(0) for i in range(len(arguments))]


def _images(x: Tensor, filters: Tensor) -> Iterator[slice]:
    return chunks(len(x), math.prod(x.shape[1:]) * len(filters), x.device)


def statistics(x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
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


def statistics_backward(grad: Tensor, x: Tensor, alpha: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and alpha."""
    mean, peak = (part.unsqueeze(1) for part in grad.chunk(2, 1))
    grad_attended = (mean / x.shape[1]).expand_as(x).scatter_add(1, which.unsqueeze(1).long(), peak)
    return grad_attended * alpha[..., None, None], (grad_attended * x).sum((3, 4))


def suppress(x: Tensor, alpha: Tensor | None, weight: Tensor) -> Tensor:
    """``x (1 − α^C α^X)``.

    Args:
        x: The field, ``(B, C, S, height, width)``.
        alpha: The channel attention ``α^C``, ``(B, C, S)``, or None for ones.
        weight: The spatial attention ``α^X``, ``(B, S, height, width)``; all are of one type.
    """
    attended = x if alpha is None else x * alpha[..., None, None]
    return x - attended * weight.unsqueeze(1)


def suppress_backward(grad: Tensor, x: Tensor, alpha: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, alpha and weight; that of alpha is empty for None."""
    place, both = weight.unsqueeze(1), grad * x
    if alpha is None:
        return grad - grad * place, x.new_empty(0), -both.sum(1)
    factor = alpha[..., None, None]
    return grad - grad * (factor * place), -(both * place).sum((3, 4)), -(both * factor).sum(1)
