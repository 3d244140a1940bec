"""The images of a fine-tuning: read, divided into splits, and their statistics."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..data import (
    CATALOG,
    AnySplit,
    batches,
    channels_found,
    check,
    check_apart,
    complete_splits,
    image_sources,
    read_images,
    resized,
    source_counts,
)
from ..data.arrays import without_npz
from ..data.folder import folder_of
from ..data.hashes import USES
from .rules import keeps_statistics

if TYPE_CHECKING:
    from .plan import Request


@dataclass(frozen=True)
class OwnImages:
    """The user's images.

    Args:
        splits: ``train``, ``valid`` and ``test``, without those of which nothing is held out.
        drawn: The splits that were drawn from the training images.
        colors: A line where some images are gray and others in color, and no number of channels was given.
        sources: The number of sources that the images of each split come from, if they were split by these; of splits
            whose sources are known.
        source_lines: A line on these, if there are any.
    """

    splits: Mapping[str, AnySplit]
    drawn: frozenset[str]
    colors: Sequence[str]
    sources: Mapping[str, int]
    source_lines: Sequence[str]


def own_images(request: "Request", side: int) -> OwnImages:
    """Reads the images with a side in pixels, and draws the splits that are missing."""
    data, split_by = request.data, request.split_by
    channels, colors = channels_found(data) if request.channels is None else (request.channels, [])
    if isinstance(data, Mapping):
        check(data, "data")
        if (found := data["train"].shape[0]) != channels and channels is not None:
            raise ValueError(f"channels={channels}, and the splits have {found}; leave channels out")
        images = {part: resized(split, (side, side)) for part, split in data.items()}
    else:
        images = read_images(data, side, channels, request.data_dir, request.download)
    sources: dict[str, list[str]] = {}
    if split_by is not None:  # known of all images of a folder, of others of the training images alone
        parts = images if folder_of(data) else ["train"]
        sources = {part: image_sources(split_by, data, images[part]) for part in parts}
        check_apart(sources)
    fractions = {"valid": request.valid_fraction, "test": request.test_fraction}
    drawn = any(part not in images and fraction != 0 for part, fraction in fractions.items())
    apart = not drawn and len(sources) > 1  # the user's own splits are checked alone
    splits = complete_splits(
        images, request.valid_fraction, request.test_fraction, None if apart else sources.get("train")
    )
    counts = source_counts(splits, images, sources) if sources else {}
    lines = [_by_source(split_by, counts, [part for part in splits if part not in counts])] if sources else []
    return OwnImages(splits, frozenset(splits.keys() - images.keys()), colors, counts, lines)


def _by_source(split_by: object, counts: Mapping[str, int], unknown: Sequence[str]) -> str:
    parts = ", ".join(f"{count:,} to {USES[part]}" for part, count in counts.items())
    by = f" ({split_by})" if isinstance(split_by, str) else ", listed in Python as split_by"
    others = "".join(f"; those of the images to {USES[part]} are not known" for part in unknown)
    return f"the images come from {sum(counts.values()):,} sources{by}, each whole in one split: {parts}{others}"


def data_label(data: object) -> str:
    """The name of a data set in letters, digits and dashes, as in the name of a checkpoint."""
    if isinstance(data, Mapping):
        return "own"
    path = Path(cast(str, data))
    last = path.resolve().name if path.is_dir() else without_npz(str(data).rpartition(":")[2])
    plain = unicodedata.normalize("NFKD", last.lower()).encode("ascii", "ignore").decode()  # é as e
    label = re.sub(r"[^a-z0-9_-]+", "-", plain).strip("-") or "own"
    other = path.exists() or str(data).lower() != label  # a set of the user's, or hf:<owner>/<label>
    return f"own-{label}" if other and label in CATALOG else label


def data_argument(data: object) -> str:
    """The data in a command; files and folders without their parent folders."""
    if isinstance(data, Mapping):
        return "own"
    path = Path(cast(str, data))
    return path.resolve().name.encode("utf-8", "replace").decode() if path.exists() else str(data)


def image_statistics(
    blank: nn.Module, train: AnySplit, *, started: bool, frozen: bool = False, workers: int = 0
) -> tuple[list[float], list[float]]:
    """The mean and the standard deviation of each channel that images are normalized by, for pixel values in 0 to 1.

    Those of the training images; but those that belong to the weights, if the run starts from trained ones and the
    network is frozen or has no batch norms.

    Args:
        blank: The network, without weights.
        train: The training images.
        started: Whether the run starts from trained weights.
        frozen: Whether parts of the network are not trained.
        workers: The processes that read images that are not in memory.
    """
    cfg: Any = blank.pretrained_cfg
    channels = train.shape[0]
    fits = len(cfg["mean"]) in (1, channels) and getattr(blank, "in_chans", cfg["input_size"][0]) == channels
    if started and fits and (frozen or keeps_statistics(blank)):
        mean, std = list(cfg["mean"]), list(cfg["std"])
        return mean * (channels // len(mean)), std * (channels // len(std))
    return _statistics(train, workers)


def _statistics(split: AnySplit, workers: int) -> tuple[list[float], list[float]]:
    """The mean and the standard deviation of each channel, for pixel values in 0 to 1, of at most 2,000 images."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:2000].sort().values
    channels, height, width = split.shape
    count = len(order) * height * width
    total = squares = torch.zeros(channels, dtype=torch.int64)
    for images in batches(split, order.split(50), workers):
        values = images.cpu().transpose(0, 1).flatten(1).long()
        total, squares = total + values.sum(1), squares + (values * values).sum(1)
    # In whole numbers, which are exact.
    variances = [
        (count * b - a * a) / (count * (count - 1)) for a, b in zip(total.tolist(), squares.tolist(), strict=True)
    ]
    # The standard deviation of a constant channel would be zero.
    return (
        [round(a / count / 255, 4) for a in total.tolist()],
        [max(round(math.sqrt(v) / 255, 4), 1e-2) for v in variances],
    )
