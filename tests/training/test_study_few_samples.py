"""The study of few training images: runs that are not repeated, rows that stay, a page of the runs."""

import json
import shutil
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import study_few_samples as study


def test_published_runs_stay_and_new_ones_say_where_they_were_made(monkeypatch, tmp_path):
    made = {"parameters": 24_610, "steps": 240, "choice": 90.0, "accuracy": [90.0] * len(study.ANGLES)}
    monkeypatch.setattr(study, "read_splits", lambda *_: {})
    monkeypatch.setattr(study, "split_up", lambda splits: splits)
    monkeypatch.setattr(study, "one_run", lambda *_: dict(made))
    monkeypatch.setattr("common.machine", lambda device: "another machine")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["study_few_samples.py", "--output", str(tmp_path), *args])
        study.main()
        return json.loads((tmp_path / f"{study.NAME}.json").read_text())

    with pytest.raises(SystemExit, match="no runs to make a page of"):
        run("--render")
    assert {row["seed"] for row in run("--seeds", "4")["runs"]} == {4}  # in a folder without rows
    page = (ROOT / "docs" / f"{study.NAME}.md").read_text()
    shutil.copy(ROOT / "docs" / f"{study.NAME}.json", tmp_path)
    before = json.loads((tmp_path / f"{study.NAME}.json").read_text())
    assert run() == before
    assert (tmp_path / f"{study.NAME}.md").read_text() == page
    after = run("--seeds", "0", "3")
    added = after["runs"][len(before["runs"]) :]
    assert after == before | {"runs": before["runs"] + added}
    assert len(added) == len(list(study.plan([3])))
    assert {(row["seed"], row["machine"]) for row in added} == {(3, "another machine")}
    said = f"Made on another machine: {len(added)} of the {len(after['runs'])} runs"
    assert said in (tmp_path / f"{study.NAME}.md").read_text()
