"""Orbits of filters, and equivariance errors at each pixel."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..equivariance import in_float64, module_group, without_parallel
from ..groups import Group
from ..layers import GroupConv2d, LiftingConv2d
from ..layers.group_conv import _OrbitConv2d
from ._inside import act, act_on_input, copies_of, fed_to


def orbit_filters(layer: LiftingConv2d | GroupConv2d) -> Tensor:
    """The orbits of the filters of a lifting or group convolution.

    Args:
        layer: The convolution, plain or attentive.

    Returns:
        ``(C', |H|, C, k, k)`` for a lifting convolution, ``(C', |H|, C, |H|, k, k)`` for a group convolution, with
        axes output field, element, input channel or field, input pose, row and column. C is the number of those that
        one filter sees, ``in_channels / groups``.

    Example:
        >>> from eqzoo.groups import P4
        >>> orbit_filters(GroupConv2d(P4, 3, 2, kernel_size=5)).shape
        torch.Size([2, 4, 3, 4, 5, 5])
    """
    filters = layer.filters().detach().unflatten(0, (layer.out_channels, layer.group.order))
    return filters if layer.in_field == "trivial" else filters.unflatten(2, (-1, layer.group.order))


def first_convolution(model: nn.Module) -> LiftingConv2d | GroupConv2d:
    """The model itself if it is a lifting or group convolution, else the first one that it contains.

    Raises:
        ValueError: If there is none.
    """
    found = next((module for module in model.modules() if isinstance(module, _OrbitConv2d)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no lifting or group convolution; pass a network or layer with one"
        )
    return cast(LiftingConv2d | GroupConv2d, found)


@dataclass(frozen=True)
class ErrorMaps:
    """The equivariance error of a layer or a network at each pixel.

    Args:
        group: The group.
        maps: ``(height, width)`` for each element that maps the pixel grid onto itself: the norm of ``Φ(g x) − g Φ(x)``
            over images, fields and poses at each pixel of the output, divided by the root mean square over the pixels
            of the same norm of ``Φ(x)``. The root mean square of a map is ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``.
    """

    group: Group
    maps: dict[int, Tensor]

    @property
    def errors(self) -> dict[int, float]:
        """The relative error of each element."""
        return {g: m.square().mean().sqrt().item() for g, m in self.maps.items()}


@torch.no_grad()
def error_maps(model: nn.Module, x: Tensor, layer: str | None = None, group: Group | str | None = None) -> ErrorMaps:
    """The equivariance error of a network's features, or of a layer, at each pixel; in float64 and evaluation mode.

    Args:
        model: The network, whose ``feature_field`` or else ``forward_features`` is measured, or a layer.
        x: The input with a batch axis: images or, for a layer, its input.
        layer: The name of a layer of the network, which is measured on the input that it receives there.
        group: The group, or its name; by default the network's own, or p4 if it is trivial. The output of a network
            without a group is a trivial field.

    Raises:
        ValueError: If the group does not permute the poses, or the output is not a map or is zero everywhere.

    Example:
        >>> from eqzoo.groups import P4
        >>> found = error_maps(nn.Conv2d(1, 2, 3), torch.randn(1, 1, 8, 8), group=P4)
        >>> found.maps[1].shape, found.errors[0], found.errors[1] > 0.1
        (torch.Size([6, 6]), 0.0, True)
    """
    net = in_float64(without_parallel(model))
    x = fed_to(net, layer or "", x.detach().to("cpu", torch.float64))
    module = net.get_submodule(layer or "")
    if layer and getattr(net, "_deployed", False) and module_group(module) is None:
        raise ValueError(
            f"the layer {layer!r} of a deployed (reparameterized) network returns planes, without their group: map the "
            "whole network, or a layer of the one that it was made of"
        )
    own = module_group(module) or module_group(net) or Group(1)
    group = copies_of(own, group)
    field, trunk = (getattr(module, name, None) for name in ("feature_field", "forward_features"))
    function = partial(_maps, field or trunk or module, own=own, planes=field is None and trunk is not None)
    y = function(x)
    scale = y.square().sum((0, 1, 2)).mean().sqrt()
    if scale == 0:
        raise ValueError("the output is zero everywhere, so the relative error is undefined; pass another x")
    maps = {}
    for g in group.grid_elements:
        difference = function(act_on_input(x, own, group, g)) - act(y, own, group, g)
        maps[g] = difference.square().sum((0, 1, 2)).sqrt() / scale
    return ErrorMaps(group, maps)


def _maps(module: Callable[[Tensor], Any], x: Tensor, own: Group, planes: bool) -> Tensor:
    """The output as ``(B, C, poses, height, width)``; a fused network returns planes."""
    y: Tensor = module(x)
    if y.ndim not in (4, 5):
        raise ValueError(f"the output is no map (B, C, height, width) and no regular field, got {tuple(y.shape)}")
    if y.ndim == 5:
        return y
    return y.unflatten(1, (-1, own.order)) if planes else y.unsqueeze(2)
