"""`eqzoo predict`: the predictions of networks for an image and its rotated copies, or for many images."""

import argparse
import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..data.brightness import unlike_training
from ..data.folder import SHOWN
from ..evaluation.notes import BRIGHTNESS, other_side
from ..evaluation.predictor import Predictor, averaged, check_device, load_predictor
from ..evaluation.thresholds import check_thresholds, chosen_classes
from ..groups import P4, P4M, Group
from ._answer import Answer, table
from ._images import NamedImage, as_evaluated, copies_of, is_one_image, named_images
from ._metrics import thresholds_of

_MODELS = ("p4_cnn", "z2_cnn")  # without --model
_BATCH_SIZE = 32


def run(args: argparse.Namespace) -> Answer:
    """Prints the predictions for one image and its rotated copies, or for each of many images."""
    of_copies = is_one_image(args.images) and not args.csv
    if args.csv and args.json:
        raise ValueError("--csv and --json are two ways to print the same; leave one of them out")
    check_device(args.device)
    thresholds = thresholds_of(args.threshold)
    models = [load_predictor(name, args.device) for name in args.model or _MODELS]
    for model in models:
        check_thresholds(thresholds, model.classes, model.title, choosing=True)
    if args.tta:
        models = averaged(models, args.tta)
    if of_copies:
        (image,) = named_images(args.images)
        answer = _of_copies(image, models, args.invert, thresholds)
    else:
        answer = _of_many(named_images(args.images), models, args.invert, thresholds, args.csv)
    if not args.model:
        print(f"eqzoo: without --model, {' and '.join(_MODELS)} take an image for a digit", file=sys.stderr)
    return answer


def _of_copies(image: NamedImage, models: Sequence[Predictor], invert: bool, thresholds: Mapping[str, float]) -> Answer:
    """A row for each copy of the image, a column for each network."""
    # In float64, so that the change of a probability is that of float64 round-off.
    models = [replace(model, network=model.network.double()) for model in models]
    group = P4M if any(model.group.reflections for model in models) else P4
    read = _Read.of(image, models, partial(copies_of, group=group), invert)
    columns = [_predict(model, view, thresholds) for model, view in zip(models, read.views, strict=True)]
    _tell(models, [read], columns)
    rows = [["", *(column.name for column in columns)]]
    for g in group.elements:
        rows.append([group.describe(g), *(column.text(g) for column in columns)])
    rows.append(["largest change of a probability", *(f"{column.change:.1e}" for column in columns)])
    data = {"image": image.name, "networks": [column.data(group) for column in columns]}
    return Answer(table(rows), data)


def _of_many(
    images: Sequence[NamedImage],
    models: Sequence[Predictor],
    invert: bool,
    thresholds: Mapping[str, float],
    as_csv: bool,
) -> Answer:
    """A row for each readable image; for each network a column with the class and one with its probability."""
    columns, broken = _predict_many(models, images, invert, thresholds)
    names = [image.name for image in images if image.name not in broken]
    rows = [["file", *(text for column in columns for text in (column.name, "probability"))]]
    for i, file in enumerate(names):
        rows.append([file, *(text for column in columns for text in column.answer(i))])
    data: list[dict[str, Any]] = [
        {"image": file, "networks": [column.entry(i) for column in columns]} for i, file in enumerate(names)
    ]
    data += [{"image": file, "networks": [], "error": error} for file, error in broken.items()]
    text = _csv(names, columns) if as_csv else table(rows, right=range(2, 2 * len(columns) + 1, 2))
    return Answer(text, data, 2, _unreadable(broken, len(images))) if broken else Answer(text, data)


def _predict_many(
    models: Sequence[Predictor], images: Sequence[NamedImage], invert: bool, thresholds: Mapping[str, float]
) -> tuple[list["_Prediction"], dict[str, str]]:
    """The predictions of networks in float32 for the readable images, and the errors of the others.

    Raises:
        ValueError: If no image is readable.
    """
    parts: list[list[_Prediction]] = [[] for _ in models]
    broken: dict[str, str] = {}
    found: list[_Read] = []
    models = [replace(model, network=model.network.float()) for model in models]
    with tqdm(total=len(images), desc="predict", unit=" images", leave=False, disable=None) as bar:  # on a terminal
        for i in range(0, len(images), _BATCH_SIZE):
            batch = []
            for image in images[i : i + _BATCH_SIZE]:
                try:
                    batch.append(_Read.of(image, models, as_evaluated, invert))
                except (OSError, ValueError) as error:
                    broken[image.name] = str(error)
                bar.update()
            for k, model in enumerate(models if batch else ()):
                parts[k].append(_predict(model, torch.cat([read.views[k] for read in batch]), thresholds))
            found += [replace(read, views=[]) for read in batch]
    if not found:
        raise ValueError(_unreadable(broken, len(images)))
    joined = [replace(p[0], probabilities=torch.cat([part.probabilities for part in p])) for p in parts]
    _tell(models, found, joined)
    return joined, broken


@dataclass(frozen=True)
class _Read:
    """An image that was read.

    Args:
        name: Its name.
        views: For each network the copies of the image at its input size, ``(elements, C, height, width)``.
        side: The shorter side of the image, in pixels.
        signs: Whether it is darker (-1) or brighter (1) than a network's training images, or neither (0).
    """

    name: str
    views: list[Tensor]
    side: int
    signs: set[int]

    @staticmethod
    def of(
        image: NamedImage, models: Sequence[Predictor], view: Callable[[Tensor, Predictor], Tensor], invert: bool
    ) -> "_Read":
        """Reads an image once for each number of channels; ``view`` gives the input of a network."""
        by_channels = {channels: image.read(channels, invert) for channels in {m.input_size[0] for m in models}}
        pixels = [by_channels[model.input_size[0]] for model in models]
        views = [view(p, model) for p, model in zip(pixels, models, strict=True)]
        found = [unlike_training(p[None], m.cfg["mean"], m.cfg["std"]) for p, m in zip(pixels, models, strict=True)]
        signs = set[int]() if invert else set(map(int, found))
        return _Read(image.name, views, min(pixels[0].shape[-2:]), signs)


def _tell(models: Sequence[Predictor], images: Sequence[_Read], columns: Sequence["_Prediction"]) -> None:
    """Tells of images of another size or brightness than those of the training, and of the effect of thresholds."""
    side = sorted(image.side for image in images)[len(images) // 2]
    notes = [f"{model.name}: {line}" for model in models for line in other_side(side, model.image_side)]
    for sign, text in BRIGHTNESS.items():
        if names := [image.name for image in images if sign in image.signs]:
            notes.append(f"{len(names)} of {len(images)} images, such as {names[0]}: {text}")
    for column in columns:
        if changed := int((column.chosen != column.probabilities.argmax(1)).sum()):
            notes.append(
                f"{column.name}: thresholds give {changed} of {len(column.chosen)} another class than the most "
                "probable one"
            )
    for note in notes:
        print(f"eqzoo: {note}", file=sys.stderr)


def _unreadable(broken: Mapping[str, str], count: int) -> str:
    """The message on the files that cannot be read; only the first where all say the same: the number of channels."""
    errors = list(dict.fromkeys(broken.values()))  # one for all images of an array
    if len(broken) == count and len(errors) == 1:
        return errors[0]
    more = f"; and {len(errors) - SHOWN} other errors" * (len(errors) > SHOWN)
    return (
        f"{len(broken)} of {count} images cannot be read and have no prediction; remove or replace them: "
        f"{'; '.join(errors[:SHOWN])}{more}"
    )


def _csv(files: Sequence[str], columns: Sequence["_Prediction"]) -> str:
    """Comma-separated values: the file, and of each network the class and the probability of every class.

    The columns of one network are named by the classes, those of several by the network as well.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heading = ["file"]
    for number, column in enumerate(columns, 1):
        alone = [other.name for other in columns].count(column.name) == 1
        name = column.name if alone else f"{column.name} ({number})"
        several = [name, *(f"{name} {label}" for label in column.labels)]
        prefixed = len(columns) > 1 or {"file", "prediction"} & {*column.labels}
        heading += several if prefixed else ["prediction", *column.labels]
    writer.writerow(heading)
    for i, file in enumerate(files):
        values = [[column.answer(i)[0], *column.probabilities[i].tolist()] for column in columns]
        writer.writerow([file, *(value for part in values for value in part)])
    return text.getvalue().removesuffix("\n")


@dataclass(frozen=True)
class _Prediction:
    name: str
    labels: tuple[str, ...]
    probabilities: Tensor  # (elements or images, classes)
    thresholds: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def chosen(self) -> Tensor:
        """The class of each, see `eqzoo.evaluation.thresholds.chosen_classes`."""
        return chosen_classes(self.probabilities, self.labels, self.thresholds)

    def answer(self, i: int) -> tuple[str, str]:
        """The class of an image, and its probability in percent."""
        index = int(self.chosen[i])
        return self.labels[index], f"{100 * self.probabilities[i, index]:.2f} %"

    def text(self, g: int) -> str:
        label, percent = self.answer(g)
        return f"{label}  {percent:>8}"

    @property
    def change(self) -> float:
        return (self.probabilities - self.probabilities[0]).abs().max().item()

    def data(self, group: Group) -> dict[str, Any]:
        return {
            "name": self.name,
            "labels": self.labels,
            "copies": [
                {"copy": group.describe(g), "label": self.answer(g)[0], "probabilities": self.probabilities[g].tolist()}
                for g in group.elements
            ],
            "largest_change": self.change,
        }

    def entry(self, i: int) -> dict[str, Any]:
        """The prediction for one of many images, with the probability of each class by its name."""
        values = self.probabilities[i].tolist()
        return {
            "name": self.name,
            "label": self.answer(i)[0],
            "probability": values[int(self.chosen[i])],
            "probabilities": dict(zip(self.labels, values, strict=True)),
        }


def _predict(model: Predictor, images: Tensor, thresholds: Mapping[str, float]) -> _Prediction:
    return _Prediction(model.title, model.classes, model(images), thresholds)
