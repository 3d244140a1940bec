"""The study of land and cells: its plan, its parts of the training images, and a page that invents nothing."""

import json
import shutil
import sys

import pytest
import torch

import eqzoo
from eqzoo.data import Split
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import real_images_page
import study_real_images as study

FIRST = study.COMPARISONS["eurosat"]


def run(arm, accuracy, seed=0, percent=1, data="eurosat"):
    score = {"accuracy": accuracy, "macro_f1": accuracy - 10, "predict_ms": 1.0}
    row = {"data": data, "percent": percent, "seed": seed, **arm._asdict(), "images": 162, "equal_steps": 80}
    row |= {"steps": 80, "epochs": 4, "training_seconds": 50.0, **score}
    return row | (
        {"averaged": score | {"accuracy": accuracy + 1}} if arm.network == study.COMPARISONS[data].plain else {}
    )


def table(*runs):
    seconds = {"eurosat, affine": {FIRST.equivariant: 0.8, FIRST.plain: 0.2}}
    formats = {"eurosat, affine": {FIRST.equivariant: "float32", FIRST.plain: "bfloat16"}}
    return {"machine": "a machine", "torch": "2", "precision": formats, "step_seconds": seconds, "runs": list(runs)}


def test_small_fractions_come_first_and_arms_alternate():
    cells = list(study.plan(["eurosat", "chula_rbc12"], [100, 1], [0, 1, 2]))
    assert len(cells) == len(set(cells)) == (3 + 1) * 2 * len(FIRST.arms)
    assert [cell.percent for cell in cells] == sorted(cell.percent for cell in cells)
    assert [cell.arm for cell in cells[: len(FIRST.arms)]] == list(FIRST.arms)
    assert {cell.seed for cell in cells if cell.percent == 100} == {0}


def test_parts_have_the_share_of_each_class_and_lie_in_larger_ones():
    labels = torch.arange(400) % 40 % 3
    split = Split(torch.arange(400).view(-1, 1, 1, 1).to(torch.int32), labels, ("a", "b", "c"))
    parts = {p: study.part_of(split, p, seed=1) for p in (1, 10, 100)}
    assert parts[10].labels.bincount().tolist() == [round(0.1 * n) for n in labels.bincount().tolist()]
    kept = {p: set(part.images.flatten().tolist()) for p, part in parts.items()}
    assert kept[1] < kept[10] < kept[100]
    assert kept[10] != set(study.part_of(split, 10, seed=2).images.flatten().tolist())


def test_what_was_not_run_is_said_and_differences_are_of_the_same_seeds():
    equal, plain, longer = FIRST.arms[:3]
    page = real_images_page.page(
        table(run(equal, 80.0), run(equal, 84.0, seed=1), run(plain, 70.0), run(plain, 99.0, seed=2))
    )
    assert "## Chula RBC-12, 40 x 40\n\nNot run.\n" in page
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in page.splitlines() if line.startswith("| ")}
    assert rows["| both augmented, same steps"][0] == "+10.0"  # of seed 0 alone
    assert rows["| both augmented, same steps, 8 copies averaged"][0] == "+9.0"
    assert rows["| both augmented, same minutes"][0] == "not run"
    assert "| p4_resnet29, augmented | 82.0 ± 2.8 % | not run |" in page
    assert f"| {longer.title}, same minutes | not run |" in page
    words = " ".join(page.split())
    assert "4.0 times for p4_resnet29" in words
    assert "(p4_resnet29: float32, z2_resnet29: bfloat16)" in words


def test_runs_on_another_machine_are_named_and_their_seconds_left_out():
    equal, _, longer = FIRST.arms[:3]
    there = run(equal, 82.0, seed=1) | {"machine": "another machine", "training_seconds": 90.0}
    plain = run(longer, 70.0, seed=1) | {"machine": "another machine", "training_seconds": 75.0}
    page = real_images_page.page(table(run(equal, 80.0), there, plain))
    words = " ".join(page.split())
    assert "Made on one core of another machine, with the same numbers of steps: 2 of the 3 runs." in words
    assert "the equivariant network took 20 to 20 % longer than the plain one in the same minutes" in words
    assert f"| seconds on EuroSAT: {equal.title}, same steps | 50 |" in page
    alone = " ".join(real_images_page.page(table(run(equal, 80.0), there)).split())  # without a plain run beside it
    assert "same numbers of steps: 1 of the 2 runs." in alone
    assert "% longer" not in alone
    assert "81.0 ± 1.4 %" in page
    assert "with torch 1" not in words
    words = " ".join(real_images_page.page(table(run(equal, 80.0), there | {"torch": "1"}, plain)).split())
    assert "2 of the 3 runs, 1 of them with torch 1. Seconds" in words
    assert "another machine" not in real_images_page.page(table(run(equal, 80.0)))


@pytest.fixture
def untrained(monkeypatch, tmp_path):
    """Runs the study on 100 % of the tiles without training, and without the page: a function of the seed."""
    score = {"accuracy": 80.0, "macro_f1": 70.0, "predict_ms": 1.0}
    row = {"images": 9, "steps": 240, "epochs": 4, "training_seconds": 50.0, **score, "averaged": score}
    same = dict.fromkeys((FIRST.equivariant, FIRST.plain), 0.5)
    monkeypatch.setattr(study, "split_up", lambda *_: {})
    monkeypatch.setattr(study, "measured", lambda *_: (dict.fromkeys(same, "float32"), same))
    monkeypatch.setattr(study, "one_run", lambda *_: dict(row))

    def run_study(seed):
        words = ["--data", "eurosat", "--fractions", "100", "--seeds", seed, "--output", tmp_path]
        monkeypatch.setattr(sys, "argv", ["study_real_images.py", *map(str, words)])
        study.main()
        return json.loads((tmp_path / f"{study.NAME}.json").read_text())

    return run_study


@pytest.mark.slow
def test_rows_say_what_they_started_from_and_a_file_has_one_start(untrained, monkeypatch, tmp_path):
    runs = untrained(0)["runs"]
    assert len(runs) == len(FIRST.arms)
    digests = {run["network"]: run["start_sha256"] for run in runs}
    for network, digest in digests.items():
        results = json.loads((ROOT / "model_cards" / f"{network}.cifar10" / "results.json").read_text())
        assert digest == results["weights_sha256"]
    assert "from their first weights" not in (tmp_path / f"{study.NAME}.md").read_text()
    assert len(untrained(1)["runs"]) == 2 * len(runs)
    with monkeypatch.context() as patch:
        patch.setattr("common.sha256_of", lambda path: "0" * 64)
        assert len(untrained(1)["runs"]) == 2 * len(runs)  # nothing to add
        with pytest.raises(
            SystemExit, match=r"other weights of p4_resnet29\.cifar10 \(SHA-256 .*, here 00000000\.\.\.\); .* --output"
        ):
            untrained(2)
    shutil.copy(ROOT / "docs" / f"{study.NAME}.json", tmp_path)
    first, plain = (study.start_of({"data": "eurosat", "network": name})[1] for name in ("p4_resnet29", "z2_resnet29"))
    with pytest.raises(SystemExit, match=f"started from other weights .*SHA-256 {first[:8]}"):
        untrained(1)
    starts = {"p4_resnet29.cifar10": first, "z2_resnet29.cifar10": plain}
    monkeypatch.setattr("common.sha256_of", lambda path: starts[path.parent.name])
    added = untrained(1)["runs"][-len(runs) :]
    assert {run["start_sha256"] for run in added} == set(starts.values())
    assert "from their first weights" in (tmp_path / f"{study.NAME}.md").read_text()


def test_the_p4m_network_is_compared_from_the_weights_that_it_has():
    comparison = study.COMPARISONS["chula_rbc12_p4m"]
    cells = list(study.plan(["chula_rbc12_p4m"], [10], [0]))
    assert {cell.arm.network for cell in cells} == {"p4m_resnet29", "z2_resnet29"}
    model = study.build(comparison.equivariant, comparison.start, tuple("abcdefghij"))  # as many as EuroSAT has
    weights = eqzoo.create_model("p4m_resnet29.eurosat", pretrained=True)
    assert torch.equal(model.stem.conv.weight, weights.stem.conv.weight)
    assert not torch.equal(model.head.weight, weights.head.weight)
    page = real_images_page.page(table(run(cells[0].arm, 80.0, data="chula_rbc12_p4m", percent=10)))
    assert "| p4m_resnet29, augmented | not run | not run | 80.0 % |" in page


def test_a_comparison_that_was_made_on_another_machine_alone_has_the_times_of_that_one():
    equal, plain, longer = study.COMPARISONS["eurosat_p4m"].arms[:3]
    other = {"machine": "another machine"}
    runs = [run(arm, 80.0, data="eurosat_p4m") | other for arm in (equal, plain, longer)]
    page = real_images_page.page(table(run(FIRST.arms[0], 80.0), *runs))
    words = " ".join(page.split())
    assert "3 of the 4 runs" in words
    assert "For EuroSAT with p4m_resnet29, all of whose runs were made there, both are of that machine." in words
    assert "% longer" not in words  # the minutes are those of that machine
    row = "| seconds on EuroSAT with p4m_resnet29: p4m_resnet29, augmented, same steps |"
    assert f"{row} 50 | not run" in page
    assert "SHA-256 of all weights that runs started from" in words
    mixed = real_images_page.page(table(run(FIRST.arms[0], 80.0), runs[0], run(plain, 80.0, data="eurosat_p4m")))
    assert "all of whose runs" not in " ".join(mixed.split())
    assert f"{row} other machine | not run" in mixed


def test_averaging_over_8_copies_is_invariant_and_one_copy_is_not():
    class Corner(torch.nn.Module):
        pretrained_cfg = {"mean": (0.0,), "std": (1.0,)}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * torch.stack([x[:, 0, 0, 0], x[:, 0, 1:, 1:].mean((1, 2))], 1)

    images = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8)
    split = Split(images, torch.arange(40) % 2, ("a", "b"))
    rotated = Split(images.rot90(1, (2, 3)), split.labels, split.classes)
    first, second = (study.test(Corner(), part, "float32", averaged=True) for part in (split, rotated))
    assert first["averaged"]["accuracy"] == second["averaged"]["accuracy"]
    assert first["accuracy"] != second["accuracy"]


def test_the_page_is_rendered_from_its_runs():
    path = ROOT / "docs" / f"{study.NAME}.json"
    if not path.is_file():
        pytest.skip("the study has not been run")
    assert path.with_suffix(".md").read_text() == real_images_page.page(json.loads(path.read_text())), (
        "run it with --render"
    )
