"""The check of arguments that the layers share: the group, and numbers of channels and pixels."""

import operator

from ..groups import Group

__all__ = ["check_arguments"]


def check_arguments(group: object = None, **numbers: object) -> None:
    """Raises an error unless the arguments of a layer have the types that it needs.

    Args:
        group: The group of a layer that has one.
        **numbers: Whole numbers by their names; those that count channels, features or heads are at least 1.

    Raises:
        TypeError: If the group is no `eqzoo.Group`, or a number is not one whole number.
        ValueError: If a number of channels, features or heads is less than 1.
    """
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"group is an eqzoo.Group such as eqzoo.groups.P4, got {group!r}")
    for name, value in numbers.items():
        counts = name.endswith(("channels", "features", "heads"))
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            said = "a whole number" if counts else "one whole number of pixels, the same for height and width"
            raise TypeError(f"{name} is {said}, got {value!r}") from None
        if counts and number < 1:
            raise ValueError(f"{name} is at least 1, got {value}")
