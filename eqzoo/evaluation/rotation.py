"""Rotation of images by any angle, and the accuracy of a classifier on rotated images."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis._mode import evaluation_mode
from ..data import AnySplit
from ..data.splits import part_of
from .predictor import finite

SAMPLE_SIZE = 1_000  # images: at 24 angles they take as long as 24,000
SAMPLE_SEED = 0


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotates images about their center, counter-clockwise as displayed.

    The nearest multiple of 90° is exact, pixel by pixel; the rest, at most 45°, is a bicubic interpolation with the
    image reflected at its border, so that no corner is empty.

    Args:
        images: ``(B, C, height, width)``, floating point; of fewer bits than float32 they are interpolated in float32.
        degrees: The angle in degrees.

    Returns:
        Images of the same type and shape, or with height and width exchanged after an odd number of 90° rotations.

    Raises:
        ValueError: If the images are not a batch of images, or are integers.

    Example:
        >>> x = torch.rand(2, 3, 8, 8)
        >>> torch.equal(rotate(x, 90), x.rot90(1, (2, 3))), rotate(x, 30).shape
        (True, torch.Size([2, 3, 8, 8]))
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(f"images are (B, C, height, width), floating point; got {images.dtype} {tuple(images.shape)}")
    quarters = round(degrees / 90)
    images = images.rot90(quarters % 4, (2, 3))
    rest = math.radians(degrees - 90 * quarters)
    if rest == 0:
        return images
    height, width = images.shape[2:]
    # The unit of the grid is half a side, so the units of unequal sides differ. It holds (x, y), y downwards, and a
    # pixel's source is the pixel rotated back.
    cosine, sine = math.cos(rest), math.sin(rest)
    dtype = torch.promote_types(images.dtype, torch.float32)  # in 16 bits a grid is off by pixels, or not finite
    rows = [[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0]]
    matrix = torch.tensor(rows, dtype=dtype, device=images.device)
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images.to(dtype), grid, "bicubic", "reflection", align_corners=False).to(images.dtype)


@torch.no_grad()
def rotation_curve(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    degrees: Sequence[float] = range(0, 360, 15),
    batch_size: int = 500,
) -> list[float]:
    """The accuracy of a classifier on rotated images.

    Args:
        model: The classifier, from ``(B, C, height, width)`` to ``(B, classes)``. Its modules keep their modes.
        images: The normalized images, ``(n, C, height, width)``.
        labels: Their classes, ``(n,)`` integers.
        degrees: The angles, in degrees.
        batch_size: The number of images in a batch.

    Returns:
        The accuracy in percent at each angle.

    Raises:
        ValueError: If there is not one integer for each image, or there are no images, or logits are not finite.

    Example:
        >>> rotation_curve(nn.Flatten(), torch.eye(4).reshape(4, 1, 2, 2), torch.arange(4), [0, 90, 180])
        [100.0, 0.0, 0.0]
    """
    if labels.shape != (len(images),) or not len(images) or labels.is_floating_point():
        raise ValueError(
            f"labels are (n,) integers, one for each of n >= 1 images; got {labels.dtype} {tuple(labels.shape)} for "
            f"{len(images)} images"
        )
    curve = []
    with evaluation_mode(model):
        for angle in degrees:
            hits = sum(
                int((finite(model(rotate(x, angle))).argmax(1) == y).sum())
                for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True)
            )
            curve.append(100 * hits / len(labels))
    return curve


def sample(split: AnySplit, size: int = SAMPLE_SIZE) -> AnySplit:
    """The images on which accuracy over rotations is measured: drawn without replacement from the seed `SAMPLE_SEED`.

    Not the first ones, since the images of a folder are ordered by class.

    Args:
        split: A split.
        size: The number of images; all if there are not as many.

    Returns:
        The images, in their order in the split.
    """
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(SAMPLE_SEED))
    return part_of(split, order[:size].sort().values)
