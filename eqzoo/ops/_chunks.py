"""Chunk sizes: how much of an operation's intermediate results is in memory at a time."""

from collections.abc import Iterator

import torch

# In elements. On a CPU about a core's cache: larger chunks are slower. On a GPU enough to keep it busy.
CPU_ELEMENTS = 2**20
GPU_ELEMENTS = 2**26
# An exported graph cannot be chunked by image, as it does not know the batch size; few larger operators run faster.
EXPORTED_ELEMENTS = 2**21


def chunk_size(elements: int, device: torch.device) -> int:
    """How many items to process at once, at so many elements of intermediate results an item; at least 1."""
    budget = CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS
    return max(1, budget // max(1, elements))


def chunks(length: int, elements: int, device: torch.device) -> Iterator[slice]:
    """The slices of an axis of that length in chunks of `chunk_size`."""
    step = chunk_size(elements, device)
    return (slice(first, min(first + step, length)) for first in range(0, length, step))
