"""Every network on a GPU: in float64 that of a CPU for all rotations of the image, in float32 nearly so."""

import pytest
import torch

import eqzoo
from eqzoo.groups import transform
from tests.models.test_models import HEAVY, KINDS, NAMES, trained_like


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HEAVY])
def test_networks_are_those_of_the_cpu(name):
    model, x = trained_like(name)
    with torch.no_grad():
        expected = model(x)
        on_gpu, images = model.cuda(), x.cuda()
        for g in model.group.grid_elements:
            found = on_gpu(transform(images, model.group, g, "trivial")).cpu()
            assert (found - expected).norm() < 1e-9 * expected.norm()
        found = on_gpu.float()(images.float()).cpu().double()
        in_float32 = model.cpu()(x.float()).double()
    # Up to 8e-4 on a CPU too in p4_asc_resnet83, whose 27 softmax layers amplify round-off; 2e-4 is ample elsewhere.
    bound = max(2e-4 * expected.norm(), 5 * (in_float32 - expected).norm())
    assert (found - expected).norm() < bound < 1e-2 * expected.norm()


def test_a_recorded_network_outlives_the_training_of_another():
    """The step of any optimizer drops the filters that are kept; a graph has its own."""
    model, x = trained_like("p4_cnn")
    model, x = model.cuda(), x.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        expected = model(x)
        with torch.cuda.graph(graph):
            found = model(x)
    other = torch.nn.Linear(2, 2).cuda()
    other(torch.ones(1, 2, device="cuda")).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    torch.cuda.empty_cache()
    torch.full((1 << 24,), torch.nan, device="cuda")
    graph.replay()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_the_cpu(name):
    model, x = trained_like(name)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if hasattr(module, "attn_drop"):
            module.attn_drop = 0.0
    found = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model.to(device, dtype).zero_grad()
        logits = model(x.to(device, dtype))
        logits.square().mean().backward()
        found[device] = torch.cat([p.grad.double().cpu().flatten() for p in model.parameters() if p.grad is not None])
    assert found["cpu"].norm() > 0
    assert (found["cuda"] - found["cpu"]).norm() < 5e-3 * found["cpu"].norm()


@pytest.mark.parametrize("name", KINDS)
def test_networks_are_made_on_the_default_device(name):
    model = eqzoo.create_model(name).eval()
    with torch.device("cuda"):
        made = eqzoo.create_model(name).eval()
        made.load_state_dict(model.state_dict())
        x = torch.randn(1, *model.input_size)
        with torch.no_grad():
            torch.testing.assert_close(made(x).cpu(), model(x.cpu()), rtol=1e-9, atol=1e-9)
