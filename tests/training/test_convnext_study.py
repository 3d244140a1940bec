"""The study of ConvNeXts: equal minutes, chosen learning rates, runs that are not repeated, a page of what was run."""

import json
import sys

import pytest
import torch

from eqzoo.data import Split
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import study_convnext as study

SMALL = {"planes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Runs the study on 16 x 16 images with narrow networks: a function of further arguments, and the folder."""

    def read(data, args):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(64) % 2
        images = torch.randint(0, 128, (64, 3, 16, 16), generator=generator) + 100 * labels.view(-1, 1, 1, 1)
        split = Split(images.to(torch.uint8), labels, ())  # as CIFAR-10 in a .npz file
        return {"train": split, "valid": split[:32], "test": split[32:]}

    def narrow(arm):
        sizes = {"dims": SMALL["planes"], "depths": SMALL["depths"]} if arm.is_plain else SMALL
        return arm._replace(args=arm.args | sizes)

    monkeypatch.setattr(study, "read", read)
    monkeypatch.setattr(study, "ARMS", {key: narrow(study.ARMS[key]) for key in ("p4m", "plain", "p4m_max")})
    monkeypatch.setattr(study, "DIFFERENCES", {"p4m less plain": ("p4m", "plain")})

    def run(*args):
        words = ["study_convnext.py", "--data", "eurosat", "--output", tmp_path, "--minutes", 0.001, *args]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        study.main()
        return json.loads((tmp_path / f"{study.NAME}.json").read_text())

    return run, tmp_path


def test_runs_are_made_once_and_the_others_take_the_better_learning_rate(small, monkeypatch):
    run, folder = small
    with pytest.raises(SystemExit, match="takes the learning rate of p4m, which has no run on eurosat"):
        run("--arms", "p4m_max")
    table = run("--arms", "p4m", "plain")
    assert [(row["arm"], row["lr"]) for row in table["runs"]] == [
        (arm, rate) for rate in study.RATES for arm in ("p4m", "plain")
    ]
    networks = table["networks"]["eurosat"]
    for row in table["runs"]:  # equal minutes: steps by the time of a step
        assert row["steps"] == max(1, int(0.06 / (networks[row["arm"]]["ms"] / 1000 * study.BATCH)))
    assert networks["p4m"]["parameters"] < networks["plain"]["parameters"]
    for place, accuracy in ((0, 10.0), (2, 90.0), (4, 80.0)):  # of p4m, with all learning rates
        table["runs"][place] |= {"valid": accuracy, "test": accuracy}
    (folder / f"{study.NAME}.json").write_text(json.dumps(table))
    later = run()
    assert later["runs"][:6] == table["runs"]
    assert [(row["arm"], row["lr"]) for row in later["runs"][6:]] == [("p4m_max", study.RATES[1])]
    monkeypatch.setattr(study, "one_run", None)
    assert run() == later
    text = (folder / f"{study.NAME}.md").read_text()
    run("--render")
    assert (folder / f"{study.NAME}.md").read_text() == text
    with pytest.raises(SystemExit, match=r"has runs of 0\.001 minutes, not of 2; name another --output"):
        run("--minutes", 2)


def test_the_plain_twin_has_maps_of_the_same_sides():
    split = Split(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), torch.arange(4) % 2, ("a", "b"))
    sides = {}
    for key in ("p4m", "plain", "plain_coarse"):
        model = study.build(study.ARMS[key], split)
        sides[key] = model.forward_features(torch.zeros(1, 3, 32, 32)).shape[-1]
    assert sides == {"p4m": 2, "plain": 2, "plain_coarse": 1}


def row(arm, lr, valid, test, data="eurosat"):
    return {"data": data, "arm": arm, "lr": lr, "seed": 0, "steps": 480, "images": 15_360, "epochs": 0.95} | {
        "minutes": 4.0, "valid": valid, "test": test,
    }  # fmt: skip


def test_the_page_shows_the_better_learning_rate_and_what_was_not_run():
    table = {"machine": "a machine", "torch": "2", "timm": "1", "minutes": 4.0, "splits": {}}
    network = {"parameters": 400, "multiply_adds": 10**8, "ms": 2.0, "precision": "float32", "channels_last": True}
    table["networks"] = {"eurosat": {key: dict(network) for key in study.ARMS}}
    table["networks"]["eurosat"]["plain"] |= {"parameters": 3_200, "ms": 1.0}
    low, high, _ = study.RATES
    table["runs"] = [row("p4m", low, 80.0, 81.0), row("p4m", high, 79.0, None), row("plain", low, 70.5, 70.0)]
    page = study.page(table)
    assert "| 400 | 100 | 2.0, float32, channels last | 480 | 15,360 | 0.9 | 4.0 | 0.0003 | 80.0 | 81.0 |" in page
    assert "takes 2.00 times as long: in the same minutes it sees 0.50 times as many images" in page.replace("\n", " ")
    assert "## CIFAR-10, 32 x 32\n\nNot run.\n" in page
    assert "| p4m less plain, rotated and reflected | +9.5 / +11.0 | not run |" in page
    assert "| p4m less plain, not augmented | not part of the study | not run |" in page
    assert "| `p4m_convnext_atto`, mean over the group | EuroSAT, 32 x 32 | 80.0 | 79.0 | not run |" in page
    assert f"| {study.ARMS['plain'].title} | EuroSAT, 32 x 32 | 70.5 | not run | not run |" in page


def test_stopped_studies_compare_the_two_networks_on_both_data_sets():
    cells = list(study.plan(list(study.TITLES), list(study.ARMS)))
    assert len(cells) == len(set(cells)) == 12 + 9
    assert {(cell.data, cell.arm) for cell in cells[:12]} == {(d, a) for d in study.TITLES for a in ("p4m", "plain")}
    assert all(cell.rate for cell in cells[:12])


def test_the_page_is_rendered_from_its_runs():
    path = ROOT / "docs" / f"{study.NAME}.json"
    if not path.is_file():
        pytest.skip("the study has not been run")
    assert path.with_suffix(".md").read_text() == study.page(json.loads(path.read_text())), "run it with --render"
