"""Pictures turned by any angle, and what a classifier makes of them."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["turn", "turn_curve"]


def turn(images: Tensor, degrees: float) -> Tensor:
    """Turns pictures about their centre, counter-clockwise as displayed.

    Quarter turns are exact, pixel by pixel; the rest, at most 45 degrees, is a bicubic interpolation in which the
    picture is reflected at its border, so that no corner is empty.

    Args:
        images: ``(B, C, height, width)``.
        degrees: The angle in degrees.

    Returns:
        Pictures of the same shape, or with height and width exchanged after an odd number of quarter turns.

    Raises:
        ValueError: If the images are not a batch of pictures.

    Example:
        >>> x = torch.rand(2, 3, 8, 8)
        >>> torch.equal(turn(x, 90), x.rot90(1, (2, 3))), turn(x, 30).shape
        (True, torch.Size([2, 3, 8, 8]))
    """
    if images.ndim != 4:
        raise ValueError(f"images are (B, C, height, width), got {tuple(images.shape)}")
    quarters = round(degrees / 90)
    images = images.rot90(quarters % 4, (2, 3))
    rest = math.radians(degrees - 90 * quarters)
    if rest == 0:
        return images
    height, width = images.shape[2:]
    # The grid's unit is half a side, so that sides that differ have units that differ. It holds (x, y), y downwards:
    # where a pixel comes from is the pixel turned back.
    cosine, sine = math.cos(rest), math.sin(rest)
    matrix = images.new_tensor([[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0]])
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, "bicubic", "reflection", align_corners=False)


@torch.no_grad()
def turn_curve(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    degrees: Sequence[float] = range(0, 360, 15),
    batch_size: int = 500,
) -> list[float]:
    """The accuracy of a classifier on pictures that are turned: what equivariance buys.

    Args:
        model: The classifier, from ``(B, C, height, width)`` to ``(B, classes)``. Its mode is restored.
        images: The pictures as it takes them, ``(n, C, height, width)``.
        labels: Their classes, ``(n,)``.
        degrees: The angles.
        batch_size: Pictures at once.

    Returns:
        The accuracy in percent at each angle.

    Example:
        >>> turn_curve(nn.Flatten(), torch.eye(4).reshape(4, 1, 2, 2), torch.arange(4), [0, 90, 180])
        [100.0, 0.0, 0.0]
    """
    was_training = model.training
    model.eval()
    curve = []
    try:
        for angle in degrees:
            hits = sum(
                int((model(turn(x, angle)).argmax(1) == y).sum())
                for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True)
            )
            curve.append(100 * hits / len(labels))
    finally:
        model.train(was_training)
    return curve
