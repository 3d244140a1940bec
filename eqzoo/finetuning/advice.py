"""What a fine-tuning says before and after training: its images and settings, and advice with the option to take."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timm.models import is_model
from torch import nn

from .._common import setting_text
from ..analysis.cost import multiply_adds
from ..analysis.sizes import weightless
from ..data import AnySplit, Split, folders_in_classes
from ..data.brightness import DARK, NEARLY_ALL, dark_images
from ..data.copies import copies
from ..data.folder import NamingLine, some_names
from ..data.hashes import SPLIT_NAMES, image_codes, trained_images
from ..engine.recipe import Recipe
from ..evaluation import Predictor
from ..evaluation.notes import SOME, cut_off
from ..models.load import resolve
from ..models.sizes import refusal

if TYPE_CHECKING:
    from .plan import Plan

FEW_IMAGES = 20  # of a class for training
IMBALANCE = 5.0  # between the sizes of the largest and the smallest class
LARGER = 1.5  # times the network's size: images that lose detail, so that any larger size is worth a trial
TRY_AT_MOST = 2.0  # times the size
OVERFIT = 10.0  # percentage points of training accuracy above that of validation
NOT_FITTED = 90.0  # percent of training accuracy
FEW_EPOCHS, ENOUGH_EPOCHS = 5, 20
QUICK_NETWORKS = ("p4m_resnet_s", "p4_cnn")  # for color and for gray images, see docs/real_images.md
_SMALL = 0.1  # a small share of images to hold out
# Up to the first, second or third number of a file's name, as --split-by takes it: slide12 of slide12_0034.png.
_IN_NAMES = [rf"((?:[^/\d]*\d+[A-Za-z]*){{1,{depth}}}|[^/]+)" for depth in (1, 2, 3)]
_FEW_SOURCES = 3  # that are not only the classes under other names
_REPEATED = 0.75  # of the images: at most so many pairs of source and class, else sources are numbers within a class
_STRONGER = {"affine": "affine_color", "affine_color": ""}  # augmentations by the one that a run has; else affine


def chosen(recipe: Recipe, splits: Mapping[str, AnySplit]) -> dict[str, Any]:
    """The settings that a fine-tuning was given or has chosen, with the number of steps and of threads."""
    steps = len(splits["train"]) // recipe.batch_size
    keys = ("optimizer", "lr", "weight_decay", "schedule", "warmup_epochs", "epochs", "batch_size")
    values = {key: getattr(recipe, key) for key in keys} | {"steps": steps * recipe.epochs}
    more = ["augment", "label_smoothing", "ema_decay", "patience", "precision", "channels_last"]
    where_set = ("layer_decay", "lr_factors", "freeze", "class_weights", "teachers", "seed")
    more += [key for key in where_set if getattr(recipe, key)]
    return values | {key: getattr(recipe, key) for key in more} | {"threads": torch.get_num_threads()}


def summary(plan: "Plan") -> tuple[str, str]:
    """Two lines: images, steps and expected time; and the settings."""
    assert plan.speed is not None
    recipe, settings, splits = plan.recipe, plan.settings, plan.splits
    counts = splits["train"].labels.bincount()
    images = ", ".join(f"{len(split):,} {SPLIT_NAMES[name]}" for name, split in splits.items())
    spread = f"{int(counts.min()):,} to {int(counts.max()):,}" if counts.min() < counts.max() else f"{counts[0]:,}"
    made = chosen(recipe, splits)
    shape = " x ".join(map(str, settings["input_size"]))
    steps, epochs = made["steps"] // recipe.epochs, recipe.epochs
    length = f"{epochs} epoch{'' if epochs == 1 else 's'} of {steps} step{'' if steps == 1 else 's'}"
    time = _duration(epochs * plan.speed.epoch_seconds(splits))
    values = [f"{key} {setting_text(value)}" for key, value in made.items()]
    if plan.fits_classifier:
        values = ["features are computed once, and the classifier is fitted to them"]
    return (
        f"images of {shape}: {images}; {len(counts)} classes of {spread} training images; {length}; "
        f"about {time} at {plan.speed.images_per_second:g} images/s, and the evaluation",
        f"{', '.join(values)}, mean {settings['mean']}, std {settings['std']}",
    )


def advice_before(plan: "Plan") -> list[str]:
    """What the images call for, a line each."""
    splits, train, request = plan.splits, plan.splits["train"], plan.request
    by_source, inner, drawn = request.source_of_splits, folders_in_classes(request.data), plan.images.drawn
    trained_side = plan.source.image_side if plan.settings["start"] else None
    resized = request.size is None and plan.native is not None and plan.native[0] != trained_side
    return [
        *([] if by_source == "folder" else _nested(inner, splits, bool(drawn), bool(by_source))),
        *([] if by_source or inner else _named_sources(splits, drawn)),
        *_few(plan),
        *([] if request.balance else _imbalanced(train, plan.names)),
        *_dark(train),
        *cut_off(plan.native),
        *(_larger(plan.blank, plan.native[0], plan.side) if resized and plan.native else []),
        *_copied(splits),
        *_trained_before(plan),
        *_taught_before(plan),
        *([] if "augment" in request.given or plan.fits_classifier else _not_rotated(plan.blank, plan.recipe.augment)),
    ]


def advice_on_time(plan: "Plan") -> list[str]:
    """A line where the minutes that the user gave allow few epochs, with a network and size that allow enough."""
    assert plan.speed is not None
    minutes, seconds = plan.request.minutes, plan.speed.epoch_seconds(plan.splits)
    if minutes is None or (epochs := 60 * minutes / seconds) >= FEW_EPOCHS:
        return []
    faster = _faster(plan, epochs)
    way = f"; {faster}" if faster else "; smaller images (--size) take less time"
    return [
        f"an epoch takes about {_duration(seconds)}, and --minutes is {minutes:g}: {plan.recipe.epochs} "
        f"{'epoch is' if plan.recipe.epochs == 1 else 'epochs are'} trained, which seldom suffices{way}"
    ]


def _faster(plan: "Plan", epochs: float) -> str:
    """A quick network, a side and how many epochs it allows, by its multiply-adds; or nothing.

    The largest side that allows enough epochs, else the smallest.
    """
    channels, side = plan.settings["input_size"][0], plan.side
    cost = multiply_adds(plan.blank, (channels, side, side))
    found: list[tuple[float, str]] = []
    for name in QUICK_NETWORKS:
        model = weightless(name)
        for smaller in (28, 32, 48, 64, 96):
            if model.in_chans == channels and smaller <= side and refusal(model, smaller, smaller) is None:
                allowed = epochs * cost / multiply_adds(model, (channels, smaller, smaller))
                found.append((allowed, f"{name} --size {smaller}"))
    enough = [each for each in found if each[0] >= ENOUGH_EPOCHS]
    allowed, name = min(enough) if enough else max(found, default=(0.0, ""))
    return f"{name} allows about {int(allowed)}" if allowed > 2 * max(epochs, 1) else ""


def advice_after(
    plan: "Plan", metrics: Mapping[str, Any], training_accuracy: float, valid_accuracy: float | None
) -> list[str]:
    """What the result calls for, a line each.

    Args:
        plan: The plan.
        metrics: The metrics.
        training_accuracy: The accuracy on training images without augmentation, in percent.
        valid_accuracy: The accuracy of the kept epoch on validation images, in percent; None without any.
    """
    recipe, minutes = plan.recipe, plan.request.minutes
    reflections = Predictor.of(plan.blank).group.reflections
    found = []
    length, twice = ("epochs", 2 * recipe.epochs) if minutes is None else ("minutes", 2 * minutes)
    longer = f"train for longer with --{length} {twice:g} and another --output"
    if plan.fits_classifier:
        longer = "train the whole network, without --freeze and with another --output"
    rows = metrics["classes"]
    predicted = [sum(counts) for counts in zip(*metrics["confusion"], strict=True)]
    missed = [row["name"] for row, count in zip(rows, predicted, strict=True) if row["images"] and not count]
    given = [row["name"] for row, count in zip(rows, predicted, strict=True) if count]
    if missed and len(given) == 1 and training_accuracy < NOT_FITTED and not plan.fits_classifier:
        more = "" if recipe.class_weights else ", --balance"
        other = f"a lower learning rate such as --lr {recipe.lr / 10:g}{more} or more --{length}, with another --output"
        said = f"{given[0]!r} is the only class ever predicted: try {other}"
        return [said, *_reflected(recipe.model, reflections)]
    if missed:
        more = "add images of it, or" if recipe.class_weights else "try --balance, or"
        found.append(f"never predicted: {some_names(missed, 5)}: {more} {longer}")
    if valid_accuracy is None:
        return found
    gap = training_accuracy - valid_accuracy
    said = f"accuracy is {training_accuracy:.1f} % on training and {valid_accuracy:.1f} % on validation images"
    if training_accuracy < NOT_FITTED:
        more = ", and add images if the difference stays" * (gap >= OVERFIT)
        found.append(f"{said}: the network does not fit its images yet; {longer}{more}")
        found += _reflected(recipe.model, reflections)
    elif gap >= OVERFIT:
        more = "" if plan.fits_classifier else _STRONGER.get(recipe.augment, "affine")
        way = f", or, if that keeps their classes, augment them more with --augment {more}" if more else ""
        found.append(f"{said}: add images{way}")
    return found


def _reflected(model: str, reflections: bool) -> Iterator[str]:
    """A line on networks that cannot tell an image from its reflection."""
    if reflections:
        other = model.replace("m_", "_", 1)
        other = other if other != model and is_model(other) else "p4_resnet_m"
        way = "--invariant p4" if model == "orbitnet" else f"a network whose group has no reflections, such as {other}"
        yield (
            f"{model} gives an image and its reflection the same prediction: if a reflection changes the class, as of "
            f"left- and right-handed spirals, take {way}"
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} minutes"


def _nested(inner: Sequence[str], splits: Mapping[str, AnySplit], drawn: bool, by_source: bool) -> Iterator[str]:
    """A line on folders inside of the class folders; unless split ``by_source``, on those in several splits."""
    if not inner:
        return
    apart = ""
    if drawn and not by_source:
        apart = (
            "; images of one inner folder can be in several splits, so if one is a patient or a slide, keep it in one: "
            "--split-by folder (split_by='folder')"
        )
    elif not by_source:
        paths = [(part, file.split("/")[2:]) for part, split in splits.items() for file in split.files]
        several = _in_several((part, path[0]) for part, path in paths if len(path) > 1)
        if len(several) >= _FEW_SOURCES:
            apart = f"; {_spread_over_splits(f'{len(several):,} inner folders')}"
    classes = some_names(splits["train"].classes, 3)
    yield NamingLine(
        "class folders hold folders of images",
        f" ({some_names(inner, 3)})",
        f": the classes are the outer folders ({classes}){apart}",
    )


def _named_sources(splits: Mapping[str, AnySplit], drawn: Collection[str]) -> Iterator[str]:
    """A line where names such as slide12_0034.png tell several images of one source, with each way to read them.

    Where no split is drawn from the training images, of the ways by which images of one source are in several splits.
    """
    files = [
        ("train" if part in drawn else part, label, file.rpartition("/")[2])
        for part, split in splits.items()
        for label, file in zip(split.labels.tolist(), split.files, strict=False)
    ]
    readings = dict[tuple[int, int], tuple[str, str]]()
    for pattern in _IN_NAMES:
        found = {(part, label, match[1]) for part, label, name in files if (match := re.match(pattern, name))}
        names = sorted({source for _, _, source in found if re.search(r"\d", source)})
        apart = len({pair[:2] for pair in found}) < len(found) <= _REPEATED * len(files)
        if not (apart and _FEW_SOURCES <= len(names) <= len(files) / 2):
            continue
        if drawn:
            several, text = names, f"{len(names):,} sources of {len(files):,} images: --split-by '{pattern}'"
        else:
            several = sorted({*names} & _in_several((part, source) for part, _, source in found))
            text = f"{len(several):,} of {len(names):,} sources"
        if several:
            readings.setdefault((len(names), len(found)), (f"{', '.join(several[:2])}, ...", text))
    texts = "; or ".join(text for _, text in readings.values())
    examples = ", or ".join(example for example, _ in readings.values())
    if readings and drawn:
        yield NamingLine(
            "names of files may tell what the images come from: if these are patients, slides or scenes, keep the "
            f"images of each in one split ({texts}",
            f"; the sources are {examples}",
            ")",
        )
    elif readings:
        yield NamingLine("by the names of files", f" ({examples})", f" {_spread_over_splits(texts)}")


def _in_several(sources: Iterable[tuple[str, str]]) -> set[str]:
    """The sources that are in several splits, of pairs of split and source."""
    found = Counter(source for _, source in {*sources})
    return {source for source, count in found.items() if count > 1}


def _spread_over_splits(sources: str) -> str:
    """What to do about sources, in words, that are in several splits."""
    return (
        f"images of {sources} are in several splits: if these are patients, slides or scenes, the metrics are too "
        "good; move the images of each into one split"
    )


def _not_rotated(model: nn.Module, augment: str) -> Iterator[str]:
    if Predictor.of(model).group.rotations == 1:
        yield (
            f"a network without rotations sees no rotated images in training (augment {augment}): if rotated and "
            "reflected images mean the same, --augment affine"
        )


def _few(plan: "Plan") -> Iterator[str]:
    counts = plan.splits["train"].labels.bincount().tolist()
    few = [f"{plan.names[label]!r} ({count})" for label, count in enumerate(counts) if count < FEW_IMAGES]
    if few:
        shares = {"valid": plan.request.valid_fraction, "test": plan.request.test_fraction}
        drawn = {part: share for part, share in shares.items() if part in plan.images.drawn}
        fewer = [f"--{part} {_SMALL:g}" for part, share in drawn.items() if share is None or share > _SMALL]
        options = f", or hold out fewer with {' '.join(fewer)}" if fewer else ""
        more = ", ..." if len(few) > 5 else ""
        yield f"fewer than {FEW_IMAGES} training images of {', '.join(few[:5])}{more}: add images{options}"


def _imbalanced(train: AnySplit, names: Sequence[str]) -> Iterator[str]:
    counts = train.labels.bincount()
    most, least = int(counts.argmax()), int(counts.argmin())
    if (ratio := counts[most] / counts[least]) >= IMBALANCE:
        yield (
            f"{names[most]!r} has {ratio:.0f} times the images of {names[least]!r}: if rare classes matter "
            "as much, compare the mean recall with that of --balance"
        )


def _dark(train: AnySplit) -> Iterator[str]:
    if not isinstance(train, Split):
        return
    if (value := int(train.images.amin())) == int(train.images.amax()):
        yield (
            f"all pixels of all training images are {value}, so there is nothing to learn; if they were scaled, was a "
            "number among them infinite or not a number?"
        )
    elif (count := int(dark_images(train.images).sum())) >= SOME * len(train):
        yield (
            f"{count:,} of the {len(train):,} training images are dark: {100 * NEARLY_ALL:g} % of their pixels are "
            f"below {DARK} of 255, as with 12-bit numbers in files of 16 bits: if the files hold more shades, stretch "
            "all images first by the same factor, or, where single bright pixels matter, by np.arcsinh"
        )


def _larger(model: Any, native: int, side: int) -> Iterator[str]:
    if native <= side:
        return
    largest = min(native, int(TRY_AT_MOST * side))
    sizes = range(largest, side, -1) if native >= LARGER * side else [native]  # slightly larger ones: as they are
    size = next((s for s in sizes if refusal(model, s, s) is None), None)
    if size:
        yield (
            f"the images have {native} pixels a side and are scaled to {side}: if details matter, try --size {size}, "
            f"which takes about {(size / side) ** 2:.1f} times as long"
        )


def _copied(splits: Mapping[str, AnySplit]) -> Iterator[str]:
    """Lines on images that are copies of images in another split, and on copies in two classes."""
    found = copies(splits)

    def named(place: tuple[str, int]) -> str:
        split, index = place
        return splits[split].files[index] if splits[split].files else f"{SPLIT_NAMES[split]} image {index}"

    if found.leaked:
        yield NamingLine(
            f"at least {len(found.leaked):,} validation or test images are copies of images in another split, if "
            "rotated, reflected, resized, recompressed or of another brightness",
            f" ({', '.join(map(named, found.leaked[:3]))}{', ...' * (len(found.leaked) > 3)})",
            ", so the metrics are too good: remove them, or give folders train, val and test without them",
        )
    if found.contradictory:
        one, other = found.contradictory[0]
        yield NamingLine(
            f"at least {len(found.contradictory):,} pairs of copies are in two classes",
            f", such as {named(one)} and {named(other)}",
            ": look at them, and keep each in its own class",
        )


def _trained_before(plan: "Plan") -> Iterator[str]:
    side = Predictor.of(plan.blank).input_size[-1]
    if seen := _seen(partial(plan.images_at, side), plan.trained_before):
        yield (
            f"the weights were trained on {seen}, so the metrics are too good: start from the checkpoint that these "
            "weights started from, or give folders train, val and test that keep these images in train"
        )


def _taught_before(plan: "Plan") -> Iterator[str]:
    """A line where a teacher was trained on images that are held out here, of which the network learns from it."""
    for name in plan.recipe.teachers:
        source = resolve(name)
        side = Predictor.of(weightless(source)).input_size[-1]
        if seen := _seen(partial(plan.images_at, side), trained_images(source.folder)):
            yield (
                f"the teacher {name} was trained on {seen}, so the metrics are too good: train it with the same images "
                "held out, those of the same --valid, --test and --split-by"
            )


def _seen(read: Callable[[], Mapping[str, AnySplit]], trained: np.ndarray) -> str:
    """How many of the images that are held out are among those of the codes, and no copies of training images."""
    if not len(trained):
        return ""
    splits = read()
    others = np.setdiff1d(trained, image_codes(splits["train"]))
    held_out = [split for name, split in splits.items() if name != "train"]
    count = sum(int(np.isin(image_codes(split), others).sum()) for split in held_out)
    return f"{count:,} of the {sum(map(len, held_out)):,} validation and test images" if count else ""
