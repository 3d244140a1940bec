"""The answer of a command, and tables that fit the terminal."""

import shutil
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_GAP = "   "


@dataclass(frozen=True)
class Answer:
    """The answer of a command.

    Args:
        text: The output.
        data: The same as data, which ``--json`` prints.
        code: The exit code: 0, 1 for a negative answer, or 2 where a part of the input was wrong.
        error: What was wrong with that part, for stderr.
    """

    text: str
    data: dict[str, Any] | list[dict[str, Any]]
    code: int = 0
    error: str = ""


def table(rows: Sequence[Sequence[str]], right: Collection[int] = (), flexible: int | None = None) -> str:
    """Rows in aligned columns.

    Args:
        rows: The rows; the first may be a heading.
        right: The columns that are aligned to the right.
        flexible: The column whose text is wrapped if the table is wider than the terminal.

    Example:
        >>> print(table([["name", "n"], ["p4_cnn", "12"]], right={1}))
        name      n
        p4_cnn   12
    """
    width = shutil.get_terminal_size((0, 0)).columns  # 0 in a pipe
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if flexible is not None and width:
        over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
        widths[flexible] = max(min(widths[flexible], widths[flexible] - over), 1)
    lines = []
    for row in rows:
        cells = [
            textwrap.wrap(cell, widths[i], break_long_words=False) if i == flexible else [cell]
            for i, cell in enumerate(row)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [
                p.rjust(w) if i in right else p.ljust(w) for i, (p, w) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append(_GAP.join(padded).rstrip())
    return "\n".join(lines)
