"""Turned pictures: against pictures drawn turned, at quarter turns, and what a turn curve shows."""

import math

import pytest
import torch

import eqzoo
from eqzoo.groups import P4, transform
from eqzoo.turns import turn, turn_curve


@pytest.mark.parametrize("quarters", range(-3, 8))
def test_quarter_turns_are_those_of_the_group(quarters):
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(turn(x, 90 * quarters), transform(x, P4, quarters % 4, "trivial"))


def blob(height, width, degrees):
    """A smooth picture, drawn as it is after a counter-clockwise turn about the centre, pixels as the unit."""
    rows, columns = (torch.arange(side) - (side - 1) / 2 for side in (height, width))
    angle = math.radians(degrees)
    # What stands at (row, column), rows downwards, stood here before the turn.
    row = math.cos(angle) * rows[:, None] + math.sin(angle) * columns
    column = -math.sin(angle) * rows[:, None] + math.cos(angle) * columns
    return torch.exp(-((row - 3) ** 2 / 8 + (column + 2) ** 2 / 16))[None, None]


@pytest.mark.parametrize("degrees", [15, 40, 100, 250, -20])
@pytest.mark.parametrize(("height", "width"), [(31, 31), (30, 42)])
def test_smooth_pictures_turn_as_if_they_were_drawn_turned(degrees, height, width):
    turned = turn(blob(height, width, 0), degrees)
    assert (turned - blob(*turned.shape[2:], degrees)).abs().max() < 0.02  # what the interpolation loses
    assert (turned - blob(*turned.shape[2:], -degrees)).abs().max() > 0.1


def test_turning_keeps_its_law():
    """Turning by an angle after a quarter turn is turning by the sum."""
    x = torch.randn(1, 1, 9, 9)
    torch.testing.assert_close(turn(turn(x, 30), 90), turn(x, 120))
    torch.testing.assert_close(turn(turn(x, 90), 30), turn(x, 120))
    assert (turn(turn(x, 90), 30) - turn(x, 60)).abs().max() > 0.1


def test_the_curve_of_an_exact_network_repeats_every_quarter_and_the_baselines_does_not():
    images, labels = torch.randn(200, 1, 28, 28), torch.arange(200) % 10
    degrees = [20, 110, 200, 290]
    ours, theirs = (
        turn_curve(eqzoo.create_model(name, pretrained=True).double(), images, labels, degrees)
        for name in ("p4_cnn", "z2_cnn")
    )
    assert len(set(ours)) == 1
    assert len(set(theirs)) > 1


def test_the_mode_is_restored_and_a_single_picture_is_refused():
    model = eqzoo.create_model("p4_cnn").train()
    turn_curve(model, torch.randn(2, 1, 28, 28), torch.tensor([1, 2]), [0])
    assert model.training
    with pytest.raises(ValueError, match=r"\(B, C, height, width\)"):
        turn(torch.randn(3, 8, 8), 30)
