"""The image sizes that a network accepts, found on the meta device, without computing."""

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..layers import SizeError
from ..ops import use_backend

if TYPE_CHECKING:
    from ._base import EquivariantNet

__all__ = ["nearest_sides", "refusal", "with_image_size"]

_SEARCH = 64  # how far the nearest sides are searched to either side, in pixels


@torch.no_grad()
def refusal(model: "EquivariantNet", height: int, width: int) -> str | None:
    """Why a network on the meta device does not accept images of a size, or None if it does."""
    dtype = next(model.parameters()).dtype
    try:
        with use_backend("eager"):
            model(torch.empty(1, model.in_chans, height, width, dtype=dtype, device="meta"))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def nearest_sides(model: "EquivariantNet", side: int) -> tuple[int | None, int | None]:
    """The nearest sides below and above another of the square images that a network on the meta device accepts.

    None where there is none within 64 pixels.
    """
    below, above = range(side - 1, max(0, side - _SEARCH), -1), range(side + 1, side + _SEARCH)
    first, second = (next((s for s in way if refusal(model, s, s) is None), None) for way in (below, above))
    return first, second


def with_image_size(model: "EquivariantNet", x: Tensor, error: SizeError) -> SizeError:
    """The error of a layer at the size of its input, said with sizes of the network's images that work.

    Args:
        model: The network.
        x: The images, ``(B, C, height, width)``.
        error: The error of the layer.
    """
    blank = copy.deepcopy(model).to("meta", torch.float32).eval()
    kept = [refusal(blank, side, side) is None for side in x.shape[-2:]]
    near = [
        (side, side) if works else nearest_sides(blank, side) for works, side in zip(kept, x.shape[-2:], strict=True)
    ]
    sizes = [f"{height} x {width}" for height, width in zip(*near, strict=True) if height and width]
    name = getattr(model, "pretrained_cfg", {}).get("architecture") or type(model).__name__
    work = f"the nearest sizes that work are {' and '.join(sizes)}" if sizes else "no size near it works"
    return SizeError(f"{name} does not accept images of {x.shape[-2]} x {x.shape[-1]} pixels; {work} ({error.reason})")
