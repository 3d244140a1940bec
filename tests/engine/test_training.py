"""The training loop: it learns, is the same when stopped, and says what went wrong."""

import itertools
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo._common import atomic
from eqzoo.data import Split
from eqzoo.engine import FinishedRun, Recipe, best_row, is_finished, loop, train
from eqzoo.engine.epochs import patience_is_over
from eqzoo.engine.run import RunDirectory
from eqzoo.engine.state import TrainingState
from eqzoo.evaluation.metrics import predictions, top1
from eqzoo.layers import GroupBatchNorm2d, GroupLayerNorm2d
from tests import forks


def bars(count, seed):
    """Two classes of images: bright in the middle or at the edge, which no rotation changes."""
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
    assert rows[-1]["loss"] < rows[0]["loss"] / 1.5  # dropout keeps it from falling further
    best = max(rows, key=lambda row: (row["valid_accuracy"], row["epoch"]))
    images = (SPLITS["valid"].images.float() / 255 - 0.1314) / 0.3025
    assert top1(predictions(model, images), SPLITS["valid"].labels) == best["valid_accuracy"] > 90
    saved = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == [
        "best.safetensors",
        "recipe.json",
        "record.jsonl",
        "state.pt",
    ]


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


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("place", "moment"),
    [
        (RunDirectory, "save_state"),
        (RunDirectory, "save_weights"),
        (RunDirectory, "append_row"),
        (loop, "_train_epoch"),
    ],
)
def test_a_run_stopped_at_any_moment_ends_as_one_that_was_not(tmp_path, monkeypatch, place, moment):
    whole = run(tmp_path / "whole").state_dict()
    original, calls = getattr(place, moment), []

    def stop(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return original(*args)

    monkeypatch.setattr(place, moment, stop)
    with pytest.raises(Killed):
        run(tmp_path / "stopped")
    monkeypatch.setattr(place, moment, original)
    resumed = run(tmp_path / "stopped").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    records = [(tmp_path / name / "record.jsonl").read_text().splitlines() for name in ("whole", "stopped")]
    without_time = [[{k: v for k, v in json.loads(row).items() if k != "seconds"} for row in rows] for rows in records]
    assert without_time[0] == without_time[1]


@pytest.mark.parametrize("moment", ["save_state", "save_weights", "append_row"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "behind"])
def test_the_weights_are_those_of_the_recorded_epoch_if_one_comes_out_otherwise(tmp_path, monkeypatch, moment, done):
    """Epochs that are not deterministic: the second one would have been the best, and is worse when repeated."""
    original, calls, accuracies = getattr(RunDirectory, moment), [], iter([50.0, 60.0])
    monkeypatch.setattr(TrainingState, "validate", lambda self: {"valid_accuracy": next(accuracies), "valid_loss": 1.0})
    monkeypatch.setattr(TrainingState, "backward", lambda self, images, labels, numbers: torch.zeros(()))
    monkeypatch.setattr(TrainingState, "step", lambda self, *_: self.model.head.weight.data.add_(next(drawn)))
    drawn, recipe = itertools.count(1.0), other(epochs=3)

    def stop(*args):
        calls.append(args)
        if len(calls) == 2:
            original(*args) if done else None
            raise Killed
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, moment, stop)
        with pytest.raises(Killed):
            run(tmp_path, recipe)
    accuracies = iter([45.0, 40.0])
    before = load_file(tmp_path / "best.safetensors")["head.weight"]
    run(tmp_path, recipe)
    found = rows(tmp_path)
    assert [row["epoch"] for row in found] == [1, 2, 3]
    kept = (moment, done) != ("save_state", False)  # the second epoch is not repeated
    assert [row["valid_accuracy"] for row in found] == ([50.0, 60.0, 45.0] if kept else [50.0, 45.0, 40.0])
    weights, state = load_file(tmp_path / "best.safetensors"), torch.load(tmp_path / "state.pt", weights_only=True)
    assert best_row(found)["epoch"] == (2 if kept else 1)
    missing = {("save_state", True), ("save_weights", False)}  # weights of the second epoch, when it was killed
    assert torch.equal(weights["head.weight"], before) != ((moment, done) in missing)
    assert not torch.equal(weights["head.weight"], state["model"]["head.weight"])


def test_a_line_that_was_not_finished_is_written_again(tmp_path):
    run(tmp_path)
    record, state = tmp_path / "record.jsonl", (tmp_path / "state.pt").read_bytes()
    whole = record.read_text()
    record.write_text(whole[:-20])
    assert len(RunDirectory(tmp_path).rows()) == 2
    with pytest.raises(ValueError, match="has 2 of 3 epochs"):
        FinishedRun.read(tmp_path)
    run(tmp_path)
    assert record.read_text() == whole
    assert (tmp_path / "state.pt").read_bytes() == state
    record.write_text(whole.replace('"epoch": 2', '"epoch" 2'))
    with pytest.raises(ValueError, match=r"line 2 of .*record\.jsonl is not JSON"):
        RunDirectory(tmp_path).rows()


def test_a_run_killed_by_the_system_goes_on(tmp_path):
    """SIGKILL, at a moment that nobody chose."""
    process = forks.start(run, tmp_path / "killed")
    deadline = time.monotonic() + 60
    while not (tmp_path / "killed" / "state.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0)  # at its end, if this process was slow to see the first epoch's
    assert (tmp_path / "killed" / "state.pt").exists()
    torch.set_num_threads(1)
    whole, resumed = run(tmp_path / "whole").state_dict(), run(tmp_path / "killed").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_second_command_does_not_train_in_the_folder_of_a_run(tmp_path, monkeypatch):
    original, errors = loop._train_epoch, []

    def with_a_second_command(*args):
        with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(loop, "_train_epoch", original)
            errors.append(pool.submit(run, tmp_path).exception())
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_train_epoch", with_a_second_command)
        run(tmp_path)
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2, 3]
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, ValueError)
        assert f"another command trains in {tmp_path}; wait until it has ended, or name another folder" in str(error)
    whole = (tmp_path / "record.jsonl").read_text()
    run(tmp_path)
    assert (tmp_path / "record.jsonl").read_text() == whole


def test_a_folder_is_free_once_the_command_that_trains_there_is_killed(tmp_path):
    script = f"from filelock import FileLock; a = FileLock({str(tmp_path / '.lock')!r}); a.acquire(); print(); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(ValueError, match="another command trains in"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    process.kill()
    process.communicate()
    run(tmp_path)
    assert len(rows(tmp_path)) == 3


def test_a_record_that_two_commands_wrote_is_not_gone_on_with(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Killed):
            run(tmp_path)
    first, second = (tmp_path / "record.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "record.jsonl").write_text(first + first + second + second)
    with pytest.raises(ValueError, match=r"cannot be resumed \(line 2 of record\.jsonl is of epoch 1\); train in"):
        run(tmp_path)


def test_another_seed_is_another_run(tmp_path):
    first = run(tmp_path / "0").state_dict()
    other = Recipe(**(vars(RECIPE) | {"seed": 1}))
    assert not torch.equal(first["head.weight"], run(tmp_path / "1", other).state_dict()["head.weight"])
    with pytest.raises(ValueError, match="another recipe"):
        run(tmp_path / "0", other)


def test_every_epoch_has_an_order_of_its_own(tmp_path, monkeypatch):
    orders, original = [], loop._epoch_order

    def noted(*args):
        batches = list(original(*args))
        orders.append(torch.cat(batches).tolist())
        return iter(batches)

    monkeypatch.setattr(loop, "_epoch_order", noted)
    run(tmp_path)
    assert all(sorted(order) == list(range(48)) for order in orders)
    assert len({tuple(order) for order in orders}) == RECIPE.epochs


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_best_weights(tmp_path):
    with pytest.raises(FloatingPointError, match=r"best\.safetensors"):
        run(tmp_path, Recipe("p4_cnn", "bars", epochs=3, batch_size=16, lr=1e30, model_args=RECIPE.model_args))


def test_a_run_that_fails_in_its_first_epoch_leaves_its_folder_to_the_corrected_command(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingState, "backward", lambda self, *_: torch.tensor(float("nan")))
    with pytest.raises(FloatingPointError, match=r"no epoch was finished, so there is no .*best\.safetensors yet"):
        run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    narrow = {name: Split(split.images[..., :20], split.labels) for name, split in SPLITS.items()}
    with pytest.raises(ValueError, match="square"):
        train(other(augment="rotations"), build, narrow, tmp_path)
    run(tmp_path, other(epochs=2))
    with pytest.raises(ValueError, match="another recipe"):
        run(tmp_path)
    with monkeypatch.context() as patch:  # a run with a finished epoch keeps its folder
        patch.setattr(loop, "_resume", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, other(epochs=2))
    assert (tmp_path / "recipe.json").is_file()


def test_learning_rates():
    cosine = Recipe("p4_cnn", "bars", epochs=10, lr=1.0, warmup_epochs=2)
    assert [cosine.rate(epoch) for epoch in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    twice = Recipe("p4_cnn", "bars", epochs=10, lr=1.0, warmup_epochs=2, half_size_epochs=8, full_size_lr=0.4)
    assert [twice.rate(epoch) for epoch in (1, 2, 5, 8, 9, 10)] == pytest.approx([0.5, 1, 0.5, 0.4, 0.2, 0])
    with pytest.raises(ValueError, match="full_size_lr needs a cosine schedule, and more epochs at half size"):
        Recipe("p4_cnn", "bars", epochs=10, warmup_epochs=2, half_size_epochs=2, full_size_lr=0.4)
    assert Recipe("p4_cnn", "bars", epochs=10, lr=1.0, schedule="constant").rate(9) == 1


def test_learning_rates_with_restarts():
    values = {"epochs": 10, "lr": 1.0, "warmup_epochs": 2}
    again = Recipe("p4_cnn", "bars", **values, restarts=(4, 8), restart_lrs=(0.5, 0.25))
    expected = [0, 0.5, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0]
    assert [again.rate(epoch) for epoch in (0, 1, 2, 3, 4, 6, 8, 9, 10)] == pytest.approx(expected)
    same = Recipe("p4_cnn", "bars", **values, restarts=(4,))  # from the rate of the first cycle
    assert [same.rate(epoch) for epoch in (3.5, 4, 7, 10)] == pytest.approx([0.5 * (1 - 0.5**0.5), 1, 0.5, 0])
    sizes = Recipe("p4_cnn", "bars", **values, half_size_epochs=4, full_size_lr=0.4, restarts=(6,), restart_lrs=(0.8,))
    assert [sizes.rate(epoch) for epoch in (3, 4, 5, 6, 8)] == pytest.approx([0.5, 0.4, 0.2, 0.8, 0.4])
    for bad, said in (
        ({"restarts": (2, 4)}, "restarts are ascending and between 2 and the 10 epochs, got"),
        ({"restarts": (5, 4)}, "restarts are ascending"),
        ({"restarts": (10,)}, "restarts are ascending"),
        ({"half_size_epochs": 4, "full_size_lr": 0.4, "restarts": (4,)}, "between 4 and the 10 epochs"),
        ({"restarts": (4,), "restart_lrs": (0.1, 0.2)}, "restart_lrs is empty or has a rate for each restart"),
        ({"restart_lrs": (0.1,)}, "restart_lrs is empty or has a rate for each restart"),
        ({"restarts": (4,), "restart_lrs": (0.0,)}, "restart_lrs is a list of rates above 0, got"),
        ({"seed": 2**32}, r"seed is from 0 to 2\^32 - 1, got 4294967296"),
        ({"restarts": (4,), "schedule": "constant"}, "restarts belong to a cosine schedule"),
    ):
        with pytest.raises(ValueError, match=said):
            Recipe("p4_cnn", "bars", **values | bad)


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"schedule": "step"}, {"warmup_epochs": 3}, {"lr": 0.0}])
def test_bad_recipes_are_refused(bad):
    with pytest.raises(ValueError, match="got"):
        Recipe(**({"model": "p4_cnn", "dataset": "bars", "epochs": 3} | bad))


def test_a_run_starts_from_the_weights_of_a_checkpoint(tmp_path):
    recipe = other(start="p4_cnn", model_args={}, epochs=1, lr=1e-12, warmup_epochs=0, weight_decay=0.0)
    filters = run(tmp_path / "run", recipe).state_dict()["stem.conv.weight"]
    trained = eqzoo.create_model("p4_cnn", pretrained=True).state_dict()["stem.conv.weight"]
    torch.testing.assert_close(filters, trained, rtol=0, atol=1e-6)
    fresh = run(tmp_path / "fresh", replace(recipe, start=None)).state_dict()["stem.conv.weight"]
    assert (fresh - trained).abs().max() > 0.1

    with pytest.raises(ValueError, match="start='p4_cnn' does not fit p4_cnn: "):
        run(tmp_path / "small", other(start="p4_cnn"))
    with pytest.raises(ValueError, match=r"start='z2_cnn' does not fit p4_cnn: .* for the group z2, which mean"):
        run(tmp_path / "plain", other(start="z2_cnn"))
    with pytest.raises(ValueError, match="no network 'p4_cn' here"):
        run(tmp_path / "near", other(start="p4_cn"))
    run(tmp_path / "near", replace(recipe, start=None))  # the mistake has not taken the folder
    with pytest.raises(ValueError, match=r"another recipe \(start: None there, 'p4_cn' here\)"):
        run(tmp_path / "near", replace(recipe, start="p4_cn"))
    assert (tmp_path / "near" / "recipe.json").is_file()
    with pytest.raises(ValueError, match="needs a network of eqzoo, got a Linear"):
        go(tmp_path / "none", other(start="p4_cnn"), lambda: torch.nn.Linear(2, 2))


def test_a_run_starts_from_the_weights_of_another_run(tmp_path):
    trained = run(tmp_path / "seed0", other(epochs=2)).state_dict()
    recipe = other(start=f"run:{tmp_path}/seed{{seed}}", epochs=1, lr=1e-12, warmup_epochs=0, weight_decay=0.0)
    begun = run(tmp_path / "next", recipe).state_dict()
    for name in (name for name in trained if "running" not in name and "num_batches" not in name):
        torch.testing.assert_close(begun[name], trained[name], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="that run has valid_size=None, not 8"):
        run(tmp_path / "split", replace(recipe, valid_size=8))
    with pytest.raises(ValueError, match="that run has model_args="):
        run(tmp_path / "wider", replace(recipe, model_args=recipe.model_args | {"drop_rate": 0.1}))
    with pytest.raises(ValueError, match=r"needs a finished run of p4_cnn on bars: .*seed1 is not the folder of a run"):
        run(tmp_path / "second", replace(recipe, seed=1))
    with pytest.raises(ValueError, match=r"one of p4_cnn on bars; eqzoo publish .* --output FOLDER"):
        run(tmp_path / "elsewhere", replace(recipe, dataset="stripes"))
    fewer = {name: Split(split.images[1:], split.labels[1:]) for name, split in SPLITS.items()}
    with pytest.raises(ValueError, match=r"other images \(the training images differ; the validation images differ\)"):
        train(recipe, lambda: eqzoo.create_model(recipe.model, **recipe.model_args), fewer, tmp_path / "fewer")
    with pytest.raises(ValueError, match=r"name another folder with --output, because this run starts from that one"):
        run(tmp_path / "seed0", recipe)
    state = tmp_path / "seed0" / "state.pt"
    state.write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"state\.pt is damaged; restore it or remove it"):
        run(tmp_path / "damaged", recipe)
    state.unlink()
    run(tmp_path / "unknown", recipe)
    (tmp_path / "seed0" / "record.jsonl").write_text("")
    with pytest.raises(ValueError, match="has 0 of 2 epochs"):
        run(tmp_path / "early", recipe)


def test_weights_are_adapted_to_the_network_that_starts_from_them(tmp_path):
    sizes = {"num_classes": 2, "in_chans": 3}
    recipe = Recipe("r8_gsanet_t", "bars", epochs=1, batch_size=2, lr=1e-12, weight_decay=0.0, start="r4_gsanet_t")
    colored = {name: Split(part.images[:4].expand(-1, 3, -1, -1), part.labels[:4]) for name, part in SPLITS.items()}
    torch.set_default_dtype(torch.float32)
    net = train(recipe, lambda: eqzoo.create_model("r8_gsanet_t", kernel_size=3, **sizes), colored, tmp_path)
    trained = eqzoo.create_model("r4_gsanet_t", pretrained=True, group=net.group, **sizes)
    head = trained.head.weight
    for name, value in trained.state_dict().items():
        close = torch.allclose(net.state_dict()[name], value, rtol=0, atol=1e-6)
        assert close != (value.shape == head.shape and bool((value == head).all())), name


def test_a_run_goes_on_without_the_weights_that_it_started_from(tmp_path, monkeypatch):
    source = tmp_path / "weights" / "p4_cnn.mine"
    source.mkdir(parents=True)
    small = eqzoo.create_model("p4_cnn", width=2, num_classes=2)
    config = {"architecture": "p4_cnn", "num_classes": 2, "model_args": {"width": 2}}
    (source / "config.json").write_text(json.dumps(config | {"pretrained_cfg": {"tag": "mine"}}))
    save_file(small.state_dict(), source / "model.safetensors")
    monkeypatch.setenv("EQZOO_WEIGHTS", str(source.parent))
    recipe = other(start="p4_cnn.mine")
    whole = run(tmp_path / "whole", recipe)
    with pytest.MonkeyPatch.context() as monkey:
        stop_after(monkey, 1)
        with pytest.raises(Killed):
            run(tmp_path / "part", recipe)
    shutil.rmtree(source)
    shutil.copytree(tmp_path / "part", tmp_path / "anew")
    assert same(run(tmp_path / "part", recipe), whole)
    with pytest.raises(ValueError, match=r"no checkpoint 'p4_cnn\.mine'"):
        run(tmp_path / "fresh", recipe)
    (tmp_path / "anew" / "state.pt").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint 'p4_cnn\.mine'"):
        run(tmp_path / "anew", recipe)
    assert (tmp_path / "anew" / "recipe.json").is_file()  # it was there before
    (tmp_path / "part" / "state.pt").unlink()
    assert same(run(tmp_path / "part", recipe), whole)


def test_too_few_images_for_a_batch(tmp_path):
    with pytest.raises(
        ValueError, match="48 training images do not fill a batch of 64; set a smaller batch_size or add images"
    ):
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


def swap_norms(model):
    """Layer norms instead of batch norms: they know no batch, so that a batch may be split."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GroupBatchNorm2d):
                setattr(module, name, GroupLayerNorm2d(child.group, child.num_features))
    return model


def build_without_batch_norm():
    return swap_norms(eqzoo.create_model("p4_cnn", width=2, num_classes=2, drop_rate=0.0))


def other(**changes):
    return replace(RECIPE, **changes)


def go(folder, recipe, build=build_without_batch_norm, **kwargs):
    torch.set_default_dtype(torch.float32)
    return train(recipe, build, SPLITS, folder, **kwargs)


def rows(folder):
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def losses(folder):
    return [row["loss"] for row in rows(folder)]


def same(a, b):
    return all(torch.equal(a.state_dict()[name], value) for name, value in b.state_dict().items())


EVERYTHING = {
    "augment": "standard",
    "ema_decay": 0.9,
    "accumulate": 2,
    "clip_grad": 1.0,
    "label_smoothing": 0.1,
    "optimizer": "sgd",
    "optimizer_args": {"momentum": 0.8},
    "lr": 0.05,
    "schedule": "multistep",
    "milestones": (2,),
}


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(tmp_path):
    """SIGKILL before the first epoch, and twice at moments that nobody chose."""
    recipe = other(epochs=25, **EVERYTHING)
    record, seen = tmp_path / "killed" / "record.jsonl", []
    for wanted in (0, 3, 9):
        process = forks.start(run, tmp_path / "killed", recipe)
        deadline = time.monotonic() + 120
        there = tmp_path / "killed" / "recipe.json" if wanted == 0 else record
        while time.monotonic() < deadline:
            if there.exists() and len(there.read_text().splitlines()) > wanted:
                break
            time.sleep(0.002)
        process.kill()
        process.join()
        seen.append(len(record.read_text().splitlines()) if record.exists() else 0)
    assert seen[0] < seen[1] < seen[2] < 25
    torch.set_num_threads(1)
    (tmp_path / "killed" / ".state.pt.1.tmp").write_text("left by a run that was killed while it wrote")
    (others := tmp_path / "killed" / ".results.json.1.tmp").write_text("of a command that does not train")
    whole, resumed = run(tmp_path / "whole", recipe), run(tmp_path / "killed", recipe)
    assert same(whole, resumed)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
    others.unlink()
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


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


def test_a_run_of_an_older_recipe_goes_on(tmp_path):
    """Folders from before some keys and entries were there: those of the recipe are left out, and of the state."""
    whole = run(tmp_path / "whole", other(epochs=4))
    with pytest.MonkeyPatch.context() as monkey:
        stop_after(monkey, 2)
        with pytest.raises(Killed):
            run(tmp_path / "old", other(epochs=4))
    path = tmp_path / "old" / "recipe.json"
    values = json.loads(path.read_text())
    keys = "model dataset epochs batch_size optimizer lr weight_decay schedule warmup_epochs seed model_args"
    path.write_text(json.dumps({key: values[key] for key in keys.split()}))
    state = torch.load(tmp_path / "old" / "state.pt", weights_only=True)
    assert set(state) == {"model", "optimizer", "epoch", "row", "data_sha256"}
    del state["row"], state["data_sha256"]
    for group in state["optimizer"]["param_groups"]:
        del group["initial_lr"]
    torch.save(state, tmp_path / "old" / "state.pt")
    lines = [{k: v for k, v in row.items() if k != "valid_loss"} for row in rows(tmp_path / "old")]
    (tmp_path / "old" / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert same(run(tmp_path / "old", other(epochs=4)), whole)
    assert path.read_text() == json.dumps({key: values[key] for key in keys.split()})


def stop_after(monkeypatch, epochs):
    original = loop._train_epoch

    def stop(state, epoch, *args):
        if epoch == epochs:
            raise Killed
        return original(state, epoch, *args)

    monkeypatch.setattr(loop, "_train_epoch", stop)


def test_a_run_does_not_go_on_with_other_images(tmp_path):
    recipe = other(epochs=2)
    with pytest.MonkeyPatch.context() as monkey:
        stop_after(monkey, 1)
        with pytest.raises(Killed):
            run(tmp_path, recipe)
    for part, words in (("train", "training"), ("valid", "validation")):
        splits = SPLITS | {part: bars(len(SPLITS[part]), 9)}
        with pytest.raises(
            ValueError, match=f"cannot be resumed .* other images: the {words} images differ.*remove it"
        ):
            train(recipe, build, splits, tmp_path)
    with pytest.raises(ValueError, match="there are no validation images, and there were some"):
        train(recipe, build, {"train": SPLITS["train"]}, tmp_path)
    run(tmp_path, recipe)


def test_another_recipe_is_told_by_what_differs(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match=r"another recipe \(lr: 0\.001 there, 0\.01 here\)"):
        run(tmp_path, other(lr=0.01))
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"speed": 9}))
    with pytest.raises(ValueError, match="no 'speed'"):
        run(tmp_path)


@pytest.mark.parametrize("name", ["state.pt", "record.jsonl", "best.safetensors"])
def test_a_run_that_cannot_be_gone_on_with_says_so(tmp_path, name):
    run(tmp_path)
    if name == "state.pt":
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1000])
    else:
        (tmp_path / name).unlink()
    if name == "best.safetensors":  # of an epoch before the last one, whose weights the state has not
        first, *others = rows(tmp_path)
        lines = [first | {"valid_accuracy": 100.0}, *others]
        (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    way = r"train in another folder .*best\.safetensors stays as it is" if name == "state.pt" else "remove it"
    with pytest.raises(ValueError, match=rf"cannot be resumed .*; {way}"):
        run(tmp_path)


@pytest.mark.parametrize("patience", [None, 1])
def test_a_run_that_has_ended_is_not_trained_anew_without_its_state(tmp_path, monkeypatch, patience):
    accuracies = iter([50.0, 40.0, 30.0])
    monkeypatch.setattr(TrainingState, "validate", lambda self: {"valid_accuracy": next(accuracies), "valid_loss": 1.0})
    recipe = other(patience=patience)
    whole = run(tmp_path, recipe)
    assert len(rows(tmp_path)) == (2 if patience else 3)
    (tmp_path / "state.pt").unlink()
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert same(run(tmp_path, recipe), whole)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    longer = replace(recipe, epochs=5, restarts=(3,))
    with pytest.raises(ValueError, match="by patience" if patience else r"after epoch 3 without .*state\.pt, which"):
        run(tmp_path, longer)
    (tmp_path / "record.jsonl").write_text(files["record.jsonl"].decode().replace('"epoch": 2', '"epoch" 2') + "{}\n")
    with pytest.raises(ValueError, match=r"cannot be resumed \(line 2 of .* is not JSON.*; train in another folder"):
        run(tmp_path, recipe)
    assert (tmp_path / "best.safetensors").read_bytes() == files["best.safetensors"]


def test_the_end_of_a_run_is_seen_in_its_record():
    record = [{"epoch": i + 1, "valid_accuracy": value} for i, value in enumerate((50.0, 60.0, 40.0, 40.0))]
    assert best_row(record)["epoch"] == 2
    assert [is_finished(other(epochs=9, patience=2), record[:n]) for n in range(5)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert [is_finished(other(epochs=4), record[:n]) for n in range(5)] == [False, False, False, False, True]


def test_patience_counts_epochs_at_full_size():
    recipe = other(epochs=9, patience=2, half_size_epochs=5)
    assert [patience_is_over(recipe, 1, epoch) for epoch in (3, 5, 6, 7)] == [False, False, False, True]
    assert [patience_is_over(recipe, 6, epoch) for epoch in (7, 8)] == [False, True]


def test_early_stopping_stops_and_stays_stopped(tmp_path, monkeypatch):
    accuracies = iter([50.0, 60.0, 55.0, 55.0, 99.0, 99.0])
    monkeypatch.setattr(TrainingState, "validate", lambda self: {"valid_accuracy": next(accuracies), "valid_loss": 1.0})
    recipe = other(epochs=9, patience=2)
    go(tmp_path, recipe)
    assert len(rows(tmp_path)) == 4
    assert is_finished(recipe, rows(tmp_path))
    go(tmp_path, recipe)
    assert len(rows(tmp_path)) == 4


def test_a_plateau_lowers_the_rate_and_a_resumed_run_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingState, "validate", lambda self: {"valid_accuracy": 50.0, "valid_loss": 1.0})
    recipe = other(epochs=6, schedule="plateau", plateau_patience=1, decay_rate=0.5, lr=0.4, warmup_epochs=0)
    go(tmp_path / "whole", recipe)
    assert [row["lr"] for row in rows(tmp_path / "whole")] == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1, 0.1])
    with pytest.MonkeyPatch.context() as monkey:
        stop_after(monkey, 4)
        with pytest.raises(Killed):
            go(tmp_path / "stopped", recipe)
    go(tmp_path / "stopped", recipe)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_finished_run_goes_on_behind_a_restart(tmp_path):
    """With the weights of a run that had the longer recipe from the first epoch."""
    long = other(epochs=4, restarts=(2,), restart_lrs=(0.01,), ema_decay=0.9)
    whole = go(tmp_path / "whole", long)
    go(tmp_path / "parts", other(epochs=2, ema_decay=0.9))
    with pytest.raises(
        ValueError, match=r"epochs: 2 there, 4 here\); to continue it add --set 'restarts=\[2\]', or name"
    ):
        go(tmp_path / "parts", other(epochs=4, ema_decay=0.9))
    for changes in ({"lr": 0.1}, {"restarts": (3,)}, {"seed": 1, "restart_lrs": (0.1,)}):
        with pytest.raises(ValueError, match=r"another recipe \((?!.*to continue)"):
            go(tmp_path / "parts", replace(long, **changes))
    parts = go(tmp_path / "parts", long)
    assert Recipe.read(tmp_path / "parts" / "recipe.json") == long
    seconds = {"seconds": None}
    # The rate in the row of the last epoch of a part is that behind it: 0 at its end, or that of the restart.
    left, right = ([row | seconds for row in rows(tmp_path / name)] for name in ("whole", "parts"))
    assert [row.pop("lr") for row in left][1] == 0.01
    assert [row.pop("lr") for row in right][1] == 0
    assert left == right
    for one, two in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    # Until its first epoch is finished, the folder is that of the run that had ended.
    longest = replace(long, epochs=5, restarts=(2, 4), restart_lrs=(0.01, 0.01))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_train_epoch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go(tmp_path / "parts", longest)
    assert Recipe.read(tmp_path / "parts" / "recipe.json") == long
    with pytest.raises(ValueError, match=r"add --set 'restarts=\[2, 4\]' 'restart_lrs=\[0\.01, 0\.001\]', or name"):
        go(tmp_path / "parts", replace(long, epochs=5, restarts=(), restart_lrs=()))
    # A recipe with restarts of its own, which --epochs has made longer.
    with pytest.raises(ValueError, match=r"add --set 'restarts=\[2, 4\]' 'restart_lrs=\[0\.01, 0\.001\]', or name"):
        go(tmp_path / "parts", replace(long, epochs=5))
    with pytest.raises(ValueError, match=r"another recipe \((?!.*to continue)"):
        go(tmp_path / "parts", replace(long, epochs=5, restarts=(3,)))
    # Rates that are given and rates that are not are compared as rates.
    first = other(epochs=6, restarts=(2,))
    more = other(epochs=8, restarts=(2, 6), restart_lrs=(RECIPE.lr, 0.1))
    assert more.continues(first)
    assert not replace(more, restart_lrs=(0.5, 0.1)).continues(first)
    assert not first.continues(first)
    assert not first.continues(more)


def test_nothing_follows_a_run_that_ended_early(tmp_path, monkeypatch):
    falling = iter(range(90, 0, -1))
    monkeypatch.setattr(
        TrainingState, "validate", lambda self: {"valid_accuracy": float(next(falling)), "valid_loss": 1.0}
    )
    for epochs in (9, 3):  # the last one is that after which patience ends
        recipe = other(epochs=epochs, patience=2)
        go(tmp_path / str(epochs), recipe)
        with pytest.raises(ValueError, match="was ended by patience=2, after epoch 3, and so would be a longer one"):
            go(tmp_path / str(epochs), replace(recipe, epochs=12, restarts=(epochs,)))
        assert Recipe.read(tmp_path / str(epochs) / "recipe.json") == recipe


@pytest.mark.parametrize("optimizer", ["nmuon", "nadamuon"])
def test_a_resumed_run_knows_the_momentum_of_matrices(tmp_path, optimizer):
    """Muon keeps other state for matrices than for vectors; without it the losses after the stop are others."""
    recipe = other(epochs=4, optimizer=optimizer, optimizer_args={"fallback_lr_scale": 0.3}, lr=0.02, ema_decay=0.9)
    whole = go(tmp_path / "whole", recipe)
    for folder in ("stopped", "forgetful"):
        with pytest.MonkeyPatch.context() as monkey:
            stop_after(monkey, 2)
            with pytest.raises(Killed):
                go(tmp_path / folder, recipe)
    state = torch.load(tmp_path / "forgetful" / "state.pt", weights_only=True)
    for kept in state["optimizer"]["state"].values():
        for value in kept.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    torch.save(state, tmp_path / "forgetful" / "state.pt")
    assert same(whole, go(tmp_path / "stopped", recipe))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    go(tmp_path / "forgetful", recipe)
    assert losses(tmp_path / "forgetful") != losses(tmp_path / "whole")


def test_without_validation_images_the_last_epoch_is_kept(tmp_path):
    torch.set_default_dtype(torch.float32)
    recipe = other(valid_size=0)
    model = train(recipe, build, {"train": SPLITS["train"]}, tmp_path)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())
    assert best_row(rows(tmp_path))["epoch"] == 3
    assert [row["valid_accuracy"] for row in rows(tmp_path)] == [None] * 3
    with pytest.raises(ValueError, match="need a validation split"):
        train(other(patience=2), build, {"train": SPLITS["train"]}, tmp_path / "patience")


def test_nan_in_the_middle_of_a_run_names_the_last_good_epoch(tmp_path, monkeypatch):
    original = TrainingState.backward
    monkeypatch.setattr(
        TrainingState, "backward", lambda self, *args: original(self, *args) * (float("nan") if broken else 1)
    )
    broken = False
    go(tmp_path, other(epochs=2))
    (tmp_path / "recipe.json").write_text(json.dumps(asdict(other(epochs=3))))  # as of a run that was killed
    best = (tmp_path / "best.safetensors").read_bytes()
    broken = True
    with pytest.raises(
        FloatingPointError, match=r"epoch 3 is nan; the best weights, of epoch 1, are in .*best\.safetensors"
    ):
        go(tmp_path, other(epochs=3))
    assert (tmp_path / "best.safetensors").read_bytes() == best


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

    torch.set_default_dtype(torch.float32)
    train(other(epochs=2, valid_size=None if held_out else 0), build, splits, tmp_path / "two")
    monkeypatch.setattr(TrainingState, "step", step)
    with pytest.raises(FloatingPointError, match=found + r".*; the best weights, of epoch \d, are in .*; a smaller lr"):
        train(other(epochs=3, valid_size=None if held_out else 0), build, splits, tmp_path / "three")
    assert len(rows(tmp_path / "three")) == 2
    assert all(value.isfinite().all() for value in load_file(tmp_path / "three" / "best.safetensors").values())


@pytest.mark.parametrize(
    ("epoch", "remedy"), [(1, "a smaller lr than 0.001"), (2, "a smaller one of restart_lrs than 0.5")]
)
def test_the_rate_that_was_too_high_is_named(tmp_path, monkeypatch, epoch, remedy):
    original, seen = TrainingState.backward, []

    def backward(self, *args):
        seen.append(len(rows(tmp_path)) if (tmp_path / "record.jsonl").exists() else 0)
        return original(self, *args) * (float("nan") if seen[-1] == epoch else 1)

    monkeypatch.setattr(TrainingState, "backward", backward)
    with pytest.raises(FloatingPointError, match=f"; {remedy}, a warm-up or"):
        go(tmp_path, other(epochs=4, restarts=(2,), restart_lrs=(0.5,)))


def test_damaged_weights_are_noticed_before_the_run_goes_on(tmp_path, monkeypatch):
    accuracies = iter([50.0, 40.0, 30.0])
    validate = TrainingState.validate
    monkeypatch.setattr(TrainingState, "validate", lambda self: validate(self) | {"valid_accuracy": next(accuracies)})
    go(tmp_path, other(epochs=2))
    weights = tmp_path / "best.safetensors"  # of epoch 1, which the state does not have
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    longer = other(epochs=3, restarts=(2,))
    damaged = r"cannot be resumed \(.*best\.safetensors is damaged: .*; remove it and train again, or restore best"
    for recipe in (other(epochs=2), longer):
        with pytest.raises(ValueError, match=damaged) as caught:
            go(tmp_path, recipe)
        assert "\n" not in str(caught.value)
    state = tmp_path / "state.pt"
    saved = state.read_bytes()
    state.unlink()  # a run that has ended goes without
    with pytest.raises(ValueError, match=damaged):
        go(tmp_path, other(epochs=2))
    state.write_bytes(saved)
    assert len(rows(tmp_path)) == 2
    weights.write_bytes(whole)
    go(tmp_path, longer)
    assert weights.read_bytes() == whole


def test_the_weights_of_an_ended_run_without_a_state_are_compared(tmp_path, monkeypatch):
    accuracies = iter([40.0, 50.0])
    validate = TrainingState.validate
    monkeypatch.setattr(TrainingState, "validate", lambda self: validate(self) | {"valid_accuracy": next(accuracies)})
    go(tmp_path, other(epochs=2))
    (tmp_path / "state.pt").unlink()  # which had the weights of the best epoch, the last one
    weights = tmp_path / "best.safetensors"
    weights.write_bytes(weights.read_bytes()[:-400] + bytes(400))
    with pytest.raises(ValueError, match=r"cannot be resumed \(.*has been changed: .*; remove it and train again"):
        go(tmp_path, other(epochs=2))


def test_changed_weights_are_not_taken_for_those_of_the_run(tmp_path, monkeypatch):
    accuracies = iter([50.0, 40.0])
    validate = TrainingState.validate
    monkeypatch.setattr(TrainingState, "validate", lambda self: validate(self) | {"valid_accuracy": next(accuracies)})
    go(tmp_path, other(epochs=2))
    weights = tmp_path / "best.safetensors"  # of epoch 1, which the state does not have
    whole = weights.read_bytes()
    zeros = whole[:-400] + bytes(400)
    save_file(load_file(weights), tmp_path / "again.safetensors", {"of": "another program"})
    for changed in (zeros, (tmp_path / "again.safetensors").read_bytes()):
        weights.write_bytes(changed)
        with pytest.raises(
            ValueError, match=r"best\.safetensors has been changed: its SHA-256 .*; remove it and train"
        ):
            go(tmp_path, other(epochs=2))
        with pytest.raises(ValueError, match=r"best\.safetensors has been changed: its SHA-256"):
            FinishedRun.read(tmp_path)
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(whole)
    with pytest.raises(ValueError, match=r"; copy .*model\.safetensors to .*best\.safetensors, whose weights it has"):
        go(tmp_path, other(epochs=2))
    weights.unlink()
    with pytest.raises(ValueError, match=r"best\.safetensors is missing\); copy .*model\.safetensors to "):
        go(tmp_path, other(epochs=2))
    shutil.copy(copy, weights)
    go(tmp_path, other(epochs=2))
    # The record of an earlier version has no digest.
    record = tmp_path / "record.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    record.write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k != "weights_sha256"}) + "\n" for row in lines)
    )
    go(tmp_path, other(epochs=2))
    save_file(eqzoo.create_model("p4_cnn", num_classes=5).state_dict(), weights)
    with pytest.raises(ValueError, match=r"best\.safetensors has the weights of another network: "):
        go(tmp_path, other(epochs=2))


def test_a_state_older_than_the_record_is_compared_with_its_own_epochs(tmp_path, monkeypatch):
    accuracies = iter([50.0, 40.0, 60.0])
    validate = TrainingState.validate
    monkeypatch.setattr(TrainingState, "validate", lambda self: validate(self) | {"valid_accuracy": next(accuracies)})
    save, saved = RunDirectory.save_state, []

    def kept(self, state):
        save(self, state)
        saved.append(self.state.read_bytes())

    monkeypatch.setattr(RunDirectory, "save_state", kept)
    go(tmp_path, other(epochs=3))
    (tmp_path / "state.pt").write_bytes(saved[1])  # its best epoch is the first, and the file has the third
    with pytest.raises(ValueError, match=r"cannot be resumed \(.*best\.safetensors has been changed"):
        go(tmp_path, other(epochs=3))
    assert next(accuracies, None) is None  # nothing was trained


def test_memory_that_runs_out_is_not_taken_for_other_weights(tmp_path):
    builds = iter([build, lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        train(other(freeze=("stem",)), lambda: next(builds)(), SPLITS, tmp_path)


def test_a_changed_state_is_not_gone_on_with(tmp_path):
    go(tmp_path, other(epochs=2))
    state = tmp_path / "state.pt"
    whole = state.read_bytes()
    with zipfile.ZipFile(state) as file:
        part = max(file.infolist(), key=lambda part: part.file_size)
    names = part.header_offset + 26  # two lengths of two bytes, the name and more; then the data, torch pads before it
    name, more = struct.unpack("<HH", whole[names : names + 4])
    damaged = bytearray(whole)
    damaged[names + 4 + name + more + part.file_size // 2] ^= 0xFF
    state.write_bytes(damaged)
    longer = other(epochs=3, restarts=(2,))
    with pytest.raises(ValueError, match=r"cannot be resumed \(.*state\.pt is damaged, in its part"):
        go(tmp_path, longer)
    state.write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"cannot be resumed \(File is not a zip file\)"):
        go(tmp_path, longer)
    state.write_bytes(whole)
    go(tmp_path, longer)


def test_an_optimizer_of_a_package_that_is_missing(tmp_path):
    with pytest.raises(
        ValueError, match=r"optimizer 'fusedsgd' cannot be used here: .*; others are adamw, sgd and nmuon"
    ):
        go(tmp_path, other(optimizer="fusedsgd"))
    with pytest.raises(
        ValueError, match=r"optimizer_args=\{'mars_type': 'foo'\} do not suit mars: MARS type not supported"
    ):
        go(tmp_path, other(optimizer="mars", optimizer_args={"mars_type": "foo"}))


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tracker 'nonesuch' is installed"):
        go(tmp_path, RECIPE, track="nonesuch")
    with pytest.raises(ValueError, match="device is 'cpu'"):
        go(tmp_path, RECIPE, device="abacus")

    class NoBlocks(torch.nn.Linear):
        num_classes, in_chans = 2, 1

    with pytest.raises(ValueError, match="cannot recompute its blocks"):
        go(tmp_path, other(checkpointing=True), lambda: NoBlocks(2, 2))


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


@pytest.mark.parametrize("left", ["state.pt", "record.jsonl", "best.safetensors"])
def test_a_run_without_its_recipe_is_not_taken_for_another_one(tmp_path, left):
    run(tmp_path)
    for path in tmp_path.iterdir():
        if path.name not in (left, ".lock"):
            path.unlink()
    with pytest.raises(ValueError, match=rf"holds {left} of a run whose recipe\.json is missing: restore that file"):
        go(tmp_path, other(lr=0.003))
    assert not (tmp_path / "recipe.json").exists()
