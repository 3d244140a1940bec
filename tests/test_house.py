"""Conventions of the repository: import order, vocabulary, style, and rendered files."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import eqzoo
from tests.conftest import ROOT

PACKAGE = ROOT / "eqzoo"
TEXT = {".py", ".md", ".cpp", ".h", ".csv"}
# A sub-package imports only those before it; equivariance and data import groups alone.
ORDER = [
    "groups",
    "_common",
    "equivariance",
    "hub",
    "data",
    "ops",
    "layers",
    "models",
    "export",
    "analysis",
    "evaluation",
    "viz",
    "engine",
    "cards",
    "finetuning",
    "page",
    "cli",
    "__main__",
    "__init__",
]


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path):
    """The sub-packages that a file imports, by its relative imports."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]
            yield from names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_are_in_order(path):
    for other in imported_rooms(path):
        assert ORDER.index(other) < ORDER.index(room(path)), f"{room(path)} imports {other}"
    absolute = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not [n for n in absolute if ast.unparse(n).startswith(("import eqzoo", "from eqzoo"))]


def test_leaves_import_groups_alone():
    rooms = [set(imported_rooms(path)) for path in (PACKAGE / "equivariance").glob("*.py")]
    assert set().union(*rooms) == {"groups"}
    assert not set(imported_rooms(PACKAGE / "hub.py"))
    assert {other for path in (PACKAGE / "data").glob("*.py") for other in imported_rooms(path)} <= {
        "_common",
        "groups",
    }


def test_there_are_no_other_sub_packages():
    found = {room(path) for path in PACKAGE.rglob("*.py")}
    assert found == set(ORDER), "a new sub-package or a loose module: put it into the sub-package that it belongs to"


def test_no_function_hides_its_module():
    hidden = []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        parent, _, name = module.rpartition(".")
        if name != "__init__" and callable(getattr(import_module(parent), name, None)):
            hidden.append(module)
    assert not hidden


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_style_and_types(command):
    ran = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the source archive has no weights of more than 2 MB")
def test_cards_and_tables_are_rendered_from_the_results():
    sys.path.insert(0, str(ROOT / "training"))
    from publish import rendered

    for path, text in rendered().items():
        assert path.read_text() == text, f"{path} drifted; run python training/publish.py --render"


def test_recipes_are_those_of_the_published_checkpoints():
    import json

    sys.path.insert(0, str(ROOT / "training"))
    from common import load_recipe

    from eqzoo.engine import Recipe

    for name in eqzoo.list_pretrained():
        recipe = Recipe(**json.loads((ROOT / "model_cards" / name / "training.json").read_text())["recipe"])
        assert replace(load_recipe(name), seed=recipe.seed) == recipe


def test_the_version_is_that_of_the_changelog():
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert heading.split()[1] == eqzoo.__version__
    assert f"version: {eqzoo.__version__}\n" in (ROOT / "CITATION.cff").read_text()


# Words that the vocabulary replaces: image, rotated, fixed orientation, equivariance check.
AVOIDED = re.compile(r"\b(picture|turned|upright|certificate)\b", re.IGNORECASE)


def test_avoided_words_are_rare():
    folders = {"eqzoo": "*", "training": "*.py", "tests": "*.py", "docs": "*.md", "examples": "*"}
    paths = [path for folder, pattern in folders.items() for path in (ROOT / folder).rglob(pattern)]
    texts = [path for path in [*paths, ROOT / "README.md", ROOT / "hubconf.py"] if path.suffix in TEXT]
    found = {path.relative_to(ROOT): len(AVOIDED.findall(path.read_text())) for path in texts}
    assert sum(found.values()) < 60, {str(path): count for path, count in found.items() if count}


@pytest.mark.parametrize("folder", ["eqzoo", "training"])
def test_text_files_are_utf_8_whatever_the_locale(folder):
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "attr", "")
            if name in ("read_text", "write_text") and "encoding" not in [keyword.arg for keyword in node.keywords]:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_files_are_small():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            assert (ROOT / name).stat().st_size < 16e6, name
    assert all(len(path.read_text().splitlines()) <= 450 for path in Path(PACKAGE).rglob("*.py"))
