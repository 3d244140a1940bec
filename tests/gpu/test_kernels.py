"""The Triton kernels on a GPU against the reference, outputs and gradients: ``TRITON_INTERPRET=0 pytest tests/gpu``."""

import pytest
import torch

from eqzoo.groups import P4, P4M, Z2, cyclic
from eqzoo.layers import (
    AffineSelfConv2d,
    AttentiveGroupConv2d,
    AttentiveLiftingConv2d,
    E4Layer2d,
    GroupSelfAttention2d,
    LiftingSelfAttention2d,
    SimpleAffineSelfConv2d,
    StandAloneSelfAttention2d,
)
from eqzoo.ops import _dispatch, use_backend

# A layer, its input without the batch, and odd sides.
CASES = {
    "e4": lambda: (E4Layer2d(P4, 16, 16, 5, 2), (16, 4, 29, 27)),
    "e4, p4m": lambda: (E4Layer2d(P4M, 6, 6, 3, 2), (6, 8, 7, 5)),
    "asc": lambda: (AffineSelfConv2d(P4, 16, 5, 8), (16, 4, 17, 15)),
    "asc, p4m": lambda: (AffineSelfConv2d(P4M, 12, 3, 6), (12, 8, 9, 11)),
    "asc, simple": lambda: (SimpleAffineSelfConv2d(P4, 8, 3, 4), (8, 4, 17, 15)),
    "sasa": lambda: (StandAloneSelfAttention2d(Z2, 32, num_heads=8), (32, 1, 17, 15)),
    "attentive": lambda: (AttentiveGroupConv2d(P4, 10, 10, 3, padding=1), (10, 4, 25, 23)),
    "attentive, channel": lambda: (AttentiveGroupConv2d(P4M, 4, 3, 3, attention="channel"), (4, 8, 9, 11)),
    "attentive, spatial": lambda: (AttentiveGroupConv2d(P4, 4, 3, 3, attention="spatial"), (4, 4, 9, 11)),
    "attentive, lifting": lambda: (AttentiveLiftingConv2d(P4, 3, 8, 5, padding=2), (3, 21, 23)),
    "gsa": lambda: (GroupSelfAttention2d(P4, 12, 12, 5, num_heads=3), (12, 4, 15, 13)),
    "gsa, r8": lambda: (GroupSelfAttention2d(cyclic(8), 6, 6, 3, num_heads=2), (6, 8, 9, 7)),
    "gsa, global": lambda: (GroupSelfAttention2d(P4, 6, 6, "global", num_heads=2), (6, 4, 5, 7)),
    "gsa, lifting": lambda: (LiftingSelfAttention2d(P4, 3, 12, 5, num_heads=3), (3, 15, 13)),
}


def with_gradients(layer, x, backend):
    """The output, and the gradients of a weighted sum of it, in float64 on the CPU."""
    inputs = (x, *layer.parameters())
    with use_backend(backend):
        y = layer(x)
        weight = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        grads = torch.autograd.grad((y * weight).sum(), inputs)
    return [t.double().cpu() for t in (y, *grads)]


def assert_close(found, expected, bound):
    """Relative to each tensor, or to a hundredth of the largest gradient: some, behind a softmax, are 0."""
    largest = max(other.norm() for other in expected[1:])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= bound * max(other.norm(), largest / 100)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_the_reference(case, dtype, bound):
    layer, shape = CASES[case]()
    x = torch.randn(3, *shape)
    expected = with_gradients(layer, x.requires_grad_(), "reference")
    on_gpu = x.detach().to("cuda", torch.float32).requires_grad_()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = with_gradients(layer.to("cuda", torch.float32), on_gpu, "auto")
    assert_close(found, expected, bound)


def test_the_kernels_ran(monkeypatch):
    """Negative control: without them eager torch would pass the test above."""
    asked = []
    on_cuda = _dispatch.on_cuda
    monkeypatch.setattr(_dispatch, "on_cuda", lambda *tensors: asked.append(on_cuda(*tensors)) or asked[-1])
    for make in CASES.values():
        layer, shape = make()
        asked.clear()
        layer.to("cuda", torch.float32)(torch.randn(1, *shape, device="cuda", dtype=torch.float32))
        assert asked
        assert all(asked)


def test_results_do_not_change_from_run_to_run():
    layer, shape = CASES["gsa"]()
    layer, x = layer.to("cuda", torch.float32), torch.randn(2, *shape, device="cuda", dtype=torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch's own convolutions around the kernels
    try:
        first, second = (with_gradients(layer, x.requires_grad_(), "auto") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
