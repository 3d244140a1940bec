"""`eqzoo predict`: the predictions of networks for an image and its rotated copies."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..groups import P4, P4M, Group
from ..models import EquivariantNet
from ..models.loading import load_network
from ._answer import Answer, table
from ._images import transformed_copies

__all__ = ["run"]

_MODELS = ("p4_cnn", "z2_cnn")  # without --model


def run(args: argparse.Namespace) -> Answer:
    """Prints predictions: a row for each copy of the image, a column for each network."""
    models = [load_network(name, pretrained=True).network for name in args.model or _MODELS]
    group = P4M if any(model.group.reflections for model in models) else P4
    columns = [_predict(model, transformed_copies(args.image, model, group, args.invert)) for model in models]
    rows = [["", *(column.name for column in columns)]]
    for g in group.elements:
        rows.append([group.describe(g), *(column.text(g) for column in columns)])
    rows.append(["largest change of a probability", *(f"{column.change:.1e}" for column in columns)])
    data = {"image": args.image, "networks": [column.data(group) for column in columns]}
    return Answer(table(rows), data)


@dataclass(frozen=True)
class _Prediction:
    name: str
    labels: tuple[str, ...]
    probabilities: Tensor  # (elements, classes)

    def text(self, g: int) -> str:
        value, index = self.probabilities[g].max(0)
        return f"{self.labels[int(index)]}  {100 * value:6.2f} %"

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
                    "label": self.labels[int(self.probabilities[g].argmax())],
                    "probabilities": self.probabilities[g].tolist(),
                }
                for g in group.elements
            ],
            "largest_change": self.change,
        }


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
