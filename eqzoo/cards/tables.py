"""The tables of all checkpoints."""

from typing import Any

from ..data import CATALOG, dataset
from ..models.papers import rows
from .card import wrapped
from .checkpoint import counts_of, error_text

_TREE = "https://github.com/eqzoo/eqzoo/tree/main/model_cards/"  # docs/ is a site too, which does not hold the cards


def render_table(results: list[dict[str, Any]]) -> str:
    """The tables of docs/results.md, one for each data set of `CATALOG` and a row for each checkpoint."""
    sets = [(name, [r for r in results if r["data"] == name]) for name in CATALOG]
    return "\n\n".join(_dataset_table(name, of_set) for name, of_set in sets if of_set)


def _seeds(r: dict[str, Any]) -> str:
    """Behind an error, of how many seeds it is the mean."""
    count = len(r.get("accuracies", ()))
    return f" ({count} seeds)" if count > 1 else ""


def _macro_f1(r: dict[str, Any]) -> str:
    """Behind an error, the mean of the classes' F1 where it differs from the accuracy, as with unequal classes."""
    macro_f1 = r.get("macro_f1", r["accuracy"])
    return f", macro F1 {macro_f1:.1f} %" if abs(macro_f1 - r["accuracy"]) > 1 else ""


def _dataset_table(name: str, results: list[dict[str, Any]]) -> str:
    data, counts = dataset(name), [counts_of(r) for r in results]
    columns = ["checkpoint", "group", "parameters", "test error", "paper"]
    differ = any(row != counts[0] for row in counts)
    columns += ["same class at all 90° rotations", "error under p4", *["images: train, valid, test"] * differ]
    words = {split: " or ".join(dict.fromkeys(row[split] for row in counts)) for split in counts[0]}
    lines = [
        f"## {data.title}",
        "",
        f"{wrapped(f'Trained and tested on {data.text.format(**words)}.')}",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    for r, count in zip(results, counts, strict=True):
        row = rows().get(r["checkpoint"])
        cells = [
            f"[{r['checkpoint']}]({_TREE}{r['checkpoint']})",
            r["group"],
            f"{r['parameters']:,}",
            error_text(r, 2) + _seeds(r) + _macro_f1(r),
            f"{row.error_text} %" if row and row.error_text else "",
            f"{r['same_class_at_all_quarter_rotations']:.2f} %",
            f"{r['equivariance_error_p4']:.0e}",
        ]
        cells += ["; ".join(count.values())] if differ else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
