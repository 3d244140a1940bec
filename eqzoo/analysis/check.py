"""Equivariance check of any network: of this package, of timm, or an ONNX file."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..equivariance import (
    EquivarianceReport,
    element_errors,
    equivariance_report,
    group_layers,
    group_of,
    group_to_check,
    in_float64,
    is_subgroup,
    looks_untrained,
    noise_images,
    randomize_norms,
    tensors_of,
    without_parallel,
)
from ..equivariance.untrained import deployed_parts
from ..export.onnx_file import OnnxFile
from ..groups import P4, Group
from ..models import EquivariantNet
from ..models.load import instantiate, is_own, load_network, resolve
from .diagnosis import diagnose, diagnose_onnx, other_groups, suspects
from .sizes import check_side

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
            ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``, or relative to its change for another image where that is smaller.
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
        usual = self.tolerance <= _TOLERANCES[getattr(torch, self.precision)]
        verdict = "exactly equivariant" if usual else f"equivariant up to {self.tolerance:.0e}"
        measured = Group.from_name(self.group).of_grid.name
        under = measured + (f", of its group {self.group}" if measured != self.group else "")
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
        lines = [f"{self.subject} is {'' if self.exact else 'NOT '}{verdict} under {under}", "", *table, ""]
        if self.worst_layer:
            lines.append(f"worst layer: {self.worst_layer[0]}, {self.worst_layer[1]:.1e}")
        lines.append(f"tolerance: {self.tolerance:.0e}, in {self.precision}, on images of {sides}")
        lines += [f"diagnosis: {cause}" for cause in self.diagnosis]
        return "\n".join([*lines, *self.notes])


@torch.no_grad()
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
        ValueError: If there is no such network, it does not take the size, its output hardly depends on the image, the
            group has no rotation or reflection of the pixel grid, or an argument is given that does not apply to the
            source.
        WeightsNotFoundError: If weights are asked for and found nowhere.
        FileNotFoundError: If there is no such file.
        ImportError: If the source is an ONNX file and ONNX Runtime is not installed.

    Example:
        >>> check_equivariance("p4_cnn").exact, check_equivariance("z2_cnn").exact
        (True, False)
    """
    asked = None if group is None else group_to_check(group)
    file = Path("" if isinstance(source, nn.Module) else source)
    is_onnx = file.suffix.lower() == ".onnx"
    has_weights = is_onnx or isinstance(source, nn.Module)
    if (has_weights and (model is not None or pretrained)) or (is_onnx and randomize is not None):
        raise ValueError("networks and ONNX files have their weights: leave model, pretrained and randomize out")
    if is_onnx:
        return _check_onnx(file, asked, size, tolerance, seed)
    network, subject, kind, trained = _network_of(source, model, pretrained, seed)
    own = group_of(network)
    to_check, notes = _group_of_check(own, asked)
    network = in_float64(network)
    if size and isinstance(network, EquivariantNet):
        check_side(subject, size, network)
    x = noise_images(network, torch.Generator().manual_seed(seed), size)
    try:
        if not trained if randomize is None else randomize:
            notes.append(_randomize(network, own, x, seed, bool(randomize)))
        _check_depends_on_image(network, x, torch.float64, subject)
    except (AssertionError, RuntimeError) as error:
        sides = " x ".join(map(str, x.shape[1:]))
        raise ValueError(f"{subject} takes no images of {sides} (channels, height, width): {error}") from error
    report = _measure(network, x, to_check, own, notes)
    limit = _TOLERANCES[torch.float64] if tolerance is None else tolerance
    broken = max(report.logits.values()) > limit
    if broken and kind == "timm":
        notes.append("Equivariant networks: eqzoo list 'p4*'.")
    return EquivarianceCheck(
        subject=subject,
        kind=kind,
        group=to_check.name,
        image=tuple(x.shape[1:]),
        precision="float64",
        tolerance=limit,
        logits=_described(to_check, report.logits),
        features=_described(to_check, report.features),
        worst_layer=max(report.layers.items(), key=lambda item: item[1], default=None),
        diagnosis=_diagnose(network, x, own, report, limit) if broken else _diagnose_parts(report, limit),
        notes=tuple(notes),
    )


def _network_of(
    source: str | os.PathLike[str] | nn.Module, model: str | None, pretrained: bool, seed: int
) -> tuple[nn.Module, str, str, bool]:
    """The network of a source, what it is called, its kind, and whether it is trained."""
    if isinstance(source, nn.Module):
        network = without_parallel(source)
        return network, type(network).__name__, "module", not looks_untrained(network)
    text = os.fspath(source)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # the same random weights at every call; those of GPUs stay
        found = None if model else resolve(text)
        if found and not is_own(found.architecture):
            trained = pretrained or bool(found.config)  # a checkpoint's folder or repo is named for its weights
            return instantiate(found, trained), found.name, "timm", trained
        loaded = load_network(text, model, pretrained or None)
        return loaded.network, loaded.name, "eqzoo", loaded.trained


def _group_of_check(own: Group | None, asked: Group | None) -> tuple[Group, list[str]]:
    """The group to check: as asked, or the network's own, or p4; and what the reader should know of it."""
    notes = []
    group = asked or own or P4
    if len(group.grid_elements) < 2:
        notes.append(f"Its own group, {group.name}, has no rotation or reflection to check, so p4 was checked.")
        group = P4
    if not group.on_grid:
        notes.append(
            f"Of the {group.order} elements of {group.name}, those that map the pixel grid to itself were checked."
        )
    return group, notes


def _randomize(network: nn.Module, own: Group | None, x: Tensor, seed: int, asked: bool) -> str:
    """Randomizes norms, biases and constant weights in place, where it is known how the group acts on them."""
    plain = own is not None and not group_layers(network)
    if plain or deployed_parts(network):
        # As after `timm.utils.reparameterize_model`: norms of planes would get other values for each pose.
        why = "it has a group, but no layer that says how the group acts on them" if plain else "it is deployed"
        return (
            f"Its norms and biases were left as they are: {why}. Fresh ones, of a network that is untrained, can hide "
            "what training breaks."
        )
    randomize_norms(network, torch.Generator().manual_seed(seed), x)
    if asked:
        return "Its norms, biases and constant weights were randomized, as asked."
    return "It is untrained: its weights are random, its norms and biases randomized."


def _measure(network: nn.Module, x: Tensor, group: Group, own: Group | None, notes: list[str]) -> EquivarianceReport:
    """The errors of output, features and layers; of the output alone where a layer does not take its input's fields."""
    try:
        if own is not None:
            try:
                return equivariance_report(network, x, group, other=x.square())
            except ValueError:
                if not (others := other_groups(network, own, group)):
                    raise
                notes.append(f"Layers were not measured: {others[0]}.")
        return EquivarianceReport(group, element_errors(network, x, group, other=x.square()), {}, {})
    except RuntimeError as error:
        sides = " x ".join(map(str, x.shape[2:]))
        raise ValueError(
            f"the network takes images of {sides} (height, width), but not all that {group.name} makes of them; check "
            f"r2, or square images by size ({error})"
        ) from error


def _diagnose(
    network: nn.Module, x: Tensor, own: Group | None, report: EquivarianceReport, limit: float
) -> tuple[str, ...]:
    """What breaks the equivariance of the output."""
    group = report.group
    others = other_groups(network, own, group)
    wrong = [f"the layer {name} has error {error:.1e}" for name, error in report.layers.items() if error > limit]
    if wrong or (others and "equal order" in others[0]):
        return (*others, *wrong)
    if own is not None and own.order > 1 and not is_subgroup(group, own):
        return (f"the network's group is {own.name}, and {group.name} has elements that are not in it",)
    return diagnose(network, x, group) or others or suspects(network, report.layers)


def _diagnose_parts(report: EquivarianceReport, limit: float) -> tuple[str, ...]:
    """The layers and features that are not equivariant as fields of their shape, where the output is."""
    parts = {f"the layer {name}": error for name, error in report.layers.items()}
    parts["the last features"] = max(report.features.values(), default=0.0)
    return tuple(
        f"the output is exact; {part}, read by shape, has error {error:.1e}: a method transform_field of the layer or "
        "feature_field of the network says how the group acts on it"
        for part, error in parts.items()
        if error > limit
    )


def _check_depends_on_image(function: Callable[[Tensor], Any], x: Tensor, precision: torch.dtype, subject: str) -> None:
    """Raises ValueError for an output that hardly depends on the image, which any rotation leaves unchanged."""
    first, other = (torch.cat([y.flatten() for y in tensors_of(function(z))]) for z in (x, x.square()))
    change = ((first - other).norm() / first.norm()).item()
    if change <= 10 * _TOLERANCES[precision]:
        raise ValueError(
            f"the output of {subject} hardly depends on the image (another image changes it by {change:.1e}), so its "
            "output for a rotated image proves nothing; check a trained network"
        )


def _described(group: Group, errors: dict[int, float]) -> dict[str, float]:
    return {group.describe(g): error for g, error in errors.items()}


def _check_onnx(
    path: Path, asked: Group | None, size: int | None, tolerance: float | None, seed: int
) -> EquivarianceCheck:
    file = OnnxFile(path)
    named = None if asked else file.metadata.get("group")
    group, notes = _group_of_check(Group.from_name(named) if named else None, asked)
    shape, batch, channels_last = _image_shape(file, path, size)
    if shape[1] != shape[2] and group.of_grid.rotations == 4:
        group = Group(2, group.reflections)
        notes.append(f"Its images are not square, so rotations by 90° were left out, and {group.name} was checked.")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, *shape, generator=generator, dtype=torch.float32, device="cpu")

    def run(images: Tensor) -> list[Tensor]:
        found = [y.double() for y in file.run(images.movedim(1, -1) if channels_last else images)]
        return [y.movedim(-1, 1) if channels_last and y.ndim == 4 else y for y in found]

    limit = _TOLERANCES[file.dtype] if tolerance is None else tolerance
    _check_depends_on_image(run, x, file.dtype, str(path))
    logits = element_errors(run, x, group, other=x.square())
    fed = (batch, *shape[1:], shape[0]) if channels_last else (batch, *shape)
    return EquivarianceCheck(
        subject=str(path),
        kind="onnx",
        group=group.name,
        image=shape,
        precision=str(file.dtype).removeprefix("torch."),
        tolerance=limit,
        logits=_described(group, logits),
        features={},
        worst_layer=None,
        diagnosis=diagnose_onnx(path, fed) if max(logits.values()) > limit else (),
        notes=tuple(notes),
    )


def _image_shape(file: OnnxFile, path: Path, size: int | None) -> tuple[tuple[int, int, int], int, bool]:
    """Channels, height and width of what a file takes, the batch to feed, and whether channels come last."""
    if len(file.input_shape) != 4:
        raise ValueError(f"{path} takes {file.input_shape}, which is not a batch of images")
    batch, *rest = file.input_shape
    channels_last = rest[2] in (1, 3, 4) and rest[0] not in (1, 3, 4)
    channels, *sides = [rest[2], *rest[:2]] if channels_last else rest
    stored = json.loads(file.metadata.get("input_size", "[null, null, null]"))
    known = [channels or stored[0], *(have or size or side for have, side in zip(sides, stored[1:], strict=True))]
    if None in known or (size and known[1:] != [size, size]):
        raise ValueError(f"{path} takes images of {file.input_shape}, not of size={size}; give their side with --size")
    return (known[0], known[1], known[2]), batch or 2, channels_last
