"""Runs what a page of the docs shows, in order, and compares what it prints with what the page says.

* A ``python`` block runs in the namespace of those before it on the page. One that begins with ``# <name>.py`` is
  written to that file, for later blocks to import; of a ``test_<name>.py`` all tests are run.
* A ``text`` block right behind it is what it prints; ``...`` stands for anything, numbers may differ by 2 in 100, and
  all that is below 1e-9 is rounding.
* A ``text`` block that begins with ``$ eqzoo`` holds commands and what they print.
* ``<!-- not run: reason -->`` before a block keeps it from being run, ``<!-- needs: module -->`` where that module is
  missing; blocks in other languages are not run either.
"""

import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from eqzoo.cli import main as command_line

ROUNDING = 1e-9
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")


class Block(NamedTuple):
    """A fenced block: its language, its first line in the page, its text, and why it is not run if it is not."""

    language: str
    line: int
    text: str
    skipped: str | None
    adjoins: bool  # whether nothing but blank lines is between it and the block before


def blocks(page):
    """All fenced blocks of a page's text."""
    found, inside, reason, between = [], None, None, True
    for number, line in enumerate(page.splitlines(), 1):
        if inside is not None:
            if line.strip() == "```":
                text = "\n".join(inside[2]) + "\n"
                found.append(Block(inside[0], inside[1], text, reason, inside[3]))
                inside, reason, between = None, None, False
            else:
                inside[2].append(line)
        elif line.startswith("```"):
            inside = (line[3:].strip(), number + 1, [], bool(found) and not between)
        elif line.strip():
            mark = re.fullmatch(r"<!-- (not run|needs): (.+) -->", line.strip())
            installed = mark and mark[1] == "needs" and importlib.util.find_spec(mark[2])
            reason, between = mark[2] if mark and not installed else None, True
    assert inside is None, f"the block at line {inside and inside[1]} has no end"
    return found


def run(text, name="page"):
    """Runs a page in the current folder; raises AssertionError at the first block that fails. Returns how many ran."""
    namespace = {"__name__": "__main__"}
    printed, ran = None, 0
    for block in blocks(text):
        where = f"{name}, line {block.line}"
        if block.language == "python" and not block.skipped:
            printed = _python(block, namespace, where)
            ran += 1
        elif block.language == "text" and block.text.startswith("$ eqzoo"):
            for part in re.split(r"^(?=\$ eqzoo)", block.text, flags=re.MULTILINE)[1:]:
                command, _, wanted = part.partition("\n")
                compare(wanted, _command(shlex.split(command)[2:]), where)
            ran += 1
        elif block.language == "text" and block.adjoins and printed is not None:
            compare(block.text, printed, where)
        if block.language != "python":
            printed = None
    return ran


def compare(wanted, got, where):
    """Raises AssertionError if a text is not as wanted, word by word."""
    pattern, words = wanted.split(), got.split()
    assert _matches(pattern, words), f"{where}\nsays:\n{wanted}\nand there is:\n{got}"


def _matches(pattern, words):
    if not pattern:
        return not words
    if pattern[0] == "...":
        return any(_matches(pattern[1:], words[i:]) for i in range(len(words) + 1))
    if pattern[0].startswith("..."):  # anything up to a word that ends like this one
        ends = [i for i, word in enumerate(words) if word.endswith(pattern[0][3:])]
        return any(_matches(pattern[1:], words[i + 1 :]) for i in ends)
    return bool(words) and _same(pattern[0], words[0]) and _matches(pattern[1:], words[1:])


def _same(wanted, got):
    if _NUMBER.sub("#", wanted) != _NUMBER.sub("#", got):
        return False
    pairs = zip(_NUMBER.findall(wanted), _NUMBER.findall(got), strict=True)
    return all(_close(*(float(number.replace(",", "")) for number in pair)) for pair in pairs)


def _close(a, b):
    return max(abs(a), abs(b)) < ROUNDING or abs(a - b) <= 0.02 * max(abs(a), abs(b))


def _python(block, namespace, where):
    own = re.match(r"# (\w+\.py)\n", block.text)
    if own:
        Path(own[1]).write_text(block.text)
        if not own[1].startswith("test_"):
            return None
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(block.text, where, "exec"), namespace)
            for test in [namespace[name] for name in namespace if own and name.startswith("test_")]:
                test()
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return out.getvalue()


def _command(args):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        command_line.main(args)
    lines = out.getvalue().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("eqzoo: compiling "))  # the first command alone
