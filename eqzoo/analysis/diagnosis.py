"""Diagnosis of networks that are not equivariant: strides, padding, filters, position embeddings, groups."""

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..equivariance import element_errors, group_layers, is_subgroup
from ..groups import Group, transform

_POSITIONS = ("pos_embed", "position", "rel_pos", "pos_emb", "pos_bias")
_TOLERANCE = 1e-6  # a smaller relative change, in float64, is none


@torch.no_grad()
def diagnose(model: nn.Module, x: Tensor, group: Group) -> tuple[str, ...]:
    """Looks for layers that break the equivariance of a network that is not equivariant by construction.

    A layer is applied on its own to a rotated input, so what is found is a likely cause, not a proven one.

    Args:
        model: The network, in evaluation mode and float64.
        x: A batch of images, ``(B, C, height, width)``.
        group: The group.

    Returns:
        A sentence for each kind of cause, with the number of layers and the first of them.

    Example:
        >>> conv = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1)).double()
        >>> from eqzoo.groups import P4
        >>> for cause in diagnose(conv, torch.rand(1, 1, 8, 8, dtype=torch.float64), P4):
        ...     print(cause)
        likely strided windows that do not end at the edge: 0, on 8 pixels a 3 x 3 window with stride 2 ends 1 before
            the edge, exact on 7 or 9
        likely filters that are not symmetric: 0, a rotation changes them by ...
    """
    found: dict[str, list[str]] = {}
    for name, (module, value) in _leaves(model, x).items():
        for kind, text in _of_layer(module, value, group):
            found.setdefault(kind, []).append(f"{name}, {text}")
    for name, module in model.named_modules():
        if reason := getattr(module, "breaks_group", None):
            found.setdefault("layers that end a group", []).append(f"{name}, {reason}")
    layers = tuple(f"{name}." for name in group_layers(model))
    for name, parameter in model.named_parameters():
        if any(word in name for word in _POSITIONS) and not name.startswith(layers):  # those of layers are relative
            shape = " x ".join(map(str, parameter.shape))
            found.setdefault("learned position embeddings", []).append(f"{name}, {shape}")
    return tuple(_sentence(kind, layers) for kind, layers in found.items())


def other_groups(network: nn.Module, own: Group | None, group: Group) -> tuple[str, ...]:
    """The first layer whose group breaks what is checked, in words.

    It has another group than the network (or, without one, than the first layer) of equal order, so that shapes do not
    tell, or it lacks elements that are checked.

    Args:
        network: The network.
        own: Its group, or None.
        group: The group that is checked.
    """
    layers = group_layers(network)
    first, (_, of_first) = next(iter(layers.items()), ("", (network, None)))
    reference, whose = (own, "the network") if own else (of_first, f"the layer {first}")
    for name, (module, its) in layers.items():
        text = f"the layer {name} ({type(module).__name__}) has the group {its.name}"
        if reference is not None and its != reference and its.order == reference.order > 1:
            return (f"{text} and {whose} {reference.name}, of equal order; fields of two groups do not mix",)
        if (own is None or its != own) and not is_subgroup(group, its, on_grid=True):
            hint = f"; check it with group={its.name!r}" if its.of_grid.order > 1 else ""
            return (f"{text}, which has not all elements of {group.name}{hint}",)
    return ()


def suspects(network: nn.Module, layers: Collection[str]) -> tuple[str, ...]:
    """What is left to suspect of a network whose measured layers are exact.

    Args:
        network: The network.
        layers: The names of the layers that were measured, those that have a group.
    """
    if not layers:
        return ("likely layers that mix pixels in a fixed order, such as a linear layer after a flattened image",)
    measured = tuple(f"{layer}." for layer in layers)
    others = [
        f"{name} ({type(module).__name__})"
        for name, module in network.named_modules()
        if not list(module.children()) and not f"{name}.".startswith(measured) and list(module.state_dict())
    ]
    where = f"likely one of the others: {', '.join(others[:5])}" if others else "likely what forward does between them"
    return (
        f"the layers that have a group are exact, each on its own; {where}; or the output is no map or invariant "
        "vector, which a method transform_field(value, element) of the network says",
    )


def stride_mismatch(side: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> str | None:
    """How a strided window misses the edge, so that it samples other pixels after a rotation; None if it does not.

    Args:
        side: The side of the input, in pixels.
        kernel: The side of the window, in taps.
        stride: Its stride, in pixels.
        padding: The zeros added to each side, in pixels.
        dilation: The step between taps, in pixels.

    Example:
        >>> stride_mismatch(32, 3, 2, 1)
        'on 32 pixels a 3 x 3 window with stride 2 ends 1 before the edge, exact on 31 or 33'
        >>> stride_mismatch(33, 3, 2, 1) is None
        True
    """
    rest = (side + 2 * padding - dilation * (kernel - 1) - 1) % stride
    if not rest:
        return None
    return (
        f"on {side} pixels a {kernel} x {kernel} window with stride {stride} ends {rest} before the edge, exact on "
        f"{side - rest} or {side - rest + stride}"
    )


def _of_layer(module: nn.Module, x: Tensor, group: Group) -> Iterator[tuple[str, str]]:
    # An in-place activation has overwritten the input that was kept; the others also take tokens and scores, whose last
    # two axes are not an image.
    skipped = isinstance(module, nn.Linear | nn.LayerNorm | nn.Softmax) or getattr(module, "inplace", False)
    if skipped or not _is_field(x):
        return
    try:
        y = module(x)
        error = max(element_errors(module, x, group).values()) if _is_field(y) and y.any() else 0.0
    except Exception:  # it takes no rotated input, as a layer on channels that come last
        return
    if error > _TOLERANCE:
        kinds = dict([*_of_window(module, x), *_of_filters(module, group)])
        yield from (kinds or {"layers that are not equivariant": f"a {type(module).__name__}, by {error:.1e}"}).items()


def _of_window(module: nn.Module, x: Tensor) -> Iterator[tuple[str, str]]:
    """What is wrong with a sliding window: its padding, or its stride along the width."""
    names = ("kernel_size", "stride", "padding", "dilation")
    values = [getattr(module, name, 1 if name == "dilation" else None) for name in names]
    along_width = (value[-1] if isinstance(value, tuple | list) else value for value in values)
    numbers = [number for number in along_width if isinstance(number, int)]
    if len(numbers) < len(names):
        return
    kernel, stride, padding, dilation = numbers
    if type(module).__name__.endswith("Same"):  # timm's name for TensorFlow's padding
        if stride > 1:
            yield "asymmetric padding", f"a {type(module).__name__} with stride {stride}"
    elif mismatch := stride_mismatch(x.shape[-1], kernel, stride, padding, dilation):
        yield "strided windows that do not end at the edge", mismatch


def _of_filters(module: nn.Module, group: Group) -> Iterator[tuple[str, str]]:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 4 or weight.shape[-1] != weight.shape[-2]:
        return
    rotated = [transform(weight, group, g, "trivial") for g in group.grid_elements]
    change = max(((other - weight).norm() / weight.norm()).item() for other in rotated)
    if change > _TOLERANCE:
        yield "filters that are not symmetric", f"a rotation changes them by {change:.1e}"


def _leaves(model: nn.Module, x: Tensor) -> dict[str, tuple[nn.Module, Tensor]]:
    """The layers without sub-layers, each with the input of its first call in the network."""
    kept: dict[str, tuple[nn.Module, Tensor]] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor):
            kept.setdefault(name, (module, args[0]))

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    handles = [module.register_forward_pre_hook(partial(keep, name)) for name, module in leaves]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return kept


def _is_field(x: Any) -> bool:
    """Whether a group element acts on it as on images: planes, or a field with a single pose."""
    return isinstance(x, Tensor) and x.is_floating_point() and (x.ndim == 4 or (x.ndim == 5 and x.shape[2] == 1))


def _sentence(kind: str, layers: list[str]) -> str:
    count = f"{len(layers)} layers, the first " * (len(layers) > 1)
    return f"likely {kind}: {count}{layers[0]}"


def diagnose_onnx(path: Path, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Likely causes that can be read from the graph of an ONNX file: strides and asymmetric padding.

    Args:
        path: The file.
        shape: The shape of the input that was run.
    """
    import onnx

    model = onnx.load(path)
    weights = {weight.name for weight in model.graph.initializer}
    image = next(value for value in model.graph.input if value.name not in weights)
    for axis, side in zip(image.type.tensor_type.shape.dim, shape, strict=True):
        axis.dim_value = side
    del model.graph.value_info[:]  # free axes may have names there
    inferred = onnx.shape_inference.infer_shapes(model).graph
    sides = {
        value.name: ([axis.dim_value for axis in value.type.tensor_type.shape.dim] or [0])[-1]
        for value in (*inferred.value_info, *inferred.input)
    }
    found: dict[str, list[str]] = {}
    for node in inferred.node:
        if node.op_type not in ("Conv", "MaxPool", "AveragePool"):
            continue
        has = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        padding, side, name = has.get("pads", [0] * 4), sides.get(node.input[0], 0), node.name or node.output[0]
        window = (has.get("kernel_shape", [1])[-1], has.get("strides", [1])[-1], padding[-1])
        if len(set(padding)) > 1:
            found.setdefault("asymmetric padding", []).append(f"{name}, {padding}")
        elif side and (mismatch := stride_mismatch(side, *window, has.get("dilations", [1])[-1])):
            found.setdefault("strided windows that do not end at the edge", []).append(f"{name}, {mismatch}")
    causes = tuple(_sentence(kind, layers) for kind, layers in found.items())
    return causes or ("likely filters or position embeddings: all strides and paddings are symmetric",)
