"""`eqzoo attention`: draws the attention of a layer."""

import argparse
from functools import partial
from pathlib import Path

import torch

from .._common import atomic
from ..data import load_image
from ..evaluation import Predictor
from ..groups import Z2
from ..models.load import load_network
from ..viz import attention, attention_layers, attention_maps
from ._answer import Answer, table
from ._images import NamedImage, copies_of


def run(args: argparse.Namespace) -> Answer:
    """Draws the attention of a layer for an image and its rotated copies."""
    output = Path(args.output)
    torch.manual_seed(0)
    source, name = (args.checkpoint, args.name) if args.checkpoint else (args.name, None)
    model = load_network(source, name, pretrained=None if args.checkpoint else not args.untrained).network
    named, predictor = NamedImage(args.image, partial(load_image, args.image)), Predictor.of(model.double())
    pixels = copies_of(named.read(model.in_chans, args.invert), predictor, Z2)
    (image,) = predictor.normalized(pixels)
    place = None if args.place is None else (args.place[0], args.place[1])
    seen = attention(model, image, args.layer, place, args.head, args.pose, args.group)
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
    return Answer(table(rows, flexible=1), data)
