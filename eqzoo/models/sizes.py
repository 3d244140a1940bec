"""The image sizes that a network accepts, found on the meta device, without computing."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from .._common import network_name
from ..layers import SizeError
from ..ops import use_backend

if TYPE_CHECKING:
    from .base import EquivariantNet
    from .orbit import OrbitNet

Network = TypeVar("Network", bound=nn.Module)
_SEARCH = 64  # how far the nearest sides are searched to either side, in pixels


def blank(model: "Network") -> "Network":
    """A copy of a network on the meta device, in float32 and evaluation mode, which has shapes but no values."""
    return copy.deepcopy(model).to("meta", torch.float32).eval()


@torch.no_grad()
def refusal(model: nn.Module, height: int, width: int) -> str | None:
    """Why a network on the meta device does not accept images of a size, or None if it does.

    The sizes that a layer would accept are left out: they are those of its input, not of the image.
    """
    dtype = next(model.parameters()).dtype
    try:
        with use_backend("eager"):
            channels = getattr(model, "in_chans", 3)
            model(torch.empty(1, channels, height, width, dtype=dtype, device="meta"))
    except (AssertionError, ValueError, RuntimeError) as error:
        return error.reason if isinstance(error, SizeError) else str(error)
    return None


def sizes_that_work(model: "EquivariantNet | OrbitNet", height: int, width: int) -> str:
    """In words, the sizes nearest to one that a network refuses.

    Each side is varied by up to 64 pixels; the other one is then that of the network's own size, where that is
    accepted.

    Args:
        model: The network, on the meta device.
        height: The height of the images, in pixels.
        width: Their width.
    """
    own = getattr(model, "pretrained_cfg", {}).get("input_size", ())[1:]
    anchor = own if own and refusal(model, *own) is None else None

    def accepts_height(side: int) -> bool:
        return refusal(model, side, anchor[1] if anchor else side) is None

    def accepts_width(side: int) -> bool:
        return refusal(model, anchor[0] if anchor else side, side) is None

    heights = _nearest(accepts_height, height)
    # What a network with rotations by 90° accepts in one direction it accepts in the other.
    alike = height == width and (anchor is None or anchor[0] == anchor[1]) and model.group.rotations % 4 == 0
    near = zip(heights, heights if alike else _nearest(accepts_width, width), strict=True)
    sizes = list(dict.fromkeys(f"{h} x {w}" for h, w in near if h and w))
    if sizes:
        which = "size that works is" if len(sizes) == 1 else "sizes that work are"
        return f"the nearest {which} {' and '.join(sizes)}"
    return f"its own size is {own[0]} x {own[1]}" if anchor else "no size near it works"


def _nearest(accepts: Callable[[int], bool], side: int) -> tuple[int | None, int | None]:
    """The nearest accepted sides below and above one, None where there is none; twice the side itself if it is."""
    if accepts(side):
        return side, side
    below, above = range(side - 1, max(0, side - _SEARCH - 1), -1), range(side + 1, side + _SEARCH + 1)
    return next(filter(accepts, below), None), next(filter(accepts, above), None)


def with_image_size(model: "EquivariantNet", x: Tensor, error: SizeError) -> SizeError:
    """The error of a layer at the size of its input, said with sizes of the network's images that work.

    Args:
        model: The network.
        x: The images, ``(B, C, height, width)``.
        error: The error of the layer.

    Returns:
        The error to raise: that of the layer if the network cannot be copied, such as while it is traced.
    """
    height, width = x.shape[-2:]
    try:
        work = sizes_that_work(blank(model), height, width)
    except Exception:  # no copy of hooks, pruned weights and tensors without memory is worth losing the layer's error
        return error
    return SizeError(
        f"{network_name(model)} does not accept images of {height} x {width} pixels; {work} ({error.reason})"
    )
