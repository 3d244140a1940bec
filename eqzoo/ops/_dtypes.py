"""Data types: what an operation is computed in, and accumulated in."""

import functools

import torch
from torch import Tensor


def promote(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one type: autocast's where it is on, else the one that holds them all."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    device = tensors[0].device.type
    # There is no autocast for the meta device.
    if dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over values of this type are computed in: float32 for half precision, else the type itself."""
    return torch.promote_types(dtype, torch.float32)


def upcast(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors of the type in which sums over the first one are computed, see `accumulation_dtype`."""
    dtype = accumulation_dtype(tensors[0].dtype)
    return [x.to(dtype).contiguous() for x in tensors]
