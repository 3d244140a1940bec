"""The checks that the layers share: of their arguments, and of the field that they are given."""

from torch import Tensor, nn

from ..groups import Group, whole

__all__ = ["check_arguments", "check_field", "check_numbers", "check_poses", "named"]


def check_arguments(group: object, **numbers: object) -> None:
    """Raises an error unless the arguments of a layer have the types that it needs.

    Args:
        group: The group of the layer.
        **numbers: As `check_numbers` takes them.

    Raises:
        TypeError: If the group is no `eqzoo.Group`, or as `check_numbers`.
        ValueError: As `check_numbers`.
    """
    if not isinstance(group, Group):
        raise TypeError(f"group is an eqzoo.Group such as eqzoo.groups.P4, got {group!r}")
    check_numbers(**numbers)


def check_numbers(**numbers: object) -> None:
    """Raises an error unless arguments of a layer are whole numbers.

    Args:
        **numbers: The arguments by their names; those that count channels, features or heads are at least 1.

    Raises:
        TypeError: If one is not a whole number, such as a pair of them.
        ValueError: If a number of channels, features or heads is less than 1.
    """
    for name, value in numbers.items():
        counts = name.endswith(("channels", "features", "heads"))
        said = "a whole number" if counts else "one whole number, the same for height and width"
        if whole(value, f"{name} is {said}") < 1 and counts:
            raise ValueError(f"{name} is at least 1, got {value}")


def check_field(layer: nn.Module, x: Tensor, channels: int, order: int | None) -> None:
    """Raises an error unless a layer is given fields of its shape, or images where ``order`` is None.

    Args:
        layer: The layer, for the error.
        x: The input.
        channels: The number of fields, or of channels of the image.
        order: The order of the group; None for an image.

    Raises:
        ValueError: If the shape is not ``(B, channels, order, height, width)`` or ``(B, channels, height, width)``.
        TypeError: If the values are whole numbers.
    """
    lead = (channels,) if order is None else (channels, order)
    if x.ndim != len(lead) + 3 or tuple(x.shape[1:-2]) != lead:
        wanted = ", ".join(map(str, ("B", *lead, "height", "width")))
        raise ValueError(f"{named(layer)} takes ({wanted}), got {tuple(x.shape)}")
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"{named(layer)} takes floating point tensors, got {x.dtype}; eqzoo.data.normalize makes them of pixels"
        )


def check_poses(layer: nn.Module, x: Tensor, order: int) -> None:
    """Raises an error unless a layer, which takes any number of them, is given regular fields of its group.

    Args:
        layer: The layer, for the error.
        x: The input.
        order: The order of the group.

    Raises:
        ValueError: If the shape is not ``(B, C, order, height, width)``.
    """
    if x.ndim != 5 or x.shape[2] != order:
        raise ValueError(f"{named(layer)} takes (B, C, {order}, height, width), got {tuple(x.shape)}")


def named(layer: nn.Module | str) -> str:
    """The layer as it is printed, without its parts."""
    return layer if isinstance(layer, str) else f"{type(layer).__name__}({layer.extra_repr()})"
