"""What users of timm do with a network: replace the head, place it, wrap it, deploy it, hook into it."""

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, prune

import eqzoo
from eqzoo.groups import P4, orbit_array
from eqzoo.models import ResNet44


def test_a_deployed_network_that_is_trained_is_not_equivariant():
    """Its filters of all poses are parameters of their own: train the network that it was made of."""
    deployed = reparameterize_model(eqzoo.create_model("p4_resnet29").eval())
    x = torch.randn(4, 3, 16, 16)
    assert eqzoo.check_equivariance(deployed, size=16).exact
    loss = nn.functional.cross_entropy(deployed(x), torch.arange(4))
    loss.backward()
    with torch.no_grad():
        for parameter in deployed.parameters():
            parameter -= 0.05 * parameter.grad
    assert not eqzoo.check_equivariance(deployed, size=16).exact


def test_a_linear_classifier_of_a_deployed_network_is_reset():
    linear = reparameterize_model(eqzoo.create_model("p4_resnet29").eval())
    linear.reset_classifier(3)
    assert linear(torch.zeros(1, 3, 16, 16)).shape == (1, 3)
    attentive = reparameterize_model(ResNet44(P4, (2, 2, 2), depth=1, attention="full").eval())
    assert not list(attentive.stem.parameters())  # whose stem has buffers alone
    attentive.reset_classifier(0)
    assert attentive(torch.zeros(1, 3, 32, 32)).ndim == 2
    for args, message in (((3,), "no new classifier"), ((0, "max"), "no new pooling")):  # they would be of fields
        with pytest.raises(ValueError, match=message):
            attentive.reset_classifier(*args)


def test_networks_are_placed_as_they_are_created():
    model = timm.create_model("p4_resnet29", device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    features = eqzoo.create_model(model_name="p4_cnn", pretrained=True, dtype=torch.float32, features_only=True)
    assert {p.dtype for p in features.parameters()} == {torch.float32}
    other = eqzoo.create_model("p4_cnn", pretrained=True, dtype=torch.float32)
    assert torch.equal(other.stem.conv.weight, features.model.stem.conv.weight)


WRAPS = [nn.DataParallel, lambda m: nn.DataParallel(nn.DataParallel(m)), lambda m: torch.compile(nn.DataParallel(m))]


@pytest.mark.parametrize("wrap", [*WRAPS, None])
def test_networks_of_several_processes_are_measured_as_the_network_in_them(wrap, tmp_path):
    model = eqzoo.create_model("p4_cnn").eval()
    if wrap:
        wrapped = wrap(model)
    else:
        torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        wrapped = nn.parallel.DistributedDataParallel(model)
    try:
        assert eqzoo.check_equivariance(wrapped).as_dict() == eqzoo.check_equivariance(model).as_dict()
        assert eqzoo.equivariance_error(wrapped) == eqzoo.equivariance_error(model)
        assert eqzoo.multiply_adds(wrapped) == eqzoo.multiply_adds(model)
    finally:
        if not wrap:
            torch.distributed.destroy_process_group()


def test_a_hook_on_the_blocks_is_called():
    model, seen = eqzoo.create_model("p4_resnet29").eval(), []
    model.blocks.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    x = torch.randn(1, 3, 16, 16)
    y = model.forward_features(x)
    assert seen == [tuple(y.shape)]


class _LowRank(nn.Module):
    """``W + B A``, as LoRA has it."""

    def __init__(self, weight):
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, weight[0].numel()) / 10)
        self.b = nn.Parameter(torch.randn(len(weight), 2) / 10)

    def forward(self, weight):
        return weight + (self.b @ self.a).view_as(weight)


def test_a_low_rank_change_of_the_filters_keeps_the_symmetry():
    model = eqzoo.create_model("p4_resnet29").eval()
    x = torch.randn(2, 3, 16, 16)
    before = model(x)
    for layer in [m for m in model.modules() if isinstance(m, eqzoo.layers.GroupConv2d)]:
        parametrize.register_parametrization(layer, "weight", _LowRank(layer.weight))
    assert not torch.allclose(model(x), before, rtol=1e-2)
    assert eqzoo.equivariance_error(model, x) < 1e-12


@pytest.mark.slow
def test_a_backbone_that_is_not_deployed_is_exported_by_torch(tmp_path):
    """As a user may do it in a network of ones own: with filters that the graph transforms."""
    pytest.importorskip("onnxruntime")
    model = eqzoo.create_model("p4_resnet29", depth=11).float().eval()
    with torch.no_grad():
        torch.onnx.export(
            model, (torch.zeros(1, 3, 16, 16).float(),), tmp_path / "net.onnx", external_data=False, verbose=False
        )
    assert eqzoo.check_equivariance(tmp_path / "net.onnx", size=16).exact


@pytest.mark.parametrize("name", ["p4_cnn", "p4_se_resnet29", "p4_asc_resnet29", "p4_e4net", "p4_alpha_f_cnn"])
def test_a_recorded_graph_gives_what_the_network_gives(name):
    """Kernels that write into memory by themselves, and filters that are kept, are hidden from make_fx."""
    model = timm.create_model(name).eval()
    side = 28 if name.endswith("_cnn") else 8
    x = torch.randn(1, model.in_chans, side, side)
    with torch.no_grad():
        for _ in range(2):  # the second time filters are kept
            wanted = model(x)
            torch.testing.assert_close(make_fx(model)(x)(2 * x), model(2 * x))
            torch.testing.assert_close(model(x), wanted)


def test_networks_are_made_of_fake_tensors_and_real_ones_afterwards():
    orbit_array.cache_clear()
    for name in ("p4_cnn", "r4_gsanet_t"):
        with FakeTensorMode():
            model = eqzoo.create_model(name)
            assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
        eqzoo.create_model(name, pretrained=True)


def test_a_hook_on_an_identity_in_place_of_an_attention_is_called():
    model, seen = timm.create_model("p4_resnet29").eval(), []
    model.blocks[0][0].branch.se.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model(torch.zeros(1, 3, 8, 8))
    assert len(seen) == 1


def test_a_pruned_network_is_measured_once_it_has_run():
    model = timm.create_model("p4_cnn").eval()
    prune.l1_unstructured(model.blocks[1].conv, "weight", 0.5)
    with pytest.raises(RuntimeError, match="deepcopy"):  # the pruned filters are no leaves of the graph yet
        eqzoo.equivariance_error(model)
    with torch.no_grad():
        model(torch.zeros(1, 1, 28, 28))
    assert eqzoo.equivariance_error(model) < 1e-12
