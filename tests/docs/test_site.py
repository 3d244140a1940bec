"""The site: it builds without a warning, has an entry for each public name, and its links lead somewhere."""

import importlib
import inspect
import re
import sys

import pytest

import eqzoo
from eqzoo.cli.main import parser
from tests import forks
from tests.conftest import ROOT

for package in ("sphinx", "myst_parser", "furo", "sphinxarg"):
    pytest.importorskip(package, reason="the docs are built with pip install 'eqzoo[docs]'")
from sphinx.cmd.build import build_main  # noqa: E402

PACKAGES = [path.stem for path in sorted((ROOT / "docs" / "reference").glob("*.rst")) if path.stem != "eqzoo"]
BROKEN = """# A page

[1](none.md) [2](#none) [3](docs.md#none) `eqzoo.none` `eqzoo.layers.GroupConv3d(P4)` `eqzoo.P4` `eqzoo.hub`
"""


def sphinx(source, output, *args):
    """Builds a site as its users do; warnings are errors, and all of them are printed."""
    command = ["-q", "-W", "--keep-going", "-d", output / "trees", *args, source, output / "html"]
    return forks.run(build, list(map(str, command)), folder=ROOT)


def build(command):
    sys.exit(build_main(command))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    output = tmp_path_factory.mktemp("site")
    built = sphinx(ROOT / "docs", output)
    assert built.returncode == 0, built.stderr
    return output / "html"


def names(site):
    """What the site's inventory can look up, by its kind."""
    from sphinx.util.inventory import InventoryFile

    found = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    return {name for kind, entries in found.items() if kind.startswith("py:") for name in entries}


def test_every_public_name_can_be_looked_up(site):
    known = names(site)
    missing = [f"eqzoo.{name}" for name in eqzoo.__all__ if f"eqzoo.{name}" not in known]
    for package in PACKAGES:
        module = importlib.import_module(f"eqzoo.{package}")
        for name in module.__all__:
            if inspect.isfunction(value := getattr(module, name)) or inspect.isclass(value):
                # What is a name of eqzoo too has its entry there.
                here = f"eqzoo.{name}" if getattr(eqzoo, name, None) is value else f"eqzoo.{package}.{name}"
                missing += [here] if here not in known else []
    assert not missing
    assert {"eqzoo.layers.GroupConv2d.fuse", "eqzoo.models.EquivariantNet.forward_features"} <= known
    assert not [name for name in known if re.search(r"\.(_\w+|add_note|register_buffer)$", name)]


def test_the_page_of_commands_has_all_of_them_with_their_options(site):
    page = re.sub(r"<[^>]+>", "", (site / "commands.html").read_text())
    commands = parser()._subparsers._group_actions[0].choices
    sections = re.split(r"eqzoo (\w+) \[-h\]", page)[1:]
    assert sections[::2] == list(commands)
    for command, section in zip(sections[::2], sections[1::2], strict=True):
        described = section.partition("Named Arguments")[2]
        options = {option for action in commands[command]._actions for option in action.option_strings}
        assert not [option for option in options - {"-h", "--help"} if option not in described], command


def test_links_of_pages_outside_the_site_lead_somewhere(site):
    text = (ROOT / "README.md").read_text() + (ROOT / "CHANGELOG.md").read_text()
    links = re.findall(r"\]\(([^)#:\s]+)(?:#([\w-]+))?\)", text)
    assert links
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        page = site / path.removeprefix("docs/").replace(".md", ".html")
        assert not anchor or f'id="{anchor}"' in page.read_text(), anchor


def test_every_package_has_a_page():
    packages = {path.parent.name for path in (ROOT / "eqzoo").glob("*/__init__.py")} - {"cli"}
    assert packages | {"groups", "equivariance", "hub"} == set(PACKAGES)


def test_a_broken_link_and_a_name_that_does_not_exist_stop_the_build(tmp_path):
    """Negative control, on one page."""
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text(f"__file__ = {str(ROOT / 'docs' / 'conf.py')!r}\nexec(open(__file__).read())\n")
    (source / "index.md").write_text(BROKEN)
    (source / "names.rst").write_text(":orphan:\n\nNames\n=====\n\n.. py:module:: eqzoo\n.. py:data:: P4\n")
    built = sphinx(source, tmp_path, "-b", "dummy")
    assert built.returncode != 0
    for wrong in ("none.md", "#none", "docs.md", "eqzoo.none", "eqzoo.layers.GroupConv3d"):
        assert wrong in built.stderr.replace("'none'", "'#none'"), built.stderr
    for right in ("eqzoo.P4 ", "eqzoo.hub "):
        assert right not in built.stderr


def test_links_to_the_repository_lead_to_files():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst"), ROOT / "README.md"]
    links = [
        (page.name, path)
        for page in pages
        for path in re.findall(r"https://github\.com/eqzoo/eqzoo/(?:blob|tree)/main/([\w./-]+)", page.read_text())
    ]
    assert links
    assert not [(page, path) for page, path in links if not (ROOT / path).exists()]
