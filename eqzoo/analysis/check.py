"""Equivariance check of any network: of this package, of timm, or an ONNX file."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..equivariance import (
    element_errors,
    equivariance_report,
    group_layers,
    group_of,
    group_to_check,
    in_float64,
    is_subgroup,
    looks_untrained,
    randomize_norms,
    tensors_of,
    unwrapped,
    without_parallel,
)
from ..equivariance.untrained import deployed_parts
from ..export.onnx_file import OnnxFile
from ..groups import P4, Group
from ..models import EquivariantNet
from ..models.load import ModelSource, instantiate, is_own, load_network, resolve
from .diagnosis import diagnose, lost_elements, mixed_groups, other_laws, stride_mismatch, suspects
from .sizes import check_side

__all__ = ["EquivarianceCheck", "check_equivariance"]

# Round-off, amplified by the depth of a network: the largest over the zoo is 5e-11 in float64.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2}


@dataclass(frozen=True)
class EquivarianceCheck:
    """The equivariance errors of a network, and whether they are round-off.

    Args:
        subject: The network, by name or file.
        kind: ``"eqzoo"``, ``"timm"``, ``"onnx"`` or ``"module"``.
        group: The name of the group.
        image: The size of the input, ``(channels, height, width)``.
        precision: The number type of the computation.
        tolerance: The largest error that counts as exact.
        logits: For every element of the group on the pixel grid, in words, the relative error of the output,
            ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``.
        features: The same for the last features, where the network has fields of the group.
        worst_layer: The layer with the largest error of its own, and that error, where layers were measured.
        diagnosis: The layers that break equivariance: measured in networks of this package, else likely causes.
        notes: What else the reader should know.
    """

    subject: str
    kind: str
    group: str
    image: tuple[int, ...]
    precision: str
    tolerance: float
    logits: dict[str, float]
    features: dict[str, float]
    worst_layer: tuple[str, float] | None
    diagnosis: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def largest(self) -> float:
        """The largest of all errors."""
        layer = self.worst_layer[1] if self.worst_layer else 0.0
        return max([*self.logits.values(), *self.features.values(), layer])

    @property
    def exact(self) -> bool:
        """Whether all errors are round-off, up to the tolerance."""
        return self.largest <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """The report as plain types, for JSON."""
        return {**asdict(self), "largest": self.largest, "exact": self.exact}

    def __str__(self) -> str:
        sides = " x ".join(map(str, self.image))
        verdict = "is exactly equivariant under" if self.exact else "is NOT exactly equivariant under"
        columns = ["output" if self.kind == "module" else "logits", *["features"] * bool(self.features)]
        rows = [["", *columns]]
        identity = P4.describe(0)
        for element, error in self.logits.items():
            if element == identity:
                continue
            errors = [error, *([self.features[element]] if self.features else [])]
            rows.append([element, *(f"{value:.1e}" for value in errors)])
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        table = ["   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines = [f"{self.subject} {verdict} {self.group}", "", *table, ""]
        if self.worst_layer:
            lines.append(f"worst layer: {self.worst_layer[0]}, {self.worst_layer[1]:.1e}")
        lines.append(f"tolerance: {self.tolerance:.0e}, in {self.precision}, on images of {sides}")
        lines += [f"diagnosis: {cause}" for cause in self.diagnosis]
        return "\n".join([*lines, *self.notes])


def check_equivariance(
    source: str | os.PathLike[str] | nn.Module,
    group: Group | str | None = None,
    model: str | None = None,
    size: int | None = None,
    tolerance: float | None = None,
    pretrained: bool = False,
    seed: int = 0,
    randomize: bool | None = None,
) -> EquivarianceCheck:
    """Measures the equivariance error of a network, and diagnoses what breaks equivariance.

    Torch networks are measured in float64, ONNX files in their own precision. In an untrained network norms, biases and
    weights with one value everywhere are randomized first (`eqzoo.equivariance.randomize_norms`), because at their
    initial values they hide what training would break. A network that is given itself counts as untrained if all its
    norms have their initial values or, where it has none, if a tensor of its parameters has one value everywhere;
    ``randomize`` decides otherwise.

    Args:
        source: A name of this package, a checkpoint's folder or .safetensors file, an .onnx file, the name of a timm
            network, or a network.
        group: The group to check: a `Group`, or ``"p4"``, ``"p4m"``, ``"r2"``, ``"r2m"`` or ``"z2m"``. By default the
            network's own, where it has one with more than the identity, else p4.
        model: The name of the network that a .safetensors file without ``config.json`` is of.
        size: The side of the images, in pixels; by default the network's own.
        tolerance: The largest error that counts as exact; by default 1e-9 in float64, 1e-4 in float32 and 3e-2 in
            float16.
        pretrained: Whether to load weights, which must then be there, of a network that is given by name: those of a
            timm network may need the Hub. By default a network of this package has its weights if there are any, one of
            timm has none.
        seed: The seed of the random images, and of the weights of an untrained network.
        randomize: Whether norms, biases and constant weights are randomized; None for those of untrained networks.

    Raises:
        ValueError: If there is no such network, it does not map images to logits, it does not take the size, the group
            has no rotation or reflection of the pixel grid, the tolerance is no number from 0, ``model`` or
            ``pretrained`` is given with an ONNX file or a network itself, or ``randomize`` with an ONNX file.
        WeightsNotFoundError: If weights are asked for and found nowhere.
        FileNotFoundError: If there is no such file.
        ImportError: If the source is an ONNX file and ONNX Runtime is not installed.

    Example:
        >>> check_equivariance("p4_cnn").exact, check_equivariance("z2_cnn").exact
        (True, False)
    """
    asked = None if group is None else group_to_check(group)
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ValueError(f"the tolerance is a number from 0, the largest error that counts as exact; got {tolerance}")
    own_weights = isinstance(source, nn.Module) or Path(source).suffix.lower() == ".onnx"
    if own_weights and (model is not None or pretrained):
        what = "a network" if isinstance(source, nn.Module) else f"the ONNX file {source}"
        raise ValueError(f"{what} is checked with the weights that it has; leave model and pretrained out")
    if isinstance(source, nn.Module):
        source = without_parallel(source)
        trained = not looks_untrained(source)
        return _module(source, type(source).__name__, "module", asked, size, tolerance, seed, trained, randomize)
    text = os.fspath(source)
    if Path(text).suffix.lower() == ".onnx":
        if randomize is not None:
            raise ValueError(f"the ONNX file {source} is checked with the weights that it has; leave randomize out")
        return _onnx(Path(text), asked, size, tolerance, seed)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # the same random weights at every call; those of GPUs stay
        found = None if model else resolve(text)
        if found and not is_own(found.architecture):
            network, trained = _timm(found, pretrained)
            return _module(network, found.name, "timm", asked, size, tolerance, seed, trained, randomize)
        loaded = load_network(text, model, pretrained or None)
    return _module(loaded.network, loaded.name, "eqzoo", asked, size, tolerance, seed, loaded.trained, randomize)


def _timm(source: ModelSource, pretrained: bool) -> tuple[nn.Module, bool]:
    """The network, and whether it has weights."""
    trained = pretrained or bool(source.config)  # a checkpoint's folder or repo is named for its weights
    if pretrained and not source.has_weights:
        raise ValueError(f"timm has no weights of {source.name}; leave pretrained out")
    return instantiate(source, trained), trained


@torch.no_grad()
def _module(
    network: nn.Module,
    subject: str,
    kind: str,
    asked: Group | None,
    size: int | None,
    tolerance: float | None,
    seed: int,
    trained: bool,
    randomize: bool | None,
) -> EquivarianceCheck:
    own = group_of(network)
    notes = []
    if asked is None:
        promised = own is not None and len(own.grid_elements) > 1
        asked = cast(Group, own) if promised else P4
        if own is not None and not promised:
            notes.append(
                f"Its own group, {own.name}, has no rotation or reflection to check, so {asked.name} was checked."
            )
    if not asked.on_grid:
        notes.append(
            f"Of the {asked.order} elements of {asked.name}, those that map the pixel grid to itself were checked."
        )
    network = in_float64(network)
    if size and isinstance(network, EquivariantNet):
        check_side(subject, size, network)
    x = _images(network, size, seed)
    limit = _TOLERANCES[torch.float64] if tolerance is None else tolerance
    try:
        drawn = not trained if randomize is None else randomize
        plain = own is not None and not group_layers(network)
        if drawn and (plain or deployed_parts(network)):
            # As after `timm.utils.reparameterize_model`: norms of planes would get other values for each pose.
            why = "it has a group, but no layer that says how the group acts on them" if plain else "it is deployed"
            notes.append(
                f"Its norms and biases were left as they are: {why}. Fresh ones, of a network that is untrained, can "
                "hide what training breaks."
            )
        elif drawn:
            randomize_norms(network, torch.Generator().manual_seed(seed), x)
            notes.append(
                "Its norms, biases and constant weights were randomized, as asked."
                if randomize
                else "It is untrained: its weights are random, its norms and biases randomized."
            )
        _check_depends_on_image(network, x, torch.float64, subject)
    except (AssertionError, RuntimeError) as error:
        sides = " x ".join(map(str, x.shape[1:]))
        raise ValueError(f"{subject} takes no images of {sides} (channels, height, width): {error}") from error
    mixed, lost = mixed_groups(network, own), lost_elements(network, own, asked)
    try:
        report = equivariance_report(network, x, asked) if own is not None else None
    except ValueError:
        if not mixed + lost:
            raise
        report = None  # a layer does not take the fields of the network's group; its output is measured
        notes.append(f"Layers were not measured: {(mixed + lost)[0]}.")
    try:
        logits = report.logits if report else element_errors(network, x, asked)
    except RuntimeError as error:
        sides = " x ".join(map(str, x.shape[2:]))
        raise ValueError(
            f"{subject} takes images of {sides} (height, width), but not all that {asked.name} makes of them; check "
            f"r2, or square images by size ({error})"
        ) from error
    features = report.features if report else {}
    layers = report.layers if report else {}
    worst = max(layers.items(), key=lambda item: item[1], default=None)
    broken = max(logits.values()) > limit
    diagnosis: tuple[str, ...] = ()
    if broken:
        wrong = (f"the layer {name} has error {error:.1e}" for name, error in layers.items() if error > limit)
        diagnosis = (*mixed, *wrong)
    if broken and not diagnosis and own is not None and own.order > 1 and not is_subgroup(asked, own):
        diagnosis = (f"the network's group is {own.name}, and {asked.name} has elements that are not in it",)
    elif broken and not diagnosis:
        diagnosis = other_laws(network, x, asked, own, limit) or diagnose(network, x, asked)
        diagnosis = diagnosis or lost or suspects(network, layers)
    if not broken:
        parts = {f"the layer {name}": error for name, error in layers.items()}
        parts["the last features"] = max(features.values(), default=0.0)
        diagnosis = tuple(
            f"the output is exact; {part}, read by shape, has error {error:.1e}: transform_field of a layer or "
            "feature_field of a network says what else it is"
            for part, error in parts.items()
            if error > limit
        )
    if broken and kind == "timm":
        notes.append("Equivariant networks: eqzoo list 'p4*'.")
    return EquivarianceCheck(
        subject=subject,
        kind=kind,
        group=asked.name,
        image=tuple(x.shape[1:]),
        precision="float64",
        tolerance=limit,
        logits=_in_words(asked, logits),
        features=_in_words(asked, features),
        worst_layer=worst,
        diagnosis=diagnosis,
        notes=tuple(notes),
    )


def _images(network: nn.Module, size: int | None, seed: int) -> Tensor:
    network = unwrapped(network)
    cfg: Any = getattr(network, "pretrained_cfg", None) or {}
    shape = getattr(network, "input_size", None) or cfg.get("input_size")
    channels = getattr(network, "in_chans", None)
    if shape is None and size and channels:
        shape = (channels, size, size)
    if shape is None:
        missing = "set its input_size = (channels, height, width)" + ", or its in_chans" * bool(size)
        missing = "pass size=, the side of its images" if channels else missing
        raise ValueError(f"{type(network).__name__} has no input_size and no pretrained_cfg; {missing}")
    channels, *sides = (*shape[:1], size, size) if size else shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, channels, *sides), generator=generator, dtype=torch.float64, device="cpu")


def _check_depends_on_image(function: Callable[[Tensor], Any], x: Tensor, precision: torch.dtype, subject: str) -> None:
    """Raises ValueError for an output that hardly depends on the image, which any rotation leaves unchanged."""
    try:
        outputs = [[y.flatten() for y in tensors_of(function(z))] for z in (x, x.square())]
    except TypeError as error:
        raise ValueError(f"{subject} cannot be checked: {error}") from error
    if not all(outputs):
        raise ValueError(f"{subject} cannot be checked: its output has no tensor")
    first, other = map(torch.cat, outputs)
    change = ((first - other).norm() / first.norm()).item()
    if change <= 10 * _TOLERANCES[precision]:
        raise ValueError(
            f"the output of {subject} hardly depends on the image (another image changes it by {change:.1e}), so its "
            "output for a rotated image proves nothing; check a trained network"
        )


def _in_words(group: Group, errors: dict[int, float]) -> dict[str, float]:
    return {group.describe(g): error for g, error in errors.items()}


def _onnx(path: Path, asked: Group | None, size: int | None, tolerance: float | None, seed: int) -> EquivarianceCheck:
    file = OnnxFile(path)
    notes = []
    if asked is None:
        own = _of_grid(file.metadata.get("group", ""))
        asked = own or P4
        if own is None:
            notes.append("Its metadata names no group with rotations of the pixel grid, so p4 was checked.")
    shape, batch, channels_last = _image_shape(file, path, size)
    if shape[1] != shape[2] and asked.rotations == 4:
        asked = Group(2, asked.reflections)
        notes.append(f"Its images are not square, so rotations by 90° were left out, and {asked.name} was checked.")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, *shape, generator=generator, dtype=torch.float32, device="cpu")

    def run(images: Tensor) -> list[Tensor]:
        try:
            found = [y.double() for y in file.run(images.movedim(1, -1) if channels_last else images)]
        except Exception as error:  # ONNX Runtime has errors of its own
            raise ValueError(f"{path} does not run on images of {' x '.join(map(str, shape))}: {error}") from error
        return [y.movedim(-1, 1) if channels_last and y.ndim == 4 else y for y in found]

    limit = _TOLERANCES[file.dtype] if tolerance is None else tolerance
    _check_depends_on_image(run, x, file.dtype, str(path))
    logits = element_errors(run, x, asked)
    return EquivarianceCheck(
        subject=str(path),
        kind="onnx",
        group=asked.name,
        image=shape,
        precision=str(file.dtype).removeprefix("torch."),
        tolerance=limit,
        logits=_in_words(asked, logits),
        features={},
        worst_layer=None,
        diagnosis=_diagnose_onnx(path) if max(logits.values()) > limit else (),
        notes=tuple(notes),
    )


def _of_grid(name: str) -> Group | None:
    """The elements of a named group that map the pixel grid to itself; None if there is no rotation or reflection."""
    try:
        found = Group.from_name(name).of_grid
    except ValueError:
        return None
    return found if found.order > 1 else None


def _image_shape(file: OnnxFile, path: Path, size: int | None) -> tuple[tuple[int, int, int], int, bool]:
    """Channels, height and width of what a file takes, the batch to feed, and whether channels come last."""
    if len(file.input_shape) != 4:
        raise ValueError(f"{path} takes {file.input_shape}, which is not a batch of images")
    batch, *rest = file.input_shape
    channels_last = rest[2] in (1, 3, 4) and rest[0] not in (1, 3, 4)
    channels, *sides = [rest[2], *rest[:2]] if channels_last else rest
    told = _told_shape(file.metadata.get("input_size", "[null, null, null]"), path)
    known = [channels or told[0], *(have or size or said for have, said in zip(sides, told[1:], strict=True))]
    if known[0] is None:
        raise ValueError(
            f"{path} takes images of {file.input_shape}, any number of channels, and has no metadata that says which; "
            "export it with a fixed number of channels"
        )
    if None in known:
        raise ValueError(f"{path} takes images of {file.input_shape}; give their side with --size")
    if size and known[1:] != [size, size]:
        raise ValueError(f"{path} takes images of {known[1]} x {known[2]} pixels alone, not of {size}")
    return (known[0], known[1], known[2]), batch or 2, channels_last


def _told_shape(text: str, path: Path) -> list[Any]:
    """Channels, height and width in a file's metadata, each None where it does not say it."""
    try:
        told: Any = json.loads(text)
    except ValueError:
        told = None
    if isinstance(told, list) and len(told) == 3 and all(n is None or (type(n) is int and n > 0) for n in told):
        return told
    raise ValueError(f"{path}: input_size in its metadata is [channels, height, width], got {text!r}")


def _diagnose_onnx(path: Path) -> tuple[str, ...]:
    """Likely causes that can be read from the graph: strides that do not end at the edge, asymmetric padding."""
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    shapes = {
        value.name: [side.dim_value for side in value.type.tensor_type.shape.dim]
        for value in [*model.graph.value_info, *model.graph.input]
    }
    strides, pads = [], []
    for node in model.graph.node:
        if node.op_type not in ("Conv", "MaxPool", "AveragePool"):
            continue
        has = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        padding = has.get("pads", [0, 0, 0, 0])
        side, kernel = (shapes.get(node.input[0]) or [0])[-1], has.get("kernel_shape", [1])[-1]
        name = node.name or node.output[0]
        if len(set(padding)) > 1:
            pads.append(f"{name}, {padding}")
        elif side:
            said = stride_mismatch(
                side, kernel, has.get("strides", [1])[-1], padding[-1], has.get("dilations", [1])[-1]
            )
            strides += [f"{name}, {said}"] if said else []
    found = {"strided windows that do not end at the edge": strides, "asymmetric padding": pads}
    causes = tuple(
        f"likely {kind}: {len(nodes)} layers, the first {nodes[0]}" for kind, nodes in found.items() if nodes
    )
    return causes or ("likely filters or position embeddings: all strides and paddings are symmetric",)
