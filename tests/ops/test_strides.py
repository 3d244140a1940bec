"""What torch.compile is told of an operator's outputs, their sizes and strides, is what the operator gives."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from eqzoo import layers
from eqzoo.groups import P4, P4M
from eqzoo.models import create_model
from eqzoo.ops import use_backend
from tests.ops.test_group_conv_kernels import channels_last

LAYERS = {
    "group convolution": lambda: (layers.GroupConv2d(P4M, 3, 5, 3, padding=1), (3, 8, 7, 7)),
    "affine": lambda: (layers.AffineSelfConv2d(P4, 8), (8, 4, 5, 5)),
    "attentive": lambda: (layers.AttentiveGroupConv2d(P4, 3, 5, 3, padding=1), (3, 4, 7, 7)),
    "attention on the input": lambda: (
        layers.AttentiveGroupConv2d(P4, 3, 5, 3, padding=1, attention="input"),
        (3, 4, 7, 7),
    ),
    "E4": lambda: (layers.E4Layer2d(P4, 4, 4, 3), (4, 4, 7, 7)),
    "self-attention": lambda: (layers.GroupSelfAttention2d(P4, 6, 8), (6, 4, 7, 7)),
    "octic": lambda: (
        create_model("p4m_octic_vit_tiny_patch16_224", img_size=32, depth=2, num_classes=2),
        (3, 32, 32),
    ),
}


class Recorded(TorchDispatchMode):
    """Keeps the calls of the package's operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "eqzoo":
            self.calls.setdefault(operator, tree_map_only(torch.Tensor, torch.Tensor.detach, args))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("name", LAYERS)
def test_fakes_have_the_strides_of_results(name, backend, memory_format):
    torch.manual_seed(0)
    layer, shape = LAYERS[name]()
    x = torch.randn(2, *shape)
    if memory_format == torch.channels_last:
        x = channels_last(x) if x.ndim == 5 else x.to(memory_format=memory_format)
    kernels = "irreps" if name == "group convolution" else "auto"
    with use_backend(kernels), Recorded() as recorded:
        layer(x.requires_grad_()).square().sum().backward()
    names = {str(operator) for operator in recorded.calls}
    assert any("backward" in n or "kernel" in n or "filters" in n for n in names), names  # both passes
    fake = FakeTensorMode()
    for operator, args in recorded.calls.items():
        with torch.no_grad(), use_backend(kernels if backend == "auto" else backend):
            results = operator(*args)
        with fake:
            told = operator(*tree_map_only(torch.Tensor, fake.from_tensor, args))
        for result, other in zip(*map(tree_leaves, (results, told)), strict=True):
            assert (result.shape, result.stride(), result.dtype) == (other.shape, other.stride(), other.dtype), operator
