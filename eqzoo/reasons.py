"""Why a network is not equivariant: the steps, paddings, filters and positions that a turn does not leave alone."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .equivariance import element_errors
from .groups import Group, transform

__all__ = ["find_reasons", "misses_the_edge"]

_POSITIONS = ("pos_embed", "position", "rel_pos", "pos_emb", "pos_bias")
_SAME = 1e-6  # what differs by less, in float64, is the same


@torch.no_grad()
def find_reasons(model: nn.Module, x: Tensor, group: Group) -> tuple[str, ...]:
    """Looks for what breaks a group in a network that is not made for it, layer by layer.

    Args:
        model: The network, in evaluation mode and float64.
        x: What it is fed, ``(B, C, height, width)``.
        group: The group.

    Returns:
        A sentence for each kind of reason, with the number of layers and the first of them.

    Example:
        >>> conv = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1)).double()
        >>> from eqzoo.groups import P4
        >>> for reason in find_reasons(conv, torch.rand(1, 1, 8, 8, dtype=torch.float64), P4):
        ...     print(reason)
        steps that miss the edge: 0, on 8 pixels a 3 x 3 window with step 2 ends 1 before the edge, exact on 7 or 9
        filters that see a direction in one pose: 0, a turn changes them by ...
    """
    found: dict[str, list[str]] = {}
    for name, (module, value) in _leaves(model, x).items():
        for kind, text in _of_layer(module, value, group):
            found.setdefault(kind, []).append(f"{name}, {text}")
    for name, parameter in model.named_parameters():
        if any(word in name for word in _POSITIONS):
            shape = " x ".join(map(str, parameter.shape))
            found.setdefault("learnt positions", []).append(f"{name}, {shape}")
    return tuple(_sentence(kind, layers) for kind, layers in found.items())


def misses_the_edge(side: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> str | None:
    """Says how a strided window samples other places after a turn, or nothing if it ends at the edge.

    Args:
        side: The side of what it slides over, in pixels.
        kernel: The side of the window, in taps.
        stride: Its step, in pixels.
        padding: The zeros added to each side, in pixels.
        dilation: The step between taps, in pixels.

    Example:
        >>> misses_the_edge(32, 3, 2, 1)
        'on 32 pixels a 3 x 3 window with step 2 ends 1 before the edge, exact on 31 or 33'
        >>> misses_the_edge(33, 3, 2, 1) is None
        True
    """
    rest = (side + 2 * padding - dilation * (kernel - 1) - 1) % stride
    if not rest:
        return None
    return (
        f"on {side} pixels a {kernel} x {kernel} window with step {stride} ends {rest} before the edge, exact on "
        f"{side - rest} or {side - rest + stride}"
    )


def _of_layer(module: nn.Module, x: Tensor, group: Group) -> Iterator[tuple[str, str]]:
    # An activation that works in place has changed what was kept; the others take tokens and scores as well, of which
    # the last two axes are no picture.
    blind = isinstance(module, nn.Linear | nn.LayerNorm | nn.Softmax) or getattr(module, "inplace", False)
    if blind or not _is_field(x):
        return
    y = module(x)
    if not _is_field(y) or not y.any():
        return
    error = max(element_errors(module, x, group).values())
    if error < _SAME:
        return
    kinds = dict([*_of_window(module, x), *_of_filters(module, group)])
    yield from (kinds or {"layers that change with a turn": f"a {type(module).__name__}, by {error:.1e}"}).items()


def _of_window(module: nn.Module, x: Tensor) -> Iterator[tuple[str, str]]:
    window = _window(module)
    if window is None:
        return
    if type(module).__name__.endswith("Same"):  # timm's name for what pads as TensorFlow does
        if window[1] > 1:
            yield "padding that is larger at one end", f"a {type(module).__name__} with step {window[1]}"
        return
    steps = misses_the_edge(x.shape[-1], *window)
    if steps:
        yield "steps that miss the edge", steps


def _of_filters(module: nn.Module, group: Group) -> Iterator[tuple[str, str]]:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 4 or weight.shape[-1] != weight.shape[-2]:
        return
    turned = [transform(weight, group, g, "trivial") for g in group.grid_elements]
    change = max(((other - weight).norm() / weight.norm()).item() for other in turned)
    if change > _SAME:
        yield "filters that see a direction in one pose", f"a turn changes them by {change:.1e}"


def _leaves(model: nn.Module, x: Tensor) -> dict[str, tuple[nn.Module, Tensor]]:
    """The layers without layers inside, with what they are fed in the network when they are first called."""
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
    """Whether an element acts on it by turning pictures: planes, or a field with a single pose."""
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
    if len(layers) == 1:
        return f"{kind}: {layers[0]}"
    return f"{kind}: {len(layers)} of them, the first {layers[0]}"
