"""Images that are much darker or brighter than others: such as 12-bit numbers in files of 16 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

DARK = 32  # of 255: darker than this are nearly all pixels of images that use a small part of the range
NEARLY_ALL = 0.999  # of the pixels, as single ones may be saturated
_FAR = 3.0  # standard deviations of the training images' pixels
_BATCH = 256  # images whose brightness is measured together


def dark_images(images: Tensor) -> Tensor:
    """Which images have nearly all of their pixels below `DARK`, but are not black, ``(n,)`` bool.

    Args:
        images: ``(n, channels, height, width)`` with values in 0 to 255.
    """
    parts = [part.flatten(1) for part in images.split(_BATCH)]
    found = [((part < DARK).double().mean(1) >= NEARLY_ALL) & (part.amax(1) > 0) for part in parts]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def unlike_training(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Which images are much darker or brighter than those that a network was trained on: ``(n,)`` of -1, 0 and 1.

    Darker, -1: as `dark_images` says, where the training images are bright. Where they are dark themselves, such as
    cells that glow on a black ground: the images whose largest value in each channel is below ``mean + std`` of the
    training images, and `DARK`. Black images are not. Brighter, 1: the images whose median in each channel is above
    ``mean + 3 std``. The first three channels count: a fourth may be the opacity.

    Args:
        images: ``(n, channels, height, width)`` with values in 0 to 255.
        mean: Of the training images' values divided by 255, one for each channel or for all.
        std: The same.
    """
    colors = images[:, :3].flatten(2)
    means, deviations = 255 * torch.tensor(mean[:3]), 255 * torch.tensor(std[:3])
    bright = (colors.median(2).values.double().cpu() > means + _FAR * deviations).all(1)
    if means.max() >= 2 * DARK:
        dark = dark_images(images[:, :3]).cpu()
    else:
        largest = colors.amax(2).double().cpu()
        dark = (largest < (means + deviations).clamp(max=DARK)).all(1) & (largest > 0).any(1)
    return bright.long() - dark.long()
