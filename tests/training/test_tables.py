"""Rendered tables follow the JSON; that the pages hold them is a test of the house."""

import json
import shutil
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "training"))
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
