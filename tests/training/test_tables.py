"""Rendered tables follow the JSON; that the pages hold them is a test of the house."""

import json
import shutil
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
import real_images
import tables


@pytest.mark.parametrize(
    ("block", "source"), [("twins", "twins_cpu"), ("attention", "models_cpu"), ("files", "files_cpu")]
)
def test_another_number_is_another_table(block, source, tmp_path):
    shutil.copytree(ROOT / "docs" / "benchmarks", tmp_path / "docs" / "benchmarks")
    page = tmp_path / "README.md"
    page.write_text(f"before\n<!-- {block}: rendered by training/tables.py -->\n<!-- end of {block} -->\nafter\n")
    text = tables.rendered_pages(tmp_path)[page]
    page.write_text(text)
    assert tables.rendered_pages(tmp_path)[page] == text
    assert text.count("\n| ") > 3
    path = tmp_path / "docs" / "benchmarks" / f"{source}.json"
    report = json.loads(path.read_text())
    for row in report["rows"]:
        row["ratio"] += 0.5
    path.write_text(json.dumps(report))
    assert tables.rendered_pages(tmp_path)[page] != text


def test_of_several_seeds_the_published_error_stands_beside_the_mean(tmp_path):
    folder = shutil.copytree(ROOT / "model_cards" / "p4_cnn.rotmnist", tmp_path / "model_cards" / "p4_cnn.rotmnist")
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(results | {"accuracies": [97.0, 98.0], "accuracy": 98.0}))
    assert "| 2.50 ± 0.71 % (2 seeds; 2.00 % published) |" in tables.checkpoints(tmp_path)


def earlier_weights(name):
    """A checkpoint, that from which it started, and so on."""
    while name and (path := ROOT / "model_cards" / name / "training.json").is_file():
        yield name
        name = json.loads(path.read_text())["recipe"]["start"]


@pytest.mark.parametrize("data", tables.DATA_TITLES)
@pytest.mark.parametrize("network", real_images.NETWORKS)
def test_no_network_starts_from_weights_of_the_same_images(network, data):
    start = real_images.start_of(network, data)
    assert not any(name.endswith(f".{data}") for name in earlier_weights(start)), start


def test_earlier_weights_are_followed():
    assert list(earlier_weights("p4m_resnet_s.chula_rbc12")) == ["p4m_resnet_s.chula_rbc12", "p4m_resnet_s.eurosat"]
