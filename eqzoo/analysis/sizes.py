"""Whether a network accepts images of a size."""

from typing import Any

import torch

from ..models import EquivariantNet, OrbitNet
from ..models.load import ModelSource, instantiate, resolve
from ..models.sizes import blank, refusal, sizes_that_work


def check_side(name: str | ModelSource, side: int, model: EquivariantNet | OrbitNet | None = None) -> None:
    """Raises ValueError unless a network accepts square images of a side and is equivariant on them.

    Args:
        name: The network.
        side: The side of the images, in pixels.
        model: The network itself, where its name alone does not build it.
    """
    model = blank(model) if model else weightless(name)
    reason = refusal(model, side, side)
    if reason is None:
        return
    said = name if isinstance(name, str) else name.name
    work = sizes_that_work(model, side, side)
    raise ValueError(f"{said} does not accept images of {side} x {side} pixels; {work} ({reason})")


def weightless(name: str | ModelSource, **model_args: Any) -> EquivariantNet | OrbitNet:
    """The network, with other arguments of its class if these are given, on the meta device: shapes without values."""
    source = resolve(name) if isinstance(name, str) else name
    with torch.device("meta"):
        model = instantiate(source, **model_args)
    if not isinstance(model, EquivariantNet | OrbitNet):
        raise ValueError(
            f"{source.name} is no network of eqzoo but a {type(model).__name__}; eqzoo.list_models() has all"
        )
    return model.eval()
