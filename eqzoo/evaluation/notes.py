"""Notes on images that a network may predict wrongly: cut off, of another size or brightness than those of training."""

from collections.abc import Iterator, Sequence

import torch

from ..data import AnySplit, Split
from ..data.brightness import DARK, unlike_training

CUT_OFF = 0.05  # of an image, beyond its central square
OTHER_SIDE = 1.5  # times as large or as small
SOME = 0.01  # of the images
BRIGHTNESS = {  # by the numbers of `unlike_training`
    -1: f"much darker than what the network was trained on, nearly all pixels below {DARK} of 255: if the numbers have "
    "12 bits in files of 16, or another scale, stretch them by the factor that the training images were stretched by",
    1: "much brighter than what the network was trained on: if those had 12 bits in files of 16, or another scale, "
    "scale these by the same factor",
}
_BATCH = 256


def brightness_notes(images: AnySplit, mean: Sequence[float], std: Sequence[float]) -> Iterator[str]:
    """A line where images in memory are much darker or brighter than those of this mean and deviation, 0 to 1.

    See `eqzoo.data.brightness.unlike_training`.
    """
    if isinstance(images, Split):
        found = torch.cat([unlike_training(part, mean, std) for part in images.images.split(_BATCH)])
        for sign, text in BRIGHTNESS.items():
            if (count := int((found == sign).sum())) >= max(1, SOME * len(images)):
                yield f"{count:,} of the {len(images):,} images {'is' if count == 1 else 'are'} {text}"


def cut_off(native: tuple[int, int] | None) -> Iterator[str]:
    """A line where images are not square, by their shorter and their longer side."""
    if native is None or (lost := 1 - native[0] / native[1]) < CUT_OFF:
        return
    yield (
        f"most images have about {native[0]} x {native[1]} pixels, and the network sees their central squares: about "
        f"{100 * lost:.0f} % of each, at its ends, is cut off, here and by eqzoo predict; if something lies there, "
        "make squares of them first (PIL.ImageOps.pad), or cut them into square tiles"
    )


def other_side(side: int | None, trained: int | None) -> Iterator[str]:
    """A line where images are much larger or smaller than those that a network was trained on.

    Args:
        side: Their shorter side before they are resized, in pixels; None if it is unknown.
        trained: That of the training images.
    """
    if side is None or trained is None or 1 / OTHER_SIDE < side / trained < OTHER_SIDE:
        return
    if side > trained:
        seen, then, only = f"{side / trained:.3g} times smaller", f"cut them into tiles of {trained} pixels", "more"
    else:
        seen, then, only = f"{trained / side:.3g} times larger", f"take views of {trained} pixels", "fewer"
    yield (
        f"the images have about {side} pixels a side, those that the network was trained on {trained}, and all are "
        f"scaled to its input: at the same magnification it sees things {seen} than in training, so {then}; if they "
        f"only have {only} pixels of the same view, go on"
    )
