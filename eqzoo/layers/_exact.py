"""The one rule of exact sampling, and the error that names its fix."""

from torch import Tensor, nn

from ..groups import Group

__all__ = ["check_size"]


def check_size(
    module: nn.Module, group: Group, x: Tensor, span: int, stride: int, padding: int, exact: bool = True
) -> None:
    """Raises unless a sliding window sees the same places of a picture and of its transformed copies.

    A window of ``span`` pixels that starts at the first pixel must end at the last one, along every axis that the
    group reverses: ``(side + 2·padding − span) % stride == 0``. Half turns and quarter turns reverse both axes, a
    mirror alone reverses the width, translations none.

    Args:
        module: The layer, for the message.
        group: The group that the layer promises.
        x: The input, ``(..., height, width)``.
        span: The side of the window, counted with its dilation, in pixels.
        stride: The step of the window, in pixels.
        padding: The zeros added to each side, in pixels.
        exact: Whether the group must be kept; False only asks that the window fits.

    Raises:
        ValueError: If the window is larger than the input or the sampled places change with the turn.
    """
    height, width = x.shape[-2:]
    room = min(height, width) + 2 * padding - span
    if room < 0:
        raise ValueError(
            f"{module} has a window of {span} pixels and an input of {height} x {width} with {padding} pixels of "
            f"padding a side; give a picture that is at least {-room} pixels larger here, or a larger padding"
        )
    if stride == 1 or not exact:
        return
    sides = {"height": height} if group.rotations > 1 else {}
    if group.order > 1:
        sides["width"] = width
    for axis, side in sides.items():
        rest = (side + 2 * padding - span) % stride
        if rest:
            raise ValueError(
                f"{module} would break {group.name}: at {axis} {side} its last window ends {rest} pixels before the "
                f"edge, so a transformed picture is sampled at other places. It is exact at {axis} {side - rest} or "
                f"{side - rest + stride} here; or use stride 1 and then a pool whose size divides the side"
            )
