"""Triton kernels of the operations, for GPUs. The modules of this package need Triton."""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["on_own_device"]

P = ParamSpec("P")
T = TypeVar("T")


def on_own_device(function: Callable[P, T]) -> Callable[P, T]:
    """Makes the GPU of the first tensor the current one, on which kernels are launched."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0]
        tensor = first if isinstance(first, Tensor) else first[0]  # type: ignore[index]
        with torch.cuda.device_of(tensor) if tensor.is_cuda else contextlib.nullcontext():
            return function(*args, **kwargs)

    return run
