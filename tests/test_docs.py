"""What the pages say: their code runs, prints what they show, and their links lead somewhere."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo_cli
from tests import doc_pages
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_PROCESS = {"adding_a_model.md"}  # pages that add to the registry
RUN = [
    page for page in PAGES if any(b.language == "python" and not b.skipped for b in doc_pages.blocks(page.read_text()))
]
MUST_RUN = {"README.md", "adding_a_model.md", "conventions.md", "exactness.md", "export.md", "fine_tuning.md"} | {
    "looking_inside.md",
    "migration.md",
}


def title(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the examples and some pictures in two classes, float32 as a user has it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    draw = np.random.default_rng(0)
    for kind in ("long", "round"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for i in range(10):
            picture = draw.integers(0, 40, (32, 32)).astype(np.uint8)
            y, x = draw.integers(11, 21, 2)
            high, wide = (2, 10) if kind == "long" else (5, 5)
            picture[y - high : y + high, x - wide : x + wide] = 220
            Image.fromarray(picture).save(tmp_path / "pictures" / kind / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    return tmp_path


@pytest.mark.parametrize("page", RUN, ids=title)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, desk):
    if page.name not in OWN_PROCESS:
        assert doc_pages.run(page.read_text(), page.name) > 0
        return
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.doc_pages", str(page)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) > 0


def test_the_pages_that_teach_by_code_are_among_them():
    assert {page.name for page in RUN} >= MUST_RUN


def test_a_page_that_is_wrong_is_noticed(desk):
    """Negative controls: code that fails, another number, another word, a line too many, a command that says otherwise."""
    good = "```python\nx = 2\n```\n\n```python\nprint('seven', x / 3, 1e-16)\n```\n\n```text\nseven 0.667 3e-15\n```\n"
    assert doc_pages.run(good) == 2
    for said, instead in (
        ("x = 2", "x = y"),
        ("0.667", "0.65"),
        ("seven 0", "eight 0"),
        ("3e-15", "3e-15\nmore"),
        ("3e-15", "3e-1"),
        ("x = 2\n```", "x = 2\n```\n\n```text\n2\n```"),
    ):
        with pytest.raises(AssertionError, match="line"):
            doc_pages.run(good.replace(said, instead, 1))
    assert doc_pages.run(good.replace("```python\nx", "<!-- not run: a reason -->\n```python\nx = y\nx") * 0) == 0
    skipped = good.replace("```python\nx = 2", "<!-- not run: a reason -->\n```python\nx = y")
    with pytest.raises(AssertionError, match="NameError"):  # x is not there for the second block
        doc_pages.run(skipped)
    listed = "```text\n$ eqzoo list z2_cnn\nz2_cnn\n```\n"
    assert doc_pages.run(listed) == 1
    with pytest.raises(AssertionError, match="p4_cnn"):
        doc_pages.run(listed.replace("\nz2_cnn", "\np4_cnn"))


def dead_links(page, text):
    """The relative links of a page that lead to no file, or to no heading of one."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        place = (page.parent / file) if file else page
        if not place.exists() or (heading and heading not in anchors(text if not file else place.read_text())):
            yield target


def anchors(text):
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", heading)).lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=title)
def test_links_lead_somewhere(page):
    assert not list(dead_links(page, page.read_text()))


def test_a_dead_link_is_noticed():
    page = ROOT / "docs" / "conventions.md"
    text = "# A [b](c.md)\n[1](none.md) [2](conventions.md#none) [3](../README.md) [4](#a-b) [5](#b) [6](http://x)\n"
    assert list(dead_links(page, text)) == ["c.md", "none.md", "conventions.md#none", "#b"]


def test_every_page_is_named_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in readme]


def test_looking_inside_makes_its_pictures(desk):
    page = (ROOT / "docs" / "looking_inside.md").read_text()
    command = re.search(r"```bash\neqzoo (.*?)\n```", page)[1]
    assert eqzoo_cli.main(command.split()) == 0
    doc_pages.run(page)
    made = {path.name for path in (desk / "docs" / "images").iterdir()}
    assert made == set(re.findall(r"\(images/(.*?)\)", page))
    for name in made:
        there, new = (np.asarray(Image.open(root / "docs" / "images" / name).convert("L")) for root in (ROOT, desk))
        assert (ROOT / "docs" / "images" / name).stat().st_size < 100_000
        assert there.shape == new.shape, f"docs/images/{name} is of an older {page}"
