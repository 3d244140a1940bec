"""Equivariance errors of networks and layers, for each element of the group on the pixel grid."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..groups import Group, transform
from .untrained import randomize_norms


@dataclass(frozen=True)
class EquivarianceReport:
    """The equivariance errors of a network, each a norm over the whole batch.

    Args:
        group: The group.
        logits: The error of the output for each element that maps the pixel grid onto itself; of several tensors, that
            of the one with the largest.
        features: The same for ``forward_features``; empty if the group does not act on the features.
        layers: The error of each layer that has a group, on the input that it receives in the network: the largest
            over the elements. Layers of several inputs, and those whose output is zero everywhere, are left out.
    """

    group: Group
    logits: dict[int, float]
    features: dict[int, float]
    layers: dict[str, float]

    @property
    def largest(self) -> float:
        """The largest of all errors."""
        return max([*self.logits.values(), *self.features.values(), *self.layers.values()])


def equivariance_error(
    model: nn.Module, x: Any = None, group: Group | str | None = None, randomize: bool = False, seed: int = 0
) -> float:
    """The largest equivariance error of a network, over its layers, features and output and over all elements.

    Args:
        model: The network, or a single layer; a copy is measured, the model itself is not changed. How the group acts
            on its output follows from the shape, see `eqzoo.equivariance`: logits ``(B, C)`` stay, maps are moved.
        x: The input, for a layer on fields of irreps an `eqzoo.layers.Irreps`; by default a batch of two noise images
            of the network's ``input_size``.
        group: The group, or its name; by default the network's own. If it is not a subgroup of the network's own group,
            only the output is measured. Measured are the elements that map the pixel grid onto itself.
        randomize: Whether to draw norms, biases and other parameters with one value everywhere at random first, as
            `randomize_norms` does. Their initial values are the same for all elements, which hides errors that appear
            with training.
        seed: The seed of the noise images and of the random norms.

    Returns:
        ``max ‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``, computed in float64 and evaluation mode on the CPU.

    Raises:
        ValueError: If the model has no group or input size and none is given, if the input has no batch axis, if the
            output is zero or not finite, or if the group has no rotation or reflection of the pixel grid, as that of a
            plain network, z2, and r3.
        TypeError: If the output is not of tensors.

    Example:
        >>> import eqzoo
        >>> eqzoo.equivariance_error(eqzoo.create_model("p4_cnn", pretrained=True)) < 1e-12
        True
        >>> eqzoo.equivariance_error(eqzoo.create_model("z2_cnn", pretrained=True), group=eqzoo.P4) > 1e-2
        True
    """
    group = group_of(without_parallel(model)) if group is None else group
    return equivariance_report(model, x, group, randomize, seed).largest


def group_to_check(group: Group | str) -> Group:
    """The group that is given, by itself or by name, to compare a network on an image and its transformed copies.

    Raises:
        ValueError: If it is the name of no group, or has no rotation or reflection of the pixel grid, so that there is
            no copy but the image itself.

    Example:
        >>> group_to_check("p4m").order
        8
    """
    found = group if isinstance(group, Group) else Group.from_name(group)
    if len(found.grid_elements) < 2:
        raise ValueError(
            f"{found.name} has only the identity on the pixel grid, so there is nothing to compare; pass a group= that "
            "has reflections or an even number of rotations, such as z2m, r2, p4 and p4m"
        )
    return found


def equivariance_report(
    model: nn.Module,
    x: Any = None,
    group: Group | str | None = None,
    randomize: bool = False,
    seed: int = 0,
    other: Any = None,
) -> EquivarianceReport:
    """All equivariance errors of a network; the arguments are those of `equivariance_error` and `element_errors`.

    Where the network's own group has only the identity on the pixel grid, the errors are those of the identity, 0.
    """
    model = without_parallel(model)
    group = group_of(model) if group is None else group_to_check(group)
    if group is None:
        raise ValueError(f"{type(model).__name__} has no group of eqzoo as its attribute; pass group=")
    if isinstance(x, Tensor) and x.ndim < 4 and not hasattr(model, "transform_field"):
        raise ValueError(
            "x is a batch of images (B, C, height, width) or of fields (B, C, |H|, height, width), got "
            f"{tuple(x.shape)}; image[None] is a batch of one"
        )
    own = in_float64(model)
    generator = torch.Generator().manual_seed(seed)
    x = noise_images(own, generator) if x is None else _measured(x)
    if randomize:
        randomize_norms(own, generator, x)
    with torch.no_grad():
        own_group = group_of(own) or group
        law = getattr(own, "transform_field", None)
        logits = element_errors(_with_fields(own), x, group, own_group, law, other)
        inside = is_subgroup(group, own_group)
        trunk = getattr(own, "feature_field", getattr(own, "forward_features", None))
        features = element_errors(trunk, x, group, own_group) if inside and trunk else {}
        layers = _layer_errors(own, x, group) if inside else {}
    return EquivarianceReport(group, logits, features, layers)


def in_float64(model: nn.Module) -> nn.Module:
    """A copy of a model in float64 and evaluation mode, on the CPU, to measure it."""
    return copy.deepcopy(model).to("cpu", torch.float64).eval()


def group_of(model: nn.Module) -> Group | None:
    """The network's own group, its attribute ``group``; None if it has none, or another one."""
    return module_group(unwrapped(model))


def module_group(module: nn.Module) -> Group | None:
    """The group of a layer or network of this package, its attribute ``group``; None if it has none, or another one."""
    group = getattr(module, "group", None)
    return group if isinstance(group, Group) else None


def group_layers(model: nn.Module) -> dict[str, tuple[nn.Module, Group]]:
    """The layers inside of a network that have a group, by name, and their groups.

    Those inside of a module whose ``layers_have_group`` is False are left out: its group is not theirs.
    """
    others = tuple(
        name and f"{name}." for name, module in model.named_modules() if not getattr(module, "layers_have_group", True)
    )
    return {
        name: (module, group)
        for name, module in model.named_modules()
        if name and (group := module_group(module)) and not name.startswith(others)
    }


def without_parallel(model: nn.Module) -> nn.Module:
    """The network in `torch.nn.DataParallel` or `torch.nn.parallel.DistributedDataParallel`; else the model.

    `timm.utils.unwrap_model` would also enter a network's own attribute ``module``, and measure a part of it.
    """
    parallel: tuple[type[nn.Module], ...] = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    inner = getattr(model, "_orig_mod", model)  # of torch.compile, which may be outside
    if not isinstance(inner, parallel):
        return model
    while isinstance(inner, parallel):
        inner = cast(nn.Module, inner.module)
    return inner


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, where timm's ``features_only=True`` has wrapped one of this package; else the model."""
    inner = getattr(model, "model", None)
    wrapped = hasattr(model, "feature_info") and isinstance(getattr(inner, "group", None), Group)
    return cast(nn.Module, inner) if wrapped else model


def _with_fields(model: nn.Module) -> Callable[[Any], Any]:
    """The model; where ``features_only=True`` has wrapped a network, its features as regular fields."""
    inner = cast(Any, unwrapped(model))
    if inner is model:
        return model
    if not getattr(inner, "planes_are_fields", True):
        raise ValueError(
            f"features of a {type(inner).__name__} are no regular fields; measure it without features_only"
        )
    return lambda x: [planes.unflatten(1, (-1, inner.group.order)) for planes in model(x)]


def _measured(x: Any) -> Any:
    """The input in float64 on the CPU; the fields of some layers are named tuples of tensors."""
    if isinstance(x, Tensor):
        return x.detach().to("cpu", torch.float64)
    return type(x)(*map(_measured, x))


def noise_images(model: nn.Module, generator: torch.Generator, side: int | None = None) -> Tensor:
    """Two images of noise, ``(2, C, height, width)`` in float64, of the network's input size or of a side in pixels.

    Raises:
        ValueError: If the network has no size, or with a side no number of channels.
    """
    model = unwrapped(model)
    size = getattr(model, "input_size", None) or (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    channels = size[0] if size else getattr(model, "in_chans", None)
    if side and channels:
        size = (channels, side, side)
    if size is None:
        raise ValueError(
            f"{type(model).__name__} has no input_size and no pretrained_cfg; set its input_size = (channels, height, "
            "width), or pass images as x"
        )
    return torch.randn(2, *size, generator=generator, dtype=torch.float64, device="cpu")


def element_errors(
    function: Callable[[Any], Any],
    x: Any,
    group: Group,
    own: Group | None = None,
    law: Callable[[Any, int], Any] | None = None,
    other: Any = None,
) -> dict[int, float]:
    """The error ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖`` of a function of tensors, for each element on the pixel grid.

    Args:
        function: Φ. The shapes of its input and output say how elements act on them: a regular field
            ``(B, C, |H|, height, width)``, an image or map ``(B, C, height, width)``, an output ``(B, height, width)``
            of the sides of the input, or an invariant vector. The output may be a list, tuple or dictionary: the error
            is the largest of its parts, of one that is zero at x relative to the largest norm.
        x: The input.
        group: The group.
        own: The group of the regular fields, if ``group`` is a subgroup of it; by default ``group``.
        law: How an element of ``own`` acts on the input and the output, where their shapes do not say it; fields may
            then be tuples of tensors.
        other: Another input x'. Errors are then relative to ``‖Φ(x) − Φ(x')‖`` where that is smaller than ``‖Φ(x)‖``,
            so that a large constant in the output hides nothing.

    Raises:
        ValueError: If the output is zero everywhere or not finite, or the group does not act on a field of its shape.
        TypeError: If the output holds something else than tensors.

    Example:
        >>> from eqzoo.groups import P4
        >>> element_errors(lambda x: x.flip(-1), torch.rand(1, 1, 4, 4), P4)[2]  # a flip and a 180° rotation commute
        0.0
    """
    own = own or group
    tensors = tensors_of if law is None else lambda output: [_flat(output)]
    y, sides = function(x), x.shape[-2:] if law is None and x.ndim > 3 else None
    parts = list(tensors(y))
    norms = [float(part.norm()) for part in parts]
    if other is not None:
        changes = [float((a - b).norm()) for a, b in zip(parts, tensors(function(other)), strict=True)]
        norms = [min(norm, change) if change else norm for norm, change in zip(norms, changes, strict=True)]
    largest = max((norm for norm in norms if norm), default=0.0)  # a NaN, if one is the first
    scales = [norm or largest for norm in norms]
    errors = {}
    for g in group.grid_elements if largest else ():
        if law is None:
            moved, expected = _act(x, group, g, own), [_act(part, group, g, own, sides) for part in parts]
        else:
            moved, expected = _act_by(law, x, group, g, own), [_flat(_act_by(law, y, group, g, own))]
        found = list(tensors(function(moved)))
        if [part.shape for part in found] != [part.shape for part in expected]:
            shapes = [[tuple(part.shape) for part in tensors] for tensors in (found, expected)]
            raise ValueError(f"the output for a transformed image has shapes {shapes[0]} instead of {shapes[1]}")
        values = [float((a - b).norm()) / scale for a, b, scale in zip(found, expected, scales, strict=True)]
        errors[g] = max(values) if all(map(math.isfinite, values)) else math.nan
    if not errors:
        raise ValueError("the output is zero everywhere, so the relative error is undefined; pass another x")
    # Checked for every element: a NaN compares as neither larger nor smaller than any bound.
    if not all(math.isfinite(error) for error in errors.values()):
        raise ValueError(f"the output is not finite, its errors are {errors}; pass another x, or check the weights")
    return errors


def tensors_of(output: Any) -> Iterable[Tensor]:
    """The tensors of an output: of itself, or of a list, tuple or dictionary, also within others.

    Raises:
        TypeError: If it holds something else.
    """
    if isinstance(output, Tensor):
        yield output if output.is_floating_point() or output.is_complex() else output.double()
    elif isinstance(output, Mapping | list | tuple):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_of(part)
    else:
        raise TypeError(f"outputs are tensors, or lists, tuples and dictionaries of them, got {type(output).__name__}")


def _flat(x: Tensor | tuple[Tensor, ...]) -> Tensor:
    """All numbers of a field in a row."""
    return x.flatten() if isinstance(x, Tensor) else torch.cat([part.flatten() for part in x])


def _act_by(law: Callable[[Any, int], Any], x: Any, group: Group, g: int, own: Group) -> Any:
    """The action that a layer states, of the element of its own group."""
    element = own.element(group.matrix(g))
    if element is None:
        raise ValueError(f"{own.name}, the group of the layer, has no element that is {group.describe(g)}")
    return law(x, element)


def _act(x: Tensor, group: Group, g: int, own: Group, sides: Sequence[int] | None = None) -> Tensor:
    """The action of g on an input or output, by its shape: a field of ``own``, an image, a map or an invariant vector.

    ``sides``, those of the input, tell a map without channels from a vector.
    """
    if x.ndim == 3 and sides is not None and x.shape[1:] == sides:
        return transform(x[:, None], group, g, "trivial")[:, 0]
    if x.ndim < 4:
        return x
    if x.ndim == 4 or x.shape[2] == 1:
        return transform(x, group, g, "trivial")
    element = own.element(group.matrix(g))
    if element is None or x.shape[2] != own.order:
        raise ValueError(
            f"{group.name} does not act on a field of shape {tuple(x.shape)}; a regular field of {own.name} is "
            f"(B, C, {own.order}, height, width)"
        )
    return transform(x, own, element, "regular")


def is_subgroup(group: Group, other: Group, on_grid: bool = False) -> bool:
    """Whether all elements of a group, or those that map the pixel grid onto itself, are in another one."""
    elements = group.grid_elements if on_grid else group.elements
    return all(other.element(group.matrix(g)) is not None for g in elements)


def _layer_errors(model: nn.Module, x: Tensor, group: Group) -> dict[str, float]:
    layers = group_layers(model)
    inputs: dict[str, Any] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keeps the input of a layer that takes one and whose output, as that of a branch at its start, is not zero."""
        given = [*args, *kwargs.values()]
        if len(given) == 1 and any(part.any() for part in tensors_of(output)):
            inputs[name] = given[0]

    handles = [
        module.register_forward_hook(partial(keep, name), with_kwargs=True) for name, (module, _) in layers.items()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    errors = {}
    for name, value in inputs.items():
        layer, own = layers[name]
        law = getattr(layer, "transform_field", None)
        errors[name] = max(element_errors(layer, value, group, own, law).values())
    return errors
