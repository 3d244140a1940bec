"""Runs the code of a notebook, in order, without Jupyter, and stores what it shows.

`python -m tests.docs.notebooks NOTEBOOK NAME=VALUE ...` runs a notebook with other parameters, JSON values, and writes
what its cells print and draw into the file.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

from eqzoo._common import atomic


def run(notebook: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Runs the code cells in one namespace in the current folder, and fills their outputs in.

    Args:
        notebook: The notebook, in format 4. The values of the cell tagged ``parameters`` may be replaced.
        parameters: The values to replace.

    Returns:
        The namespace.

    Raises:
        AssertionError: If a cell fails, or a parameter has no such name.
    """
    matplotlib.use("agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        try:
            cell["outputs"] = list(_shown("".join(cell["source"]), namespace))
        except Exception as error:
            raise AssertionError(f"cell {number}: {type(error).__name__}: {error}") from error
        cell["execution_count"] = number
        if "parameters" in cell["metadata"].get("tags", []):
            assert parameters.keys() <= namespace.keys(), f"the parameters are {[k for k in namespace if k.isupper()]}"
            namespace |= parameters
    return namespace


def _shown(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell; what it prints, and the figures that it draws or ends with."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    lines = ["" if line.startswith("%") else line for line in source.splitlines()]  # magics are Jupyter's alone
    body = ast.parse("\n".join(lines)).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    figures += [value] if isinstance(value, Figure) and value not in figures else []
    for figure in figures:
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=80, bbox_inches="tight")
        data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": [repr(figure)]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    pyplot.close("all")
    return outputs


if __name__ == "__main__":
    path = Path(sys.argv[1])
    content = json.loads(path.read_text())
    run(content, {name: json.loads(value) for name, _, value in (item.partition("=") for item in sys.argv[2:])})
    atomic(path, lambda file: file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n"))
