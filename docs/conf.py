"""How Sphinx builds the site: `pip install -e ".[docs]"`, then `sphinx-build -W docs site`."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from torch.nn import Module

import eqzoo

SOURCE = "https://github.com/eqzoo/eqzoo/blob/main/"
ROOT = Path(__file__).resolve().parents[1]

project = "eqzoo"
copyright = "The eqzoo authors"  # noqa: A001  Sphinx's name
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxarg.ext"]
exclude_patterns = ["demo/dist"]
html_theme = "furo"
html_title = "eqzoo"
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/eqzoo/eqzoo/",
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_heading_anchors = 3  # links to headings, as on GitHub
smartquotes = False  # C' is a number of channels
default_role = "code"  # docstrings mark code with one backtick or two
rst_prolog = r".. |H| replace:: \|H\|"  # the order of a group, outside of code

autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "inherited-members": "Module, EquivariantNet, tuple, BaseException, OSError",
    "show-inheritance": True,
}
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_custom_sections = ["Shape"]
napoleon_use_rtype = False

# A name of eqzoo that leads nowhere stops the build; those of torch and Python would need their inventories.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!eqzoo\b).*")]


class LinkNames(SphinxTransform):
    """Makes a link of each `eqzoo.name` in code style, so that one that does not exist is noticed."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Wraps the literals of one page or docstring."""
        for literal in list(self.document.findall(nodes.literal)):
            name = re.match(r"eqzoo(\.[A-Za-z_]\w*)+(?=$|\()", literal.astext())
            if not name or name[0] == "eqzoo.json" or isinstance(literal.parent, nodes.reference):
                continue
            options = {"refdomain": "py", "reftype": "obj", "reftarget": name[0], "refwarn": True}
            link = addnodes.pending_xref("", refdoc=self.env.docname, refexplicit=True, **options)
            literal.replace_self(link)
            link += literal


def link_to_source(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Element
) -> nodes.Node | None:
    """A module that has no page of its own is read on GitHub."""
    target = node.get("reftarget", "")
    if not target.startswith("eqzoo.") or not (spec := _module(target)):
        return None
    return nodes.reference("", "", text, refuri=SOURCE + Path(spec).relative_to(ROOT).as_posix(), internal=False)


def _module(name: str) -> str | None:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return None
    return spec.origin if spec else None


def each_once(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """What is a name of `eqzoo` itself is described there, and not again in its sub-package."""
    elsewhere = what == "module" and app.env.docname != "reference/eqzoo"
    return True if elsewhere and name in eqzoo.__all__ and getattr(eqzoo, name) is obj else None


def public_bases(app: Sphinx, name: str, obj: type, options: Any, bases: list[type]) -> None:
    """Shows torch's Module instead of the classes that layers share, private or of private modules."""
    bases[:] = [Module if re.match(r"eqzoo\b.*\._", f"{base.__module__}.{base.__name__}") else base for base in bases]


def setup(app: Sphinx) -> None:
    """Registers the above."""
    app.add_transform(LinkNames)
    app.connect("missing-reference", link_to_source)
    app.connect("autodoc-skip-member", each_once)
    app.connect("autodoc-process-bases", public_bases)
