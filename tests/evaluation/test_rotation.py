"""Rotation of images, and accuracy over rotations."""

import math

import pytest
import torch

from eqzoo.data import Split
from eqzoo.evaluation.rotation import rotate, rotation_curve, sample
from eqzoo.groups import P4, transform


@pytest.mark.parametrize("quarters", range(-3, 8))
def test_quarter_rotations_are_those_of_the_group(quarters):
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(rotate(x, 90 * quarters), transform(x, P4, quarters % 4, "trivial"))


def blob(height, width, degrees):
    """A smooth image, drawn as it is after a counter-clockwise rotation about the center, in pixels."""
    rows, columns = (torch.arange(side) - (side - 1) / 2 for side in (height, width))
    angle = math.radians(degrees)
    # Where the content of (row, column), rows downwards, was before the rotation.
    row = math.cos(angle) * rows[:, None] + math.sin(angle) * columns
    column = -math.sin(angle) * rows[:, None] + math.cos(angle) * columns
    return torch.exp(-((row - 3) ** 2 / 8 + (column + 2) ** 2 / 16))[None, None]


@pytest.mark.parametrize("degrees", [15, 40, 100, 250, -20])
@pytest.mark.parametrize(("height", "width"), [(31, 31), (30, 42)])
def test_rotating_a_smooth_image_equals_drawing_it_rotated(degrees, height, width):
    rotated = rotate(blob(height, width, 0), degrees)
    assert (rotated - blob(*rotated.shape[2:], degrees)).abs().max() < 0.02  # what the interpolation loses
    assert (rotated - blob(*rotated.shape[2:], -degrees)).abs().max() > 0.1


def test_rotations_compose_with_quarter_rotations():
    x = torch.randn(1, 1, 9, 9)
    torch.testing.assert_close(rotate(rotate(x, 30), 90), rotate(x, 120))
    torch.testing.assert_close(rotate(rotate(x, 90), 30), rotate(x, 120))
    assert (rotate(rotate(x, 90), 30) - rotate(x, 60)).abs().max() > 0.1


def test_the_sample_is_the_same_at_every_call_and_not_the_first_images():
    """A folder's images are ordered by class: the first ones would be of one class."""
    labels = torch.arange(90) // 30
    images = torch.arange(90, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 28, 28)
    split = Split(images, labels)
    drawn = sample(split, 30)
    assert torch.equal(drawn.images, sample(split, 30).images)
    assert set(drawn.labels.tolist()) == {0, 1, 2}
    assert drawn.labels.tolist() == sorted(drawn.labels.tolist())
    assert len(sample(split, 1_000)) == 90


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("degrees", [15, 30, 45])
def test_half_precision_images_are_rotated_as_those_of_float64(dtype, degrees):
    smooth = torch.nn.functional.interpolate(torch.rand(1, 1, 16, 16), (224, 224), mode="bicubic").to(dtype)
    rotated = rotate(smooth, degrees)
    expected = rotate(smooth.double(), degrees)
    assert rotated.dtype == dtype
    assert (rotated.double() - expected).norm() < 1e-2 * expected.norm()  # a NaN is not smaller


@pytest.mark.parametrize("images", [torch.zeros(3, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)], ids=str)
def test_what_is_no_batch_of_images_is_refused(images):
    with pytest.raises(ValueError, match=r"\(B, C, height, width\), floating point"):
        rotate(images, 30)


@pytest.mark.parametrize(("images", "labels"), [(4, (4, 1)), (4, (3,)), (4, ()), (0, (0,)), (2, None)])
def test_labels_that_are_no_integers_or_of_another_shape_are_refused(images, labels):
    labels = torch.rand(images) if labels is None else torch.zeros(labels, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"labels are \(n,\) integers"):
        rotation_curve(torch.nn.Flatten(), torch.rand(images, 1, 2, 2), labels, [0])
