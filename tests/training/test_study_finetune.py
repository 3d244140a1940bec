"""The study of fine-tuning: runs by the rules of `eqzoo finetune`, runs that are not repeated, a page of the runs."""

import json
import sys

import pytest
import torch

from eqzoo.data import Split
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import study_finetune as study


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Runs the study on light and dark images: a function of further arguments, and the folder of runs and page."""
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
        words = ["study_finetune.py", "--output", tmp_path / "docs", "--runs", tmp_path / "runs", *args]
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
    for factor, found in runs.items():
        assert [found[f"{name}_images"] for name in ("train", "valid", "choice", "test")] == [16, 16, 24, 20]
        assert ("test" in found) == (factor in ("the rules", "timm")), "the test is read for the rules alone"
    assert not [path for path in (folder / "runs").iterdir() if path.is_dir()], "folders of runs are removed"
    page = (folder / "docs" / f"{study.NAME}.md").read_text()
    assert "| p4_cnn, EuroSAT, 8 a class | 3 |" in page
    assert "| timm resnet10t | random weights | 0.001 |" in page
    monkeypatch.setattr(study, "trained", lambda *args: pytest.fail("a finished run is repeated"))
    assert run()["runs"] == table["runs"]
    (folder / "runs" / "timm_resnet10t_0.001.json").unlink()
    with pytest.raises(pytest.fail.Exception):
        run()
