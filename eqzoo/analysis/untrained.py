"""What tells an untrained network, whose initial values hide what training would break."""

from torch import nn

from ..equivariance import is_constant

__all__ = ["looks_untrained", "note_of"]


def looks_untrained(network: nn.Module) -> bool:
    """Whether norms, or other parameters, have the initial values that hide what training would break.

    If the network has norms with weights or running statistics, they tell; else a tensor with one value everywhere,
    such as position embeddings.
    """
    state = network.state_dict()
    own = [name for name, module in network.named_modules() if "norm" in type(module).__name__.lower()]
    weights = [state[key] for name in own if (key := f"{name}.weight") in state]
    means = [state[key] for name in own if (key := f"{name}.running_mean") in state]
    if not all(bool(((w == 1) | (w == 0)).all()) for w in weights) or any(m.any() for m in means):
        return False
    return bool(weights or means) or any(p.numel() > 1 and is_constant(p) for p in network.parameters())


def note_of(trained: bool, randomize: bool | None) -> str:
    """What is said of norms and biases that are randomized; empty if they are left as they are."""
    if randomize:
        return "Its norms, biases and constant weights were randomized, as asked."
    if trained or randomize is False:
        return ""
    return "It is untrained: its weights are random, its norms and biases randomized."
