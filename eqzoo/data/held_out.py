"""Validation and test images that are drawn from the training images of a user."""

from collections.abc import Mapping

import torch

from .splits import AnySplit, numbered, stratified

__all__ = ["complete_splits"]

_FRACTION = 0.15
_NOUNS = {"valid": "validation", "test": "test"}


def _check_classes(train: AnySplit, drawn: list[str]) -> None:
    """Raises ValueError unless each class has an image for the training and for each split that is drawn from it."""
    counts = torch.bincount(train.labels).tolist()
    if few := [label for label, count in enumerate(counts) if 0 < count <= len(drawn)]:
        name, count = dict(enumerate(train.classes)).get(few[0], few[0]), counts[few[0]]
        *others, last = "training", *(_NOUNS[part] for part in drawn)
        options = " or ".join(f"--{part} 0" for part in drawn)
        raise ValueError(
            f"class {name!r} has {count} image{'s' * (count > 1)}, and one each is needed for "
            f"{', '.join(others)} and {last}: add images, hold none out ({options}; "
            f"{', '.join(f'{part}_fraction' for part in drawn)}), or give the folders train, val and test yourself"
        )


def complete_splits(
    splits: Mapping[str, AnySplit], valid: float | None = None, test: float | None = None
) -> dict[str, AnySplit]:
    """Draws missing validation and test splits from the training split, stratified, the same at every call.

    Args:
        splits: ``train`` and possibly ``valid`` and ``test``.
        valid: The fraction of the training images for ``valid``, 0 for none; None for 0.15 if it is missing.
        test: The same for ``test``.

    Raises:
        ValueError: If a fraction is out of range or is given for a split that there is, or a class has too few images.
    """
    given = {"valid": valid, "test": test}
    for part, share in given.items():
        if share is not None and part in splits:
            raise ValueError(
                f"the data has {len(splits[part]):,} {_NOUNS[part]} images of its own, so none are drawn from its "
                f"training images: leave --{part} ({part}_fraction) out, got {share}"
            )
    rule = {part: 0.0 if part in splits else _FRACTION for part in given}
    valid, test = (rule[part] if share is None else share for part, share in given.items())
    if min(valid, test) < 0 or valid + test >= 1:
        raise ValueError(
            f"the fractions valid and test are at least 0 and together less than 1, got {valid} and {test}"
        )
    # Those of a part that is drawn are known by their numbers in the whole.
    parts = {part: numbered(split) for part, split in splits.items()}
    drawn = [part for part, share in (("valid", valid), ("test", test)) if share]
    _check_classes(parts["train"], drawn)
    left = 1.0
    if test:
        parts["train"], parts["test"] = stratified(parts["train"], test)
        left -= test
    if valid:
        parts["train"], parts["valid"] = stratified(parts["train"], valid / left)
    return parts
