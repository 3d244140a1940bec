"""Exported ONNX files with weights and features of 8 bits, which stay exactly equivariant.

Sums of integers are the same in any order, so a convolution of 8-bit numbers gives a rotated image the rotated
features, bit for bit, where float32 leaves round-off. It holds as long as no sum in float32 is rounded to 8 bits again.
"""

import copy
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._common import atomic
from ..equivariance import element_errors
from ..groups import Group
from ..models.canonical import group_of_sides
from .onnx_file import OnnxFile, need_onnx, quiet
from .onnx_filters import expand_filters, replace_all, store_filters_once
from .programs import ExportError, latencies, target

_QUANTIZED = ("Conv", "Relu", "Add", "MaxPool", "Concat", "Reshape", "Transpose")
# They only move and compare numbers, or sum integers, and so rotate with their input bit for bit.
_EXACT = frozenset(("QuantizeLinear", "DequantizeLinear", "ReduceMax", "Slice", "Split", "Identity", *_QUANTIZED))
_PERCENTILE = 99.99  # of a feature's values are in its range; the range of all of them has coarser steps
_BATCH = 8  # images whose features are in memory together
_LAST = 0.25  # of the convolutions may be among the last layers, which stay in float32
_OVER_USUAL = 10.0  # times the largest normalized pixel: those in 0 to 255 are about 90 times as large
_CHECKED = 32  # images that the equivariance is checked with
_TOLERANCE = 1e-5  # round-off of the last layers, in float32, is about 1e-7; one step of 8 bits is 4e-3


@dataclass(frozen=True)
class QuantizationReport:
    """A file with 8-bit weights and features, and how it differs from the float32 file.

    Args:
        path: The file.
        size: Its size, in bytes.
        float_size: The size of the float32 file.
        images: The number of images that the ranges were measured on.
        same_class: The share of these images that both files give the same class, in [0, 1]; None for a network of
            fewer than two classes.
        difference: ``‖file − float32 file‖ / ‖float32 file‖`` of their outputs.
        group: The name of the group.
        equivariance: ``‖file(g x) − file(x)‖ / ‖file(x)‖`` for each element that maps the pixel grid onto itself.
        operators: The number of nodes of each operator.
        seconds: The median time of a batch of 1, in seconds: of the file (``"file"``) and of the float32 file
            (``"float32"``).
        threads: The number of threads in these measurements.
    """

    path: str
    size: int
    float_size: int
    images: int
    same_class: float | None
    difference: float
    group: str
    equivariance: dict[int, float]
    operators: dict[str, int]
    seconds: dict[str, float]
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """The report as plain types, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        error = max(self.equivariance.values())
        elements = len(self.equivariance)
        images = "the image" if self.images == 1 else f"the {self.images} images"
        rows = {
            "file": f"{self.path}, {self.size / 1e6:.2f} MB, in float32 {self.float_size / 1e6:.2f} MB",
            "numbers": "weights of 7 bits, stored in 8, features of 8 bits, sums of 32 bits",
            "difference": f"{self.difference:.1e} from the output in float32, for {images}",
        }
        if self.same_class is not None:
            rows["same class"] = f"for {100 * self.same_class:.1f} % of {images}, as in float32"
        if elements > 1:
            size = "0, bit for bit," if error == 0 else f"{error:.1e}"
            rows["equivariance"] = f"{size} over the {elements} elements of {self.group} on the grid"
        rows["an image takes"] = (
            f"{1e3 * self.seconds['file']:.2f} ms, in float32 {1e3 * self.seconds['float32']:.2f} ms "
            f"({self.threads} thread{'s' * (self.threads != 1)})"
        )
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}   {text}" for name, text in rows.items())


def quantize_onnx(source: str | Path, images: Tensor, path: str | Path) -> QuantizationReport:
    """Writes an exported ONNX file anew with weights and features of 8 bits, for ONNX Runtime.

    A feature x becomes the integer ``q = round(x / s) + z`` in 0 to 255, which stands for ``s (q − z)``. The step s and
    the zero z of each layer are chosen so that 99.99 % of its values on ``images`` are in the range. Weights have a
    step for each output channel and 7 bits, so that sums of products do not overflow on processors without VNNI
    instructions. Average pooling and norms become convolutions of each channel. The classifier and the mean before it
    stay in float32.

    The file stays equivariant: sums of integers do not depend on the order, and the poses of a filter have the same
    steps. So networks of convolutions, norms and pooling can be quantized: `p4_cnn`, the All-CNNs, the ResNets without
    attention, the DenseNets. Networks of attention, and squeeze and excitation, are refused: their sums in float32
    would be rounded to 8 bits again, and a rotated image would sometimes round to the next step.

    Args:
        source: The file that `export_onnx` wrote with ``irreps=False``, in float32.
        images: Images as the network will see them, normalized, ``(n, channels, height, width)``; 100 are enough.
        path: The file to write, ``*.onnx``; an existing one is replaced.

    Returns:
        How the file differs from the float32 file, on ``images``. Evaluate it on images with labels as well.

    Raises:
        FileNotFoundError: If there is no such file or no folder to write to.
        ValueError: If the file is not one of `export_onnx` with ``irreps=False``, has been quantized already, or the
            images do not suit it.
        ImportError: If the packages of ``eqzoo[export]`` are not installed.
        ExportError: If the network would not stay equivariant.

    References:
        Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference (Jacob et al.,
        2018), equation 1 https://arxiv.org/abs/1712.05877

    Example:
        >>> import tempfile, eqzoo
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = eqzoo.create_model("p4_cnn", pretrained=True)
        >>> exported = eqzoo.export_onnx(model, f"{folder.name}/p4_cnn.onnx", irreps=False)
        >>> images = torch.rand(32, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        >>> report = eqzoo.quantize_onnx(exported.path, images, f"{folder.name}/p4_cnn_int8.onnx")
        >>> max(report.equivariance.values()), report.size < exported.size
        (0.0, True)
    """
    need_onnx("onnx", "onnxruntime")
    path = target(path, ".onnx")
    before = OnnxFile(source)
    refused = {"quantized": "has been quantized already", "irreps": "has group convolutions through irreps"}
    what = next((text for key, text in refused.items() if key in before.metadata), None)
    if what or not {"group", "eqzoo_version"} <= before.metadata.keys():
        raise ValueError(
            f"{source} {what or 'was not written by eqzoo'}; give the float32 file that eqzoo.export_onnx wrote with "
            "irreps=False"
        )
    images = _suitable(images, before, source)
    return atomic(path, partial(_write, Path(source), before, images, path))


def _suitable(images: Tensor, file: OnnxFile, source: str | Path) -> Tensor:
    """The images in float32; raises ValueError unless they are normalized and finite."""
    largest = images.abs().max().item()
    mean, std = (json.loads(file.metadata[key]) for key in ("mean", "std"))
    usual = max(max(m, 1 - m) / s for m, s in zip(mean, std, strict=True))
    if not largest <= _OVER_USUAL * usual:  # nor is NaN
        raise ValueError(
            f"images are normalized, as the network takes them: (pixel / 255 − mean) / std, of magnitudes up to "
            f"{usual:.3g} for {source}; got {largest:.3g}; eqzoo.data.normalize does it"
        )
    return images.detach().cpu().float()


def _write(source: Path, before: OnnxFile, images: Tensor, path: Path, temporary: Path) -> QuantizationReport:
    import onnx

    model = onnx.load(source)
    expand_filters(model)
    _as_convolutions(model)
    for i, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{i}"
    last = {node.name: operators for node, operators in _float_operators(model) if operators}
    convolutions = [node.name for node in model.graph.node if node.op_type == "Conv"]
    if len(last.keys() & set(convolutions)) > _LAST * len(convolutions):
        raise ExportError(_refusal(path, set().union(*last.values())))
    _quantize(model, images, list(last), temporary)
    written = onnx.load(temporary)
    if rounded := [found for node, found in _float_operators(written) if node.op_type == "QuantizeLinear" and found]:
        raise ExportError(_refusal(path, set().union(*rounded)))
    del written.metadata_props[:]
    onnx.helper.set_model_props(written, before.metadata | {"quantized": "int8"})
    operators = Counter(node.op_type for node in written.graph.node)
    store_filters_once(written, Group.from_name(before.metadata["group"]))
    onnx.checker.check_model(written, full_check=True)
    temporary.write_bytes(written.SerializeToString())
    after = OnnxFile(temporary)
    some = images[:: max(1, len(images) // _CHECKED)][:_CHECKED]
    group = group_of_sides(Group.from_name(before.metadata["group"]), some.shape[2], some.shape[3])
    equivariance = element_errors(after, some, group)
    allowed = element_errors(before, some, group)  # more than round-off in networks that are approximate on the grid
    if any(error > _TOLERANCE + allowed[g] for g, error in equivariance.items()):
        raise ExportError(f"{path} would not be equivariant under {group.name}: {equivariance}; keep the float32 file")
    expected, found = (torch.cat([file(part) for part in images.split(_BATCH)]) for file in (before, after))
    classes = len(json.loads(before.metadata["classes"]))
    return QuantizationReport(
        path=str(path),
        size=temporary.stat().st_size,
        float_size=source.stat().st_size,
        images=len(images),
        same_class=(expected.argmax(1) == found.argmax(1)).double().mean().item() if classes > 1 else None,
        difference=((found - expected).norm() / expected.norm()).item(),
        group=group.name,
        equivariance=equivariance,
        operators=dict(operators.most_common()),
        seconds=latencies({"file": after, "float32": before}, images[:1]),
        threads=torch.get_num_threads(),
    )


def _refusal(path: Path, operators: set[str]) -> str:
    return (
        f"{path} would not stay equivariant: between its convolutions this network computes "
        f"{', '.join(sorted(operators))} in float32, with another round-off for a rotated image, and the results would "
        "be rounded to 8 bits again; int8 is for networks of convolutions, norms and pooling, so keep the float32 file"
    )


def _float_operators(model: Any) -> Iterator[tuple[Any, set[str]]]:
    """Each node, with the operators among it and those before it that have round-off in float32."""
    of_value: dict[str, set[str]] = {}
    for node in model.graph.node:  # in an order in which inputs come first
        found = set().union(*(of_value.get(name, ()) for name in node.input)) | ({node.op_type} - _EXACT)
        of_value.update(dict.fromkeys(node.output, found))
        yield node, found


def _as_convolutions(model: Any) -> None:
    """Replaces average pooling without padding, and batch norms, by convolutions of each channel, in place.

    Their sums are then of integers too.
    """
    import numpy as np
    from onnx import helper, numpy_helper, shape_inference

    constants = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    graph = shape_inference.infer_shapes(model).graph
    shapes = {
        value.name: [side.dim_value for side in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.input)
    }
    nodes = list(model.graph.node)
    for i, node in enumerate(nodes):
        given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        shape = shapes.get(node.input[0], []) if node.input else []
        plain = len(shape) == 4 and not any(given.get("pads", ())) and not given.get("ceil_mode")
        if node.op_type == "AveragePool" and plain:
            kernel = given["kernel_shape"]
            weights = np.full((shape[1], 1, *kernel), 1 / np.prod(kernel))
            bias = np.zeros(shape[1])
        elif node.op_type == "BatchNormalization" and len(shape) == 4 and constants.keys() >= set(node.input[1:5]):
            weight, shift, mean, variance = (constants[name].astype(np.float64) for name in node.input[1:5])
            scale = weight / np.sqrt(variance + given.get("epsilon", 1e-5))
            weights, bias, kernel = scale.reshape(-1, 1, 1, 1), shift - mean * scale, [1, 1]
        else:
            continue
        names = [f"{node.output[0]}_of_each_channel_{part}" for part in ("weight", "bias")]
        for name, values in zip(names, (weights, bias), strict=True):
            model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
        strides = given.get("strides", [1, 1])
        nodes[i] = helper.make_node(
            "Conv",
            [node.input[0], *names],
            [node.output[0]],
            name=node.name,
            kernel_shape=kernel,
            strides=strides,
            group=len(bias),
        )
    replace_all(model.graph.node, nodes)
    used = {name for node in nodes for name in node.input}
    replace_all(model.graph.initializer, [each for each in model.graph.initializer if each.name in used])


def _quantize(model: Any, images: Tensor, last: list[str], path: Path) -> None:
    """Measures the ranges of features on images and writes the quantized file; the ``last`` nodes stay in float32."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    reader = _Images(model.graph.input[0].name, images)
    with quiet():
        quantize_static(
            copy.deepcopy(model),  # it moves the weights to a temporary file
            path,
            reader,
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(_QUANTIZED),
            nodes_to_exclude=last,
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.Percentile,
            extra_options={"CalibPercentile": _PERCENTILE, "CalibStridedMinMax": 1},
        )


class _Images:
    """Batches of images, as ONNX Runtime's calibration reads them: those of a range, until there are no more."""

    def __init__(self, name: str, images: Tensor) -> None:
        self._name, self._batches = name, images.split(_BATCH)
        self.set_range(0, len(self))

    def __len__(self) -> int:
        return len(self._batches)

    def set_range(self, start_index: int, end_index: int) -> None:
        """The batches that come next."""
        self._next: Iterator[Tensor] = iter(self._batches[start_index:end_index])

    def get_next(self) -> dict[str, Any] | None:
        """The next batch, or None after the last."""
        batch = next(self._next, None)
        return None if batch is None else {self._name: batch.numpy()}
