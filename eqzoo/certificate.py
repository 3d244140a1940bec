"""The certificate of exactness: does turning the picture leave the answer of a network as it is, and if not, why.

It takes any network: one of this package, trained or not, a checkpoint of one, an ONNX file, a network of timm's.
"""

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from .equivariance import element_errors, equivariance_report, randomise_norms
from .groups import P4, P4M, Z2M, Group, cyclic, dihedral
from .models import EquivariantNet, list_models
from .onnx_file import OnnxFile
from .reasons import find_reasons, misses_the_edge
from .sizes import check_side
from .sources import load_network

__all__ = ["CHECKED_GROUPS", "Certificate", "certify"]

CHECKED_GROUPS = {group.name: group for group in (cyclic(2), P4, Z2M, dihedral(2), P4M)}
# Rounding, amplified by the depth of a network: the largest over the zoo is 5e-11 in float64.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2}


@dataclass(frozen=True)
class Certificate:
    """What was measured, and the verdict.

    Args:
        subject: The network, by name or file.
        kind: ``"eqzoo"``, ``"timm"``, ``"onnx"`` or ``"module"``.
        group: The group that was asked for, by name.
        picture: The pictures that it was fed, ``(channels, height, width)``.
        precision: The type of the numbers it computed with.
        tolerance: What an error has to stay under.
        logits: For every element of the group on the pixel grid, in words, the relative error of the output,
            ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``.
        features: The same for the last features, where the network has fields of the group.
        worst_layer: The layer with the largest error of its own, and that error, where layers were measured.
        reasons: What breaks the group, if something does.
        notes: What else the reader should know.
    """

    subject: str
    kind: str
    group: str
    picture: tuple[int, ...]
    precision: str
    tolerance: float
    logits: dict[str, float]
    features: dict[str, float]
    worst_layer: tuple[str, float] | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def largest(self) -> float:
        """The largest of all errors."""
        layer = self.worst_layer[1] if self.worst_layer else 0.0
        return max([*self.logits.values(), *self.features.values(), layer])

    @property
    def exact(self) -> bool:
        """Whether all errors are those of rounding."""
        return self.largest <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """The certificate as plain types, for JSON."""
        return {**asdict(self), "largest": self.largest, "exact": self.exact}

    def __str__(self) -> str:
        sides = " x ".join(map(str, self.picture))
        verdict = "is exact for" if self.exact else "is NOT exact for"
        columns = ["logits", *["features"] * bool(self.features)]
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
        lines.append(f"tolerance: {self.tolerance:.0e}, in {self.precision}, on pictures of {sides}")
        lines += [f"why: {reason}" for reason in self.reasons]
        return "\n".join([*lines, *self.notes])


def certify(
    source: str | os.PathLike[str] | nn.Module,
    group: Group | str | None = None,
    model: str | None = None,
    size: int | None = None,
    tolerance: float | None = None,
    pretrained: bool = False,
    seed: int = 0,
) -> Certificate:
    """Measures how exactly a network keeps a group, and says why not if it does not.

    Torch networks are measured in float64, ONNX files as they are. A network that is not trained gets norms and biases
    as if it were, because fresh ones hide what training would break.

    Args:
        source: A name of this package, a checkpoint's folder or .safetensors file, an .onnx file, the name of a
            network of timm's, or a network.
        group: The group to ask for: a `Group`, or ``"p4"``, ``"p4m"``, ``"r2"``, ``"r2m"`` or ``"z2m"``. By default
            the network's own, where it has one with more than the identity, and p4 else.
        model: The name of the network that a .safetensors file without ``config.json`` is of.
        size: The side of the pictures, in pixels; by default the network's own.
        tolerance: What an error has to stay under; by default 1e-9 in float64, 1e-4 in float32 and 3e-2 in float16.
        pretrained: Whether to load the weights of a network of timm's, which may need the Hub.
        seed: The seed of the pictures of noise, and of the weights of a network that is not trained.

    Raises:
        ValueError: If nothing is called so, it does not map pictures to answers, or it does not take the size.
        FileNotFoundError: If there is no such file.
        ImportError: If the source is an ONNX file and ONNX Runtime is not installed.

    Example:
        >>> certify("p4_cnn").exact, certify("z2_cnn").exact
        (True, False)
    """
    asked = _group(group)
    if isinstance(source, nn.Module):
        return _module(source, type(source).__name__, "module", asked, size, tolerance, seed)
    text = os.fspath(source)
    if Path(text).suffix == ".onnx":
        return _onnx(Path(text), asked, size, tolerance, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same random weights whenever it is asked
        if _is_timms(text):
            network = timm.create_model(text, pretrained=pretrained)
            return _module(network, text, "timm", asked, size, tolerance, seed, trained=pretrained)
        loaded = load_network(text, model)
    return _module(loaded.network, loaded.name, "eqzoo", asked, size, tolerance, seed, loaded.trained)


def _group(group: Group | str | None) -> Group | None:
    if isinstance(group, str):
        if group not in CHECKED_GROUPS:
            raise ValueError(f"the group to check is one of {', '.join(CHECKED_GROUPS)}; got {group!r}")
        return CHECKED_GROUPS[group]
    return group


def _is_timms(text: str) -> bool:
    """Whether timm alone has a network of this name; where neither has, timm's near names are named."""
    path = Path(text)
    if ":" in text or os.sep in text or path.suffix == ".safetensors" or path.exists():
        return False
    name = text.partition(".")[0]
    if name in list_models():
        return False
    if timm.is_model(name):
        return True
    near = get_close_matches(name, timm.list_models(), n=5)  # ours are among them
    raise ValueError(
        f"nothing is called {text!r}: not a network here or of timm's{', near it are ' * bool(near)}{', '.join(near)}; "
        "and no folder, .safetensors file or .onnx file"
    )


@torch.no_grad()
def _module(
    network: nn.Module,
    subject: str,
    kind: str,
    asked: Group | None,
    size: int | None,
    tolerance: float | None,
    seed: int,
    trained: bool = True,
) -> Certificate:
    own = getattr(network, "group", None)
    notes = []
    if asked is None:
        promised = own is not None and len(own.grid_elements) > 1
        asked = cast(Group, own) if promised else P4
        if own is not None and not promised:
            notes.append(f"It promises {own.name} alone, which has no turn to check, so it is asked for {asked.name}.")
    if not asked.on_grid:
        notes.append(f"{asked.name} has {asked.order} elements, of which those that keep the pixel grid are checked.")
    network = copy.deepcopy(network).to("cpu", torch.float64).eval()
    if size and isinstance(network, EquivariantNet):
        check_side(subject, size, network)
    x = _pictures(network, size, seed)
    if not trained:
        _randomise(network, torch.Generator().manual_seed(seed), x)
        notes.append("Its weights are random, and norms and biases drawn as if trained.")
    limit = _TOLERANCES[torch.float64] if tolerance is None else tolerance
    _must_look(_answer(network), x, limit, subject)
    report = equivariance_report(network, x, asked) if own is not None else None
    logits = report.logits if report else element_errors(_answer(network), x, asked)
    features = report.features if report else {}
    layers = report.layers if report else {}
    worst = max(layers.items(), key=lambda item: item[1], default=None)
    broken = max(logits.values()) > limit
    reasons: tuple[str, ...] = ()
    if broken and layers:
        reasons = tuple(f"the layer {name} changes by {error:.1e}" for name, error in layers.items() if error > limit)
    elif broken and own is not None and own.order > 1:
        reasons = (f"its group is {own.name}, and {asked.name} asks for more",)
    elif broken:
        reasons = find_reasons(network, x, asked) or (
            "layers that mix places in a fixed order, such as a linear layer behind a flattened picture",
        )
    if broken and kind == "timm":
        notes.append("Networks that pass: eqzoo list 'p4*'.")
    return Certificate(
        subject=subject,
        kind=kind,
        group=asked.name,
        picture=tuple(x.shape[1:]),
        precision="float64",
        tolerance=limit,
        logits=_in_words(asked, logits),
        features=_in_words(asked, features),
        worst_layer=worst,
        reasons=reasons,
        notes=tuple(notes),
    )


def _pictures(network: nn.Module, size: int | None, seed: int) -> Tensor:
    cfg: Any = getattr(network, "pretrained_cfg", None) or {}
    shape = getattr(network, "input_size", None) or cfg.get("input_size")
    if shape is None:
        raise ValueError(f"{type(network).__name__} does not say which pictures it takes; check it from a name")
    channels, *sides = shape
    generator = torch.Generator().manual_seed(seed)
    count = 2 if isinstance(network, EquivariantNet) else 1
    return torch.randn(count, channels, *([size, size] if size else sides), generator=generator, dtype=torch.float64)


def _answer(network: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = network(x)
        if not isinstance(y, Tensor):
            raise ValueError(f"{type(network).__name__} gives a {type(y).__name__}, not one answer for each picture")
        return y

    return run


def _randomise(network: nn.Module, generator: torch.Generator, x: Tensor) -> None:
    """Makes a fresh network look trained: no weights that are all zero, as some classifiers have at first."""
    for parameter in network.parameters():
        if parameter.ndim > 1 and not parameter.any():
            parameter.normal_(std=0.02, generator=generator)
    randomise_norms(network, generator, x)


def _must_look(function: Callable[[Tensor], Tensor], x: Tensor, limit: float, subject: str) -> None:
    """Raises for an answer that hardly depends on the picture, which no turn could change."""
    first, other = function(x), function(x.square())
    change = ((first - other).norm() / first.norm()).item()
    if change <= 10 * limit:
        raise ValueError(
            f"{subject} answers alike whatever the picture (another one changes the answer by {change:.1e}), so its "
            "answer to a turned picture proves nothing; check a network that is trained"
        )


def _in_words(group: Group, errors: dict[int, float]) -> dict[str, float]:
    return {group.describe(g): error for g, error in errors.items()}


def _onnx(path: Path, asked: Group | None, size: int | None, tolerance: float | None, seed: int) -> Certificate:
    file = OnnxFile(path)
    notes = []
    if asked is None:
        own = CHECKED_GROUPS.get(file.metadata.get("group", ""))
        asked = own or P4
        if own is None:
            notes.append("It does not name a group with turns on the grid, so it is asked for p4.")
    shape, batch, channels_last = _picture_shape(file, path, size)
    x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)

    def run(pictures: Tensor) -> Tensor:
        y = file(pictures.movedim(1, -1) if channels_last else pictures).double()
        return y.movedim(-1, 1) if channels_last and y.ndim == 4 else y

    limit = _TOLERANCES[file.dtype] if tolerance is None else tolerance
    _must_look(run, x, limit, str(path))
    logits = element_errors(run, x, asked)
    return Certificate(
        subject=str(path),
        kind="onnx",
        group=asked.name,
        picture=shape,
        precision=str(file.dtype).removeprefix("torch."),
        tolerance=limit,
        logits=_in_words(asked, logits),
        features={},
        worst_layer=None,
        reasons=_onnx_reasons(path) if max(logits.values()) > limit else (),
        notes=tuple(notes),
    )


def _picture_shape(file: OnnxFile, path: Path, size: int | None) -> tuple[tuple[int, int, int], int, bool]:
    """Channels, height and width of what a file takes, the batch to feed, and whether channels come last."""
    if len(file.input_shape) != 4:
        raise ValueError(f"{path} takes {file.input_shape}, which is no batch of pictures")
    batch, *rest = file.input_shape
    channels_last = rest[2] in (1, 3, 4) and rest[0] not in (1, 3, 4)
    channels, *sides = [rest[2], *rest[:2]] if channels_last else rest
    told = json.loads(file.metadata.get("input_size", "[null, null, null]"))
    known = [channels or told[0], *(have or size or said for have, said in zip(sides, told[1:], strict=True))]
    if None in known:
        raise ValueError(f"{path} takes pictures of {file.input_shape}; say how large with --size")
    if size and known[1:] != [size, size]:
        raise ValueError(f"{path} takes pictures of {known[1]} x {known[2]} pixels alone, not of {size}")
    return (known[0], known[1], known[2]), batch or 2, channels_last


def _onnx_reasons(path: Path) -> tuple[str, ...]:
    """What can be read from the graph: steps that miss the edge, and paddings that differ."""
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    shapes = {
        value.name: [side.dim_value for side in value.type.tensor_type.shape.dim]
        for value in [*model.graph.value_info, *model.graph.input]
    }
    steps, pads = [], []
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
            said = misses_the_edge(
                side, kernel, has.get("strides", [1])[-1], padding[-1], has.get("dilations", [1])[-1]
            )
            steps += [f"{name}, {said}"] if said else []
    found = {"steps that miss the edge": steps, "padding that is larger at one end": pads}
    known = tuple(f"{kind}: {len(nodes)} of them, the first {nodes[0]}" for kind, nodes in found.items() if nodes)
    return known or ("filters or positions: its steps and paddings are alike from every side",)
