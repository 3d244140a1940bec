"""The commands behind `eqzoo`; each takes the parsed arguments and prints."""

import argparse
import json
import sys
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .certificate import certify
from .convert import convert as convert_weights
from .data import load_picture, normalise, preprocess
from .export import ExportError, export_onnx, export_pt2
from .groups import P4, P4M, Group, transform
from .models import EquivariantNet, create_model, list_models, list_pretrained
from .sources import load_network

__all__ = ["check", "convert", "export", "list", "predict"]


def check(args: argparse.Namespace) -> int:
    """Prints the certificate of a network; 0 if it is exact, 1 if not."""
    certificate = certify(args.source, args.group, args.model, args.size, args.tolerance, args.pretrained)
    print(json.dumps(certificate.as_dict(), indent=2) if args.json else certificate)
    return 0 if certificate.exact else 1


def export(args: argparse.Namespace) -> int:
    """Writes a network to a file and prints what was checked; 1 if the file would be wrong."""
    source = load_network(args.source, args.model)
    if not source.trained and not args.untrained:
        raise ValueError(
            f"{source.name} has no published weights, and random ones are hardly wanted; give a checkpoint's folder or "
            "file, or add --untrained"
        )
    try:
        if args.output.endswith(".pt2"):
            report = export_pt2(source.network, args.output, args.size)
        elif args.output.endswith(".onnx"):
            report = export_onnx(source.network, args.output, args.opset, args.size)
        else:
            raise ValueError(f"the file to write ends in .onnx or .pt2, got {args.output}")
    except ExportError as error:
        print(f"eqzoo export: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return 0


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
        rows.append([group.describe(g), *(column.answer(g) for column in columns)])
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
