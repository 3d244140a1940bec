"""`eqzoo predict`: the predictions of networks for an image and its rotated copies, or for many images."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import load_image
from ..groups import P4, P4M, Z2, Group
from ..models import EquivariantNet
from ..models.loading import load_network
from ._answer import Answer, table
from ._images import image_files, transformed_copies

__all__ = ["run"]

_MODELS = ("p4_cnn", "z2_cnn")  # without --model
_BATCH_SIZE = 32


def run(args: argparse.Namespace) -> Answer:
    """Prints the predictions for one image and its rotated copies, or for each of many images."""
    models = [load_network(name, pretrained=True).network for name in args.model or _MODELS]
    if len(args.images) == 1 and not Path(args.images[0]).is_dir():
        return _of_copies(args.images[0], models, args.invert)
    return _of_files(image_files(args.images), models, args.invert)


def _of_copies(image: str, models: Sequence[EquivariantNet], invert: bool) -> Answer:
    """A row for each copy of the image, a column for each network."""
    group = P4M if any(model.group.reflections for model in models) else P4
    columns = [_predict(model, transformed_copies(image, model, group, invert)) for model in models]
    rows = [["", *(column.name for column in columns)]]
    for g in group.elements:
        rows.append([group.describe(g), *(column.text(g) for column in columns)])
    rows.append(["largest change of a probability", *(f"{column.change:.1e}" for column in columns)])
    data = {"image": image, "networks": [column.data(group) for column in columns]}
    return Answer(table(rows), data)


def _of_files(files: Sequence[str], models: Sequence[EquivariantNet], invert: bool) -> Answer:
    """A row for each file; for each network a column with the class and one with its probability."""
    for file in files:  # all of them before the first prediction, which may take long
        load_image(file, models[0].in_chans)
    columns = [_predict_files(model, files, invert) for model in models]
    rows = [["file", *(text for column in columns for text in (column.name, "probability"))]]
    for i, file in enumerate(files):
        rows.append([file, *(text for column in columns for text in column.answer(i))])
    data = [{"image": file, "networks": [column.entry(i) for column in columns]} for i, file in enumerate(files)]
    return Answer(table(rows, right=range(2, 2 * len(columns) + 1, 2)), data)


@dataclass(frozen=True)
class _Prediction:
    name: str
    labels: tuple[str, ...]
    probabilities: Tensor  # (elements or images, classes)

    def answer(self, i: int) -> tuple[str, str]:
        """The most probable class of an image, and its probability in percent."""
        value, index = self.probabilities[i].max(0)
        return self.labels[int(index)], f"{100 * value:.2f} %"

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
                {
                    "copy": group.describe(g),
                    "label": self.answer(g)[0],
                    "probabilities": self.probabilities[g].tolist(),
                }
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
            "probability": max(values),
            "probabilities": dict(zip(self.labels, values, strict=True)),
        }


def _predict_files(model: EquivariantNet, files: Sequence[str], invert: bool) -> _Prediction:
    """The predictions for files, of batches of images that are read one after the other."""
    batches = [files[i : i + _BATCH_SIZE] for i in range(0, len(files), _BATCH_SIZE)]
    found = [
        _predict(model, torch.cat([transformed_copies(file, model, Z2, invert) for file in batch])) for batch in batches
    ]
    return _Prediction(found[0].name, found[0].labels, torch.cat([part.probabilities for part in found]))


@torch.no_grad()
def _predict(model: EquivariantNet, x: Tensor) -> _Prediction:
    cfg = model.pretrained_cfg
    if not model.num_classes:
        raise ValueError(
            f"{cfg['architecture']} has no classifier here, so it predicts nothing; eqzoo finetune trains one"
        )
    labels = cfg.get("label_names") or tuple(str(i) for i in range(model.num_classes))
    name = ".".join(part for part in (cfg["architecture"], cfg.get("tag")) if part)
    probabilities = model.double()(x).softmax(1)
    if not probabilities.isfinite().all():
        raise ValueError(f"the output of {name} is not finite; its weights, or the image, hold NaN or infinite numbers")
    return _Prediction(name, tuple(labels), probabilities)
