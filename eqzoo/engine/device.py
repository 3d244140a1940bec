"""The device of a run: bfloat16 in hardware, subnormal numbers, and the threads that torch takes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import timm.optim.muon as muon_of_timm
import torch

from .._common import usable_cores
from ..ops._compile import cpu_flags, multiplies_bfloat16


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 numbers in hardware; other processors emulate them, slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return multiplies_bfloat16()


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether a device is a processor that is known not to multiply bfloat16; False where its flags cannot be read."""
    return device.type == "cpu" and bool(cpu_flags()) and not multiplies_bfloat16()


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    """Lets the processor take numbers below the smallest normal one (1e-38 in float32) for 0, in this thread.

    Gradients and moments of an optimizer that vanish become such numbers, and processors take over a hundred cycles for
    each. Threads that are started meanwhile do the same, then and afterwards; those that run already do not. The other
    threads of torch are started by its first operation that is large enough for them.
    """
    before = not torch.any(torch.full((1,), 1e-39, dtype=torch.float32) * 1)  # in float64 it is a normal number
    torch.set_flush_denormal(True)  # returns False, and does nothing, where the processor cannot
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def limited_threads() -> Iterator[None]:
    """Lets torch use no more threads than there are usable cores, unless the environment has ``OMP_NUM_THREADS``.

    In a container, torch counts the cores of the machine, and threads that wait for each other's core are slower than
    one.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and before > usable_cores():
        torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def muon_in_float32() -> Iterator[None]:
    """Lets timm's Muon orthogonalize its updates in float32 instead of bfloat16.

    Where a processor emulates bfloat16, its matrix products take 20 times as long as those in float32.
    """
    before = muon_of_timm.zeropower_via_newtonschulz
    muon_of_timm.zeropower_via_newtonschulz = partial(before, dtype=torch.float32)
    try:
        yield
    finally:
        muon_of_timm.zeropower_via_newtonschulz = before
