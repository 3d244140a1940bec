"""The benchmark writes what it measured."""

import json

import pytest

from tests.training.in_process import run_script  # which makes the scripts importable

import benchmark_cases  # isort: skip


def test_every_case_has_a_name_of_its_own():
    for cases in (getattr(benchmark_cases, suite) for suite in ("MODELS", "TWINS", "FILES", "MEMORY")):
        assert len({case.key for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("suite", "options"),
    [
        ("models", ["--only", "p4_cnn : plain"]),
        ("twins", ["--only", "p4_cnn", "--dtype", "bfloat16"]),
        pytest.param("files", ["--only", "p4m_resnet_s"], marks=pytest.mark.slow),
        pytest.param("memory", ["--only", "p4_e4net : p4_cnn_w19"], marks=pytest.mark.slow),
    ],
)
def test_a_suite_writes_what_it_measured(tmp_path, suite, options):
    sizes = ["--batch-size", "2", "--rounds", "2"]
    ran = run_script("benchmark", suite, *options, *sizes, "--device", "cpu", "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / f"{suite}_cpu{'_bfloat16' * ('bfloat16' in options)}.json").read_text())
    for row in report["rows"]:
        assert row["ratio"] > 0
        assert f"| {row['subject']} | {row['against']} |" in ran.stdout
    assert {"machine", "threads", "versions", "dtype"} <= set(report)


def test_an_unknown_case_is_refused():
    ran = run_script("benchmark", "models", "--only", "p5_cnn")
    assert ran.returncode == 1
    assert "p5_cnn" in ran.stderr
