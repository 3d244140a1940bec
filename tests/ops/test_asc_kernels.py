"""Affine attention: C++, Triton and eager torch against the reference and against loops, outputs and gradients."""

import pytest
import torch

from eqzoo.groups import P4
from eqzoo.layers import AffineSelfConv2d
from eqzoo.ops import AffineBank, AffineBanks, _chunks, _compile, affine_attention, reference, use_backend
from eqzoo.ops.asc import operator as asc
from eqzoo.ops.asc.eager import mapped
from tests.conftest import kept_numbers, threads
from tests.ops.test_group_conv_kernels import channels_last


@pytest.fixture
def compiled():
    if _compile.cpu_function("asc/cpu", "affine_attention", torch.ones(1)) is None:
        pytest.skip("no C++ compiler")


def draw(order, sides=(5, 7), k=3, values=True, batch=2, channels=4, dtype=torch.float64):
    """Fields and maps, as the operator takes them."""
    shapes = [(batch, channels, order, *sides)] * (3 if values else 2)
    shapes += [(channels, order, order, 1), (channels, order, 1)]
    shapes += [(channels, order, order, k * k), (channels, order, k * k)] * (2 if values else 1)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(tensors, k=3, heads=2, scale=0.3):
    fields = len(tensors) // 3
    maps = [AffineBank(*tensors[i : i + 2]) for i in range(fields, len(tensors), 2)]
    banks = AffineBanks(maps[0], maps[1], maps[2] if fields == 3 else None)
    return affine_attention(*tensors[:2], tensors[2] if fields == 3 else None, banks, k, heads, scale)


def with_gradients(tensors, **options):
    y = attend(tensors, **options)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y, *torch.autograd.grad((y * weights).sum(), tensors)]


def assert_same(found, expected, bound):
    """Norms of differences, relative to what is compared; gradients that vanish leave their rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= bound * (other.norm() + 1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(("order", "channels", "heads"), [(1, 4, 1), (2, 4, 2), (4, 6, 2), (8, 2, 2)])
@pytest.mark.parametrize(("sides", "k", "batch"), [((5, 7), 3, 3), ((1, 1), 5, 1), ((6, 3), 5, 2), ((2, 40), 1, 1)])
def test_compiled_is_the_reference(compiled, sides, k, batch, order, channels, heads, values, dtype, bound):
    tensors = draw(order, sides, k, values, batch, channels, dtype)
    found = with_gradients(tensors, k=k, heads=heads)
    with use_backend("reference"):
        assert_same(found, with_gradients(tensors, k=k, heads=heads), bound)


def test_eager_affine_maps_are_the_reference():
    x, psi, beta = torch.randn(2, 3, 4, 5, 6), torch.randn(3, 4, 4, 9), torch.randn(3, 4, 9)
    for bank in (AffineBank(psi, beta), AffineBank(None, beta), AffineBank(psi, None)):
        torch.testing.assert_close(mapped(x, bank, 3), reference.affine_map(x, bank, 3), rtol=1e-10, atol=1e-10)


def test_numbers_below_the_smallest_normal_one_are_flushed_and_the_processor_is_left_as_it_was(compiled):
    tensors = [tensor.detach() * 1e-39 for tensor in draw(4, dtype=torch.float32)]
    small = torch.tensor([1e-39])
    assert not torch.any(attend(tensors))
    with use_backend("reference"):
        assert torch.any(attend(tensors))
    assert torch.all(small * 1 > 0)


def test_bands_of_large_planes_and_parts_of_the_batch_add_up(compiled):
    tensors = draw(4, (37, 50), 5, batch=5, channels=2)
    found = with_gradients(tensors, k=5, heads=1)
    with threads(3):
        assert_same(with_gradients(tensors, k=5, heads=1), found, 1e-13)
    with use_backend("eager"):
        assert_same(found, with_gradients(tensors, k=5, heads=1), 1e-13)


@pytest.mark.parametrize(
    ("order", "sides", "k", "values", "batch", "channels", "heads"),
    [
        (1, (5, 7), 3, True, 1, 3, 1),
        (2, (3, 6), 3, True, 2, 2, 1),
        (4, (3, 2), 3, False, 1, 2, 1),
        (8, (1, 1), 1, True, 1, 1, 1),
    ],
)
def test_triton_is_the_reference(monkeypatch, order, sides, k, values, batch, channels, heads):
    pytest.importorskip("triton")
    from eqzoo.ops.asc import cuda as triton_kernels

    monkeypatch.setattr(triton_kernels, "_MAX_BLOCK", 16)  # several tiles a plane
    tensors = draw(order, sides, k, values, batch, channels, torch.float32)
    grad = torch.linspace(-1, 2, tensors[0].numel(), dtype=torch.float32).reshape(tensors[0].shape)
    detached = [t.detach() for t in tensors]
    found = [
        triton_kernels.forward(detached, k, heads, 0.3),
        *triton_kernels.backward(grad, detached, k, heads, 0.3),
    ]
    with use_backend("reference"):
        assert_same(found, with_gradients(tensors, k=k, heads=heads), 2e-5)


@pytest.mark.parametrize(
    ("order", "sides", "k", "values", "batch", "channels", "heads"),
    [
        (8, (7, 9), 3, True, 2, 2, 2),  # two heads a product of matrices, two tiles a plane
        (8, (3, 5), 3, False, 1, 4, 1),  # products of 32 rows
        (4, (5, 4), 3, True, 2, 8, 4),  # two channels a head
        (4, (1, 1), 1, True, 1, 4, 4),
        (2, (3, 2), 3, True, 1, 8, 8),
    ],
)
def test_triton_in_half_precision_is_the_reference(order, sides, k, values, batch, channels, heads):
    """In float16, as the interpreter does not multiply bfloat16; maps stay in float32."""
    pytest.importorskip("triton")
    from eqzoo.ops.asc import cuda_half as half

    tensors = draw(order, sides, k, values, batch, channels, torch.float32)
    fields = len(tensors) // 3
    with torch.no_grad():
        for i, tensor in enumerate(tensors):
            tensor.copy_(tensor.half())
            if i < fields and i > 0:  # in another layout
                tensor.data = channels_last(tensor)
    given = [t.detach().half() if i < fields else t.detach() for i, t in enumerate(tensors)]
    assert half.fits(given[0], heads)
    grad = torch.linspace(-1, 2, tensors[0].numel()).reshape(tensors[0].shape).half()
    found = [half.forward(given, k, heads, 0.3), *half.backward(grad, given, k, heads, 0.3)]
    assert [t.dtype for t in found] == [given[0].dtype, *(t.dtype for t in given)]
    with use_backend("reference"):
        y = attend(tensors, k=k, heads=heads)
        expected = [y, *torch.autograd.grad((y * grad.float()).sum(), tensors)]
    largest = max(t.norm() for t in expected[1:])
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other).norm() <= 2e-3 * max(other.norm(), largest / 100)


def test_half_precision_takes_what_fills_products_of_matrices():
    pytest.importorskip("triton")
    from eqzoo.ops.asc.cuda_half import fits

    def field(channels, order, dtype=torch.bfloat16):
        return torch.empty(1, channels, order, 3, 3, dtype=dtype)

    assert fits(field(8, 4), 8)  # p4_asc_resnet29
    assert fits(field(32, 4), 8)
    assert fits(field(6, 8), 6)  # p4m_asc_resnet29
    assert fits(field(24, 8, torch.float16), 6)
    assert not fits(field(6, 8, torch.float32), 6)
    assert not fits(field(6, 8), 2)  # three channels a head
    assert not fits(field(5, 8), 5)  # an odd number of heads, two of which would be one product
    assert not fits(field(16, 1), 8)  # diagonal maps
    assert not fits(field(8, 8), 1)  # 64 rows


def test_a_planted_fault_is_noticed(compiled, monkeypatch):
    """Negative control: the maps of keys and values are exchanged."""
    tensors = draw(4)
    with use_backend("eager"):
        expected = with_gradients(tensors)
    with_gaps = asc._with_gaps
    monkeypatch.setattr(asc, "_with_gaps", lambda t: [*with_gaps(t)[:5], *with_gaps(t)[7:], *with_gaps(t)[5:7]])
    for wrong, right in zip(with_gradients(tensors), expected, strict=True):
        assert (wrong - right).norm() > 1e-2 * right.norm()


def test_strides_do_not_matter():
    tensors = draw(2)
    expected = with_gradients(tensors)
    strided = [t.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for t in tensors]
    assert_same(with_gradients(strided), expected, 1e-14)
    planes = [t.detach().flatten(1, 2).to(memory_format=torch.channels_last) for t in tensors[:3]]
    fields = [t.unflatten(1, (4, 2)).requires_grad_() for t in planes]
    assert_same(with_gradients([*fields, *tensors[3:]]), expected, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("order", "channels", "sides"), [(4, 6, (5, 7)), (1, 16, (4, 8)), (8, 4, (3, 6)), (3, 4, (2, 3))]
)
def test_fields_with_channels_last_stay_so(dtype, order, channels, sides):
    """Whole and partial blocks of the kernels' transposition, more images than it takes at a time."""
    tensors = draw(order, sides, batch=10, channels=channels, dtype=dtype)
    if dtype == torch.bfloat16:
        tensors[3:] = [t.detach().float().requires_grad_() for t in tensors[3:]]
    expected = with_gradients(tensors)
    last = [channels_last(t.detach()).requires_grad_() for t in tensors[:3]]
    found = with_gradients([*last, *tensors[3:]])
    assert_same(found[:4], expected[:4], 0)
    assert_same(found[4:], expected[4:], 1e-14 if dtype == torch.float64 else 1e-5)
    assert all(t.stride() == last[0].stride() for t in found[:4])


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("order", [4, 3])
@pytest.mark.parametrize("layout", [channels_last, torch.Tensor.contiguous])
def test_the_operator_keeps_torchs_rules(layout, order, values):
    tensors = draw(order, (3, 2), values=values)
    fields = len(tensors) // 3
    tensors[:fields] = [layout(t.detach()).requires_grad_() for t in tensors[:fields]]
    torch.library.opcheck(torch.ops.eqzoo.affine_attention, (tensors, 3, 2, 0.3))


@pytest.mark.parametrize("order", [3, 4])
def test_without_a_kernel_it_works_through_the_batch_in_parts(monkeypatch, order):
    monkeypatch.setattr(_compile, "cpu_function", lambda *_, **__: None)
    monkeypatch.setattr(_chunks, "CPU_ELEMENTS", 2 * 4 * order * 5 * 7 * 9)  # two images at a time
    tensors = draw(order, batch=3)
    found = with_gradients(tensors)
    with use_backend("eager"):
        assert_same(found, with_gradients(tensors), 1e-13)


def test_other_types_of_numbers():
    tensors = draw(4, dtype=torch.float32)
    half = [t.detach().bfloat16().requires_grad_() for t in tensors[:3]]
    y = attend([*half, *tensors[3:]])
    assert y.dtype == torch.bfloat16
    assert (y.float() - attend(tensors)).norm() < 0.02 * y.float().norm()
    grads = torch.autograd.grad(y.float().sum(), [*half, *tensors[3:]])
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3 + [torch.float32] * 6


def test_what_is_kept_for_the_gradient_does_not_grow_with_the_window():
    for k in (1, 5):
        tensors = draw(4, k=k)
        assert kept_numbers(lambda t=tensors, k=k: attend(t, k=k)) == sum(t.numel() for t in tensors)


def test_an_empty_batch_has_gradients_of_zero():
    """Its values lie at no address, which the kernel took for no values: gradients were what was in memory."""
    layer = AffineSelfConv2d(P4, 8, 3)
    layer(torch.randn(0, 8, 4, 8, 8)).sum().backward()
    assert all(not p.grad.any() for p in layer.parameters())
