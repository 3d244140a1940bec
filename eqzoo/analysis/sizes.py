"""Whether a network accepts images of a size."""

import copy

import torch

from ..models import EquivariantNet
from ..models.loading import instantiate
from ..models.resolve import ModelSource, resolve
from ..models.sizes import nearest_sides, refusal

__all__ = ["check_side", "refusal", "weightless"]


def check_side(name: str | ModelSource, side: int, model: EquivariantNet | None = None) -> None:
    """Raises ValueError unless a network accepts square images of a side and is equivariant on them.

    Args:
        name: The network.
        side: The side of the images, in pixels.
        model: The network itself, where its name alone does not build it.
    """
    model = copy.deepcopy(model).to("meta", torch.float32) if model else weightless(name)
    reason = refusal(model, side, side)
    if reason is None:
        return
    sizes = " and ".join(f"{s} x {s}" for s in nearest_sides(model, side) if s)
    fails = f"is not equivariant under {model.group.name}" if model.group.order > 1 else "does not work"
    where = f"the nearest sizes that work are {sizes}" if sizes else f"its own size is {model.input_size[1]}"
    said = name if isinstance(name, str) else name.name
    raise ValueError(f"{said} {fails} on images of {side} x {side} pixels; {where} ({reason})")


def weightless(name: str | ModelSource) -> EquivariantNet:
    """The network on the meta device: shapes without values."""
    source = resolve(name) if isinstance(name, str) else name
    with torch.device("meta"):
        model = instantiate(source)
    if not isinstance(model, EquivariantNet):
        raise ValueError(
            f"{source.name} is no network of eqzoo but a {type(model).__name__}; eqzoo.list_models() has all"
        )
    return model.eval()
