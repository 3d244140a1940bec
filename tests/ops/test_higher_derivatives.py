"""Third derivatives of the operators whose second derivatives go through formulas."""

import pytest
import torch

from eqzoo.ops import generated_depthwise
from eqzoo.ops.octic import octic_gelu, octic_norm


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (generated_depthwise, ((1, 2, 2, 2, 2), (2, 1, 9, 2), (2, 1, 9), (1, 2, 2, 2, 2))),
        (octic_gelu, ((4, 1, 1, 2), (2, 1, 1, 4))),
        (octic_norm, ((4, 1, 1, 2), (2, 1, 1, 4), (12,), (2,))),
    ],
)
def test_third_derivatives(function, shapes):
    inputs = drawn(*shapes)

    def first(*inputs):
        out = function(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(sum(x.sin().sum() for x in out), inputs, create_graph=True)

    assert torch.autograd.gradgradcheck(first, inputs)
    # Which compares the recorded second derivatives with themselves alone.
    second = [
        torch.autograd.grad(sum(x.square().sum() for x in first(*inputs)), inputs, create_graph=recorded)
        for recorded in (True, False)
    ]
    torch.testing.assert_close(*second)
