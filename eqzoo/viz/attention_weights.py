"""Attention weights of attentive, self-attention and E⁴ layers for an image and its transformed copies."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..equivariance import in_float64, module_group
from ..groups import Group
from ..layers import E4Layer2d, InputAttention2d, LiftingSelfAttention2d
from ._inside import act, act_on_input, copies_of, fed_to, moved
from ._responses import Attentive, input_weights, response_weights
from ._windows import SelfAttention, SelfConv, group_weights, neighbor_places, window_weights

_AT_ONCE = 4_000_000  # the attention weights in memory at a time


@dataclass(frozen=True)
class Attention:
    """The attention of a layer for an image and its transformed copies.

    Args:
        layer: The name of the layer in the network.
        quantity: A description of the maps.
        own: The group of the layer, which gives the poses of the maps.
        group: The group of the copies.
        elements: The element of each copy; the first is 0, the image itself.
        images: The copies, each ``(C, height, width)``.
        maps: The maps of each copy: ``(poses, height, width)``, or ``(poses, k, k)`` around a query position. Empty if
            the attention does not depend on positions.
        channels: The channel attention ``α^C`` of each copy, ``(channels, poses)``; empty if there is none.
        place: The query position, ``(row, column)`` in pixels of the layer's input; None for all.
        size: Height and width of the layer's input, in pixels.
        signed: Whether the maps have negative values.
        error: The equivariance error ``‖A(g x) − g A(x)‖ / ‖A(x)‖`` of the maps and of α^C, the largest over the
            copies. About 1e-15 for an exact layer.
    """

    layer: str
    quantity: str
    own: Group
    group: Group
    elements: tuple[int, ...]
    images: list[Tensor]
    maps: list[Tensor]
    channels: list[Tensor]
    place: tuple[int, int] | None
    size: tuple[int, int]
    signed: bool
    error: float


@dataclass(frozen=True)
class _Choice:
    """The requested part of a layer's attention; None is the mean over all."""

    place: tuple[int, int] | None
    head: int | None
    pose: int | None


@dataclass(frozen=True)
class _Seen:
    quantity: str
    maps: Tensor | None  # (poses, height, width)
    channels: Tensor | None = None  # (channels, poses)
    signed: bool = False


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers for which `attention` returns weights, by name.

    Example:
        >>> import eqzoo
        >>> list(attention_layers(eqzoo.create_model("p4_alpha_f_cnn")))[:2]
        ['stem.conv', 'blocks.0.conv']
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        inside = isinstance(module, InputAttention2d) and isinstance(parent, Attentive)
        if isinstance(module, Attentive | SelfConv | SelfAttention | InputAttention2d | E4Layer2d) and not inside:
            found[name] = module
    return found


@torch.no_grad()
def attention(
    model: nn.Module,
    image: Tensor,
    layer: str | None = None,
    place: tuple[int, int] | None = None,
    head: int | None = None,
    pose: int | None = None,
    group: Group | str | None = None,
) -> Attention:
    """The attention of a layer for an image and its transformed copies, computed in float64.

    * Attentive convolutions: ``α^X``, one map per output pose, averaged over input poses and over output fields or,
      with ``head``, for one output field; and ``α^C`` likewise. Attention on the input has one α for all output fields.
    * Self-attention (GSA, ASC, SASA): the attention that each pixel receives from all query positions or, with
      ``place``, the softmax over the neighborhood of this query position; averaged over heads or, with ``head``, for
      one head. In group self-attention it is summed over key poses, and averaged over query poses or, with ``pose``,
      for one pose.
    * E⁴: the norm of the filter generated at each pixel, of all slices or, with ``head``, of one slice; with ``place``,
      the filter generated there, of this slice or the first.

    Args:
        model: The network, or a single layer.
        image: A normalized image ``(C, height, width)``; for a single layer, its input with a batch of one.
        layer: The name of the layer; by default the first one whose attention has poses.
        place: The query position, ``(row, column)`` in pixels of the layer's input. For transformed copies, position
            and pose are transformed too.
        head: The head, the output field of an attentive convolution, or the slice of an E⁴ layer.
        pose: The query pose, in group self-attention.
        group: The group of the copies, or its name; by default the network's own, or p4 if it has none.

    Returns:
        The attention for all copies, and its equivariance error.

    Raises:
        ValueError: If there is no such layer, head or pose, the group does not permute the poses, or the attention is
            not finite.
        IndexError: If there is no such position.

    Example:
        >>> import eqzoo
        >>> seen = attention(eqzoo.create_model("r4_gsanet_t"), torch.randn(1, 28, 28), place=(3, 5))
        >>> len(seen.maps), tuple(seen.maps[0].shape), seen.error < 1e-10
        (4, (4, 5, 5), True)
    """
    name, module = _find(model, layer)
    own = module_group(module)
    assert own is not None
    group = copies_of(own, group)
    net = in_float64(model)
    layer_here = net.get_submodule(name)
    x = image.detach().to("cpu", torch.float64)
    x = x[None] if x.ndim == 3 else x
    if len(x) != 1:
        raise ValueError(f"one image is (C, height, width) or (1, C, height, width), got {tuple(image.shape)}")
    seen, images = [], []
    size = (0, 0)
    for g in group.grid_elements:
        rotated = act_on_input(x, own, group, g)
        fed = fed_to(net, name, rotated)
        if g == 0:
            size = (fed.shape[-2], fed.shape[-1])
        choice = _Choice(place and moved(place, *size, group, g), head, _moved_pose(pose, own, group, g))
        seen.append(_look(layer_here, fed, choice))
        images.append(rotated[0] if x.ndim == 4 else rotated[0].mean(1))
    maps = [s.maps for s in seen if s.maps is not None]
    channels = [s.channels for s in seen if s.channels is not None]
    if not all(values.isfinite().all() for values in [*maps, *channels]):
        raise ValueError(
            f"the attention of {name or type(module).__name__} is not finite; the weights, or the image, hold NaN or "
            "infinite numbers"
        )
    error = max(_distance(maps, own, group), _distance([c[..., None, None] for c in channels], own, group))
    return Attention(
        name, seen[0].quantity, own, group, group.grid_elements, images, maps, channels, place, size,
        seen[0].signed, error,
    )  # fmt: skip


def _find(model: nn.Module, layer: str | None) -> tuple[str, nn.Module]:
    layers = attention_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer with attention that is drawn; eqzoo.viz.feature_rings draws regular "
            "fields, such as its last features, and eqzoo.viz.filter_orbit its filters"
        )
    name = next((n for n, m in layers.items() if _has_poses(m)), next(iter(layers))) if layer is None else layer
    if name not in layers:
        raise ValueError(f"no attention in a layer {name!r}; it is in {', '.join(layers)}")
    return name, layers[name]


def _has_poses(module: nn.Module) -> bool:
    """Whether the attention has one map per pose; attention on an image has a single map."""
    attention = getattr(module, "attention", module)
    return not (isinstance(attention, InputAttention2d) and attention.field == "trivial")


def _moved_pose(pose: int | None, own: Group, group: Group, g: int) -> int | None:
    if pose is None:
        return None
    element = own.element(group.matrix(g))
    return pose if element is None else own.product(element, pose)


def _distance(maps: list[Tensor], own: Group, group: Group) -> float:
    if not maps:
        return 0.0
    norm = maps[0].norm()
    pairs = zip(maps, group.grid_elements, strict=True)
    differences = [(m - act(maps[0], own, group, g)).norm() for m, g in pairs]
    return max((d / norm).item() if d else 0.0 for d in differences)  # maps may be zero


def _look(module: nn.Module, x: Tensor, choice: _Choice) -> _Seen:
    if isinstance(module, Attentive):
        return _responses(module, x, choice)
    if isinstance(module, InputAttention2d):
        return _input(module, x, choice)
    if isinstance(module, SelfConv):
        return _window(module, x, choice)
    if isinstance(module, SelfAttention):
        return _group_window(module, x, choice)
    assert isinstance(module, E4Layer2d)
    return _generated(module, x, choice)


def _responses(layer: Attentive, x: Tensor, choice: _Choice) -> _Seen:
    if isinstance(layer.attention, InputAttention2d):
        return _input(layer.attention, x, choice)
    _refuse(choice, "place", "pose")
    alpha = response_weights(layer, x)
    pick, of = _pick(choice.head, layer.out_channels, "output field", "output fields")
    spatial = None if alpha.spatial is None else pick(alpha.spatial[0]).mean(1)
    channel = None if alpha.channel is None else pick(alpha.channel[0]).mean(1).T
    names = ["α^X"] * (spatial is not None) + ["α^C"] * (channel is not None)
    return _Seen(f"attention {' and '.join(names)} on the responses, {of}", spatial, channel)


def _input(layer: InputAttention2d, x: Tensor, choice: _Choice) -> _Seen:
    _refuse(choice, "place", "pose", "head")
    alpha = input_weights(layer, x)
    names = "α^X and α^C" if alpha.channel is not None else "α over poses"
    return _Seen(
        f"attention {names} on the input", alpha.spatial[0], None if alpha.channel is None else alpha.channel[0]
    )


def _window(layer: SelfConv, x: Tensor, choice: _Choice) -> _Seen:
    _refuse(choice, "pose")
    pick, of = _pick(choice.head, layer.num_heads, "head", "heads")
    weights = pick(window_weights(layer, x).weights[0])  # (|H|, k², height, width)
    side = layer.kernel_size
    if choice.place:
        row, column = choice.place
        return _Seen(
            f"softmax over the neighborhood of a position, {of}", weights[..., row, column].unflatten(1, (side, side))
        )
    # Pixel y receives the sum over query positions x of the weight of the neighbor d = y − x.
    received = F.fold(weights.flatten(2), x.shape[-2:], side, padding=side // 2)[:, 0]
    return _Seen(f"attention received from all positions, {of}", received)


def _group_window(layer: SelfAttention, x: Tensor, choice: _Choice) -> _Seen:
    height, width = x.shape[-2:]
    _, of = _pick(choice.head, layer.num_heads, "head", "heads")
    heads = slice(None) if choice.head is None else slice(choice.head, choice.head + 1)
    if isinstance(layer, LiftingSelfAttention2d):
        _refuse(choice, "pose")
    else:
        of += ", mean over query poses" if choice.pose is None else f", query pose {choice.pose}"
    poses = slice(None) if choice.pose is None else slice(choice.pose, choice.pose + 1)

    def weigh(places: Tensor) -> Tensor:
        """The weights of neighbors, ``(|V|, positions, neighbors)``."""
        weights = group_weights(layer, x, places, heads).weights[0]  # (heads, |V|, |G|, places, |M|, neighbors)
        return weights[:, :, poses].sum(4).mean((0, 2))

    if choice.place:
        weights = weigh(torch.tensor([choice.place[0] * width + choice.place[1]], device=x.device))[:, 0]
        sides = (height, width) if layer.kernel_size == "global" else (int(layer.kernel_size),) * 2
        return _Seen(f"softmax over the neighborhood of a position, {of}", weights.unflatten(1, sides))
    neighbors = height * width if layer.kernel_size == "global" else int(layer.kernel_size) ** 2
    one = layer.num_heads * layer.group.order * (layer.in_order or 1) ** 2 * neighbors
    received = x.new_zeros(layer.group.order, height * width)
    for places in torch.arange(height * width, device=x.device).split(max(1, _AT_ONCE // one)):
        around, _ = neighbor_places(layer.kernel_size, height, width, places)
        received.index_add_(1, around.flatten(), weigh(places).flatten(1))
    return _Seen(f"attention received from all positions, {of}", received.unflatten(1, (height, width)))


def _generated(layer: E4Layer2d, x: Tensor, choice: _Choice) -> _Seen:
    _refuse(choice, "pose")
    hidden = layer.norm(layer.hidden(x)).relu().transpose(1, 2).flatten(1, 2)
    taps = F.conv2d(hidden, *layer.bank(), groups=layer.order)[0]
    kernels = taps.unflatten(0, (layer.order, layer.slices, -1)).transpose(0, 1)  # (s, |H|, k², height, width)
    pick, of = _pick(choice.head or 0, layer.slices, "slice", "slices")
    if choice.place:
        row, column = choice.place
        filters = pick(kernels)[..., row, column].unflatten(1, (layer.kernel_size, layer.kernel_size))
        return _Seen(f"filters generated at a position, {of}", filters, signed=True)
    if choice.head is not None:
        return _Seen(f"norm of the generated filters, {of}", pick(kernels).norm(dim=1))
    return _Seen("norm of the generated filters", kernels.transpose(0, 1).norm(dim=(1, 2)))


def _pick(chosen: int | None, count: int, one: str, many: str) -> tuple[Callable[[Tensor], Tensor], str]:
    """A function that selects one entry of the first axis, or takes the mean over it, and its description."""
    if chosen is None:
        return partial(torch.mean, dim=0), f"mean over {count} {many}"
    if not 0 <= chosen < count:
        raise ValueError(f"head is {chosen}, and this layer has {count} {many}, counted from 0")
    return (lambda t: t[chosen]), f"{one} {chosen}"


def _refuse(choice: _Choice, *names: str) -> None:
    """Raises ValueError if a choice is given that the layer does not have."""
    for name in names:
        if getattr(choice, name) is not None:
            raise ValueError(f"this layer's attention has no {name} to choose; omit {name}")
