"""Tables of indices keep their values in every conversion."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import eqzoo
from eqzoo.groups import P4
from eqzoo.layers import GroupConv2d
from eqzoo.layers._tables import KeepsTables
from tests.models.test_models import KINDS

# One network for each kind of layer with tables.
NAMES = [
    "p4_cnn", "p4_resnet29", "p4_asc_resnet29", "z2_sasa_resnet29", "p4_alpha_f_cnn", "p4_alpha_ch_cnn", "p4_e4net",
    "r4_gsanet_t", "p4m_convnext_atto",
]  # fmt: skip


@pytest.fixture
def uninitialized_memory_is_garbage():
    """PyTorch fills it with NaN and the largest integers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("uninitialized_memory_is_garbage")
def test_networks_of_the_meta_device_get_their_weights(name, assign):
    """In memory that is made before, or as the tensors of the state dict."""
    model = eqzoo.create_model(name, num_classes=3).eval()
    with torch.device("meta"):
        empty = eqzoo.create_model(name, num_classes=3)
    empty = empty if assign else empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict(), assign=assign)
    x = torch.randn(1, *model.input_size)
    with torch.no_grad():
        torch.testing.assert_close(empty.eval()(x), model(x), rtol=0, atol=0)
    assert not [name for name, buffer in empty.named_buffers() if buffer.is_meta]


@pytest.mark.parametrize("name", NAMES)
def test_an_average_of_all_buffers_leaves_them_as_they_are(name):
    """In float32 3 * 0.9 + 3 * 0.1 is less than 3 for torch, and the integer below it is another index."""
    torch.set_default_dtype(torch.float32)
    model = eqzoo.create_model(name).eval()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(model)

    def same():
        of_both = zip(averaged.module.buffers(), model.buffers(), strict=True)
        return all(torch.equal(one, other) for one, other in of_both if not one.is_floating_point())

    assert not same()  # else the test would show nothing
    averaged.eval()
    assert same()
    x = torch.rand(1, *model.input_size)
    with torch.no_grad():
        torch.testing.assert_close(averaged(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*KINDS, "p4m_octic_vit_tiny_patch16_224", "octic_vit_large_patch16_224"])
def test_networks_are_made_on_the_default_device_and_all_their_indices_are_tables(name):
    with torch.device("meta"):
        model = eqzoo.create_model(name)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {name for name, tensor in tensors.items() if not tensor.is_meta} == set()
    for module in model.modules():
        tables = module._tables if isinstance(module, KeepsTables) else {}
        assert set(tables) >= module._non_persistent_buffers_set, module


@pytest.mark.usefixtures("uninitialized_memory_is_garbage")
def test_copies_pickles_and_number_formats_keep_tables():
    layer = GroupConv2d(P4, 2, 3, 3, padding=1)
    expected = layer.orbit_index.clone()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to("meta").to_empty(device="cpu")):
        assert torch.equal(other.to_empty(device="cpu").half().orbit_index, expected)
    assert "orbit_index" not in layer.state_dict()
    assert not hasattr(nn.Linear(2, 2), "_tables")


@pytest.mark.usefixtures("uninitialized_memory_is_garbage")
def test_tables_are_restored_from_any_meta_buffer_and_share_no_memory(tmp_path):
    layer, expected = GroupConv2d(P4, 2, 3, 3), GroupConv2d(P4, 2, 3, 3).orbit_index
    layer.orbit_index = expected.to("meta")
    assert torch.equal(layer.to_empty(device="cpu").orbit_index, expected)
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", map_location="meta", weights_only=False)
    assert torch.equal(loaded.to_empty(device="cpu").orbit_index, expected)
    layer.orbit_index.zero_()
    assert torch.equal(GroupConv2d(P4, 2, 3, 3).orbit_index, expected)
    assert expected.any()
    with torch.inference_mode():
        made = GroupConv2d(P4, 2, 3, 3)
    assert not made.orbit_index.is_inference()


def test_tables_follow_the_weights_that_are_assigned():
    layer = GroupConv2d(P4, 2, 3, 3)
    state = layer.state_dict()
    empty = GroupConv2d(P4, 2, 3, 3).to("meta")
    empty.load_state_dict(empty.state_dict(), assign=True)  # there is no device to follow yet
    assert empty.orbit_index.is_meta
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), empty)
    loaded = {f"1.{key}": value.half() for key, value in state.items()}
    network.load_state_dict({"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(2)} | loaded, assign=True)
    assert torch.equal(empty.orbit_index, layer.orbit_index)
