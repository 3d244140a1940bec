"""What the pages say: their code runs, prints what they show, and their links lead somewhere."""

import itertools
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.cli import main as command_line
from eqzoo.layers import GroupConv2d
from eqzoo.models.builder import configured_name
from eqzoo.models.conversion import foreign_elements
from tests import forks
from tests.conftest import ROOT
from tests.docs import doc_pages

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_PROCESS = {"adding_a_model.md"}  # pages that register networks


def runs(page):
    return any(block.language == "python" and not block.skipped for block in doc_pages.blocks(page.read_text()))


def title(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the examples and some images in two classes, float32 as a user has it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    draw = np.random.default_rng(0)
    for kind in ("long", "round"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for i in range(10):
            image = draw.integers(0, 40, (32, 32)).astype(np.uint8)
            y, x = draw.integers(11, 21, 2)
            high, wide = (2, 10) if kind == "long" else (5, 5)
            image[y - high : y + high, x - wide : x + wide] = 220
            Image.fromarray(image).save(tmp_path / "images" / kind / f"{i}.png")
    (tmp_path / "slides").mkdir()
    for slide in "abcd":
        Image.fromarray(draw.integers(0, 255, (200, 300, 3)).astype(np.uint8)).save(tmp_path / f"slides/{slide}.png")
        (tmp_path / f"slides/{slide}.csv").write_text("100,90,lymphocyte\n290,10,monocyte\n")
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    return tmp_path


@pytest.mark.parametrize("page", list(filter(runs, PAGES)), ids=title)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, desk):
    if page.name in OWN_PROCESS:
        in_its_own_process(the_page_has_code, page)
        publish_what_the_page_made()
    elif page.name == "looking_inside.md":
        make_the_figures(page, desk)
    else:
        assert doc_pages.run(page.read_text(), page.name) > 0


def the_page_has_code(page):
    assert doc_pages.run(page.read_text(), page.name) > 0


def in_its_own_process(function, *args, **environment):
    ran = forks.run(with_modules_of_this_folder, function, *args, environment=environment)
    assert ran.returncode == 0, ran.stderr


def with_modules_of_this_folder(function, *args):
    sys.path.insert(0, "")
    function(*args)


def publish_what_the_page_made():
    """The page's own network goes by its name in a command that does not know its module."""
    words = ["publish", "cells", "--checkpoint", "p4_cellnet.cells"]
    in_its_own_process(publish, words, EQZOO_NETWORKS="cellnet")
    card = Path("cells/README.md").read_text()
    assert card.count("import cellnet  # defines the network\n") == 2
    assert "    EQZOO_NETWORKS=cellnet eqzoo predict " in card
    assert "torch.hub" not in card
    assert "license" not in card.partition("# p4_cellnet.cells")[0]  # its owner has named none
    assert "license" not in json.loads(Path("cells/config.json").read_text())["pretrained_cfg"]


def publish(words):
    assert command_line.main(words) == 0


def test_a_module_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("EQZOO_NETWORKS", "json, nowhere")
    for asks_for_names in (eqzoo.list_models, partial(configured_name, "p4_cnn", "rotmnist")):
        with pytest.raises(ValueError, match="EQZOO_NETWORKS names the module nowhere, which cannot be imported"):
            asks_for_names()


def make_the_figures(page, desk):
    """The page's code makes the figures that it shows and no others, at their size, with something drawn on each."""
    text = page.read_text()
    command = re.search(r"```bash\neqzoo (.*?)\n```", text)[1]
    assert command_line.main(command.split()) == 0
    assert doc_pages.run(text, page.name) > 0
    shown = set(re.findall(r"\(images/(.*?)\)", text))
    assert {path.name for path in desk.glob("*.png")} == shown
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} == shown
    for name in shown:
        there, new = (Image.open(folder / name).convert("L") for folder in (ROOT / "docs" / "images", desk))
        assert there.size == new.size, name
        assert new.getextrema()[1] - new.getextrema()[0] > 100, name
        assert (ROOT / "docs" / "images" / name).stat().st_size < 100_000


def test_the_pages_that_teach_by_code_are_run():
    taught = {page.name for page in PAGES if runs(page)}
    assert taught >= {"README.md", "exactness.md", "export.md", "fine_tuning.md", "migration.md", "own_training.md"}


def test_a_page_that_is_wrong_is_noticed(desk):
    """Negative controls: code that fails, other numbers and words, a line too many, a command that says otherwise."""
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
    skipped = good.replace("```python\nx = 2", "<!-- not run: a reason -->\n```python\nx = y")
    with pytest.raises(AssertionError, match="NameError"):  # x is not there for the second block
        doc_pages.run(skipped)
    listed = "```text\n$ eqzoo list z2_cnn\nz2_cnn\n```\n"
    assert doc_pages.run(listed) == 1
    with pytest.raises(AssertionError, match="p4_cnn"):
        doc_pages.run(listed.replace("\nz2_cnn", "\np4_cnn"))


def test_every_page_is_linked_from_the_start_page():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    links = set(re.findall(r"\]\(([^):]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert links == pages - {"index.md"}


@pytest.mark.parametrize("group", [eqzoo.P4, eqzoo.P4M])
def test_filters_of_groupy_become_ours(group):
    """The page's function, against GrouPy's law: copies by (m, r) ↦ M^m R^r with M the reflection of the rows."""
    namespace = {"torch": torch, "GroupConv2d": GroupConv2d, "eqzoo": eqzoo}
    page = (ROOT / "docs" / "migration.md").read_text()
    (block,) = (block for block in doc_pages.blocks(page) if "def from_groupy" in block.text)
    exec(block.text, namespace)
    rotation, rows = np.array([[0, -1], [1, 0]]), np.diag([-1, 1])
    elements = [
        np.linalg.matrix_power(rows, i // 4) @ np.linalg.matrix_power(rotation, i % 4) for i in range(group.order)
    ]
    weight, x = torch.randn(2, 3, group.order, 3, 3), torch.randn(1, 3, group.order, 7, 7)
    copies = torch.empty(2, group.order, *weight.shape[1:])
    for i, j, u, v in itertools.product(range(group.order), range(group.order), (-1, 0, 1), (-1, 0, 1)):
        back = np.rint(np.linalg.inv(elements[i])).astype(int)
        pose = next(k for k, element in enumerate(elements) if (element == back @ elements[j]).all())
        row, column = back @ (u, v)
        copies[:, i, :, j, u + 1, v + 1] = weight[:, :, pose, row + 1, column + 1]
    order = torch.tensor(foreign_elements(group)).argsort()
    y = torch.nn.functional.conv2d(x.flatten(1, 2), copies.reshape(2 * group.order, -1, 3, 3))
    layer = GroupConv2d(group, 3, 2, 3, bias=False)
    layer.load_state_dict({"weight": namespace["from_groupy"](weight, group)})
    torch.testing.assert_close(layer(x[:, :, order]), y.unflatten(1, (2, -1))[:, :, order])
    if group.reflections:  # control: reflected poses have another order
        layer.load_state_dict({"weight": weight.flatten(1, 2)})
        assert (layer(x[:, :, order]) - y.unflatten(1, (2, -1))[:, :, order]).abs().max() > 0.1
