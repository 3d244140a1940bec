"""`eqzoo export`: writes a network as ONNX or as a torch program."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..data import preprocess
from ..data.images import normalized
from ..export.programs import ExportError, ExportReport, export_onnx, export_pt2, target
from ..export.quantization import QuantizationReport, quantize_onnx
from ..models import EquivariantNet, OrbitNet
from ..models.load import load_network, resolve
from ._answer import Answer
from ._images import named_images

_IMAGES = 128  # that the ranges of features are measured on


def run(args: argparse.Namespace) -> Answer:
    """Writes and checks a file; the exit code is 1 where the network cannot be exported correctly."""
    if args.untrained and (args.model or resolve(args.source).config):
        raise ValueError(
            f"{args.source} is a checkpoint with weights of its own; leave --untrained out, or name a network"
        )
    output = target(args.output, ".onnx", ".pt2")  # before anything is computed
    if output.suffix == ".pt2" and (args.int8 or args.opset or not args.irreps):
        raise ValueError(
            f"--int8, --opset and --no-irreps are of ONNX files, and {output} is a torch program; leave them out"
        )
    source = load_network(args.source, args.model, pretrained=False if args.untrained else None)
    if not source.trained and not args.untrained:
        raise ValueError(
            f"{source.name} has no published weights; give a checkpoint's folder or file, or add --untrained to export "
            "random weights"
        )
    report: ExportReport | QuantizationReport
    try:
        if output.suffix == ".pt2":
            report = export_pt2(source.network, output, args.size)
        elif args.int8:
            batch = _read(source.network, args.int8, args.size)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "float32.onnx"
                exported = export_onnx(source.network, file, args.opset or 18, args.size, irreps=False)
                report = quantize_onnx(exported.path, batch, output)
        else:
            report = export_onnx(source.network, output, args.opset or 18, args.size, args.irreps)
    except ExportError as error:
        return Answer(f"not written: {error}", {"written": False, "reason": str(error)}, 1)
    return Answer(str(report), report.as_dict())


def _read(network: EquivariantNet | OrbitNet, images: Sequence[str], size: int | None) -> Tensor:
    """Up to 128 of the images, evenly among them, as the network sees them."""
    found = named_images(images)
    sides = (size, size) if size else network.input_size[1:]
    views, errors = list[Tensor](), list[str]()
    count = min(len(found), _IMAGES)
    for image in (found[i * len(found) // count] for i in range(count)):
        try:
            views.append(preprocess(image.read(network.in_chans).double(), (sides[0], sides[1])))
        except (OSError, ValueError) as error:
            errors.append(str(error))
    if not views:
        raise ValueError(f"none of {count} images can be read: {errors[0]}")
    if errors:
        print(f"eqzoo: {len(errors)} of {count} images cannot be read and are left out: {errors[0]}", file=sys.stderr)
    cfg = network.pretrained_cfg
    return normalized(torch.stack(views), cfg["mean"], cfg["std"], torch.float32)
