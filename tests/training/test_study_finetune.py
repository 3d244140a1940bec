"""The study of fine-tuning: runs by the rules of `eqzoo finetune`, runs that are not repeated, a page of the runs."""

import json
import shutil
import sys

import pytest
import torch

from eqzoo.data import Split
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import study_finetune as study


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Runs the study on light and dark images: a function of further arguments, and the folder of its page."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count, side):
        labels = torch.arange(count) % 2
        images = torch.randint(0, 128, (count, 3, side, side), generator=generator) + 100 * labels.view(-1, 1, 1, 1)
        return Split(images.to(torch.uint8), labels, ("dark", "light"))

    def read(data, args, input_size):
        side = input_size[-1]
        return {name: drawn(count, side) for name, count in (("train", 64), ("valid", 48), ("test", 32))}

    monkeypatch.setattr(study, "read_splits", read)
    monkeypatch.setattr(study, "SIZES", {"valid": 16, "choice": 24, "test": 20})
    monkeypatch.setattr(study, "SIDES", {"p4_cnn": 28})
    monkeypatch.setattr(study, "PLAIN", {"resnet10t": 32})
    monkeypatch.setattr(study, "PLAIN_RATES", (1e-3,))
    monkeypatch.setattr(study, "AGAINST", ("eurosat", "p4_cnn", 8))
    few = {"epochs": 2}
    factors = {name: few | study.FACTORS[name] for name in ("the rules", "three times the learning rate")}
    monkeypatch.setattr(study, "FACTORS", factors | {"random weights": few | {"pretrained": False}})
    monkeypatch.setattr(study, "REDUCED", (study.Cell("eurosat", "p4_cnn", 8, tuple(study.FACTORS)),))

    def run(*args):
        words = ["study_finetune.py", "--output", tmp_path / "docs", *args]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        study.main()
        return json.loads((tmp_path / "docs" / f"{study.NAME}.json").read_text())

    return run, tmp_path


def test_the_study_trains_by_the_rules_and_is_not_repeated(small, monkeypatch):
    run, folder = small
    with pytest.raises(SystemExit, match="no runs to make a page of"):
        run("--minutes", 0)
    table = run()
    runs = {run["factor"]: run for run in table["runs"]}
    assert set(runs) == {*study.FACTORS, "timm"}
    assert runs["three times the learning rate"]["lr"] == pytest.approx(3 * runs["the rules"]["lr"])
    assert runs["the rules"]["start"] == "weights" != runs["random weights"]["start"]
    results = json.loads((ROOT / "model_cards" / "p4_cnn.rotmnist" / "results.json").read_text())
    assert runs["the rules"]["weights"] == "p4_cnn.rotmnist"
    assert runs["the rules"]["start_sha256"] == results["weights_sha256"]
    assert "weights" not in runs["random weights"]
    for factor, found in runs.items():
        assert [found[f"{name}_images"] for name in ("train", "valid", "choice", "test")] == [16, 16, 24, 20]
        assert ("test" in found) == (factor in ("the rules", "timm")), "the test is read for the rules alone"
    page = (folder / "docs" / f"{study.NAME}.md").read_text()
    assert "| p4_cnn, EuroSAT, 8 a class | 3 |" in page
    assert "| timm resnet10t | random weights | 0.001 |" in page
    monkeypatch.setattr(study, "trained", lambda *args: pytest.fail("a finished run is repeated"))
    assert run()["runs"] == table["runs"]
    path = folder / "docs" / f"{study.NAME}.json"
    table["runs"] = [run for run in table["runs"] if run["factor"] != "timm"]
    path.write_text(json.dumps(table))
    with pytest.raises(pytest.fail.Exception):
        run()
    path.write_text(json.dumps(table | {"machine": "another machine"}))
    with pytest.raises(SystemExit, match=r"the time of p4_cnn on another machine, .* name another --output"):
        run()


def test_published_runs_stay_and_new_ones_say_where_they_were_made(monkeypatch, tmp_path):
    made = {f"{name}_images": 9 for name in ("train", *study.SIZES)} | {"lr": 0.1, "steps": 700, "seconds": 9.0}
    made |= {"valid": 90.0, "choice": 90.0, "test": 90.0, "start": "weights"}
    monkeypatch.setattr(study, "few", lambda *_: {})
    monkeypatch.setattr(study, "one_run", lambda *_: dict(made))
    monkeypatch.setattr("common.machine", lambda device: "another machine")
    for suffix in ("json", "md"):
        shutil.copy(ROOT / "docs" / f"{study.NAME}.{suffix}", tmp_path)
    path = tmp_path / f"{study.NAME}.json"
    before, page = json.loads(path.read_text()), path.with_suffix(".md").read_text()

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["study_finetune.py", "--output", str(tmp_path), *args])
        study.main()
        return json.loads(path.read_text())

    assert run("--minutes", "0") == before
    assert path.with_suffix(".md").read_text() == page
    after = run("--only", "eurosat")
    added = after["runs"][len(before["runs"]) :]
    assert after == before | {"runs": before["runs"] + added}
    assert {run["data"] for run in added} == {"eurosat"}
    assert {run["machine"] for run in added} == {"another machine"}
    count = len(after["runs"])
    said = f"Made on another machine, where their core-seconds are measured: {len(added)} of the {count} runs"
    assert said in path.with_suffix(".md").read_text()
    assert run("--only", "eurosat") == after
