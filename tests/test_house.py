"""What the house holds to: who imports whom, and texts that are rendered, not typed."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import eqzoo
from tests.conftest import ROOT

PACKAGE = ROOT / "eqzoo"
# A room imports rooms before it, never after.
ORDER = [
    "groups",
    "turns",
    "files",
    "equivariance",
    "ops",
    "count",
    "layers",
    "hub",
    "models",
    "sizes",
    "onnx_ops",
    "onnx_file",
    "sources",
    "reasons",
    "export",
    "certificate",
    "convert",
    "data",
    "recipe",
    "run",
    "engine",
    "viz",
    "report",
    "claim",
    "finetune",
    "cli",
    "__init__",
]


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path):
    """The rooms of the package that a file imports, by its relative imports."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            yield from [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_import_to_the_left_alone(path):
    for other in imported_rooms(path):
        assert ORDER.index(other) < ORDER.index(room(path)), f"{room(path)} imports {other}"
    assert "import eqzoo" not in re.sub(r">>> .*", "", path.read_text())


def test_equivariance_imports_groups_alone():
    assert set(imported_rooms(PACKAGE / "equivariance.py")) == {"groups"}


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_style_and_types(command):
    ran = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_cards_and_the_table_are_what_results_say():
    sys.path.insert(0, str(ROOT / "training"))
    from publish import rendered

    for path, text in rendered().items():
        assert path.read_text() == text, f"{path} drifted; run python training/publish.py --render"


def test_the_papers_tables_are_what_results_say():
    sys.path.insert(0, str(ROOT / "training"))
    from reproduce import page

    assert (ROOT / "docs" / "reproduction.md").read_text() == page(), "run training/reproduce.py --output it"


def test_every_published_checkpoint_has_a_recipe_that_is_the_one_it_was_trained_by():
    import json

    sys.path.insert(0, str(ROOT / "training"))
    from common import load_recipe

    from eqzoo.engine import Recipe

    for name in eqzoo.list_pretrained():
        results = json.loads((ROOT / "model_cards" / name / "results.json").read_text())
        recipe = Recipe(**results["recipe"])
        assert replace(load_recipe(name), seed=recipe.seed) == recipe


def test_the_version_is_the_changelogs():
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert heading.split()[1] == eqzoo.__version__
    assert f"version: {eqzoo.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_importing_changes_nothing_of_timms():
    script = """
import warnings; warnings.simplefilter("error")
import timm
entrypoints = {name: timm.model_entrypoint(name) for name in timm.list_models()}
pretrained = set(timm.list_pretrained())
import eqzoo
assert all(timm.model_entrypoint(name) is entry for name, entry in entrypoints.items())
assert set(timm.list_models()) - set(entrypoints) == set(eqzoo.list_models())
assert set(timm.list_pretrained()) - pretrained == set(eqzoo.list_pretrained())
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_no_file_is_large():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            assert (ROOT / name).stat().st_size < 16e6, name
    assert all(len(path.read_text().splitlines()) <= 450 for path in Path(PACKAGE).rglob("*.py"))
