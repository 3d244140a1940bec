"""Training on a GPU: recorded passes and steps are the passes and steps themselves."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from eqzoo.data import Split
from eqzoo.engine import Recipe, build_network, train
from eqzoo.engine.cuda_graph import RecordedPass
from eqzoo.engine.loop import accelerator_of
from eqzoo.engine.state import TrainingState


def trained(tmp_path, name, model, **values):
    values = {"optimizer": "sgd", "lr": 1e-2} | values
    recipe = Recipe(
        model=model, dataset="cifar10", epochs=2, batch_size=16, augment="standard_cutout", ema_decay=0.9, **values
    )
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (80, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 10, (80,))
    splits = {"train": Split(images, labels), "valid": Split(images[:32], labels[:32])}
    weights = train(recipe, lambda: build_network(recipe), splits, tmp_path / name, "cuda").state_dict()
    return {key: value.double().cpu() for key, value in weights.items()}


def way(one, other):
    """How far the parameters of two networks are apart."""
    keys = [key for key in one if "running" not in key and "num_batches" not in key]
    return torch.cat([(one[key] - other[key]).flatten() for key in keys]).norm()


@pytest.mark.parametrize("values", [{}, {"half_size_epochs": 1}, {"layer_decay": 0.9}], ids=str)
@pytest.mark.parametrize("model", ["p4_resnet29", "p4_asc_resnet29"])
def test_recorded_passes_train_the_same_network(tmp_path, model, values):
    """With SGD: a rate that is 1e-5 higher moves weights by 3 to 6 % of their way in ten steps of Muon or AdamW."""
    torch.set_default_dtype(torch.float32)
    initial = trained(tmp_path, "initial", model, lr=1e-12, **values)
    plain = trained(tmp_path, "plain", model, **values)
    recorded = trained(tmp_path, "recorded", model, cuda_graphs=True, **values)
    faster = trained(tmp_path, "faster", model, lr=1.02e-2, **values)
    assert plain["stem.norm.num_batches_tracked"] == recorded["stem.norm.num_batches_tracked"] > 0
    assert way(plain, recorded) < 1e-3 * way(initial, plain)
    assert way(plain, faster) > 1e-2 * way(initial, plain)


@pytest.mark.parametrize("optimizer", ["adam", "nmuon"])
def test_recorded_passes_and_steps_train_together(tmp_path, optimizer):
    """Through a change of the size of images, where the pass and the step are recorded anew."""
    torch.set_default_dtype(torch.float32)
    values = {"optimizer": optimizer, "half_size_epochs": 1}
    initial = trained(tmp_path, "initial", "p4_asc_resnet29", lr=1e-12, **values)
    plain = trained(tmp_path, "plain", "p4_asc_resnet29", **values)
    recorded = trained(tmp_path, "recorded", "p4_asc_resnet29", cuda_graphs=True, **values)
    slower = trained(tmp_path, "slower", "p4_asc_resnet29", lr=5e-3, **values)
    assert way(plain, recorded) < 0.15 * way(initial, plain)  # 0.05 for a rate that is 1e-5 higher
    assert way(plain, slower) > 0.3 * way(initial, plain)


def test_recorded_passes_of_the_recipes_for_a_gpu_learn_as_others(tmp_path):
    """In bfloat16 with channels last, and with dropout, weights differ by more than round-off; losses do not."""
    torch.set_default_dtype(torch.float32)
    for model, values in (
        ("p4_resnet29", {"precision": "bfloat16", "channels_last": True}),
        ("p4_allcnn", {"precision": "bfloat16"}),  # has dropout
    ):
        values = values | {"optimizer": "nmuon"}
        trained(tmp_path, f"{model} plain", model, **values)
        trained(tmp_path, f"{model} recorded", model, cuda_graphs=True, **values)
        losses = [
            [json.loads(line)["loss"] for line in (tmp_path / f"{model} {kind}" / "log.jsonl").read_text().splitlines()]
            for kind in ("plain", "recorded")
        ]
        assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize(
    "name", ["p4_cnn", "p4_alpha_f_cnn", "p4_asc_resnet29", "p4_e4_resnet18", "p4m_convnext_atto", "r4_gsanet_t"]
)
@pytest.mark.parametrize("taught", [False, True])
def test_recorded_passes_have_the_losses_and_gradients_of_others(name, taught):
    """Of every kind of network, with dropout, and for other images than those that were recorded."""
    torch.set_default_dtype(torch.float32)
    if taught and name not in ("p4_cnn", "p4_asc_resnet29"):
        pytest.skip("teachers are the same beside every network")
    teachers = {"p4_cnn": ("p4_cnn_w19.rotmnist", "p4_e4net.rotmnist")}.get(name, ("z2_resnet29.cifar10",))
    plain = Recipe(
        model=name, dataset="own", epochs=1, batch_size=8, augment="affine_color", teachers=teachers if taught else ()
    )
    draw = torch.Generator().manual_seed(0)
    found = []
    for recipe in (plain, replace(plain, cuda_graphs=True)):
        torch.manual_seed(0)
        model = build_network(recipe)
        side = 28 if model.in_chans == 1 else 32
        images = torch.randint(0, 256, (2, 8, model.in_chans, side, side), dtype=torch.uint8, generator=draw)
        draw.manual_seed(0)
        split = Split(images[0], torch.arange(8))
        state = TrainingState(recipe, lambda model=model: model, {"train": split}, accelerator_of("cuda"), 0)
        state.begin_epoch(0)
        for batch in images:
            torch.manual_seed(1)
            state.optimizer.zero_grad()
            loss = state.backward(batch, split.labels, torch.full((8, 7), 0.3)).item()
        gradients = torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None])
        found.append((loss, gradients))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert (found[1][1] - found[0][1]).norm() < 1e-2 * found[0][1].norm()


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon", "nmuon"])
def test_recorded_steps_are_the_steps_themselves(optimizer):
    """With the same gradients, at rates that change and that differ between parts; a resumed state goes on."""
    torch.set_default_dtype(torch.float32)
    values = {"optimizer": optimizer, "lr_factors": {"*.query.*": 0.3}, "lr": 1e-2, "weight_decay": 1e-2}
    plain = Recipe(model="p4_asc_resnet29", dataset="own", epochs=2, batch_size=4, **values)
    split = Split(torch.zeros(40, 3, 32, 32, dtype=torch.uint8), torch.arange(40) % 10)

    def new(recipe, resumed=None):
        state = TrainingState(recipe, lambda: build_network(recipe), {"train": split}, accelerator_of("cuda"), 0)
        if resumed:
            state.load_state_dict(resumed)
        return state, [torch.zeros_like(p) for p in state.model.parameters()]

    found = []
    for recipe in (plain, replace(plain, cuda_graphs=True), replace(plain, lr=1.02e-2)):
        state, gradients = new(recipe)
        first = torch.cat([p.detach().flatten() for p in state.model.parameters()])
        draw = torch.Generator("cuda").manual_seed(0)
        for step in range(16):
            if step == 8:
                state, gradients = new(recipe, copy.deepcopy(state.state_dict()))
            for parameter, gradient in zip(state.model.parameters(), gradients, strict=True):
                gradient.normal_(generator=draw)
                parameter.grad = gradient
            state.step(step // 8, step % 8)
        found.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    moved = (found[0] - first).norm()
    assert (found[1] - found[0]).norm() < 1e-3 * moved
    assert (found[2] - found[0]).norm() > 1e-2 * moved


def test_a_pass_that_waits_for_the_gpu_cannot_be_recorded():
    torch.set_default_dtype(torch.float32)
    model = torch.nn.Linear(2, 2).cuda()
    x = torch.ones(1, 2, device="cuda")
    with pytest.raises(ValueError, match="Linear cannot be recorded as a CUDA graph; set cuda_graphs=false"):
        RecordedPass(lambda x: model(x).sum() * model(x).sum().item(), model, [x])
    assert model(x).isfinite().all()  # the GPU is usable
    assert (torch.nn.functional.dropout(x.new_ones(1_000), 0.5) == 0).any()  # and its generator
    recorded = RecordedPass(lambda x: torch.nn.functional.dropout(model(x).sum() * x, 0.5).sum(), model, [x])
    assert len({recorded(x).item() for _ in range(20)}) > 1
