"""Plain layers on planes that replace layers of fields, for deployed networks."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from ._padding import PaddingMode

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def written_out(plain: M, layer: nn.Module, order: int, **values: Tensor) -> M:
    """A plain layer with one value for each plane, ``(C·|H|,)``, where a layer of fields has one for each field.

    Args:
        plain: The plain layer, which gets the values in place.
        layer: The layer of fields, whose mode it gets; device and type are those of the values.
        order: The number of planes of a field, ``|H|``.
        **values: The values ``(C,)`` by the names that they have in the plain layer.
    """
    first = next(iter(values.values()))
    plain = plain.to(first.device, first.dtype)
    for name, value in values.items():
        getattr(plain, name).copy_(value.repeat_interleave(order))
    return plain.train(layer.training)


@torch.no_grad()
def plain_conv2d(
    weight: Tensor,
    bias: Tensor | None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    padding_mode: PaddingMode = "zeros",
) -> nn.Conv2d:
    """A plain convolution with a copy of these filters, ``(C', C / groups, k, k)``, and biases, ``(C',)`` or None."""
    out_planes, in_planes, kernel_size, _ = weight.shape
    conv = nn.Conv2d(
        in_planes * groups,
        out_planes,
        kernel_size,
        stride,
        padding,
        dilation,
        groups,
        bias=bias is not None,
        padding_mode=padding_mode,
        device=weight.device,
        dtype=weight.dtype,
    )
    conv.weight.copy_(weight)
    if conv.bias is not None and bias is not None:
        conv.bias.copy_(bias)
    return conv
