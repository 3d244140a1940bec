"""What sees through torch's own operators alone."""

import torch

__all__ = ["is_forward_differentiated", "is_transformed"]


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or is_forward_differentiated()


def is_forward_differentiated() -> bool:
    """Whether forward-mode differentiation is at work, as in `torch.func.jvp`."""
    return torch.autograd.forward_ad._current_level >= 0
