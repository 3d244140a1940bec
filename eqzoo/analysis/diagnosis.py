"""Likely causes of a missing equivariance: strides, padding, filters, position embeddings."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..equivariance import element_errors, group_layers, is_subgroup
from ..groups import Group, transform

__all__ = ["diagnose", "lost_elements", "mixed_groups", "other_laws", "stride_mismatch", "suspects"]

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
        if said := getattr(module, "breaks_group", None):
            found.setdefault("layers that end a group", []).append(f"{name}, {said}")
    layers = tuple(f"{name}." for name in group_layers(model))
    for name, parameter in model.named_parameters():
        if any(word in name for word in _POSITIONS) and not name.startswith(layers):  # those of layers are relative
            shape = " x ".join(map(str, parameter.shape))
            found.setdefault("learned position embeddings", []).append(f"{name}, {shape}")
    return tuple(_sentence(kind, layers) for kind, layers in found.items())


def mixed_groups(network: nn.Module, own: Group | None) -> tuple[str, ...]:
    """What says so if a layer has another group than the network, of equal order, so that shapes do not tell.

    Of a network without a group, if it has another one than the first layer.
    """
    for said, group, its in _other_groups(network, own):
        if group.order == its.order > 1:
            return (f"{said}, of equal order, so that shapes fit; fields of two groups do not mix",)
    return ()


def lost_elements(network: nn.Module, own: Group | None, asked: Group) -> tuple[str, ...]:
    """What says so if the group of a layer, another one than that of the network, lacks elements that are checked."""
    if own is None:  # a sequence of layers
        for name, (module, group) in list(group_layers(network).items())[:1]:
            if not is_subgroup(asked, group, on_grid=True):
                said = f"the layer {name} ({type(module).__name__}) has the group {group.name}"
                way = f"; check it with group={group.name!r}" if group.of_grid.order > 1 else ""
                return (f"{said}, which has not all elements of {asked.name}{way}",)
    for said, group, _ in _other_groups(network, own):
        if not is_subgroup(asked, group, on_grid=True):
            return (f"{said}; {group.name} has not all elements of {asked.name}",)
    return ()


def _other_groups(network: nn.Module, own: Group | None) -> Iterator[tuple[str, Group, Group]]:
    """The layers whose group is not that of the network, or of its first layer: in words, their group and that one."""
    layers = group_layers(network)
    first = next(iter(layers), "")
    whose, its = ("the network", own) if own else (f"the layer {first}", layers[first][1] if layers else None)
    for name, (module, group) in layers.items():
        if its is not None and group != its:
            said = f"the layer {name} ({type(module).__name__}) has the group {group.name} and {whose} {its.name}"
            yield said, group, its


def suspects(network: nn.Module, layers: Collection[str]) -> tuple[str, ...]:
    """What is left to suspect of a network that is not equivariant where no layer that was measured breaks it.

    Args:
        network: The network.
        layers: The names of the layers that were measured, those that have a group.
    """
    if not layers:
        return ("likely layers that mix pixels in a fixed order, such as a linear layer after a flattened image",)
    others = [
        f"{name} ({type(module).__name__})"
        for name, module in network.named_modules()
        if not list(module.children())
        and not f"{name}.".startswith(tuple(f"{layer}." for layer in layers))
        and (list(module.parameters()) or list(module.buffers()))
    ]
    if not others:
        return (
            "the layers that have a group are exact, each on its own; the break is in what forward does between them",
        )
    return (
        "the layers that have a group are exact, each on its own; likely one of the others: "
        f"{', '.join(others[:5])}{f' and {len(others) - 5} more' * (len(others) > 5)}",
    )


def other_laws(
    function: Callable[[Tensor], Any], x: Tensor, group: Group, own: Group | None, limit: float
) -> tuple[str, ...]:
    """What says so if an output is exact as another kind of field than its shape is taken for."""
    y, own = function(x), own if own is not None and is_subgroup(group, own) else group
    if not isinstance(y, Tensor):
        return ()
    for said, law in _laws(x, y, own):
        if max(element_errors(function, x, group, own, law).values()) <= limit:
            return (
                f"the output is exact as {said}: give the network a method transform_field(value, element) that says "
                "so, see docs/own_training.md",
            )
    if y.ndim == 3:
        shape, said = (1, (1, y.shape[1])), "maps (B, height, width): give it an axis of channels, output[:, None]"
    elif y.ndim == 4 and own.order > 1 and y.shape[1] % own.order == 0:
        shape = (1, (-1, own.order))
        said = (
            f"planes of regular fields: output.unflatten(1, (-1, {own.order})) are fields, and eqzoo.layers.GroupPool "
            "makes maps of them, whose channels stay"
        )
    else:
        return ()
    try:
        errors = element_errors(lambda image: function(image).unflatten(*shape), x, group, own)
    except ValueError:  # such as tokens, whose axes are no sides
        return ()
    return (f"the output is exact as {said}",) if max(errors.values()) <= limit else ()


def _laws(x: Tensor, y: Tensor, own: Group) -> Iterator[tuple[str, Callable[[Any, int], Any]]]:
    """What an output of this shape may be, in words, and how an element of the group acts on the input and on it."""

    def vectors(value: Tensor, g: int) -> Tensor:
        moved = transform(value, own, g, "trivial") if value.ndim == 4 else value
        return moved if value is x else torch.einsum("ij,bj...->bi...", own.matrix(g).to(value), moved)

    def poses(value: Tensor, g: int) -> Tensor:
        if value is x:
            return transform(value, own, g, "trivial")
        return transform(value[..., None, None], own, g, "regular")[..., 0, 0]

    if y.ndim in (2, 4) and y.shape[1] == 2 and (y.ndim == 2 or own.order != 2):
        yield "vectors (row, column) that rotate with the image", vectors
    if y.ndim == 3 and y.shape[2] == own.order > 1:
        yield f"one number for each of the {own.order} poses, (B, C, {own.order}), which are permuted", poses


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
    if error < _TOLERANCE:
        return
    kinds = dict([*_of_window(module, x), *_of_filters(module, group)])
    yield from (kinds or {"layers that are not equivariant": f"a {type(module).__name__}, by {error:.1e}"}).items()


def _of_window(module: nn.Module, x: Tensor) -> Iterator[tuple[str, str]]:
    window = _window(module)
    if window is None:
        return
    if type(module).__name__.endswith("Same"):  # timm's name for TensorFlow's padding
        if window[1] > 1:
            yield "asymmetric padding", f"a {type(module).__name__} with stride {window[1]}"
        return
    mismatch = stride_mismatch(x.shape[-1], *window)
    if mismatch:
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


def _window(module: nn.Module) -> tuple[int, int, int, int] | None:
    """Kernel, stride, padding and dilation of a sliding window along the width, if the module is one."""
    found = [getattr(module, name, None) for name in ("kernel_size", "stride", "padding")]
    numbers = [value[-1] if isinstance(value, tuple | list) else value for value in found]
    dilation = getattr(module, "dilation", 1)
    match [*numbers, dilation[-1] if isinstance(dilation, tuple | list) else dilation]:
        case [int(kernel), int(stride), int(padding), int(dilation)]:
            return kernel, stride, padding, dilation
    return None


def _sentence(kind: str, layers: list[str]) -> str:
    count = f"{len(layers)} layers, the first " * (len(layers) > 1)
    return f"likely {kind}: {count}{layers[0]}"
