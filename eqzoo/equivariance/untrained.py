"""What the initial values of an untrained network hide, and random ones show."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def randomize_norms(model: nn.Module, generator: torch.Generator, x: Tensor | None = None) -> None:
    """Gives norms, biases and constant parameters random values, in place, as if they had been trained.

    One-dimensional parameters, those of torch's layer norms, and others that have one value everywhere, such as a gain
    of ones for each pose, are drawn uniformly from [0.5, 1.5); those that are zero everywhere, such as the last layer
    of a branch or position embeddings, from a normal distribution with standard deviation 0.02. Frozen ones that have
    one value everywhere, such as the filter of a fixed blur, stay. So does all of deployed networks, whose norms are of
    planes: other values for each pose would break them. Running statistics become those of the given images, so that
    activations neither vanish nor explode; then variances are multiplied by factors uniform in [0.5, 1.5), and means
    are shifted by up to half a standard deviation.

    Args:
        model: The network, in evaluation mode.
        generator: The random generator.
        x: A batch of images; required if norms have running statistics.

    Raises:
        ValueError: If norms have running statistics and no images are given.
    """

    def factors(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like) + 0.5

    left = deployed_parts(model)
    modules = [module for name, module in model.named_modules() if not f"{name}.".startswith(left)]
    own = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    parameters = [parameter for parameter in model.parameters() if id(parameter) in own]
    layer_norms = [module for module in modules if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    over_axes = {id(parameter) for norm in layer_norms for parameter in norm.parameters()}
    trained = [p for p in parameters if p.requires_grad] or parameters
    constant = [p for p in trained if p.ndim != 1 and id(p) not in over_axes and is_constant(p)]
    for parameter in parameters:
        if parameter.ndim == 1 or id(parameter) in over_axes:
            parameter.copy_(factors(parameter))
    for parameter in constant:
        if parameter.any():
            parameter.copy_(factors(parameter))
        else:
            parameter.normal_(std=0.02, generator=generator)
    norms = [module for module in modules if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    if x is None:
        raise ValueError(f"{len(norms)} norms have running statistics: pass x, images to compute them from")
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train().momentum = None  # the cumulative mean, here of a single batch
    model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        mean.add_((factors(mean) - 1) * variance.sqrt())
        variance.mul_(factors(variance))


def deployed_parts(model: nn.Module) -> tuple[str, ...]:
    """How the names of modules in deployed networks, as `timm.utils.reparameterize_model` gives, begin."""
    return tuple(name and f"{name}." for name, module in model.named_modules() if getattr(module, "_deployed", False))


def is_constant(parameter: Tensor) -> bool:
    """Whether a tensor has one value everywhere, as weights often have at their initialization and never later."""
    return bool((parameter == parameter.flatten()[:1]).all())


def looks_untrained(network: nn.Module) -> bool:
    """Whether norms, or other parameters, have the initial values that hide what training would break.

    If the network has norms with weights or running statistics, they tell; else a parameter that is not frozen and has
    one value everywhere, such as position embeddings, or is a single 0, such as the gate of a branch.
    """
    state = network.state_dict()
    own = [name for name, module in network.named_modules() if "norm" in type(module).__name__.lower()]
    weights = [state[key] for name in own if (key := f"{name}.weight") in state]
    means = [state[key] for name in own if (key := f"{name}.running_mean") in state]
    if not all(bool(((w == 1) | (w == 0)).all()) for w in weights) or any(m.any() for m in means):
        return False
    trained = [p for p in network.parameters() if p.requires_grad]
    hides = (is_constant(p) if p.numel() > 1 else not p.any() for p in trained or network.parameters())
    return bool(weights or means) or any(hides)
