"""Images of files as network inputs."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..data import load_image, preprocess, unlabeled_images
from ..data.arrays import ARRAYS
from ..data.folder import images_below, lines_on_other_formats
from ..data.images import preprocess_uint8
from ..evaluation import Predictor
from ..groups import Group, transform


@dataclass(frozen=True)
class NamedImage:
    """An image that is not read yet.

    Args:
        name: Its file, and for an image of an array also its position there: ``new.npz[3]``.
        load: Reads it with a number of channels, ``(channels, height, width)`` with values in 0 to 255.
        opacity: Whether a fourth channel is the opacity, as in image files; in arrays it is one like the others.
    """

    name: str
    load: Callable[[int], Tensor]
    opacity: bool = True

    def read(self, channels: int, invert: bool = False) -> Tensor:
        """The image with so many channels, ``(channels, height, width)``; inverted, 255 minus its values.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is not a readable image, or has another number of channels.
        """
        image = self.load(channels)
        if not invert:
            return image
        shades = 3 if self.opacity and len(image) == 4 else len(image)
        return torch.cat([255 - image[:shades], image[shades:]])


def is_one_image(paths: Sequence[str]) -> bool:
    """Whether they are a single image file, not a folder or a file of arrays, which hold any number."""
    return len(paths) == 1 and not Path(paths[0]).is_dir() and Path(paths[0]).suffix.lower() not in ARRAYS


def named_images(paths: Sequence[str]) -> list[NamedImage]:
    """The images of files, for each folder of those below it, sorted, and of .npz and .npy files; each once.

    Files of other image formats in a folder are reported on stderr.

    Raises:
        FileNotFoundError: If there is no .npz or .npy file of this name.
        ValueError: If there is no image below a folder, or a .npz or .npy file has no images.
    """
    found = {image.name: image for path in paths for image in _images_of(path)}
    return list(found.values())


def _images_of(path: str) -> Iterator[NamedImage]:
    if Path(path).suffix.lower() in ARRAYS and not Path(path).is_dir():
        images = unlabeled_images(path)
        if not len(images):
            raise ValueError(f"{path} has no images, its array is {tuple(images.shape)}")
        for i, image in enumerate(images):
            yield NamedImage(f"{path}[{i}]", partial(_as_it_is, image, path), opacity=False)
        return
    files = [str(file) for file in images_below(Path(path))] if Path(path).is_dir() else [path]
    for line in lines_on_other_formats(path):
        print(f"eqzoo: {line}", file=sys.stderr)
    if not files:
        raise ValueError(f"no image in the folder {path}; images end in .png, .jpg, .tif, .webp and the like")
    for file in files:
        yield NamedImage(file, partial(load_image, file))


def _as_it_is(image: Tensor, path: str, channels: int) -> Tensor:
    """An image of an array in float32; its channels are not converted."""
    if len(image) != channels:
        raise ValueError(f"the images of {path} have {len(image)} channels, and the network takes {channels}")
    return image.float()


def copies_of(image: Tensor, model: Predictor, group: Group) -> Tensor:
    """An image under every element of a group, of a predictor's input size, ``(elements, C, height, width)`` float64.

    Args:
        image: ``(C, height, width)`` with values in 0 to 255.
        model: The predictor.
        group: A group of the pixel grid.
    """
    _, height, width = model.input_size
    views = [preprocess(transform(image.double(), group, g, "trivial"), (height, width)) for g in group.elements]
    return torch.stack(views)


def as_evaluated(image: Tensor, model: Predictor) -> Tensor:
    """An image of a predictor's input size as `eqzoo evaluate` reads it, ``(1, C, height, width)`` uint8."""
    _, height, width = model.input_size
    return preprocess_uint8(image, (height, width))[None]
