"""The two layouts in memory of fields that operations take and return: contiguous, or channels last."""

from torch import Tensor

__all__ = ["empty", "in_memory", "is_last", "laid_out", "stored"]


def is_last(field: Tensor) -> bool:
    """Whether a field ``(B, C, |H|, height, width)`` lies in memory as ``(B, height, width, |H|, C)``."""
    _, channels, order, height, width = field.shape
    strides = (height * width * order * channels, 1, channels, width * order * channels, order * channels)
    return all(size == 1 or a == b for size, a, b in zip(field.shape, field.stride(), strides, strict=True)) and not (
        field.is_contiguous()
    )


def stored(field: Tensor, last: bool) -> Tensor:
    """A view of a field with its axes in the order of memory, to write to."""
    return field.permute(0, 3, 4, 2, 1) if last else field


def in_memory(field: Tensor, last: bool) -> Tensor:
    """A field as it lies in memory, copied if it does not lie so yet: to read from."""
    return stored(field, last).contiguous()


def laid_out(field: Tensor, last: bool) -> Tensor:
    """A field in one of the two layouts, itself or a copy."""
    found = in_memory(field, last)
    return found.permute(0, 4, 3, 1, 2) if last else found


def empty(field: Tensor, channels: int, height: int, width: int) -> Tensor:
    """A new field with so many channels, ``(B, channels, |H|, height, width)``, in the layout of another one."""
    batch, order = len(field), field.shape[2]
    if is_last(field):
        return field.new_empty(batch, height, width, order, channels).permute(0, 4, 3, 1, 2)
    return field.new_empty(batch, channels, order, height, width)
