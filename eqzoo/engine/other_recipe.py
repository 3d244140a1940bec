"""Recipes that one run folder cannot hold together."""

from dataclasses import fields
from pathlib import Path

from .recipe import Recipe

__all__ = ["check_same"]


def check_same(recipe: Recipe, there: Recipe, path: Path) -> None:
    """Raises ValueError if a recipe is not that of the run in a folder; the message says how to go on with that run.

    Args:
        recipe: The recipe.
        there: That of the run.
        path: The folder.
    """
    if other := [item.name for item in fields(Recipe) if getattr(there, item.name) != getattr(recipe, item.name)]:
        values = ", ".join(f"{key}: {getattr(there, key)!r} there, {getattr(recipe, key)!r} here" for key in other)
        # These follow from the epochs before the first restart, by the rules of fine-tuning and of --epochs.
        first = {"warmup_epochs", "half_size_epochs", "full_size_lr"}
        few = set(other) <= {"epochs", "restarts", "restart_lrs", *first}
        more = few and recipe.epochs > there.epochs and recipe.schedule == "cosine"
        more = more and recipe.restarts == there.restarts[: len(recipe.restarts)]
        lrs = there.restart_lrs or recipe.restart_lrs
        rates = f" 'restart_lrs={[*there.all_restart_lrs, there.lr]}'" if lrs else ""
        way = f"to continue it add --set 'restarts={[*there.restarts, there.epochs]}'{rates}, or " if more else ""
        start = recipe.start_run is not None and recipe.start_run.resolve() == path.resolve()
        remedy = "with --output, because this run starts from that one" if start else "or remove this one"
        raise ValueError(f"{path} holds a run of another recipe ({values}); {way}name another folder {remedy}")
