"""The group axioms, and the group actions as homomorphisms, for all elements."""

import itertools

import numpy as np
import pytest
import torch

from eqzoo.groups import P4, P4M, Z2, Z2M, Group, cyclic, dihedral, orbit, orbit_array, permutation, transform
from tests.layers import reference

GRID = [Z2, Z2M, cyclic(2), dihedral(2), P4, P4M]
ALL = [*GRID, cyclic(3), dihedral(3), cyclic(8), dihedral(8), cyclic(12), cyclic(16)]


@pytest.mark.parametrize("group", ALL)
def test_products_are_those_of_the_matrices(group):
    """The matrices are faithful, so that these are the axioms of a group too."""
    assert Group.from_name(group.name) == group
    for g, h in itertools.product(group.elements, repeat=2):
        torch.testing.assert_close(group.matrix(g) @ group.matrix(h), group.matrix(group.product(g, h)))
    for g in group.elements:
        assert group.element(group.matrix(g)) == g
        assert group.product(g, 0) == g == group.product(0, g)
        assert group.product(g, group.inverse(g)) == 0 == group.product(group.inverse(g), g)


def test_other_names_of_a_group_and_names_of_none():
    assert (Group.from_name("r1m"), Group.from_name("r4")) == (Z2M, P4)
    for name in ("p5", "r0", "r", "P4", "p4mm", "p4 ", "z2_cnn", ""):
        with pytest.raises(ValueError, match="no group is named"):
            Group.from_name(name)


def test_elements_flip_the_width_and_then_rotate_counter_clockwise():
    image = torch.tensor([[1, 2], [3, 4]])
    assert transform(image, P4M, 4, "trivial").tolist() == [[2, 1], [4, 3]]
    assert transform(image, P4M, 1, "trivial").tolist() == [[2, 4], [1, 3]]
    assert transform(image, P4M, 5, "trivial").tolist() == [[1, 3], [2, 4]]  # reflected, then rotated


@pytest.mark.parametrize("field", ["trivial", "regular"])
@pytest.mark.parametrize("group", [*GRID, cyclic(8), dihedral(8)])
def test_the_action_is_a_homomorphism_and_agrees_with_the_reference(group, field):
    x = torch.randn(2, group.order, 3, 4)
    slow = reference.act if field == "trivial" else reference.act_regular
    for g, h in itertools.product(group.grid_elements, repeat=2):
        product = transform(x, group, group.product(g, h), field)
        assert torch.equal(transform(transform(x, group, h, field), group, g, field), product)
    for g in group.grid_elements:
        assert torch.equal(transform(x, group, g, field), slow(x, group, g))


def test_the_homomorphism_test_can_fail():
    x = torch.randn(4, 3, 3)

    def wrong(x, g):  # permutes by g instead of its inverse
        return torch.rot90(x[permutation(P4, P4.inverse(g))], g, (-2, -1))

    assert torch.equal(wrong(wrong(x, 1), 1), wrong(x, 2))  # a homomorphism too, but not the action
    assert not torch.equal(wrong(x, 1), reference.act_regular(x, P4, 1))


@pytest.mark.parametrize("field", ["trivial", "regular"])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 5])
@pytest.mark.parametrize("group", GRID)
def test_orbit_gathers_the_transformed_filters(group, kernel_size, field):
    shape = (kernel_size, kernel_size) if field == "trivial" else (group.order, kernel_size, kernel_size)
    w = torch.randn(shape)
    for g, index in zip(group.elements, orbit(group, kernel_size, field), strict=True):
        assert torch.equal(w.flatten()[index].reshape(shape), transform(w, group, g, field))


def test_an_orbit_first_asked_for_on_another_device_is_usable_everywhere():
    orbit_array.cache_clear()
    with torch.device("meta"):
        index = orbit(P4, 3, "regular")
    assert index.device.type == "cpu"
    assert index[0].tolist() == list(range(36))


def test_names_and_grid():
    assert [g.name for g in (Z2, Z2M, P4, P4M, cyclic(8), dihedral(6))] == ["z2", "z2m", "p4", "p4m", "r8", "r6m"]
    assert all(g.of_grid == g for g in GRID)
    assert [Group(n, True).of_grid.rotations for n in (3, 6, 8, 12)] == [1, 2, 4, 4]
    for n in (3, 6, 8, 12):
        found = Group(n, True).of_grid
        assert found.order == len(Group(n, True).grid_elements)
        assert found.reflections
    assert all(g.on_grid for g in GRID)
    assert cyclic(8).grid_elements == (0, 2, 4, 6)
    assert cyclic(3).grid_elements == (0,)


def test_errors_say_what_would_work():
    with pytest.raises(ValueError, match="at least one rotation"):
        Group(0)
    with pytest.raises(ValueError, match="0 to 3"):
        P4.inverse(4)
    with pytest.raises(ValueError, match="45 degrees"):
        transform(torch.zeros(3, 3), cyclic(8), 1, "trivial")
    with pytest.raises(ValueError, match=r"\(\.\.\., 4, height, width\)"):
        transform(torch.zeros(8, 3, 3), P4, 1, "regular")
    with pytest.raises(ValueError, match="'trivial' or 'regular'"):
        transform(torch.zeros(4, 3, 3), P4, 1, "vector")
    with pytest.raises(ValueError, match="use z2"):
        orbit(cyclic(8), 3, "trivial")


@pytest.mark.parametrize("rotations", [4.0, "4", None])
def test_rotations_are_an_integer(rotations):
    with pytest.raises(TypeError, match="integer"):
        cyclic(rotations)


def test_groups_of_other_types_of_numbers():
    assert cyclic(np.int64(4)) == P4
    assert Group(4, 2) == P4M  # and no group of twelve elements
    with pytest.raises(TypeError, match=r"group is an eqzoo\.Group such as eqzoo\.P4, got 'p4m'"):
        transform(torch.zeros(4, 4), "p4m", 1, "trivial")
