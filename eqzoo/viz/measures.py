"""Filters, and where in the picture an equivariance error lies, as numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..groups import Group
from ..layers import GroupConv2d, LiftingConv2d
from ..layers.conv import _OrbitConv2d
from ._inside import act, copies_of, double, fed_to, own_group

__all__ = ["ErrorMaps", "error_maps", "first_convolution", "orbit_filters"]


def orbit_filters(layer: nn.Module) -> Tensor:
    """The filters of a lifting or group convolution under all elements.

    Args:
        layer: The convolution, plain or attentive.

    Returns:
        ``(C', |H|, C, k, k)`` for a lifting convolution, ``(C', |H|, C, |H|, k, k)`` for a group convolution: field
        that goes out, element, field that comes in, its pose.

    Raises:
        ValueError: If it is another layer.

    Example:
        >>> from eqzoo.groups import P4
        >>> orbit_filters(GroupConv2d(P4, 3, 2, kernel_size=5)).shape
        torch.Size([2, 4, 3, 4, 5, 5])
    """
    if not isinstance(layer, _OrbitConv2d):
        raise ValueError(
            f"filters with an orbit are those of LiftingConv2d, GroupConv2d and their attentive forms, got "
            f"{type(layer).__name__}"
        )
    filters = layer.filters().detach().unflatten(0, (layer.out_channels, layer.group.order))
    return filters if layer.in_field == "trivial" else filters.unflatten(2, (layer.in_channels, layer.group.order))


def first_convolution(model: nn.Module) -> nn.Module:
    """The model itself if it is a lifting or group convolution, else the first one inside.

    Raises:
        ValueError: If there is none.
    """
    found = next((module for module in model.modules() if isinstance(module, _OrbitConv2d)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no lifting or group convolution, so no filter with an orbit")
    return cast(LiftingConv2d | GroupConv2d, found)


@dataclass(frozen=True)
class ErrorMaps:
    """Where the equivariance error of a layer or a network lies.

    Args:
        group: The group.
        maps: For every element that maps the pixel grid onto itself, ``‖Φ(g x) − g Φ(x)‖`` at each pixel of the output,
            over pictures, fields and poses, divided by the root mean square of ``‖Φ(x)‖`` over the pixels:
            ``(height, width)``. The root mean square of a map is the relative error ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``.
    """

    group: Group
    maps: dict[int, Tensor]

    @property
    def errors(self) -> dict[int, float]:
        """The relative error of every element."""
        return {g: m.square().mean().sqrt().item() for g, m in self.maps.items()}


@torch.no_grad()
def error_maps(model: nn.Module, x: Tensor, layer: str | None = None, group: Group | None = None) -> ErrorMaps:
    """Where the equivariance error of a layer, or of a network's features, lies; in float64 and evaluation mode.

    Args:
        model: The network, whose ``forward_features`` is measured, or a layer.
        x: What it is fed, with a batch axis: pictures or, for a layer, its input.
        layer: The name of a layer of the network, to measure it on the input that it has there.
        group: The group; by default the network's own, or p4 for one without turns and mirrors. A network without a
            group gives planes, which are turned alone.

    Raises:
        ValueError: If the poses know nothing of the group, the output is no map or it is zero everywhere.

    Example:
        >>> from eqzoo.groups import P4
        >>> found = error_maps(nn.Conv2d(1, 2, 3), torch.randn(1, 1, 8, 8), group=P4)
        >>> found.maps[1].shape, found.errors[0], found.errors[1] > 0.1
        (torch.Size([6, 6]), 0.0, True)
    """
    net = double(model)
    x = fed_to(net, layer or "", x.detach().to("cpu", torch.float64))
    module = net.get_submodule(layer or "")
    own = own_group(module) or own_group(net) or Group(1)
    group = copies_of(own, group)
    trunk = getattr(module, "forward_features", None)
    function = partial(_maps, trunk or module, own=own, planes=trunk is not None)
    y = function(x)
    scale = y.square().sum((0, 1, 2)).mean().sqrt()
    if scale == 0:
        raise ValueError("the output is zero everywhere, so there is no relative error; feed another x")
    maps = {}
    for g in group.grid_elements:
        difference = function(_transformed(x, own, group, g)) - act(y, own, group, g)
        maps[g] = difference.square().sum((0, 1, 2)).sqrt() / scale
    return ErrorMaps(group, maps)


def _transformed(x: Tensor, own: Group, group: Group, g: int) -> Tensor:
    return act(x, own, group, g) if x.ndim == 5 else act(x.unsqueeze(2), own, group, g).squeeze(2)


def _maps(module: Callable[[Tensor], Any], x: Tensor, own: Group, planes: bool) -> Tensor:
    """An output as ``(B, C, poses, height, width)``; a fused network gives its fields as planes."""
    y = module(x)
    if not isinstance(y, Tensor) or y.ndim not in (4, 5):
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"an error has a place where the output is a map or a field; this one is {shape}")
    if y.ndim == 5:
        return y
    return y.unflatten(1, (-1, own.order)) if planes else y.unsqueeze(2)
