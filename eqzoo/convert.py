"""Turns others' checkpoints into weights of the networks here, with the same function.

**att_gconvs**, the networks of attentive group convolutions, as their authors released them. They differ from ours in

* the elements: theirs turn first and then mirror the rows, ours mirror the columns and then turn;
* a factor: their group convolutions are multiplied by π/2 (p4) or π (p4m), which goes into the filters. Attention on
  responses sees them without the factor, so the first layer of its perceptron and its spatial filters are divided by
  it: the ReLU lets a positive factor through;
* batch norms: theirs add 2e-5 to the variance, which goes into the running variance;
* the digits: the original rotated MNIST holds them transposed. A transposition τ is a symmetry of the grid, so filters
  ``τψ`` with the poses ``h ↦ τ h τ⁻¹`` see upright digits as the released filters see transposed ones.

References:
    Attentive Group Equivariant Convolutional Networks (Romero et al., 2020)
    https://arxiv.org/abs/2002.03830, https://github.com/dwromero/att_gconvs
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .files import atomic
from .groups import Group
from .layers import GroupBatchNorm2d, InputAttention2d
from .models import create_model

__all__ = ["SOURCES", "att_gconvs", "convert", "foreign_elements"]

EPS = 2e-5

_ROTMNIST = {
    "stem.conv": "c1",
    "stem.norm": "bn1",
    **{f"blocks.{i}.conv": f"c{i + 2}" for i in range(5)},
    **{f"blocks.{i}.norm": f"bn{i + 2}" for i in range(5)},
    "head": "c7",
}
_DENSENET = {
    "stem": "c1",
    **{f"blocks.{i}.dense.norm": f"block_layers.{i}.bn" for i in range(5)},
    **{f"blocks.{i}.dense.conv": f"block_layers.{i}.conv" for i in range(5)},
    **{f"blocks.{i}.transition.norm": f"trans_layers.{i}.bn" for i in range(4)},
    **{f"blocks.{i}.transition.conv": f"trans_layers.{i}.conv" for i in range(4)},
    "norm": "bn_out",
    "head": "c_out",
}
# The networks whose weights were released, and what the released layers are called.
_NETWORKS = {
    "z2_cnn": _ROTMNIST,
    "p4_cnn": _ROTMNIST,
    "p4_alpha_cnn": _ROTMNIST,
    "p4_alpha_f_cnn": _ROTMNIST,
    "p4m_densenet": _DENSENET,
}
_PARAMETERS = {
    "weight": "weight",
    "attention.reduce": "channel_attention.weight_fc1",
    "attention.expand": "channel_attention.weight_fc2",
    "attention.spatial": "spatial_attention.weight",
}


def convert(
    source: str, path: str | os.PathLike[str], model: str, output: str | os.PathLike[str], upright: bool = False
) -> None:
    """Converts a checkpoint and writes it where ``eqzoo.create_model(model, checkpoint_path=output)`` reads it.

    Args:
        source: Whose checkpoint it is, a key of `SOURCES`.
        path: The checkpoint.
        model: The network here that it is for.
        output: The file to write, ``<name>.safetensors``.
        upright: Whether the network was trained on transposed pictures and shall take upright ones.

    Raises:
        FileNotFoundError: If there is no checkpoint, or no folder for the output.
        ValueError: If the source is unknown, the output is no safetensors file, or the checkpoint does not fit.
    """
    if source not in SOURCES:
        raise ValueError(f"no conversion from {source!r}; there is one from {', '.join(SOURCES)}")
    target = Path(output)
    if target.suffix != ".safetensors":
        raise ValueError(f"weights are kept in safetensors files alone: end the output in .safetensors, got {target}")
    state = SOURCES[source](path, model, upright)
    atomic(target, partial(save_file, state, metadata={"format": "pt"}))


def att_gconvs(path: str | os.PathLike[str], model: str, upright: bool = False) -> dict[str, Tensor]:
    """The weights of a released network of attentive group convolutions, as the network here takes them.

    Args:
        path: The released state dict, a ``.pth`` file; it is read without running any of its code.
        model: The network: z2_cnn, p4_cnn, p4_alpha_cnn, p4_alpha_f_cnn or p4m_densenet.
        upright: Whether the network shall take upright digits, where the released one takes transposed ones.

    Returns:
        The state dict, in float64: in float32 the factors would be rounded.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the network is none of these, or the file is no state dict of it; names what does not fit.
    """
    if model not in _NETWORKS:
        raise ValueError(f"released weights of att_gconvs fit {', '.join(_NETWORKS)}; got {model!r}")
    theirs = _read(Path(path))
    plan = _plan(create_model(model), _NETWORKS[model], upright)
    _check(Path(path), model, theirs, {step.key: step.shape for step in plan.values()})
    return {name: step.change(theirs[step.key]) for name, step in plan.items()}


SOURCES: dict[str, Callable[[str | os.PathLike[str], str, bool], dict[str, Tensor]]] = {"att_gconvs": att_gconvs}


def foreign_elements(group: Group, upright: bool = False) -> list[int]:
    """Which element of ours is each element of att_gconvs: ``F^m R^r`` at ``m·n + r``, with F the mirror of the rows.

    Args:
        group: The group.
        upright: Whether every element is conjugated by the transposition.

    Example:
        >>> from eqzoo.groups import P4, P4M
        >>> foreign_elements(P4), foreign_elements(P4M)
        ([0, 1, 2, 3], [0, 1, 2, 3, 6, 5, 4, 7])
    """
    rows = torch.diag(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    places = []
    for g in group.elements:
        mirrored, turns = divmod(g, group.rotations)
        matrix = torch.linalg.matrix_power(rows, mirrored) @ group.matrix(turns)
        place = group.element(swap @ matrix @ swap if upright else matrix)
        assert place is not None  # both groups hold all turns and mirrors of their grid
        places.append(place)
    return places


@dataclass(frozen=True)
class _Step:
    """Where a tensor of ours comes from: the released name and shape, and what makes the one out of the other."""

    key: str
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor]


def _plan(network: nn.Module, layers: Mapping[str, str], upright: bool) -> dict[str, _Step]:
    plan = {}
    for ours, released in layers.items():
        module = network.get_submodule(ours)
        for name, own in module.state_dict().items():
            if isinstance(module, GroupBatchNorm2d):
                shift = EPS - module.eps if name == "running_var" else 0.0
                step = _Step(f"{released}.{name}", tuple(own.shape), partial(_shifted, shift=shift))
            else:
                step = _convolution(module, name, own.shape, upright, released)
            plan[f"{ours}.{name}"] = step
    return plan


def _shifted(value: Tensor, shift: float) -> Tensor:
    return value.double() + shift if value.is_floating_point() else value


def _convolution(module: Any, name: str, own: torch.Size, upright: bool, released: str) -> _Step:
    """A parameter of a convolution: ``(C', C, |H|, k, k)`` filters, or matrices whose last axis is the group."""
    group: Group = module.group
    poses = group.order if module.in_field == "regular" else 1
    filters = name in ("weight", "attention.spatial")
    on_input = isinstance(getattr(module, "attention", None), InputAttention2d)
    if filters:
        shape, axis = (own[0], own[1] // poses, poses, *own[2:]), 2
    elif on_input:
        shape, axis = (own[0], own[1] // poses, poses), 2
    else:
        shape, axis = tuple(own), 3
    places = foreign_elements(group, upright) if poses > 1 else [0]
    factor = _factor(name, group, on_input) if poses > 1 else 1.0

    def change(value: Tensor) -> Tensor:
        value = value.double().reshape(shape).index_select(axis, torch.tensor(places).argsort()) * factor
        return (value.transpose(-2, -1) if filters and upright else value).reshape(own).contiguous()

    # What has no poses is released without the axis.
    there = shape if poses > 1 else shape[:axis] + shape[axis + 1 :]
    return _Step(f"{released}.{_PARAMETERS[name]}", there, change)


def _factor(name: str, group: Group, on_input: bool) -> float:
    """What the released factor of group convolutions does to a parameter of one."""
    haar = math.pi if group.mirrors else math.pi / 2
    if name == "weight":
        return haar
    if on_input:
        return haar if name == "attention.spatial" else 1.0
    return 1.0 if name == "attention.expand" else 1 / haar


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises pickle's, zip's and its own errors here
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise ValueError(f"{path} is not a state dict that torch can read ({reason})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a state dict of tensors")
    # Networks saved from inside torch.nn.DataParallel.
    return {str(name).removeprefix("module."): value for name, value in state.items()}


def _check(path: Path, model: str, found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "not of this network": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{key} {tuple(found[key].shape)} instead of {shape}"
            for key, shape in wanted.items()
            if key in found and tuple(found[key].shape) != shape
        ],
    }
    if any(faults.values()):
        named = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        raise ValueError(f"{path} is no released checkpoint of {model}: {named}. Name the network that it is of")
