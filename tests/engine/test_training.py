"""The training loop: it learns, what its epochs and processes see, where it starts, and what stops it."""

import json
import socket
from dataclasses import replace

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file

import eqzoo
from eqzoo.data import Split
from eqzoo.engine import Recipe, best_row, loop, train
from eqzoo.engine.state import TrainingState
from eqzoo.evaluation.metrics import top1
from tests import forks
from tests.engine.bars import RECIPE, SPLITS, build, go, losses, other, predictions, rows, run


def test_a_run_learns_and_leaves_its_log(tmp_path):
    recipe = Recipe("p4_cnn", "bars", epochs=8, batch_size=16, lr=1e-2, model_args={"width": 2, "num_classes": 2})
    model = run(tmp_path, recipe)
    log = rows(tmp_path)
    assert [row["epoch"] for row in log] == list(range(1, 9))
    assert log[-1]["loss"] < log[0]["loss"] / 1.5  # dropout keeps it from falling further
    best = max(log, key=lambda row: (row["valid_accuracy"], row["epoch"]))
    images = (SPLITS["valid"].images.float() / 255 - 0.1314) / 0.3025
    assert top1(predictions(model, images), SPLITS["valid"].labels) == best["valid_accuracy"] > 90
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("emulates", [False, True])
def test_a_run_in_bfloat16_says_where_it_is_emulated(tmp_path, monkeypatch, capsys, emulates):
    monkeypatch.setattr(loop, "emulates_bfloat16", lambda device: emulates)
    half = replace(RECIPE, epochs=1, warmup_epochs=0, precision="bfloat16")
    run(tmp_path / "half", half)
    assert ("--set precision=float32" in capsys.readouterr().err) is emulates
    run(tmp_path / "half", half)  # another precision would be another recipe, so there is nothing to advise
    assert "bfloat16" not in capsys.readouterr().err
    run(tmp_path / "single", replace(RECIPE, epochs=1, warmup_epochs=0))
    assert "bfloat16" not in capsys.readouterr().err


def test_every_epoch_has_an_order_of_its_own(tmp_path, monkeypatch):
    orders, original = [], loop._process_shares

    def noted(*args):
        found = original(*args)
        orders.append(torch.cat(found[0]).tolist())
        return found

    monkeypatch.setattr(loop, "_process_shares", noted)
    run(tmp_path)
    assert all(sorted(order) == list(range(48)) for order in orders)
    assert len({tuple(order) for order in orders}) == RECIPE.epochs


def test_a_run_starts_from_the_weights_of_a_checkpoint(tmp_path):
    recipe = other(start="p4_cnn", model_args={}, epochs=1, lr=0.0, warmup_epochs=0)
    found, trained = run(tmp_path / "run", recipe), eqzoo.create_model("p4_cnn", pretrained=True)
    for name, value in trained.state_dict().items():  # running statistics too
        assert torch.equal(found.state_dict()[name].to(value), value), name
    assert json.loads((tmp_path / "run" / "log.jsonl").read_text())["loss"] is None
    fresh = run(tmp_path / "fresh", replace(recipe, start=None, lr=1e-12)).state_dict()["stem.conv.weight"]
    assert (fresh - trained.stem.conv.weight).abs().max() > 0.1

    with pytest.raises(RuntimeError, match="size mismatch"):
        run(tmp_path / "near", other(start="p4_cnn"))
    run(tmp_path / "near", replace(recipe, start=None, lr=1e-12))  # the mistake has not taken the folder


def test_a_run_starts_from_the_weights_of_another_run(tmp_path):
    trained = run(tmp_path / "seed0", other(epochs=2)).state_dict()
    recipe = other(start=f"run:{tmp_path}/seed{{seed}}", epochs=1, lr=1e-12, warmup_epochs=0, weight_decay=0.0)
    begun = run(tmp_path / "next", recipe).state_dict()
    for name in (name for name in trained if "running" not in name and "num_batches" not in name):
        torch.testing.assert_close(begun[name], trained[name], rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run(tmp_path / "wider", replace(recipe, model_args=recipe.model_args | {"width": 3}))
    with pytest.raises(FileNotFoundError, match="seed1"):
        run(tmp_path / "second", replace(recipe, seed=1))
    fewer = {name: Split(split.images[1:], split.labels[1:]) for name, split in SPLITS.items()}
    with pytest.raises(ValueError, match=r"other images \(the training images differ; the validation images differ\)"):
        train(recipe, lambda: eqzoo.create_model(recipe.model, **recipe.model_args), fewer, tmp_path / "fewer")
    with pytest.raises(ValueError, match="holds another run"):
        run(tmp_path / "seed0", recipe)
    (tmp_path / "seed0" / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="has 0 of 2 epochs"):
        run(tmp_path / "early", recipe)


def test_networks_of_timm_are_trained_too(tmp_path):
    args = {"num_classes": 2, "in_chans": 1}
    recipe = other(model="test_resnet", model_args=args, epochs=2, half_size_epochs=1, warmup_epochs=0)
    trained = run(tmp_path / "first", recipe)
    begun = other(model="test_resnet", model_args=args, epochs=1, warmup_epochs=0, lr=1e-12, weight_decay=0.0)
    again = run(tmp_path / "second", replace(begun, start=f"run:{tmp_path}/first"))
    torch.testing.assert_close(again.fc.weight, trained.fc.weight, rtol=0, atol=1e-6)
    loaded = eqzoo.create_model(f"local-dir:{tmp_path / 'first'}", pretrained=True)
    assert torch.equal(loaded.fc.weight, trained.fc.weight)


def test_weights_are_adapted_to_the_network_that_starts_from_them(tmp_path):
    sizes = {"num_classes": 2, "in_chans": 3}
    recipe = Recipe("r8_gsanet_t", "bars", epochs=1, batch_size=2, lr=0.0, start="r4_gsanet_t")
    colored = {name: Split(part.images[:4].expand(-1, 3, -1, -1), part.labels[:4]) for name, part in SPLITS.items()}
    torch.set_default_dtype(torch.float32)
    net = train(recipe, lambda: eqzoo.create_model("r8_gsanet_t", kernel_size=3, **sizes), colored, tmp_path)
    trained = eqzoo.create_model("r4_gsanet_t", pretrained=True, group=net.group, **sizes)
    head = trained.head.weight
    for name, value in trained.state_dict().items():
        kept = torch.equal(net.state_dict()[name], value)
        assert kept != (value.shape == head.shape and bool((value == head).all())), name


def test_too_few_images_for_a_batch(tmp_path):
    with pytest.raises(ValueError, match="batch_size of 64 needs as many training images, of which there are 48"):
        run(tmp_path, Recipe("p4_cnn", "bars", epochs=1, batch_size=64, model_args=RECIPE.model_args))


EVERYTHING = {"augment": "standard", "ema_decay": 0.9, "label_smoothing": 0.1, "lr": 0.05}
EVERYTHING |= {"optimizer": "sgd", "optimizer_args": {"momentum": 0.8}, "schedule": "multistep", "milestones": (2,)}


def train_as_one_of_two(folder):
    """What torchrun starts, with its variables of the environment."""
    go(folder, other(**EVERYTHING))
    state = PartialState()
    assert state.num_processes == 2
    state.destroy_process_group()


def test_two_processes_have_the_losses_of_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    together = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        forks.start(
            train_as_one_of_two,
            tmp_path / "two",
            environment=together | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            err=tmp_path / f"errors{rank}",
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        forks.wait(process)
        assert process.exitcode == 0, (tmp_path / f"errors{rank}").read_text()
    torch.set_num_threads(1)
    go(tmp_path / "one", other(**EVERYTHING))
    go(tmp_path / "seed", other(**EVERYTHING, seed=1))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "two") != pytest.approx(losses(tmp_path / "seed"), rel=1e-3)
    valid = [[row["valid_loss"] for row in rows(tmp_path / name)] for name in ("one", "two")]
    assert valid[0] == pytest.approx(valid[1], rel=1e-5)
    assert [{row["processes"] for row in rows(tmp_path / name)} for name in ("one", "two")] == [{1}, {2}]


def test_without_validation_images_the_last_epoch_is_kept(tmp_path):
    torch.set_default_dtype(torch.float32)
    recipe = other(valid_size=0)
    model = train(recipe, build, {"train": SPLITS["train"]}, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert best_row(rows(tmp_path))["epoch"] == 3
    assert [row["valid_accuracy"] for row in rows(tmp_path)] == [None] * 3


def test_nan_in_the_middle_of_a_run_names_the_last_good_epoch(tmp_path, monkeypatch):
    original = TrainingState.backward

    def backward(self, *args):
        broken = (tmp_path / "log.jsonl").exists() and len(rows(tmp_path)) == 2
        return original(self, *args) * (float("nan") if broken else 1)

    monkeypatch.setattr(TrainingState, "backward", backward)
    with pytest.raises(FloatingPointError, match=r"epoch 3 is nan; the best weights, of epoch \d, are in .*; a"):
        go(tmp_path)
    assert len(rows(tmp_path)) == 2
    load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("held_out", "found"),
    [(True, "the validation loss of epoch 3 is nan"), (False, r"epoch 3 ends with weights that are not finite, of ")],
)
def test_a_last_step_that_goes_wrong_keeps_the_weights_before_it(tmp_path, monkeypatch, held_out, found):
    splits = SPLITS if held_out else {"train": SPLITS["train"]}
    original = TrainingState.step

    def step(self, epoch, step):
        original(self, epoch, step)
        if (epoch, step) == (2, self.steps - 1):
            norm = self.model.stem.norm
            spoilt = norm.weight if held_out else norm.running_mean
            spoilt.data[0] = float("nan")

    monkeypatch.setattr(TrainingState, "step", step)
    with pytest.raises(FloatingPointError, match=found + r".*; the best weights, of epoch \d, are in .*; a smaller lr"):
        go(tmp_path, other(valid_size=None if held_out else 0), build, splits)
    assert len(rows(tmp_path)) == 2
    assert all(value.isfinite().all() for value in load_file(tmp_path / "model.safetensors").values())


def test_a_tracker_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tracker 'nonesuch' is installed"):
        go(tmp_path, RECIPE, track="nonesuch")


def test_a_tracker_sees_the_record(tmp_path, monkeypatch):
    from accelerate import tracking

    seen = []

    class Notebook(tracking.GeneralTracker):
        name, requires_logging_directory, tracker, main_process_only = "notebook", False, None, True

        def __init__(self, project):
            super().__init__()
            seen.append(project)

        def store_init_configuration(self, values):
            seen.append(values["lr"])

        def log(self, values, step=None):
            seen.append((step, values["loss"]))

        def finish(self):
            seen.append("finished")

    monkeypatch.setattr(tracking, "_available_trackers", ["notebook"])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    go(tmp_path, RECIPE, track="notebook")
    assert seen == ["eqzoo", 1e-3, *enumerate(losses(tmp_path), 1), "finished"]
