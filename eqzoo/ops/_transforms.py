"""What sees through torch's own operators alone."""

import torch

__all__ = ["is_transformed"]


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation, as in `torch.func.jvp`, is at work."""
    in_forward_mode = torch.autograd.forward_ad._current_level >= 0
    return in_forward_mode or torch._C._functorch.peek_interpreter_stack() is not None
