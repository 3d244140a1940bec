"""The training loop: it learns, is the same when stopped, and says what went wrong."""

import json
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import eqzoo
from eqzoo.data import Split
from eqzoo.engine import Recipe, predictions, top1, train
from eqzoo.files import atomic
from tests.conftest import ROOT


def bars(count, seed):
    """Two classes of pictures: bright in the middle or at the edge, which no turn changes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    images = torch.randint(0, 60, (count, 1, 28, 28), generator=generator)
    images[labels == 1, :, 10:18, 10:18] += 150
    images[labels == 0, :, :3] += 150
    return Split(images.to(torch.uint8), labels)


SPLITS = {"train": bars(48, 0), "valid": bars(16, 1)}
RECIPE = Recipe("p4_cnn", "bars", epochs=3, batch_size=16, warmup_epochs=1, model_args={"width": 2, "num_classes": 2})


def build():
    return eqzoo.create_model(RECIPE.model, **RECIPE.model_args).float()


def run(folder, recipe=RECIPE):
    torch.set_default_dtype(torch.float32)
    return train(recipe, lambda: eqzoo.create_model(recipe.model, **recipe.model_args), SPLITS, folder)


def test_a_run_learns_and_leaves_its_record(tmp_path):
    recipe = Recipe("p4_cnn", "bars", epochs=8, batch_size=16, lr=1e-2, model_args={"width": 2, "num_classes": 2})
    model = run(tmp_path, recipe)
    rows = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
    best = max(rows, key=lambda row: (row["valid_accuracy"], row["epoch"]))
    images = (SPLITS["valid"].images.float() / 255 - 0.1314) / 0.3025
    assert top1(predictions(model, images), SPLITS["valid"].labels) == best["valid_accuracy"] > 90
    saved = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.safetensors",
        "recipe.json",
        "record.jsonl",
        "state.pt",
    ]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["_record", "_save_state", "_epoch"])
def test_a_run_stopped_at_any_moment_ends_as_one_that_was_not(tmp_path, monkeypatch, moment):
    whole = run(tmp_path / "whole").state_dict()
    from eqzoo import engine

    original, calls = getattr(engine, moment), []

    def stop(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return original(*args)

    monkeypatch.setattr(engine, moment, stop)
    with pytest.raises(Killed):
        run(tmp_path / "stopped")
    monkeypatch.setattr(engine, moment, original)
    resumed = run(tmp_path / "stopped").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    records = [(tmp_path / name / "record.jsonl").read_text().splitlines() for name in ("whole", "stopped")]
    without_time = [[{k: v for k, v in json.loads(row).items() if k != "seconds"} for row in rows] for rows in records]
    assert without_time[0] == without_time[1]


def test_a_run_killed_by_the_system_goes_on(tmp_path):
    """SIGKILL, at a moment that nobody chose."""
    script = f"""
import torch; torch.set_num_threads(1)
from pathlib import Path
from tests.test_engine import run
run(Path({str(tmp_path / "killed")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "killed" / "state.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    torch.set_num_threads(1)
    whole, resumed = run(tmp_path / "whole").state_dict(), run(tmp_path / "killed").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_another_seed_is_another_run(tmp_path):
    first = run(tmp_path / "0").state_dict()
    other = Recipe(**(vars(RECIPE) | {"seed": 1}))
    assert not torch.equal(first["head.weight"], run(tmp_path / "1", other).state_dict()["head.weight"])
    with pytest.raises(ValueError, match="another recipe"):
        run(tmp_path / "0", other)


def test_every_epoch_has_an_order_of_its_own(tmp_path, monkeypatch):
    from eqzoo import engine

    orders, original = [], engine._batches

    def noted(*args):
        batches = list(original(*args))
        orders.append(torch.cat(batches).tolist())
        return iter(batches)

    monkeypatch.setattr(engine, "_batches", noted)
    run(tmp_path)
    assert all(sorted(order) == list(range(48)) for order in orders)
    assert len({tuple(order) for order in orders}) == RECIPE.epochs


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_best_weights(tmp_path):
    with pytest.raises(FloatingPointError, match=r"best\.safetensors"):
        run(tmp_path, Recipe("p4_cnn", "bars", epochs=3, batch_size=16, lr=1e30, model_args=RECIPE.model_args))


def test_learning_rates():
    cosine = Recipe("p4_cnn", "bars", epochs=10, lr=1.0, warmup_epochs=2)
    assert [cosine.rate(epoch) for epoch in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert Recipe("p4_cnn", "bars", epochs=10, lr=1.0, schedule="constant").rate(9) == 1


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"schedule": "step"}, {"warmup_epochs": 3}, {"lr": 0.0}])
def test_bad_recipes_are_refused(bad):
    with pytest.raises(ValueError, match="got"):
        Recipe(**({"model": "p4_cnn", "dataset": "bars", "epochs": 3} | bad))


def test_too_few_pictures_for_a_batch(tmp_path):
    with pytest.raises(ValueError, match="48 training pictures do not fill a batch of 64"):
        run(tmp_path, Recipe("p4_cnn", "bars", epochs=1, batch_size=64, model_args=RECIPE.model_args))


def test_atomic_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        atomic(path, fail)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "old")]
