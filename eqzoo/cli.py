"""The commands behind `eqzoo`; each takes the parsed arguments and prints."""

import argparse
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .convert import convert as convert_weights
from .data import load_picture, normalise, preprocess
from .groups import P4, P4M, Group, transform
from .models import EquivariantNet, create_model, list_models, list_pretrained

__all__ = ["convert", "list", "predict"]


def convert(args: argparse.Namespace) -> None:
    """Writes another project's checkpoint as weights of a network here."""
    convert_weights(args.source, args.path, args.model, args.output, args.upright)
    print(f"wrote {args.output}; eqzoo.create_model({args.model!r}, checkpoint_path={args.output!r}) reads it")


def list(args: argparse.Namespace) -> None:  # noqa: A001  the command's name
    """Prints names of networks, or of checkpoints."""
    names = (list_pretrained if args.pretrained else list_models)(args.pattern)
    if not names:
        raise ValueError(f"nothing matches {args.pattern!r}; `eqzoo list` shows all names")
    print("\n".join(names))


def predict(args: argparse.Namespace) -> None:
    """Prints what networks see in a picture and in its turned copies, a row a copy and a column a network."""
    models = [cast(EquivariantNet, create_model(name, pretrained=True)) for name in args.model]
    group = P4M if any(model.group.mirrors for model in models) else P4
    columns = [_view(model, _read(args.picture, model, args.invert), group) for model in models]
    rows = [["", *(column.name for column in columns)]]
    for g in group.elements:
        rows.append([_describe(group, g), *(column.answer(g) for column in columns)])
    rows.append(["largest change of a probability", *(f"{column.change:.1e}" for column in columns)])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@dataclass(frozen=True)
class _View:
    name: str
    labels: tuple[str, ...]
    probabilities: Tensor  # (elements, classes)

    def answer(self, g: int) -> str:
        value, place = self.probabilities[g].max(0)
        return f"{self.labels[int(place)]}  {100 * value:6.2f} %"

    @property
    def change(self) -> float:
        return (self.probabilities - self.probabilities[0]).abs().max().item()


def _read(path: str, model: EquivariantNet, invert: bool) -> Tensor:
    picture = load_picture(path, model.in_chans).double()
    return 255 - picture if invert else picture


@torch.no_grad()
def _view(model: EquivariantNet, picture: Tensor, group: Group) -> _View:
    cfg = model.pretrained_cfg
    _, *size = model.input_size
    copies = [preprocess(transform(picture, group, g, "trivial"), (size[0], size[1])) for g in group.elements]
    x = normalise(torch.stack(copies), cfg["mean"], cfg["std"], torch.float64)
    labels = cfg.get("label_names") or tuple(str(i) for i in range(model.num_classes))
    return _View(f"{cfg['architecture']}.{cfg['tag']}", tuple(labels), model.double().eval()(x).softmax(1))


def _describe(group: Group, g: int) -> str:
    turns, mirrored = group.quarter_turns(g)
    if not mirrored:
        return f"turned by {90 * turns} degrees" if turns else "as it is"
    return f"mirrored, turned by {90 * turns} degrees" if turns else "mirrored"
