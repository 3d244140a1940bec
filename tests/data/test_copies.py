"""Copies of images are found, and images that only resemble each other are not."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from eqzoo.data import Split
from eqzoo.data.copies import copies, near_copies


def scenes(count, seed=0, side=32):
    """Images of smooth noise, ``(count, 3, side, side)``."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 200, (count, 6, 6, 3)).astype(np.uint8)
    return [Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC) for image in small]


def tensor(images):
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def recompressed(image):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=75)
    return Image.open(file)


CHANGES = {
    "recompressed": recompressed,
    "rotated": lambda image: image.rotate(90),
    "rotated and recompressed": lambda image: recompressed(image.rotate(270)),
    "reflected": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "resized": lambda image: image.resize((24, 24), Image.Resampling.BICUBIC).resize(
        (32, 32), Image.Resampling.BICUBIC
    ),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.6),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_copies_are_found(change):
    images = scenes(40)
    found = near_copies(torch.cat([tensor(images), tensor(map(change, images))])).tolist()
    assert len(found) > 35  # some are too plain to be told from others
    assert all(other - one == 40 for one, other in found)


def test_others_are_not_copies():
    assert not len(near_copies(tensor(scenes(200))))
    assert not len(near_copies(torch.empty(0, 3, 8, 8, dtype=torch.uint8)))
    y, x = np.mgrid[:32, :32] - 15.5
    discs = [np.hypot(x, y) < radius for radius in (9.0, 9.2, 9.4)]  # round cells look alike
    random = np.random.default_rng(0)
    cells = torch.from_numpy(np.stack([100 * disc + random.integers(0, 9, (32, 32)) for disc in discs])).byte()[:, None]
    assert not len(near_copies(cells))
    assert near_copies(torch.cat([cells, cells[1:2].rot90(1, (2, 3))])).tolist() == [[1, 3]]  # but for the same one
    flat = torch.from_numpy(random.integers(100, 103, (20, 1, 32, 32))).byte()
    assert not len(near_copies(flat))
    assert near_copies(torch.cat([flat, flat[3:4].flip(3)])).tolist() == [[3, 20]]


def of_cells(coarse, added):
    """Images of 8 x 8 cells and of details, both ``(n, cells, cells)``, without a mean in each cell."""
    added = added - added.reshape(-1, 8, 2, 8, 2).mean((2, 4)).repeat_interleave(2, 1).repeat_interleave(2, 2)
    image = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2) + added.repeat_interleave(2, 1).repeat_interleave(
        2, 2
    )
    return image.round().clamp(0, 255).byte()[:, None].repeat(1, 3, 1, 1)


def test_each_rule_tells_images_apart():
    generator = torch.Generator().manual_seed(0)
    coarse = 100 + 30 * torch.randn(1, 8, 8, generator=generator)
    details, others = (10 * torch.randn(1, 16, 16, generator=generator) for _ in range(2))

    def found(coarse, details, share=0.95, brighter=3.0):
        """The pairs of an image and of one whose details are the same in this share."""
        different = share * details + (1 - share**2) ** 0.5 * details.abs().mean() / 8 * others
        return near_copies(torch.cat([of_cells(coarse, details), of_cells(coarse + brighter, different)])).tolist()

    assert found(coarse, details) == [[0, 1]]
    assert not found(coarse, details, share=0.75)
    tinted = of_cells(coarse, details)
    tinted[:, 2] += 40
    assert not len(near_copies(torch.cat([of_cells(coarse, details), tinted])))
    assert not found(100 + 0.04 * (coarse - 100), details)  # nearly flat
    assert not found(coarse, 0.05 * details, share=1)
    assert not found(coarse + coarse.rot90(2, (1, 2)), details + details.rot90(2, (1, 2)))  # symmetric
    stroke = torch.zeros(1, 16, 16)
    stroke[:, 3:13, 5] = details[:, 3:13, 5]
    assert not found(coarse, 3 * stroke)  # simple


def test_copies_of_splits():
    images = tensor(scenes(30))
    labels = torch.arange(30) % 3
    splits = {"train": Split(images[:20], labels[:20]), "test": Split(images[20:].clone(), labels[20:].clone())}
    assert copies(splits) == ([], [])
    splits["test"].images[4], splits["test"].labels[4] = images[7].rot90(2, (1, 2)), labels[7]
    assert copies(splits) == ([("test", 4)], [])
    splits["test"].labels[4] = (labels[7] + 1) % 3
    assert copies(splits) == ([("test", 4)], [(("train", 7), ("test", 4))])
    assert copies({"train": splits["train"]}) == ([], [])


def test_equal_images_are_copies_however_plain():
    gray = torch.arange(20, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 16, 16)
    splits = {"train": Split(gray[:10], torch.zeros(10)), "test": Split(gray[10:], torch.zeros(10))}
    assert copies(splits) == ([], [])
    splits = {"test": Split(gray[:10], torch.zeros(10)), "valid": Split(gray[8:], torch.zeros(12))}
    assert copies(splits) == ([("test", 8), ("test", 9)], [])
