"""Validation and test images that are drawn from the training images of a user."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from .arrays import is_npz
from .folder import composed, folder_of, split_folder
from .hashes import SPLIT_NAMES
from .splits import DRAW_SEED, AnySplit, numbered, part_of, stratified

_FRACTION = 0.15
_SWAPS = 10**6  # numbers of images, of pairs of sources that are tried in a step, at most
_SEEDS = 20  # orders of the sources that are tried
_MISSING = {"", "None", "nan", "NaN", "NaT", "<NA>"}  # what gaps in a table become
_STEPS = 1000  # of the search for a division by source


def complete_splits(
    splits: Mapping[str, AnySplit],
    valid: float | None = None,
    test: float | None = None,
    sources: Sequence[str] | None = None,
) -> dict[str, AnySplit]:
    """Draws missing validation and test splits from the training split, the same at every call.

    Each part has its fraction of each class; with ``sources`` as nearly as whole sources allow.

    Args:
        splits: ``train`` and possibly ``valid`` and ``test``.
        valid: The fraction of the training images for ``valid``, 0 for none; None for 0.15 if it is missing.
        test: The same for ``test``.
        sources: What each training image comes from, such as a patient, a slide or a scene, as `image_sources` finds
            it: the images of a source are in one split only. None if each image stands alone.

    Raises:
        ValueError: If a fraction is out of range or is given for a split that there is, a class has too few images or
            sources, or there are sources and nothing is drawn.
    """
    shares = {}
    for part, share in (("test", test), ("valid", valid)):
        if share is not None and part in splits:
            raise ValueError(
                f"there are {len(splits[part]):,} {SPLIT_NAMES[part]} images, and none are drawn from training images: "
                f"leave --{part} ({part}_fraction) out, got {share}"
            )
        shares[part] = share if share is not None else 0.0 if part in splits else _FRACTION
    if min(shares.values()) < 0 or sum(shares.values()) >= 1:
        raise ValueError(f"the fractions valid and test are at least 0 and together less than 1, got {shares}")
    # Those of a part that is drawn are known by their numbers in the whole.
    parts = {part: numbered(split) for part, split in splits.items()}
    drawn = {part: share for part, share in shares.items() if share}
    if sources is not None:
        return parts | _by_source(parts["train"], sources, drawn)
    left = 1.0
    for part, share in drawn.items():
        parts["train"], parts[part] = stratified(parts["train"], share / left)
        left -= share
    return parts


def image_sources(
    split_by: str | Sequence[object] | Mapping[str, object] | np.ndarray, data: object, split: AnySplit
) -> list[str]:
    """What each image comes from: a patient, a slide, a scene.

    Args:
        split_by: ``"folder"``: the folder inside of the class folder, by its name, also where several classes have it.
            Another string: of image files a regular expression, searched in the path below the class folder; the
            source is the first of its groups that matches, or all that it finds. Of a .npz file the name of an array
            with a value for each training image. Or the values themselves: of image files by their paths in the
            folder, such as ``{"tumor/3.png": "patient7"}``, of other data a list or an array. Names in either form of
            Unicode are equal.
        data: The data that the images were read from, as `read_images` takes it.
        split: The images; those of a folder may be of any part, others are the training images.

    Raises:
        ValueError: If it finds no source of an image.
    """
    if folder := folder_of(data):
        if isinstance(split_by, str):
            return _of_files(split_by, folder, split.files)
        if not isinstance(split_by, Mapping):
            raise ValueError(
                "of a folder of images, split_by is 'folder', a regular expression, or a dictionary with the source of "
                f"each file by its path, such as {{{split.files[0]!r}: 'patient7', ...}}; got {type(split_by).__name__}"
            )
        listed = {composed(str(file)): source for file, source in split_by.items()}
        found = [composed(str(split_by.get(file, listed.get(composed(file), "")))) for file in split.files]
        if missing := [file for file, source in zip(split.files, found, strict=True) if source in _MISSING]:
            raise ValueError(f"split_by has no source of {len(missing):,} images, such as {missing[0]!r}")
        return found
    if isinstance(split_by, str) and isinstance(data, str | os.PathLike) and is_npz(data):
        with np.load(data, allow_pickle=False) as arrays:
            if split_by not in arrays:
                raise ValueError(f"{data} has no array {split_by!r} to split by; it has {', '.join(arrays)}")
            split_by = arrays[split_by]
    if isinstance(split_by, Mapping):
        raise ValueError("split_by is a dictionary for a folder of images alone; of arrays it is a list or an array")
    values = np.asarray(split_by)
    gaps = [i for i, value in enumerate(values.reshape(-1).tolist()) if str(value) in _MISSING]
    if values.shape != (len(split),) or gaps:
        raise ValueError(
            "split_by is 'folder' or a regular expression for image files, an array of a .npz file, or a list, with a "
            f"value for each of the {len(split):,} training images, got {values.dtype} {values.shape}"
            + (f" without values at {', '.join(map(str, gaps[:5]))}" if gaps else "")
        )
    return [composed(str(value)) for value in values.tolist()]


def check_apart(sources: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError if images of one source are in several splits.

    Args:
        sources: For each split what its images come from.
    """
    parts: dict[str, list[str]] = {}
    for part, names in sources.items():
        for name in dict.fromkeys(names):
            parts.setdefault(name, []).append(part)
    if several := {name: found for name, found in parts.items() if len(found) > 1}:
        name, found = next(iter(several.items()))
        raise ValueError(
            f"{len(several):,} sources are in several splits, such as {name!r} in {' and '.join(found)}: move the "
            "images of each into one, or give one folder of class folders, which is split by sources"
        )


def source_counts(
    splits: Mapping[str, AnySplit], images: Mapping[str, AnySplit], sources: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """The number of sources in each split of which they are known: given, or drawn from the training images.

    Args:
        splits: The splits, completed by `complete_splits`.
        images: The splits before.
        sources: What the images of ``train``, and possibly of others, come from.
    """
    known = {part: dict(zip(numbered(images[part]).files, names, strict=True)) for part, names in sources.items()}
    origin = {part: part if part in sources else "train" for part in splits if part in sources or part not in images}
    return {part: len({known[of][file] for file in splits[part].files}) for part, of in origin.items()}


def _of_files(split_by: str, path: Path, files: Sequence[str]) -> list[str]:
    outer = 2 if any(split_folder(path, part) for part in SPLIT_NAMES) else 1  # train/<class>/... or <class>/...
    try:
        pattern = re.compile(r"([^/]+)/" if split_by == "folder" else composed(split_by))
    except re.error as error:
        raise ValueError(f"split_by is no regular expression: {split_by!r} ({error}); any text is .*") from error
    search = pattern.match if split_by == "folder" else pattern.search
    matches = [search(composed(file.split("/", outer)[outer])) for file in files]
    found = [next(filter(None, match.groups() or (match[0],)), "") if match else "" for match in matches]
    if missing := [file for file, source in zip(files, found, strict=True) if not source]:
        raise ValueError(
            f"{len(missing):,} of {len(files):,} images have no source to split by: {pattern.pattern!r} finds nothing "
            f"below the class folder in {missing[0]}"
        )
    return found


def _by_source(train: AnySplit, sources: Sequence[str], shares: Mapping[str, float]) -> dict[str, AnySplit]:
    """The training split divided into parts with these shares and the rest, each source whole in one of them."""
    if not shares:
        raise ValueError(
            "split_by divides training images into parts, and none is drawn from them here: the data has validation "
            "and test images of its own, or their fractions are 0; leave split_by out"
        )
    names, source = np.unique(np.asarray(sources, dtype=str), return_inverse=True)
    classes = train.labels.cpu().numpy()
    counts = np.zeros((len(names), classes.max() + 1), dtype=np.int64)  # images of each source and class
    np.add.at(counts, (source, classes), 1)
    fewest, label = min((number, label) for label, number in enumerate((counts > 0).sum(0).tolist()) if number)
    for seed in range(DRAW_SEED, DRAW_SEED + _SEEDS) if fewest > len(shares) else ():
        free, held = np.ones(len(names), dtype=bool), dict[str, np.ndarray]()
        for number, (part, share) in enumerate(shares.items()):
            chosen = _held_out(counts[free], share * counts.sum(0), len(shares) - number, seed)
            if chosen is None:
                break
            held[part] = np.flatnonzero(free)[chosen]
            free[held[part]] = False
        if len(held) == len(shares):
            parts = {part: np.isin(source, chosen) for part, chosen in held.items()} | {"train": free[source]}
            return {part: part_of(train, torch.from_numpy(np.flatnonzero(own))) for part, own in parts.items()}
    rarest = train.classes[label] if train.classes else label
    raise ValueError(
        f"no division of the {len(names):,} sources into train, {' and '.join(shares)} was found in which each class "
        f"has images in each; class {rarest!r} has images from {fewest}: add sources, hold none out, or give the "
        "folders train, val and test yourself"
    )


def _held_out(counts: np.ndarray, wanted: np.ndarray, others: int, seed: int) -> np.ndarray | None:
    """Which sources are held out, ``(sources,)`` bool, so that classes have about the wanted numbers of images.

    Sources are taken in random order while that brings the numbers nearer, and then moved and exchanged one at a time
    while that does. Minimized is the sum over classes of the squared difference, relative to the class; divisions in
    which a class has no image among those held out, or too few sources for the other parts, cost more than all others.

    Args:
        counts: ``(sources, classes)``, the images of each.
        wanted: ``(classes,)``.
        others: The number of other parts, each of which needs a source of each class.
        seed: That of the order.

    Returns:
        The sources, or None if a class lacks images in a part.
    """
    images, there = counts[:, (used := counts.any(0))].astype(np.float64), (counts[:, used] > 0).astype(np.int64)
    wanted, total, present = wanted[used], images.sum(0), there.sum(0)

    def cost(number: np.ndarray, covered: np.ndarray) -> np.ndarray:
        lacking = (covered == 0).sum(-1) + np.maximum(covered + others - present, 0).sum(-1)
        return (((number - wanted) / total) ** 2).sum(-1) + len(total) * lacking

    held = np.zeros(len(images), dtype=bool)
    number, covered = np.zeros(len(total)), np.zeros(len(total), dtype=np.int64)
    for index in np.random.RandomState(seed).permutation(len(images)):
        then = number + images[index], covered + there[index]
        if cost(*then) < cost(number, covered):
            held[index], (number, covered) = True, then
    for _ in range(_STEPS):
        number, covered = images[held].sum(0), there[held].sum(0)
        best, sign = cost(number, covered), np.where(held, -1, 1)[:, None]
        moved = cost(number + sign * images, covered + sign * there)
        changes = [(moved.min(), [int(moved.argmin())])]
        inside, outside = np.flatnonzero(held), np.flatnonzero(~held)
        if 0 < len(inside) * len(outside) * len(total) <= _SWAPS:
            swapped = cost(
                number + images[outside] - images[inside, None], covered + there[outside] - there[inside, None]
            )
            first, second = np.unravel_index(swapped.argmin(), swapped.shape)
            changes.append((swapped.min(), [int(inside[first]), int(outside[second])]))
        least, change = min(changes)
        if least >= best - 1e-6:
            break
        held[change] = ~held[change]
    return held if cost(images[held].sum(0), there[held].sum(0)) < len(total) else None
