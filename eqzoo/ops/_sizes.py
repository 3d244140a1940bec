"""The sizes of what operations return."""

__all__ = ["output_side"]


def output_side(side: int, taps: int, stride: int, padding: int, dilation: int) -> int:
    """The side of a convolution's output, ``⌊(side + 2 padding - dilation (taps - 1) - 1) / stride⌋ + 1``."""
    return (side + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
