"""Convolutions, plain or attentive, of the networks of attentive group convolutions."""

import warnings
from typing import Any

from torch import Tensor, nn

from ..groups import Group
from ..layers import AttentiveGroupConv2d, AttentiveLiftingConv2d, GroupConv2d, LiftingConv2d
from ..layers.attentive import Attention


def lifting_conv(
    group: Group,
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    padding: int = 0,
    attention: Attention | None = None,
    **options: Any,
) -> nn.Module:
    """A lifting convolution without bias; its channel attention has one hidden unit per image channel."""
    if attention is None:
        return LiftingConv2d(group, in_channels, out_channels, kernel_size, padding=padding, bias=False)
    options = {"hidden_channels": in_channels} | options
    return AttentiveLiftingConv2d(
        group, in_channels, out_channels, kernel_size, padding=padding, bias=False, attention=attention, **options
    )


def group_conv(
    group: Group,
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    padding: int = 0,
    stride: int = 1,
    attention: Attention | None = None,
    **options: Any,
) -> nn.Module:
    """A group convolution without bias; with a stride, it is only approximately equivariant at some sizes."""
    args = (group, in_channels, out_channels, kernel_size, stride, padding)
    exact = stride == 1
    if attention is None:
        return GroupConv2d(*args, bias=False, exact=exact)
    return AttentiveGroupConv2d(*args, bias=False, exact=exact, attention=attention, **options)


def fresh_where_sizes_differ(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Replaces attention and norms of stem and head by the model's own where their shapes differ.

    Their shapes depend on ``in_chans`` and ``num_classes``. timm itself adapts the filters of the first convolution and
    the classifier; all other weights have to fit.
    """
    own = model.state_dict()
    of_images = {name: value for name, value in state.items() if name.startswith("stem.") and ".attention." in name}
    if any(_resized(name, value, own) for name, value in of_images.items()):
        warnings.warn(
            "attention of the first layer depends on in_chans and is initialized anew: train the network before use",
            stacklevel=2,
        )
    return {name: own[name] if _resized(name, value, own) else value for name, value in state.items()}


def _resized(name: str, value: Tensor, own: dict[str, Tensor]) -> bool:
    within = name.startswith(("stem.", "head.")) and (".attention." in name or ".norm." in name)
    return within and name in own and own[name].shape != value.shape
