"""The speed of a run, measured before it, and what the processor offers."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

import eqzoo
from eqzoo import _common
from eqzoo.data import Split, Streamed
from eqzoo.engine import device, loop, speed
from eqzoo.engine.recipe import Recipe
from eqzoo.ops import _compile
from tests.finetuning.shapes import shapes

RECIPE = Recipe("p4_cnn", "own", epochs=1, batch_size=8, model_args={"num_classes": 3})


def build():
    return eqzoo.create_model("p4_cnn", num_classes=3)


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def measured(monkeypatch, seconds, same_loss=True):
    """The formats that are chosen where a step takes these seconds, by precision and memory format."""
    monkeypatch.setattr(speed._Trial, "seconds", lambda _, r, times: seconds[r.precision, r.channels_last])
    monkeypatch.setattr(speed._Trial, "takes_bfloat16", lambda _, recipe: same_loss)

    def choose(given, wanted=3600.0):
        found = speed.measure(RECIPE, build, shapes(), given, "cpu", wanted)
        return found.precision, found.channels_last

    return choose


def test_the_fastest_formats_are_chosen(monkeypatch):
    fast = {("float32", False): 4.0, ("float32", True): 2.0, ("bfloat16", False): 3.0, ("bfloat16", True): 1.0}
    choose = measured(monkeypatch, fast)
    assert choose({}) == ("bfloat16", True)
    assert choose({}, wanted=30.0) == ("float32", False)  # not worth it
    assert choose({"precision": "float32"}) == ("float32", True)
    assert choose({"channels_last": False}) == ("bfloat16", False)
    assert measured(monkeypatch, fast, same_loss=False)({}) == ("float32", True)
    slow = {("float32", False): 2.0, ("float32", True): 2.0, ("bfloat16", False): 1.95, ("bfloat16", True): 1.0}
    assert measured(monkeypatch, slow)({}) == ("float32", False)  # 2.5 % are no gain


def test_where_the_epochs_follow_from_the_time_whole_batches_are_timed(monkeypatch):
    """Small parts of a batch are slower for each image, so a short comparison would get too few epochs."""
    timed = []

    def seconds(trial, recipe, times):
        timed.append(len(trial.batch[1]))
        return 1e-3

    monkeypatch.setattr(speed._Trial, "seconds", seconds)
    for wanted, last in ((None, 2), (5.0, 8), (3600.0, 8)):
        speed.measure(RECIPE, build, shapes(), {}, "cpu", wanted)
        assert timed[-1] == last


def test_the_epochs_that_fit_into_a_time():
    found = speed.Speed("float32", False, 10.0)
    split = {"train": Split(torch.zeros(30, 1, 28, 28, dtype=torch.uint8), torch.arange(30) % 3)}  # 3 s an epoch
    assert found.epochs_within(7.6, split) == 2
    saved = replace(found, saving_seconds=1.0)  # large networks take long to write
    assert [saved.epochs_within(7.6, split), saved.epochs_within(8.0, split)] == [1, 2]
    assert saved.epoch_seconds(split) == 4


def test_a_measurement_is_of_the_steps_of_the_run(tmp_path):
    """The time of a step is that of the network: one that sleeps is as slow as it sleeps."""

    def sleepy():
        model = build()
        model.register_forward_pre_hook(lambda *_: time.sleep(0.2))
        return model

    assert speed.measure(RECIPE, sleepy, shapes(), {}, "cpu").images_per_second < 2 / 0.2
    plain = speed.measure(RECIPE, build, shapes(), {}, "cpu")
    assert plain.images_per_second > 2 / 0.2
    assert plain.saving_seconds == 0  # the number of epochs does not follow from it
    options = {"seconds": 60.0, "folder": tmp_path}
    timed = speed.measure(RECIPE, build, shapes(), {}, "cpu", **options)
    assert 0 < timed.saving_seconds < 5
    assert list(tmp_path.iterdir()) == []


def test_the_time_of_reading_counts_where_it_is_the_longer_one():
    def read(i):
        time.sleep(0.05)
        return torch.zeros(1, 28, 28, dtype=torch.uint8)

    splits = {"train": Streamed(read, torch.arange(40), torch.arange(40) % 3, (1, 28, 28))}
    found = [speed.measure(RECIPE, build, splits, {}, "cpu", workers=workers) for workers in (0, 1, 2)]
    assert found[0].images_per_second < found[1].images_per_second <= 20 < found[2].images_per_second <= 40


def test_a_process_trains_on_one_device(monkeypatch):
    loop.accelerator_of("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="this process has trained on cpu before"):
        loop.accelerator_of(None)


def test_small_batches_are_measured_with_networks_that_reduce_images_to_a_pixel():
    def build():
        model = timm.create_model("test_resnet", num_classes=3, in_chans=1)
        model.pretrained_cfg = model.pretrained_cfg | {"mean": (0.5,), "std": (0.5,)}
        return model

    recipe = Recipe("test_resnet", "own", epochs=1, batch_size=4)
    assert speed.measure(recipe, build, shapes(), {}, "cpu").images_per_second > 0


def test_subnormal_numbers_are_zero_while_training_alone():
    small = torch.tensor([1e-39])
    with device.flushed_subnormals():
        assert not torch.any(small * 1)
        with device.flushed_subnormals():
            pass
        assert not torch.any(small * 1)
        torch.set_default_dtype(torch.float64)
        with device.flushed_subnormals():
            pass
        assert not torch.any(small * 1)
    assert torch.all(small * 1 > 0)


@pytest.mark.parametrize(
    ("line", "multiplies", "emulates"),
    [
        ("", False, False),  # unknown
        ("flags\t\t: fpu avx2 avx512f", False, True),
        ("flags\t\t: fpu avx512_bf16 avx512f", True, False),
        ("flags\t\t: amx_bf16", True, False),
        ("Features\t: fp asimd bf16", True, False),
    ],
)
def test_processors_that_multiply_bfloat16(monkeypatch, line, multiplies, emulates):
    cpu = torch.device("cpu")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"processor : 0\n{line}\n")
    _compile.cpu_flags.cache_clear()
    try:
        assert (device.has_bfloat16(cpu), device.emulates_bfloat16(cpu)) == (multiplies, emulates)
    finally:
        _compile.cpu_flags.cache_clear()


def test_cores_that_may_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(_common, "_CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert _common.usable_cores() == 16
    for text, expected in (
        ("max 100000\n", 16),
        ("250000 100000\n", 3),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 16),
    ):
        (tmp_path / "cpu.max").write_text(text)
        assert _common.usable_cores() == expected
    before = torch.get_num_threads()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with device.limited_threads():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
