"""What sees through torch's own operators alone."""

import torch
from torch import Tensor

__all__ = ["has_memory", "is_observed", "is_transformed"]


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation, as in `torch.func.jvp`, is at work."""
    in_forward_mode = torch.autograd.forward_ad._current_level >= 0
    return in_forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def is_observed() -> bool:
    """Whether a dispatch mode sees each operator, as make_fx, fake tensors and torch's FLOP counter do.

    What a kernel writes into memory by itself would be hidden from it.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def has_memory(x: Tensor) -> bool:
    """Whether a tensor is one with memory of its own; gradients that are mapped over (``is_grads_batched``) are not."""
    try:
        return x.data_ptr() is not None
    except RuntimeError:
        return False
