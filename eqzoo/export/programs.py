"""Export of networks to files that run without this package: ONNX, or torch's .pt2.

The exported form has plain convolutions with all transformed filters stored, and batch norms folded into them. A file
is checked against the network under a temporary name and renamed only if it passes.
"""

import copy
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from .._common import __version__, atomic, interleaved_times, network_name
from ..equivariance import element_errors, in_float64, without_parallel
from ..models import EquivariantNet, OrbitNet
from ..models.builder import per_channel
from ..models.canonical import group_of_sides
from ..models.load import weights_file
from ..ops import use_backend
from .onnx_file import OnnxFile, need_onnx, write_onnx

_BATCHES = (1, 3, 5)
# Round-off of float32 is about 1e-7 and grows with depth; the tolerance is at least _OVER_TORCH times torch's own.
_TOLERANCE = 1e-4
_OVER_TORCH = 10.0


class ExportError(RuntimeError):
    """An exported file does not agree with its network; the message says where.

    No file is written, and an existing one stays.
    """


@dataclass(frozen=True)
class ExportReport:
    """An exported file and the results of its checks.

    Args:
        path: The file.
        size: Its size, in bytes.
        image: The input size, ``(channels, height, width)``; the batch size is dynamic.
        group: The name of the group.
        operators: The number of nodes of each operator.
        difference: ``‖file − network‖ / ‖network‖``, the largest over batches of 1, 3 and 5, with the network in
            float64.
        equivariance: ``‖file(g x) − file(x)‖ / ‖file(x)‖`` for each element that maps the pixel grid onto itself.
        tolerance: The upper bound of the two.
        folding: The relative difference in float64 that folding the batch norms makes.
        seconds: The median time of a batch of 1, in seconds: of the network (``"network"``), of the network without
            this package's kernels (``"eager"``), and of the file (``"file"``).
        threads: The number of threads in these measurements.
        metadata: The metadata in the file.
    """

    path: str
    size: int
    image: tuple[int, int, int]
    group: str
    operators: dict[str, int]
    difference: float
    equivariance: dict[int, float]
    tolerance: float
    folding: float
    seconds: dict[str, float]
    threads: int
    metadata: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain types, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        operators = ", ".join(f"{name} {count}" for name, count in self.operators.items())
        channels, height, width = self.image
        rows = {
            "file": f"{self.path}, {self.size / 1e6:.2f} MB",
            "images": f"{channels} x {height} x {width}, any batch size",
            "operators": f"{sum(self.operators.values())}: {operators}",
            "difference": f"{self.difference:.1e} from the network in float64, at batches of 1, 3 and 5",
            "equivariance": f"{max(self.equivariance.values()):.1e} over the {len(self.equivariance)} elements of "
            f"{self.group} on the grid",
            "tolerance": f"{self.tolerance:.1e}",
            "batch norms": f"folded, a change of {self.folding:.1e} in float64" if self.folding else "none to fold",
            "an image takes": f"{1e3 * self.seconds['file']:.2f} ms, the network in torch "
            f"{1e3 * self.seconds['network']:.2f} ms, without kernels {1e3 * self.seconds['eager']:.2f} ms "
            f"({self.threads} thread{'s' * (self.threads != 1)})",
        }
        if count := self.metadata.get("irreps"):
            rows["through irreps"] = f"{count} convolutions; irreps=False, --no-irreps, writes plain ones"
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}   {text}" for name, text in rows.items())


def export_onnx(
    model: nn.Module, path: str | Path, opset: int = 18, size: int | tuple[int, int] | None = None, irreps: bool = True
) -> ExportReport:
    """Exports a network to a single ONNX file, in float32, with standard operators and a dynamic batch size.

    Before the file is renamed into place it is checked: by the ONNX checker, and in ONNX Runtime against the network at
    batches of 1, 3 and 5 and for equivariance under each element of the group that maps the pixel grid onto itself.
    The input is ``image``, normalized images; the output is ``logits``. The metadata contain the classes, mean and
    standard deviation, input size, group, and the SHA-256 of the weights.

    Args:
        model: A network of this package; it is not changed.
        path: The file to write, ``*.onnx``; an existing one is replaced.
        opset: The ONNX opset version, 18 to 23.
        size: The side of the images, or height and width, in pixels; by default the network's own.
        irreps: Whether group convolutions of many fields are written through the irreps of the group, which is
            faster on a CPU; otherwise all are plain convolutions, as `quantize_onnx` needs them.

    Returns:
        The results of the checks.

    Raises:
        ValueError: If the model is not a network of this package, the exporter does not write the opset, or the size
            breaks the equivariance.
        ImportError: If the packages of ``eqzoo[export]`` are not installed.
        ExportError: If the file does not agree with the network.

    Example:
        >>> import tempfile, eqzoo
        >>> folder = tempfile.TemporaryDirectory()
        >>> report = eqzoo.export_onnx(eqzoo.create_model("p4_cnn", pretrained=True), f"{folder.name}/p4_cnn.onnx")
        >>> report.operators["Conv"], max(report.equivariance.values()) < 1e-5
        (7, True)
    """
    path = target(path, ".onnx")
    need_onnx("onnx", "onnxruntime", "onnxscript")
    network = _Network.of(model, size, torch.float32)
    return atomic(path, partial(_write_onnx, network, path, opset, irreps))


def export_pt2(model: nn.Module, path: str | Path, size: int | tuple[int, int] | None = None) -> ExportReport:
    """Exports a network to a program of torch operators, which `torch.export.load` reads without this package.

    The file is checked as in `export_onnx`. The data type is that of the network; the metadata are in an extra file
    ``eqzoo.json`` inside.

    Args:
        model: A network of this package; it is not changed.
        path: The file to write, ``*.pt2``; an existing one is replaced.
        size: The side of the images, or height and width, in pixels; by default the network's own.

    Returns:
        The results of the checks.

    Raises:
        ValueError: If the model is not a network of this package, or the size breaks its equivariance.
        ExportError: If the file does not agree with the network.

    Example:
        >>> import tempfile, eqzoo
        >>> folder = tempfile.TemporaryDirectory()
        >>> report = eqzoo.export_pt2(eqzoo.create_model("p4_cnn", pretrained=True), f"{folder.name}/p4_cnn.pt2")
        >>> torch.export.load(report.path).module()(torch.zeros(7, 1, 28, 28)).shape
        torch.Size([7, 10])
    """
    path = target(path, ".pt2")
    network = _Network.of(model, size, next(model.parameters()).dtype)
    return atomic(path, partial(_write_pt2, network, path))


def metadata(model: EquivariantNet | OrbitNet, size: tuple[int, int] | None = None) -> dict[str, str]:
    """The metadata of an exported network: strings, with lists as JSON.

    Args:
        model: The network.
        size: Height and width of the images, in pixels; by default those of the network's input size.
    """
    cfg = _configuration(model, size)
    labels = cfg.get("label_names") or ()
    entries = {
        "architecture": network_name(model),
        "tag": cfg.get("tag") or "",
        "classes": list(labels) if len(labels) == model.num_classes else [str(i) for i in range(model.num_classes)],
        "mean": _each(cfg["mean"], model.in_chans),
        "std": _each(cfg["std"], model.in_chans),
        "input_size": [model.in_chans, *(size or cfg["input_size"][1:])],
        "interpolation": cfg.get("interpolation") or "bicubic",
        "crop_pct": cfg.get("crop_pct") or 1.0,
        "group": model.group.name,
        "weights_sha256": weights_sha256(model),
        "eqzoo_version": __version__,
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in entries.items()}


def _configuration(model: EquivariantNet | OrbitNet, size: Any) -> dict[str, Any]:
    """The configuration of a network; of one that was built by its class, images that are not normalized."""
    cfg: dict[str, Any] | None = getattr(model, "pretrained_cfg", None)
    if cfg is not None:
        return cfg
    if size is None:
        raise ValueError(
            f"a {type(model).__name__} that eqzoo.create_model did not build has no image size of its own; give size"
        )
    return {"mean": (0.0,), "std": (1.0,)}


def weights_sha256(model: nn.Module) -> str:
    """The SHA-256 of the weights as a safetensors file without metadata, in the types that the network has."""
    return hashlib.sha256(weights_file(model.state_dict())).hexdigest()


@dataclass(frozen=True)
class _Network:
    """A network, its exported program, and its logits for five noise images."""

    model: EquivariantNet | OrbitNet  # with the data type of the file
    program: torch.export.ExportedProgram
    images: Tensor
    expected: Tensor  # in float64
    folding: float
    metadata: dict[str, str]

    @staticmethod
    @torch.no_grad()
    def of(model: nn.Module, size: int | tuple[int, int] | None, dtype: torch.dtype) -> "_Network":
        model = without_parallel(model)
        if not isinstance(model, EquivariantNet | OrbitNet):
            raise ValueError(
                f"only networks of this package, subclasses of EquivariantNet, can be exported, got "
                f"{type(model).__name__}; torch.onnx.export writes others, and eqzoo.check_equivariance checks the file"
            )
        cfg = _configuration(model, size)
        sides = (size, size) if isinstance(size, int) else size or tuple(cfg["input_size"][1:])
        about = metadata(model, sides)
        double = cast(EquivariantNet, in_float64(model)).to(memory_format=torch.contiguous_format)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(max(_BATCHES), model.in_chans, *sides, generator=generator, dtype=torch.float64)
        expected = torch.cat([double(image) for image in images.split(1)])
        if not expected.isfinite().all() or expected.norm() == 0:
            raise ValueError("the network's logits are zero or not finite, so a file cannot be compared with them")
        # Filters and norms are computed in float64 and rounded once.
        deployed = reparameterize_model(double)
        has_norms = any(isinstance(module, nn.BatchNorm2d) for module in deployed.modules())
        folded = _fold_norms(deployed, _program(deployed, images)) if has_norms else deployed
        folding = 0.0 if folded is deployed else _distance(folded(images[:1]), deployed(images[:1]))
        own = copy.deepcopy(double).to(dtype)
        return _Network(own, _program(folded.to(dtype), images.to(dtype)), images.to(dtype), expected, folding, about)

    def report(
        self, path: Path, size: int, function: Callable[[Tensor], Tensor], operators: Counter[str]
    ) -> ExportReport:
        """Compares the written file with the network; raises ExportError if they differ."""
        # One image at a time: the larger networks take gigabytes for each.
        rounding = _distance(torch.cat([self.model(x) for x in self.images.split(1)]), self.expected)
        tolerance = max(_TOLERANCE, _OVER_TORCH * rounding)
        difference = max(_distance(function(self.images[:n]), self.expected[:n]) for n in _BATCHES)
        one = self.images[:1]
        group = group_of_sides(self.model.group, one.shape[2], one.shape[3])
        equivariance = element_errors(function, one, group)
        # A network that is approximate on the pixel grid, such as one with strides, may be exported too.
        allowed = {g: tolerance + error for g, error in element_errors(self.model, one, group).items()}
        if difference > tolerance:
            raise ExportError(f"{path} would differ from the network by {difference:.1e}, more than {tolerance:.1e}")
        broken = [g for g, error in equivariance.items() if error > allowed[g]]
        if broken:
            raise ExportError(
                f"{path} would not be equivariant under elements {broken} of {group.name}: {equivariance}"
            )
        seconds = latencies({"network": self.model, "eager": use_backend("eager")(self.model), "file": function}, one)
        return ExportReport(
            path=str(path),
            size=size,
            image=(one.shape[1], one.shape[2], one.shape[3]),
            group=group.name,
            operators=dict(operators.most_common()),
            difference=difference,
            equivariance=equivariance,
            tolerance=tolerance,
            folding=self.folding,
            seconds=seconds,
            threads=torch.get_num_threads(),
            metadata=self.metadata,
        )


@torch.no_grad()
def _write_onnx(network: _Network, path: Path, opset: int, irreps: bool, temporary: Path) -> ExportReport:
    operators = write_onnx(network.program, temporary, opset, network.metadata, irreps)
    file = OnnxFile(temporary)
    return replace(network.report(path, temporary.stat().st_size, file, operators), metadata=file.metadata)


@torch.no_grad()
def _write_pt2(network: _Network, path: Path, temporary: Path) -> ExportReport:
    with temporary.open("wb") as file:
        torch.export.save(network.program, file, extra_files={"eqzoo.json": json.dumps(network.metadata)})
    with temporary.open("rb") as file:
        program = torch.export.load(file)
    calls = (node.target for node in program.graph.nodes if node.op == "call_function")
    operators = Counter(str(getattr(target, "overloadpacket", target)).removeprefix("aten.") for target in calls)
    return network.report(path, temporary.stat().st_size, program.module(), operators)


def _program(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    # Two images, because the exporter specializes a batch of 1.
    return torch.export.export(model, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))


def _fold_norms(model: nn.Module, program: torch.export.ExportedProgram) -> nn.Module:
    """Folds each batch norm into the convolution before it, if nothing else uses that convolution's output."""
    aten = torch.ops.aten
    owner = {
        name: parameter.rpartition(".")[0] for name, parameter in program.graph_signature.inputs_to_parameters.items()
    }
    pairs: list[tuple[str, str]] = []
    for norm in program.graph.nodes:
        conv = norm.args[0] if norm.target is aten.batch_norm.default else None
        if conv is None or conv.target is not aten.conv2d.default or len(conv.users) > 1:
            continue
        first, second = (owner.get(str(node.args[1])) for node in (conv, norm))
        # A parameter with several users is one of a layer that is called more than once.
        if first and second and all(len(node.args[1].users) == 1 for node in (conv, norm)):
            pairs.append((first, second))
    if not pairs:
        return model
    folded = copy.deepcopy(model)
    for first, second in pairs:
        layers = cast(nn.Conv2d, folded.get_submodule(first)), cast(nn.BatchNorm2d, folded.get_submodule(second))
        folded.set_submodule(first, fuse_conv_bn_eval(*layers))
        folded.set_submodule(second, getattr(layers[1], "act", nn.Identity()))  # timm's norms have an activation
    return folded


def _distance(y: Tensor, expected: Tensor) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


def latencies(functions: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor) -> dict[str, float]:
    """The median times of functions, in seconds: of up to 29 interleaved runs, or of those of about two seconds."""
    steps = {name: partial(function, x) for name, function in functions.items()}
    # The first run of each allocates memory and is left out.
    times = interleaved_times(steps, rounds=29, warm_up=1, at_most=2.0)
    return {name: statistics.median(measured) for name, measured in times.items()}


def _each(values: Sequence[float], channels: int) -> list[float]:
    """A mean or standard deviation for each channel; one value stands for all."""
    return list(per_channel(values, channels)) * (channels if len(values) == 1 else 1)


def target(path: str | Path, *suffixes: str) -> Path:
    """The path of a file to be written, with one of the suffixes and in a folder that there is."""
    path = Path(path)
    if path.suffix not in suffixes:
        raise ValueError(f"the name of the file ends in {' or '.join(suffixes)}, got {path}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} for {path.name}; create it first")
    return path
