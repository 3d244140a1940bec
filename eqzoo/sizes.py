"""Which sizes of pictures a network takes: asked of a copy without values, so at once."""

import copy

import torch

from .models import EquivariantNet, create_model
from .ops import use_backend

__all__ = ["check_side", "refusal", "weightless"]

_FAR = 64  # pixels to either side in which sizes that are exact are looked for


def check_side(name: str, side: int, model: EquivariantNet | None = None) -> None:
    """Raises ValueError unless a network takes square pictures of a side, in pixels, and keeps its group there.

    Args:
        name: The network.
        side: The side of the pictures, in pixels.
        model: The network itself, where its name alone does not build it.
    """
    model = copy.deepcopy(model).to("meta", torch.float32) if model else weightless(name)
    reason = refusal(model, side, side)
    if reason is None:
        return
    near = [next((s for s in way if s > 0 and refusal(model, s, s) is None), None) for way in _ways(side)]
    sizes = " and ".join(f"{s} x {s}" for s in near if s)
    keeps = f"would not keep its group {model.group.name}" if model.group.order > 1 else "does not work"
    where = f"the nearest sizes that go are {sizes}" if sizes else f"its own size is {model.input_size[1]}"
    raise ValueError(f"{name} {keeps} on pictures of {side} x {side} pixels; {where} ({reason})")


def weightless(name: str) -> EquivariantNet:
    """The network without values: made at once, whatever its size."""
    with torch.device("meta"):
        model = create_model(name)
    if not isinstance(model, EquivariantNet):
        raise ValueError(f"{name} is no network of eqzoo but a {type(model).__name__}; eqzoo.list_models() has all")
    return model.eval()


@torch.no_grad()
def refusal(model: EquivariantNet, height: int, width: int) -> str | None:
    """Why a network without values does not take pictures of a size, or None if it does."""
    try:
        with use_backend("eager"):
            model(torch.empty(1, model.in_chans, height, width, device="meta"))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _ways(side: int) -> tuple[range, range]:
    return range(side - 1, max(0, side - _FAR), -1), range(side + 1, side + _FAR)
