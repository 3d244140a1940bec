"""What happens inside a network: what its layers are fed, and copies of pictures and places under a group."""

import copy

import torch
from torch import Tensor, nn

from ..groups import P4, Group, transform

__all__ = ["act", "as_one_picture", "copies_of", "double", "fed_to", "moved", "one_of", "own_group", "subgroup"]


def double(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in float64 and evaluation mode: what is measured here is exact to rounding."""
    return copy.deepcopy(model).to("cpu", torch.float64).eval()


def as_one_picture(image: Tensor) -> Tensor:
    """A batch of one picture, float64.

    Raises:
        ValueError: If it is no picture.
    """
    image = image.detach().to("cpu", torch.float64)
    if image.ndim == 3:
        image = image[None]
    if image.ndim != 4 or len(image) != 1:
        raise ValueError(f"one picture is (C, height, width) or (1, C, height, width), got {tuple(image.shape)}")
    return image


def fed_to(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """The input that a layer has while the model looks at x; an empty name is the model itself.

    Raises:
        ValueError: If the layer is not used.
    """
    if not name:
        return x

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise _FedError(args[0])

    handle = model.get_submodule(name).register_forward_pre_hook(stop)
    try:
        model(x)
    except _FedError as fed:
        return fed.x
    finally:
        handle.remove()
    raise ValueError(f"the network never calls its layer {name!r}")


class _FedError(Exception):
    """Carries a layer's input out of the network: what comes behind the layer need not be computed."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


def own_group(module: nn.Module) -> Group | None:
    """The group that a module says it respects."""
    group = getattr(module, "group", None)
    return group if isinstance(group, Group) else None


def copies_of(own: Group, asked: Group | None) -> Group:
    """The group whose copies are shown: the one asked for, the network's own, or p4 for a network without one.

    Raises:
        ValueError: If the network's poses know nothing of the group asked for.
    """
    group = asked or (own if own.order > 1 else P4)
    if own.order > 1 and not subgroup(group, own):
        raise ValueError(
            f"the poses here are those of {own.name}, and {group.name} has elements that do not permute them; ask for "
            f"{own.name} or a subgroup of it"
        )
    return group


def subgroup(group: Group, other: Group) -> bool:
    """Whether all elements that map the pixel grid onto itself are in the other group, too."""
    return all(other.element(group.matrix(g)) is not None for g in group.grid_elements)


def act(maps: Tensor, own: Group, group: Group, g: int) -> Tensor:
    """An element acts on maps ``(..., poses, height, width)``; what has one pose is turned alone."""
    if maps.shape[-3] == 1:
        return transform(maps, group, g, "trivial")
    element = own.element(group.matrix(g))
    assert element is not None
    return transform(maps, own, element, "regular")


def moved(place: tuple[int, int], height: int, width: int, group: Group, g: int) -> tuple[int, int]:
    """Where a pixel ``(row, column)`` stands in the transformed picture."""
    marks = torch.arange(height * width).reshape(height, width)
    row, column = (transform(marks, group, g, "trivial") == marks[place]).nonzero()[0].tolist()
    return row, column


def one_of(name: str, value: int, count: int) -> int:
    """An index that exists.

    Raises:
        ValueError: If it does not.
    """
    if not 0 <= value < count:
        raise ValueError(f"{name} is 0 to {count - 1} here, got {value}")
    return value
