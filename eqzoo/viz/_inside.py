"""Inputs of inner layers, and group actions on images, maps and pixels."""

import torch
from torch import Tensor, nn

from ..equivariance import group_to_check, is_subgroup
from ..groups import P4, Group, transform


def fed_to(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """The input that a layer receives in ``model(x)``; an empty name is the model itself.

    Raises:
        AttributeError: If the model has no such layer.
        ValueError: If it does not call it.
    """
    if not name:
        return x

    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        model(x)
    finally:
        handle.remove()
    if not seen:
        raise ValueError(f"the network never calls its layer {name!r}")
    return seen[0]


def copies_of(own: Group, asked: Group | str | None) -> Group:
    """The group whose transformed copies are shown: the given one, else the network's own, else p4.

    Raises:
        ValueError: If the given group is not a subgroup of the network's group, so that it does not permute the poses,
            or as `eqzoo.equivariance.group_to_check`.
        TypeError: If it is neither a group nor a name.
    """
    group = (own if own.order > 1 else P4) if asked is None else group_to_check(asked)
    if own.order > 1 and not is_subgroup(group, own, on_grid=True):
        raise ValueError(
            f"the poses are those of {own.name}, which {group.name} does not permute; ask for {own.name} or a subgroup "
            "of it"
        )
    return group


def act(maps: Tensor, own: Group, group: Group, g: int) -> Tensor:
    """The action of an element on maps ``(..., poses, height, width)``; a single pose is a trivial field."""
    if maps.shape[-3] == 1:
        return transform(maps, group, g, "trivial")
    element = own.element(group.matrix(g))
    assert element is not None
    return transform(maps, own, element, "regular")


def act_on_input(x: Tensor, own: Group, group: Group, g: int) -> Tensor:
    """The action of an element on a regular field or on images, ``(B, C, height, width)``."""
    return act(x, own, group, g) if x.ndim == 5 else transform(x, group, g, "trivial")


def moved(place: tuple[int, int], height: int, width: int, group: Group, g: int) -> tuple[int, int]:
    """The position ``(row, column)`` of a pixel in the transformed image."""
    marks = torch.arange(height * width, device="cpu").reshape(height, width)
    row, column = (transform(marks, group, g, "trivial") == marks[place]).nonzero()[0].tolist()
    return row, column
