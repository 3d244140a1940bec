"""How much a network computes: its multiply-adds, attention included."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from . import ops  # noqa: F401  registers the operators that are counted here

__all__ = ["multiply_adds"]

Shape = Sequence[int]


@torch.no_grad()
def multiply_adds(model: nn.Module, input_size: tuple[int, ...] | None = None) -> int:
    """The multiply-adds of one picture in evaluation mode.

    Counted are convolutions, products of matrices, and the sums over neighbours in all attention; every term of the
    formulas once, also where a kernel computes it twice to save memory. Not counted are norms, activations, softmax,
    pools and the transformation of filters. Half of what is called FLOPs where a multiply-add is two of them.

    Args:
        model: The network. Its mode is restored.
        input_size: The size of a picture, ``(C, height, width)``; by default ``model.input_size``.

    Returns:
        The number of multiply-adds.

    Example:
        >>> multiply_adds(nn.Conv2d(3, 8, 3, padding=1), (3, 10, 10))
        21600
    """
    size = tuple(model.input_size) if input_size is None else input_size  # type: ignore[arg-type]
    parameter = next(model.parameters())
    was_training = model.training
    model.eval()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    try:
        with counter:
            model(torch.zeros(1, *size, dtype=parameter.dtype, device=parameter.device))
    finally:
        model.train(was_training)
    return int(counter.get_total_flops()) // 2


def _formulas() -> dict[Any, Callable[..., int]]:
    """What each operator of `eqzoo.ops` counts; two for a multiply-add, as torch's counter has it."""
    own = torch.ops.eqzoo
    return {
        own.dynamic_depthwise: _dynamic_depthwise,
        own.generated_depthwise: _generated_depthwise,
        own.affine_attention: _affine_attention,
        own.response_peak: _response_peak,
        own.response_sum: _response_sum,
        own.suppress: _suppress,
        own.local_group_attention: _local_group_attention,
    }


def _dynamic_depthwise(kernel: Shape, value: Shape, *_: Any, **kwargs: Any) -> int:
    return 2 * math.prod(value) * kernel[3]


def _generated_depthwise(hidden: Shape, weight: Shape, bias: Shape, value: Shape, *_: Any, **kwargs: Any) -> int:
    slices, taps = weight[1:3]
    return 2 * (math.prod(hidden) * slices * taps + math.prod(value) * taps)


def _affine_attention(shapes: Sequence[Shape], kernel_size: int, *_: Any, **kwargs: Any) -> int:
    field, order, taps = math.prod(shapes[0]), shapes[0][2], kernel_size**2
    maps = order + order * taps * (len(shapes) // 3 - 1)  # of queries, keys and, where they have one, values
    return 2 * field * (maps + 2 * taps)


def _response_peak(x: Shape, filters: Shape, poses: int, *sampling: int, **kwargs: Any) -> int:
    return 2 * _responses(x, filters, sampling) * math.prod(filters[2:])


def _response_sum(
    x: Shape,
    filters: Shape,
    alpha: Shape | None,
    spatial: Shape | None,
    poses: int,
    *sampling: Any,
    **kwargs: Any,
) -> int:
    responses = _responses(x, filters, sampling[:3])
    channels = filters[1] // poses
    # With channel attention the peak has counted the responses.
    once = math.prod(filters[2:]) if alpha is None else 1
    of_maps = 0 if spatial is None else (1 + 2 * math.prod(spatial[2:])) * responses // channels
    return 2 * (responses * once + of_maps)


def _responses(x: Shape, filters: Shape, sampling: Sequence[int]) -> int:
    """How many numbers all responses are."""
    stride, padding, dilation = sampling
    sides = ((side + 2 * padding - dilation * (filters[2] - 1) - 1) // stride + 1 for side in x[2:])
    return x[0] * filters[0] * filters[1] * math.prod(sides)


def _suppress(x: Shape, *_: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x)


def _local_group_attention(qkv: Shape, position: Shape, *_: Any, **kwargs: Any) -> int:
    batch, heads, channels, order, height, width = qkv[0], *qkv[2:]
    parts, poses, taps = position
    taps = min(taps, height * width)  # a global window has places for all shifts, of which each query reads its own
    content = order * order * channels
    placed = parts * poses * order
    weights, values = poses * order * order, poses * order * channels
    return 2 * batch * heads * height * width * taps * (content + placed + weights + values)
