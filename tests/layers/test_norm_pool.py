"""Batch norm and pools: equations, equivariance, fused forms, and sizes that raise."""

import copy
from functools import partial

import pytest
import torch
from timm.utils import reparameterize_model
from torch import nn

import eqzoo
from eqzoo.equivariance import equivariance_error, equivariance_report, randomize_norms
from eqzoo.groups import P4, P4M, Z2, Z2M, transform
from eqzoo.layers import (
    GlobalPool,
    GroupBatchNorm2d,
    GroupPool,
    HalvingPool2d,
    LiftingConv2d,
    PointwiseConv2d,
    SpatialAdaptiveAvgPool2d,
    SpatialPool2d,
    Upsample2d,
    norm_act,
)

GRID = [Z2, Z2M, P4, P4M]


def trained(norm):
    """A batch norm with running statistics and random affine parameters, as after training."""
    for _ in range(3):
        norm(torch.randn(4, norm.num_features, norm.group.order, 5, 5) * 3 + 1)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -1, 1)
    return norm.eval()


@pytest.mark.parametrize("group", GRID)
def test_batch_norm_is_equivariant_and_fuses(group):
    norm = trained(GroupBatchNorm2d(group, 3))
    x = torch.randn(2, 3, group.order, 5, 6)
    assert equivariance_report(norm, x).largest < 1e-14
    plain = norm.fuse()
    assert isinstance(plain, nn.BatchNorm2d)
    torch.testing.assert_close(plain(x.flatten(1, 2)), norm(x).flatten(1, 2))


def test_a_batch_norm_of_planes_breaks_equivariance_once_it_is_trained():
    """Negative control: equivariance_error has to find separate parameters for each element."""

    class PlaneNorm(nn.BatchNorm2d):
        group = P4

        def forward(self, x):
            return super().forward(x.flatten(1, 2)).unflatten(1, (3, 4))

    x = torch.randn(2, 3, 4, 5, 5)
    assert equivariance_error(PlaneNorm(12), x) < 1e-14  # at initialization the error is hidden
    assert equivariance_error(PlaneNorm(12), x, randomize=True) > 0.1


def test_randomize_norms_changes_every_vector():
    norm = GroupBatchNorm2d(P4, 3)
    with pytest.raises(ValueError, match="pass x"):
        randomize_norms(norm, torch.Generator())
    randomize_norms(norm.eval(), torch.Generator(), torch.randn(2, 3, 4, 5, 5))
    assert all(value.unique().numel() == 3 for value in norm.state_dict().values() if value.ndim)


@pytest.mark.parametrize("reduce", ["max", "avg"])
@pytest.mark.parametrize("sizes", [(2, None, 0, 6, 4), (3, 2, 1, 5, 7), (3, 3, 0, 6, 6), (2, 1, 0, 5, 4)], ids=str)
@pytest.mark.parametrize("group", GRID)
def test_spatial_pools(group, sizes, reduce):
    kernel_size, stride, padding, height, width = sizes
    pool = SpatialPool2d(group, kernel_size, stride, padding, reduce)
    x = torch.randn(2, 3, group.order, height, width)
    assert equivariance_report(pool, x).largest < 1e-14
    plain = nn.MaxPool2d if reduce == "max" else nn.AvgPool2d
    for h in group.elements:
        assert torch.equal(pool(x)[:, :, h], plain(kernel_size, stride, padding)(x[:, :, h]))
    assert torch.equal(pool.fuse()(x.flatten(1, 2)), pool(x).flatten(1, 2))


@pytest.mark.parametrize("reduce", ["max", "avg"])
def test_a_fused_pool_refuses_the_sizes_that_the_pool_refuses(reduce):
    assert SpatialPool2d(P4, 2, reduce=reduce, exact=False).fuse()(torch.zeros(1, 4, 5, 5)).shape[-1] == 2
    fused = SpatialPool2d(P4, 2, reduce=reduce).fuse()
    assert fused(input=torch.zeros(1, 4, 4, 4)).shape[-1] == 2
    with pytest.raises(ValueError, match="would break p4"):
        fused(torch.zeros(1, 4, 5, 5))


def test_a_pool_that_drops_an_edge_raises_and_does_break_equivariance():
    pool = SpatialPool2d(P4, 2)
    x = torch.randn(1, 2, 4, 7, 7)
    with pytest.raises(ValueError, match="exact at height 6 or 8"):
        pool(x)
    assert equivariance_error(SpatialPool2d(P4, 2, exact=False), x) > 0.1
    assert SpatialPool2d(Z2, 2)(x[:, :, :1]).shape == (1, 2, 1, 3, 3)


@pytest.mark.parametrize("size", [6, 7])
def test_adaptive_pool_is_exact_at_any_size(size):
    pool = SpatialAdaptiveAvgPool2d(4)
    x = torch.randn(1, 2, 8, size, size)
    for g in P4M.elements:
        rotated = pool(transform(x, P4M, g, "regular"))
        torch.testing.assert_close(rotated, transform(pool(x), P4M, g, "regular"))
    torch.testing.assert_close(pool.fuse()(x.flatten(1, 2)), pool(x).flatten(1, 2))


@pytest.mark.parametrize("reduce", ["max", "avg"])
@pytest.mark.parametrize("group", GRID)
def test_group_and_global_pools(group, reduce):
    x = torch.randn(2, 3, group.order, 4, 4)
    over_group, over_all = GroupPool(group, reduce), GlobalPool(group, reduce)
    maps = over_group(x)
    for g in group.elements:
        rotated = transform(x, group, g, "regular")
        torch.testing.assert_close(over_group(rotated), transform(maps, group, g, "trivial"))
        torch.testing.assert_close(over_all(rotated), over_all(x))
    torch.testing.assert_close(over_all(x), (maps.amax if reduce == "max" else maps.mean)((2, 3)))
    torch.testing.assert_close(over_group.fuse()(x.flatten(1, 2)), maps)
    torch.testing.assert_close(over_all.fuse()(x.flatten(1, 2)), over_all(x))


@pytest.mark.parametrize("pool", [GlobalPool, GroupPool, HalvingPool2d, partial(SpatialPool2d, kernel_size=2)])
def test_a_pool_that_there_is_not_is_refused(pool):
    with pytest.raises(ValueError, match="'max' or 'avg'"):
        pool(P4, reduce="sum")


@pytest.mark.parametrize("sides", [(6, 6), (7, 5), (8, 3)])
def test_upsampling_is_exact_to_any_side(sides):
    layer, x = Upsample2d(P4M), torch.randn(2, 3, 8, *sides, dtype=torch.float64)
    assert layer(x).shape == (2, 3, 8, 2 * sides[0], 2 * sides[1])
    assert equivariance_error(layer, x) < 1e-15
    for size in ((13, 13), (6, 11), sides):
        y = layer(x, size)
        assert y.shape == (2, 3, 8, *size)
        assert torch.equal(y.flatten(1, 2), layer(x.flatten(1, 2), size))
        rotated = layer(transform(x, P4M, 1, "regular"), size[::-1])
        assert torch.allclose(rotated, transform(y, P4M, 1, "regular"), rtol=0, atol=1e-14)
    assert torch.equal(layer(x, sides), x)
    bilinear = torch.nn.functional.interpolate(x[:, :, 0], scale_factor=2, mode="bilinear")
    assert torch.allclose(layer(x)[:, :, 0], bilinear, rtol=0, atol=1e-14)
    assert torch.equal(layer(x, 9), layer(x, (9, 9)))


@pytest.mark.parametrize("behind", ["nothing", "a pointwise convolution"])
@pytest.mark.parametrize("reduce", ["max", "avg"])
def test_halving_is_exported_for_sides_of_either_parity(reduce, behind):
    pool, sides = HalvingPool2d(P4, reduce), {2: torch.export.Dim("height", min=4), 3: torch.export.Dim("width", min=4)}
    if behind != "nothing":
        pool = nn.Sequential(LiftingConv2d(P4, 3, 4, 1), pool, PointwiseConv2d(P4, 4, 2)).eval()
    program = torch.export.export(pool, (torch.zeros(1, 3, 8, 8),), dynamic_shapes=(sides,))
    for height, width in ((8, 8), (7, 9), (5, 12), (10, 11)):
        x = torch.randn(1, 3, height, width)
        assert torch.allclose(program.module()(x), pool(x), rtol=0, atol=1e-6)


def test_a_fused_norm_takes_a_residual_too():
    norm, x = GroupBatchNorm2d(P4, 3).eval(), torch.randn(2, 3, 4, 5, 6)
    plain = norm_act(norm.fuse(), nn.ReLU(), x.flatten(1, 2), x.flatten(1, 2))
    torch.testing.assert_close(plain, norm(x, residual=x, relu=True).flatten(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_keep_their_range_and_precision_in_16_bits(dtype):
    """Variances of trained networks are larger than 65,504, the largest number of float16."""
    norm = GroupBatchNorm2d(P4, 3).float().eval()
    with torch.no_grad():
        norm.running_var.copy_(torch.tensor([1.0, 1e6, 3e7]))
        norm.running_mean.copy_(torch.tensor([0.1, 10.0, 100.0]))
    x = torch.randn(4, 3, 4, 5, 5, dtype=torch.float32) * norm.running_var.sqrt().view(1, 3, 1, 1, 1)
    expected = norm(x)
    half = copy.deepcopy(norm).to(dtype)
    assert (half.weight.dtype, half.running_var.dtype) == (dtype, torch.float32)
    assert torch.equal(half.running_var, norm.running_var)
    y = half(x.to(dtype))
    assert y.dtype == dtype
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(y.float(), expected, **tolerance)
    fused = half.fuse()(x.to(dtype).flatten(1, 2))
    assert fused.dtype == dtype
    torch.testing.assert_close(fused.float(), expected.flatten(1, 2), **tolerance)
    half.train()(x.to(dtype).requires_grad_()).sum().backward()
    assert half.weight.grad.dtype == dtype
    assert half.running_var.isfinite().all()
    assert not torch.equal(half.running_var, norm.running_var)
    assert copy.deepcopy(norm).double().running_var.dtype == torch.float64
    assert copy.deepcopy(norm).to("meta", dtype).running_var.is_meta


@pytest.mark.parametrize("name", ["p4_e4_resnet18", "p4_resnet29"])
def test_trained_networks_say_the_same_in_float16(name):
    x = torch.randn(4, 3, 32, 32, dtype=torch.float32)
    with torch.no_grad():
        expected = eqzoo.create_model(name, pretrained=True, dtype=torch.float32).eval()(x)
        found = eqzoo.create_model(name, pretrained=True, dtype=torch.float16).eval()(x.half())
        deployed = reparameterize_model(eqzoo.create_model(name, pretrained=True, dtype=torch.float32).eval())
        of_deployed = deployed.half()(x.half())
    for logits in (found, of_deployed):
        assert logits.dtype == torch.float16
        torch.testing.assert_close(logits.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.std()))
