"""Measures how exactly a network keeps its promise: ``Φ(g x) = g Φ(x)`` for its features, ``Φ(g x) = Φ(x)`` at the end.

An error is the relative L2 norm ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``: it has no unit, is about 1e-15 for an exact network in
float64, and of the order of 1 for one that promises nothing.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .groups import Group, transform

__all__ = ["EquivarianceReport", "element_errors", "equivariance_error", "equivariance_report", "randomise_norms"]


@dataclass(frozen=True)
class EquivarianceReport:
    """The equivariance errors of a network, each largest over the pictures of the batch taken together.

    Args:
        group: The group.
        logits: For every element that maps the pixel grid onto itself, the error of the network's output.
        features: The same for ``forward_features``; empty if the group does not act on them.
        layers: For every layer with a group, its own error given the input that it had in the network, largest over
            the elements.
    """

    group: Group
    logits: dict[int, float]
    features: dict[int, float]
    layers: dict[str, float]

    @property
    def largest(self) -> float:
        """The largest of all errors."""
        return max([*self.logits.values(), *self.features.values(), *self.layers.values()])


def equivariance_error(
    model: nn.Module, x: Tensor | None = None, group: Group | None = None, randomise: bool = False, seed: int = 0
) -> float:
    """The largest equivariance error of a network: of its layers, features and output, over all elements.

    Args:
        model: The network, or a single layer; it is copied and left as it is.
        x: What it is fed; by default two pictures of noise of the network's ``input_size``.
        group: The group; by default the network's own. Of a group that is no subgroup of the network's own, the output
            alone is measured.
        randomise: Whether to give norms and biases random values first, as `randomise_norms` does. Fresh ones are
            symmetric by accident, and hide what training would break.
        seed: The seed of the noise and of the random values.

    Returns:
        ``max ‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``, computed in float64 and evaluation mode on the CPU.

    Raises:
        ValueError: If there is no group or no input size to take, or the output is not a finite field.

    Example:
        >>> import eqzoo
        >>> eqzoo.equivariance_error(eqzoo.create_model("p4_cnn", pretrained=True)) < 1e-12
        True
        >>> eqzoo.equivariance_error(eqzoo.create_model("z2_cnn", pretrained=True), group=eqzoo.P4) > 1e-2
        True
    """
    return equivariance_report(model, x, group, randomise, seed).largest


def equivariance_report(
    model: nn.Module, x: Tensor | None = None, group: Group | None = None, randomise: bool = False, seed: int = 0
) -> EquivarianceReport:
    """The equivariance errors of a network, one by one; see `equivariance_error` for the arguments."""
    group = group or getattr(model, "group", None)
    if group is None:
        raise ValueError(f"{type(model).__name__} has no group of its own; say which one to measure with group=")
    own = copy.deepcopy(model).to("cpu", torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    x = (_noise(own, generator) if x is None else x.detach()).to("cpu", torch.float64)
    if randomise:
        randomise_norms(own, generator, x)
    with torch.no_grad():
        own_group = getattr(own, "group", group)
        logits = element_errors(own, x, group, own_group)
        inside = _is_subgroup(group, own_group)
        trunk = getattr(own, "forward_features", None)
        features = element_errors(partial(_features, own), x, group, own_group) if inside and trunk else {}
        layers = _layer_errors(own, x, group) if inside else {}
    return EquivarianceReport(group, logits, features, layers)


@torch.no_grad()
def randomise_norms(model: nn.Module, generator: torch.Generator, x: Tensor | None = None) -> None:
    """Makes norms and biases look trained, in place.

    Parameters that are vectors are drawn uniformly from [0.5, 1.5). Running statistics become those of the given
    pictures, so that the signal neither dies out nor explodes; then variances are multiplied by factors drawn alike,
    and means moved by up to half a standard deviation.

    Args:
        model: The network, in evaluation mode.
        generator: The randomness.
        x: What it is fed; needed only where norms keep running statistics.

    Raises:
        ValueError: If there are running statistics and no pictures.
    """

    def factors(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like) + 0.5

    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.copy_(factors(parameter))
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    if x is None:
        raise ValueError(f"{len(norms)} norms keep running statistics: pass x, pictures to take them from")
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train().momentum = None  # the mean over all batches, of which there is one
    model(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        mean.add_((factors(mean) - 1) * variance.sqrt())
        variance.mul_(factors(variance))


def _noise(model: nn.Module, generator: torch.Generator) -> Tensor:
    size = getattr(model, "input_size", None) or getattr(model, "pretrained_cfg", {}).get("input_size")
    if size is None:
        raise ValueError(f"{type(model).__name__} does not say its input size; pass x")
    return torch.randn(2, *size, generator=generator, dtype=torch.float64)


def _features(model: nn.Module, x: Tensor) -> Tensor:
    """The last features as a field, also of a fused network, which gives them as planes."""
    y: Tensor = cast(Any, model).forward_features(x)
    group = getattr(model, "group", None)
    return y.unflatten(1, (-1, group.order)) if group and y.ndim == 4 else y


def element_errors(
    function: Callable[[Tensor], Tensor], x: Tensor, group: Group, own: Group | None = None
) -> dict[int, float]:
    """The error ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖`` of any function of tensors, for each element on the pixel grid.

    Args:
        function: Φ. How an element acts on what it takes and gives is told by the shape: a regular field
            ``(B, C, |H|, height, width)``, a picture or planes ``(B, C, height, width)``, or an invariant vector.
        x: What it is fed.
        group: The group.
        own: The group of the regular fields, if it is larger; by default the group.

    Raises:
        ValueError: If the output is zero everywhere or not finite, or there is no such action.

    Example:
        >>> from eqzoo.groups import P4
        >>> element_errors(lambda x: x.flip(-1), torch.rand(1, 1, 4, 4), P4)[2]  # mirrors and half turns commute
        0.0
    """
    own = own or group
    y = function(x)
    norm = y.norm()
    if norm == 0:
        raise ValueError("the output is zero everywhere, so there is no relative error; feed another x")
    errors = {
        g: ((function(_act(x, group, g, own)) - _act(y, group, g, own)).norm() / norm).item()
        for g in group.grid_elements
    }
    # Asked of every element, because a NaN is neither larger nor smaller than any bound.
    if not all(math.isfinite(error) for error in errors.values()):
        raise ValueError(f"the output is not finite, so its errors are {errors}; feed another x or mend the weights")
    return errors


def _act(x: Tensor, group: Group, g: int, own: Group) -> Tensor:
    """The action on what a layer takes or gives, told by its shape: a field of its own group, a picture, a vector."""
    if x.ndim < 4:
        return x
    if x.ndim == 4 or x.shape[2] == 1:
        return transform(x, group, g, "trivial")
    element = own.element(group.matrix(g))
    if element is None or x.shape[2] != own.order:
        raise ValueError(f"no action of {group.name} on a field of shape {tuple(x.shape)}")
    return transform(x, own, element, "regular")


def _is_subgroup(group: Group, other: Group) -> bool:
    return all(other.element(group.matrix(g)) is not None for g in group.elements)


def _layer_errors(model: nn.Module, x: Tensor, group: Group) -> dict[str, float]:
    layers = {name: module for name, module in model.named_modules() if name and hasattr(module, "group")}
    inputs: dict[str, Tensor] = {}
    handles = [module.register_forward_pre_hook(partial(_keep_input, inputs, name)) for name, module in layers.items()]
    model(x)
    for handle in handles:
        handle.remove()
    return {
        name: max(element_errors(layers[name], value, group, layers[name].group).values())
        for name, value in inputs.items()
    }


def _keep_input(inputs: dict[str, Tensor], name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    inputs[name] = args[0]
