"""The folder of a run: a checkpoint from its first epoch on; a run that is stopped ends with the same weights."""

import itertools
import json
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

import eqzoo
from eqzoo._common import atomic
from eqzoo.data import Split
from eqzoo.engine import RunDirectory, best_row, is_finished, loop
from eqzoo.engine import run as run_module
from eqzoo.engine.recipe import patience_is_over
from eqzoo.engine.state import TrainingState
from tests import forks
from tests.engine.bars import SPLITS, Killed, bars, go, kill_after, losses, other, rows, run, same, scored

ENDED = {".lock", "config.json", "log.jsonl", "model.safetensors", "training.json"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def without_seconds(folder):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing stopped, and its network."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def test_the_folder_is_a_checkpoint_from_the_first_epoch_on(tmp_path, whole):
    kill_after(1, run, tmp_path)
    assert names(tmp_path) == ENDED | {"state.pt"}
    early = eqzoo.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert not same(early, whole[1])
    ended = run(tmp_path)
    assert names(tmp_path) == names(whole[0]) == ENDED
    assert same(ended, whole[1])
    assert same(eqzoo.create_model(str(tmp_path), pretrained=True), whole[1])


@pytest.mark.parametrize(
    ("place", "moment"),
    [
        (RunDirectory, "save_state"),
        (RunDirectory, "save_weights"),
        (RunDirectory, "append_row"),
        (RunDirectory, "finish"),
        (loop, "_train_epoch"),
    ],
)
def test_a_run_stopped_at_any_moment_ends_as_one_that_was_not(tmp_path, monkeypatch, whole, place, moment):
    original, calls = getattr(place, moment), []

    def stop(*args):
        calls.append(args)
        if len(calls) == (1 if moment == "finish" else 2):
            raise Killed
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(place, moment, stop)
        with pytest.raises(Killed):
            run(tmp_path)
    assert same(run(tmp_path), whole[1])
    assert without_seconds(tmp_path) == without_seconds(whole[0])
    assert names(tmp_path) == ENDED


@pytest.mark.parametrize("moment", ["save_state", "save_weights", "append_row"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "behind"])
def test_the_weights_are_those_of_the_recorded_epoch_if_one_comes_out_otherwise(tmp_path, monkeypatch, moment, done):
    """Epochs that are not deterministic: the second one would have been the best, and is worse when repeated."""
    original, calls, accuracies = getattr(RunDirectory, moment), [], iter([50.0, 60.0])
    monkeypatch.setattr(TrainingState, "validate", lambda self: {"valid_accuracy": next(accuracies), "valid_loss": 1.0})
    monkeypatch.setattr(TrainingState, "backward", lambda self, *_: torch.zeros(()))
    monkeypatch.setattr(TrainingState, "step", lambda self, *_: self.model.head.weight.data.add_(next(drawn)))
    drawn = itertools.count(1.0)

    def stop(*args):
        calls.append(args)
        if len(calls) == 2:
            original(*args) if done else None
            raise Killed
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, moment, stop)
        with pytest.raises(Killed):
            run(tmp_path)
    accuracies = iter([45.0, 40.0])
    before = load_file(tmp_path / "model.safetensors")["head.weight"]
    run(tmp_path)
    found = rows(tmp_path)
    assert [row["epoch"] for row in found] == [1, 2, 3]
    kept = (moment, done) != ("save_state", False)  # the second epoch is not repeated
    assert [row["valid_accuracy"] for row in found] == ([50.0, 60.0, 45.0] if kept else [50.0, 45.0, 40.0])
    assert best_row(found)["epoch"] == (2 if kept else 1)
    missing = {("save_state", True), ("save_weights", False)}  # weights of the second epoch, when it was killed
    weights = load_file(tmp_path / "model.safetensors")["head.weight"]
    assert torch.equal(weights, before) != ((moment, done) in missing)


def test_a_run_killed_by_the_system_goes_on(tmp_path, whole):
    """SIGKILL, at a moment that nobody chose."""
    process = forks.start(run, tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0)  # at its end, if this process was slow to see the first epoch's
    torch.set_num_threads(1)
    (tmp_path / ".state.pt.1.tmp").write_text("left by a run that was killed while it wrote")
    assert same(run(tmp_path), whole[1])
    assert losses(tmp_path) == losses(whole[0])
    assert names(tmp_path) == ENDED


@pytest.mark.parametrize("name", ["training.json", "model.safetensors", "state.pt"])
def test_a_file_that_cannot_be_written_leaves_the_rest_whole(tmp_path, monkeypatch, whole, name):
    def full(path, write):
        if path.name == name:
            atomic(path, lambda temporary: temporary.write_bytes(b"half") and fail())
        return atomic(path, write)

    def fail():
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "atomic", full)
        patch.setattr("eqzoo._common.atomic", full)
        with pytest.raises(OSError, match="No space"):
            run(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))
    assert same(run(tmp_path), whole[1])


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
    assert all(isinstance(error, ValueError) and "another command trains in" in str(error) for error in errors)


def test_a_folder_is_free_once_the_command_that_trains_there_is_killed(tmp_path):
    script = f"from filelock import FileLock; a = FileLock({str(tmp_path / '.lock')!r}); a.acquire(); print(); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(ValueError, match="another command trains in"):
        run(tmp_path)
    assert names(tmp_path) == {".lock"}
    process.kill()
    process.communicate()
    run(tmp_path)
    assert len(rows(tmp_path)) == 3


def test_a_run_that_fails_in_its_first_epoch_leaves_its_folder_to_the_corrected_command(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingState, "backward", lambda self, *_: torch.tensor(float("nan")))
    with pytest.raises(FloatingPointError, match="no epoch was finished"):
        run(tmp_path)
    assert names(tmp_path) == set()
    (tmp_path / "eqzoo").mkdir()  # as TensorBoard's tracker leaves it
    monkeypatch.undo()
    narrow = {name: Split(split.images[..., :20], split.labels) for name, split in SPLITS.items()}
    with pytest.raises(ValueError, match="square"):
        go(tmp_path, other(augment="rotations"), splits=narrow)
    run(tmp_path, other(epochs=2))
    with pytest.raises(ValueError, match=r"holds another run \(epochs 2, not 3\)"):
        run(tmp_path)
    assert (tmp_path / "training.json").is_file()


def test_a_run_does_not_go_on_with_other_images_or_another_recipe(tmp_path):
    kill_after(1, go, tmp_path)
    for part, words in (("train", "training"), ("valid", "validation")):
        with pytest.raises(ValueError, match=rf"holds another run \(the {words} images differ\)"):
            go(tmp_path, splits=SPLITS | {part: bars(len(SPLITS[part]), 9)})
    with pytest.raises(ValueError, match="the validation images differ"):
        go(tmp_path, splits={"train": SPLITS["train"]})
    with pytest.raises(ValueError, match=r"holds another run \(lr 0\.001, not 0\.01\)"):
        go(tmp_path, other(lr=0.01))
    go(tmp_path)
    assert len(rows(tmp_path)) == 3


@pytest.mark.parametrize("left", ["state.pt", "log.jsonl", "model.safetensors", "notes.txt"])
def test_files_of_others_are_not_overwritten(tmp_path, left):
    (tmp_path / left).write_text("of another run")
    with pytest.raises(ValueError, match=rf"holds other files \({left}\); name a new folder"):
        run(tmp_path)
    assert (tmp_path / left).read_text() == "of another run"


@pytest.mark.parametrize("patience", [None, 1])
def test_a_run_that_has_ended_is_not_trained_again(tmp_path, monkeypatch, patience):
    scored(monkeypatch, 50.0, 40.0, 30.0)
    recipe = other(patience=patience)
    ended = run(tmp_path, recipe)
    assert len(rows(tmp_path)) == (2 if patience else 3)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert same(run(tmp_path, recipe), ended)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    (tmp_path / "log.jsonl").write_text(files["log.jsonl"].decode().replace('"epoch": 2', '"epoch" 2') + "{}\n")
    with pytest.raises(ValueError, match=r"cannot be resumed \(line 2 of .* is not JSON.*; restore its files"):
        run(tmp_path, recipe)
    assert (tmp_path / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_changed_weights_are_not_taken_for_those_of_the_run(tmp_path, whole):
    folder = shutil.copytree(whole[0], tmp_path / "copy")
    weights = folder / "model.safetensors"
    saved = weights.read_bytes()
    save_file(load_file(weights), tmp_path / "again.safetensors", {"of": "another program"})
    for changed in (saved[:-400] + bytes(400), saved[:-4], (tmp_path / "again.safetensors").read_bytes()):
        weights.write_bytes(changed)
        for read in (run, RunDirectory.finished):
            with pytest.raises(ValueError, match=r"has been changed: its SHA-256 is not the one in log\.jsonl"):
                read(folder)
    weights.write_bytes(saved)
    assert same(run(folder), whole[1])


@pytest.mark.parametrize("damage", ["state", "zip", "weights", "log"])
def test_a_damaged_run_is_not_gone_on_with(tmp_path, monkeypatch, damage):
    scored(monkeypatch, 50.0, 40.0, 30.0)  # the state has other weights than those of the best epoch
    kill_after(2, run, tmp_path)
    state, weights, log = (tmp_path / name for name in ("state.pt", "model.safetensors", "log.jsonl"))
    if damage == "state":
        flip_a_bit(state)
    elif damage == "zip":
        state.write_bytes(b"garbage")
    elif damage == "weights":
        weights.write_bytes(weights.read_bytes()[:-4])
    else:  # as of two commands that wrote at once
        log.write_text("".join(f"{line}\n{line}\n" for line in log.read_text().splitlines()))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"cannot be resumed \(.*\); restore its files, or train in another") as caught:
        run(tmp_path)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def flip_a_bit(path):
    """Changes a bit of the largest part of a zip archive, which torch.load does not notice."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        part = max(file.infolist(), key=lambda part: part.file_size)
    start = part.header_offset + 26  # two lengths of two bytes, the name and more; then the data, torch pads before it
    name, more = struct.unpack("<HH", data[start : start + 4])
    data[start + 4 + name + more + part.file_size // 2] ^= 0xFF
    path.write_bytes(data)


def test_a_run_goes_on_without_the_weights_that_it_started_from(tmp_path, monkeypatch):
    source = tmp_path / "weights" / "p4_cnn.mine"
    source.mkdir(parents=True)
    config = {"architecture": "p4_cnn", "num_classes": 2, "model_args": {"width": 2}}
    (source / "config.json").write_text(json.dumps(config | {"pretrained_cfg": {"tag": "mine"}}))
    save_file(eqzoo.create_model("p4_cnn", width=2, num_classes=2).state_dict(), source / "model.safetensors")
    monkeypatch.setenv("EQZOO_WEIGHTS", str(source.parent))
    recipe = other(start="p4_cnn.mine")
    whole = run(tmp_path / "whole", recipe)
    kill_after(1, run, tmp_path / "part", recipe)
    shutil.rmtree(source)
    assert same(run(tmp_path / "part", recipe), whole)
    with pytest.raises(ValueError, match=r"no checkpoint 'p4_cnn\.mine'"):
        run(tmp_path / "fresh", recipe)


@pytest.mark.parametrize("optimizer", ["nmuon", "nadamuon"])
def test_a_resumed_run_knows_the_momentum_of_matrices(tmp_path, optimizer):
    """Muon keeps other state for matrices than for vectors; without it the losses after the stop are others."""
    options = {"optimizer_args": {"fallback_lr_scale": 0.3}, "lr_factors": {"head.*": 0.3}}
    recipe = other(optimizer=optimizer, lr=0.02, ema_decay=0.9, **options)
    whole = go(tmp_path / "whole", recipe)
    kill_after(2, go, tmp_path / "stopped", recipe)
    shutil.copytree(tmp_path / "stopped", tmp_path / "forgetful")
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


def test_the_end_of_a_run_is_seen_in_its_log():
    log = [{"epoch": i + 1, "valid_accuracy": value} for i, value in enumerate((50.0, 60.0, 40.0, 40.0))]
    assert best_row(log)["epoch"] == 2
    assert [is_finished(other(epochs=9, patience=2), log[:n]) for n in range(5)] == [False] * 4 + [True]
    assert [is_finished(other(epochs=4), log[:n]) for n in range(5)] == [False] * 4 + [True]


def test_patience_counts_epochs_at_full_size():
    recipe = other(epochs=9, patience=2, half_size_epochs=5)
    assert [patience_is_over(recipe, 1, epoch) for epoch in (3, 5, 6, 7)] == [False, False, False, True]
    assert [patience_is_over(recipe, 6, epoch) for epoch in (7, 8)] == [False, True]
