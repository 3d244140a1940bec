"""Checks of a layer's input: its shape, and the sizes at which strided windows are equivariant."""

import operator
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from ..groups import Group

M = TypeVar("M", bound=nn.Module)


class SizeError(ValueError):
    """A layer is not equivariant, or has no output, at the size of its input.

    Args:
        reason: Why.
        remedy: The sizes of the input that would work.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return ". ".join(part for part in (self.reason, self.remedy) if part)


def check_arguments(group: Group, **numbers: int) -> None:
    """Raises TypeError unless ``group`` is a `Group` and the others, which the error names, are whole numbers."""
    if not isinstance(group, Group):
        raise TypeError(f"the first argument is a group, such as eqzoo.P4 or eqzoo.Group(4); got {group!r}")
    for name, value in numbers.items():
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is one whole number; got {value!r}") from None


def check_field(layer: nn.Module, x: Tensor, channels: int | None, order: int | None) -> None:
    """Raises ValueError unless a layer is given a regular field, or an image where ``order`` is None.

    Args:
        layer: The layer, named in the error.
        x: The input, ``(B, channels, order, height, width)`` or ``(B, channels, height, width)``.
        channels: The number of fields, or of channels of the image; None for any.
        order: The order of the group; None for an image.
    """
    lead = [channels] if order is None else [channels, order]
    fits = x.ndim == len(lead) + 3 and all(n in (None, side) for n, side in zip(lead, x.shape[1:], strict=False))
    if not fits:
        shape = ", ".join("C" if n is None else str(n) for n in lead)
        raise ValueError(f"{layer_name(layer)} takes (B, {shape}, height, width), got {tuple(x.shape)}")


def layer_name(layer: nn.Module | str) -> str:
    """The layer as it is printed, without its children."""
    return layer if isinstance(layer, str) else f"{type(layer).__name__}({layer.extra_repr()})"


def check_size(
    module: nn.Module | str, group: Group, x: Tensor, span: int, stride: int, padding: int, exact: bool = True
) -> None:
    """Raises SizeError unless a strided window samples an image and its transformed copies at the same pixels.

    The first window starts at the first pixel, and the last one has to end at the last pixel, along each axis that the
    group reverses: ``(side + 2·padding − span) % stride == 0``. Rotations reverse both axes, a reflection alone
    reverses the width, and translations reverse none.

    Args:
        module: The layer, or its name, for the error.
        group: The group under which the layer is to be equivariant.
        x: The input, ``(..., height, width)``.
        span: The side of the window including its dilation, in pixels.
        stride: The step of the window, in pixels.
        padding: The pixels added to each side.
        exact: Whether to check the condition; with False, only that the window fits into the image.

    Raises:
        SizeError: If the window is larger than the padded input, or the condition does not hold.
    """
    height, width = x.shape[-2:]
    room = min(height, width) + 2 * padding - span
    if room < 0:
        raise SizeError(
            f"{layer_name(module)} has a window of {span} pixels, and an input of {height} x {width} with a padding of "
            f"{padding}",
            f"Give an input that is at least {-room} pixels larger, or a larger padding",
        )
    if stride == 1 or not exact:
        return
    sides = {"height": height} if group.rotations > 1 else {}
    if group.order > 1:
        sides["width"] = width
    for axis, side in sides.items():
        rest = (side + 2 * padding - span) % stride
        if rest:
            raise SizeError(
                f"{layer_name(module)} would break {group.name}: at {axis} {side} its last window ends {rest} pixels "
                "before the edge, so a transformed image is sampled at other places",
                f"It is exact at {axis} {side - rest} or {side - rest + stride}; or use stride 1 and then a pool whose "
                "size divides the side",
            )


def with_size_check(plain: M, layer: nn.Module, group: Group, span: int, stride: int, padding: int, exact: bool) -> M:
    """Adds the size check of an equivariant layer to the plain layer that replaces it.

    Args:
        plain: The plain layer, which gets a forward pre-hook.
        layer: The equivariant layer, named in the error.
        group: The group under which the layer is equivariant.
        span: The side of the window including its dilation, in pixels.
        stride: The step of the window, in pixels.
        padding: The pixels added to each side.
        exact: Whether sizes are checked.
    """
    if exact and stride > 1 and group.order > 1:
        check = partial(_check_input, name=layer_name(layer), group=group, span=span, stride=stride, padding=padding)
        plain.register_forward_pre_hook(check, with_kwargs=True)
    return plain


def _check_input(
    _: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor], name: str, **window: Any
) -> None:
    check_size(name, x=(*inputs, *keywords.values())[0], **window)
