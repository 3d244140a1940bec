"""Layouts of fields in memory, contiguous or channels last, and the sides of outputs."""

from collections.abc import Sequence

from torch import Tensor

# The axes of a field from the fastest in memory to the slowest: contiguous, and channels last.
FIRST, LAST = (4, 3, 2, 1, 0), (1, 2, 4, 3, 0)


def follow(x: Tensor, axes: Sequence[int], exactly: bool = False) -> bool:
    """Whether these axes, the fastest one first, follow each other in memory without gaps.

    An axis of one element may have any stride; ``exactly``, it has the one that it would have with more elements.
    """
    sizes, strides = x.shape, x.stride()
    step = 1
    for axis in axes:
        if strides[axis] != step and (exactly or sizes[axis] != 1):
            return False
        step *= sizes[axis]
    return True


def is_last(field: Tensor) -> bool:
    """Whether a field ``(B, C, |H|, height, width)`` lies in memory as ``(B, height, width, |H|, C)`` alone."""
    return follow(field, LAST) and not follow(field, FIRST)


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


def output_side(side: int, taps: int, stride: int, padding: int, dilation: int) -> int:
    """The side of a convolution's output, ``⌊(side + 2 padding - dilation (taps - 1) - 1) / stride⌋ + 1``."""
    return (side + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
