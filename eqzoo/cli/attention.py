"""`eqzoo attention`: draws the attention of a layer."""

import argparse
from functools import partial
from pathlib import Path

import torch

from .._common import atomic
from ..data import load_image
from ..evaluation import Predictor
from ..groups import Z2, Group
from ..hub import WeightsNotFoundError
from ..models import EquivariantNet, OrbitNet
from ..models.load import load_network
from ..viz import attention, attention_layers, attention_maps
from ._answer import Answer, table
from ._images import NamedImage, copies_of

__all__ = ["run"]


def run(args: argparse.Namespace) -> Answer:
    """Draws the attention of a layer for an image and its rotated copies."""
    output = Path(args.output)
    _check_output(output)
    if args.dpi < 1:
        raise ValueError(f"--dpi counts pixels an inch, got {args.dpi}")
    model = _network(args)
    named, predictor = NamedImage(args.image, partial(load_image, args.image)), Predictor.of(model.double())
    pixels = copies_of(named.read(model.in_chans, args.invert), predictor, Z2)
    (image,) = predictor.normalized(pixels)
    group = None if args.group is None else _group(args.group)
    place = None if args.place is None else (args.place[0], args.place[1])
    seen = attention(model, image, args.layer, place, args.head, args.pose, group)
    figure = attention_maps(seen)
    atomic(output, lambda path: figure.savefig(path, format=output.suffix[1:].lower(), dpi=args.dpi))
    layers = list(attention_layers(model))
    shown = {
        "network": args.name,
        "trained": not args.untrained,
        "layer": seen.layer,
        "quantity": seen.quantity,
        "copies": [seen.group.describe(g) for g in seen.elements],
        "poses": seen.own.order,
        "equivariance_error": seen.error,
        "output": str(output),
    }
    rows = [
        ["layer", f"{seen.layer} ({layers.index(seen.layer) + 1} of {len(layers)} with attention)"],
        ["shows", seen.quantity],
        ["copies", ", ".join(seen.group.describe(g) for g in seen.elements)],
        ["equivariance error", f"{seen.error:.1e}"],
        ["wrote", str(output)],
    ]
    data = shown | {
        "layers": layers,
        "maps": [maps.tolist() for maps in seen.maps],
        "channels": [channels.tolist() for channels in seen.channels],
    }
    return Answer(table(rows, flexible={1}), data)


def _network(args: argparse.Namespace) -> EquivariantNet | OrbitNet:
    if args.checkpoint and args.untrained:
        raise ValueError("--checkpoint and --untrained exclude each other; give one of them")
    torch.manual_seed(0)
    try:
        if args.checkpoint:
            return load_network(args.checkpoint, args.name).network
        return load_network(args.name, pretrained=not args.untrained).network
    except WeightsNotFoundError as error:
        raise ValueError(
            f"give weights with --checkpoint FILE, or draw the attention of random ones with --untrained: {error}"
        ) from error


def _group(name: str) -> Group:
    try:
        return Group.from_name(name)
    except ValueError as error:
        raise ValueError(f"--group is the name of a group: {error}") from error


def _check_output(output: Path) -> None:
    """Raises before anything is computed, if the figure could not be written."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError(
            "figures are drawn by matplotlib, which is not installed: pip install 'eqzoo[viz]'"
        ) from error
    known = FigureCanvasBase.get_supported_filetypes()
    if output.suffix[1:].lower() not in known:
        raise ValueError(f"{output} has no ending of a figure that can be written, such as .png, .svg or .pdf")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"no folder {output.parent} to write {output.name} into")
