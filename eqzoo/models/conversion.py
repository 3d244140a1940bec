"""Converts checkpoints of other projects to weights of the networks of eqzoo, which compute the same function.

**octic_vits**: octic vision transformers, see `eqzoo.models.octic_conversion`.

**att_gconvs**, the networks of attentive group convolutions, as their authors released them. They differ from ours in

* the elements: theirs rotate first and then flip the rows, ours flip the columns first and then rotate;
* a factor: their group convolutions are multiplied by π/2 (p4) or π (p4m), which goes into the filters. Attention on
  responses sees them without the factor, so the first layer of its perceptron and its spatial filters are divided by
  it: the ReLU lets a positive factor through;
* batch norms: theirs add 2e-5 to the variance, which goes into the running variance;
* the digits: the original rotated MNIST holds them transposed. A transposition τ is a symmetry of the grid, so filters
  ``τψ`` with the poses ``h ↦ τ h τ⁻¹`` respond to digits as the released filters to transposed digits.

References:
    Attentive Group Equivariant Convolutional Networks (Romero et al., 2020)
    https://arxiv.org/abs/2002.03830, https://github.com/dwromero/att_gconvs
"""

import inspect
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

from .._common import atomic
from ..groups import Group
from ..layers import GroupBatchNorm2d, InputAttention2d
from . import create_model
from ._released_files import read_pth, some_of
from .octic_conversion import write_octic_vit

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
# The networks whose weights were released, the data set they are of, and what the released layers are called.
_NETWORKS = {
    "z2_cnn": ("rotmnist", _ROTMNIST),
    "p4_cnn": ("rotmnist", _ROTMNIST),
    "p4_alpha_cnn": ("rotmnist", _ROTMNIST),
    "p4_alpha_f_cnn": ("rotmnist", _ROTMNIST),
    "p4m_densenet": ("pcam", _DENSENET),
}
_PARAMETERS = {
    "weight": "weight",
    "attention.reduce": "channel_attention.weight_fc1",
    "attention.expand": "channel_attention.weight_fc2",
    "attention.spatial": "spatial_attention.weight",
}


def convert(
    source: str, path: str | os.PathLike[str], model: str, output: str | os.PathLike[str], **options: Any
) -> str:
    """Converts a checkpoint, and writes it where `eqzoo.create_model` reads it.

    Args:
        source: The project that the checkpoint is from, a key of `SOURCES`.
        path: The checkpoint.
        model: The network of eqzoo that takes the weights.
        output: What to write: of att_gconvs a file ``<name>.safetensors``, of octic_vits a folder.
        **options: Those of the source that are not None. Of att_gconvs ``untransposed``: whether a network trained on
            transposed images is converted to one that takes images as they are. Of octic_vits ``settings``: arguments
            of the network that the file does not tell, such as ``{"num_heads": 3}``.

    Returns:
        What was written, and how it is loaded.

    Raises:
        FileNotFoundError: If there is no checkpoint, or no folder for the output.
        KeyError: If the source is unknown.
        ValueError: If the source has no such option, or the checkpoint does not fit.
    """
    given = {name: value for name, value in options.items() if value}
    if unknown := sorted(given.keys() - inspect.signature(SOURCES[source]).parameters.keys()):
        raise ValueError(f"{', '.join(unknown)} is of another source than {source}; leave it out")
    return SOURCES[source](Path(path), model, Path(output), **given)


def _write_att_gconvs(path: Path, model: str, output: Path, untransposed: bool = False) -> str:
    state = att_gconvs(path, model, untransposed)
    atomic(output, partial(save_file, state, metadata={"format": "pt"}))
    name = f"{model}.{_NETWORKS[model][0]}"
    return f"wrote {output}; eqzoo.create_model({name!r}, checkpoint_path={str(output)!r}) reads it"


SOURCES: dict[str, Callable[..., str]] = {"att_gconvs": _write_att_gconvs, "octic_vits": write_octic_vit}


def att_gconvs(path: str | os.PathLike[str], model: str, untransposed: bool = False) -> dict[str, Tensor]:
    """The weights of a released network of attentive group convolutions, as the network here takes them.

    Args:
        path: The released state dict, a ``.pth`` file; it is read without running any of its code.
        model: The network: z2_cnn, p4_cnn, p4_alpha_cnn, p4_alpha_f_cnn or p4m_densenet.
        untransposed: Whether the converted network takes digits as they are; the released ones take transposed digits.

    Returns:
        The state dict, in float64: in float32 the factors would be rounded.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the network is none of these, or the file is no state dict of it; names what does not fit.
    """
    if model not in _NETWORKS:
        raise ValueError(f"released weights of att_gconvs fit {', '.join(_NETWORKS)}; got {model!r}")
    dataset, layers = _NETWORKS[model]
    network, theirs = create_model(f"{model}.{dataset}"), _read(Path(path))
    plan = _plan(network, layers, untransposed)
    _check(Path(path), model, theirs, {step.key: step.shape for step in plan.values()})
    return {name: step.change(theirs[step.key]) for name, step in plan.items()}


def foreign_elements(group: Group, untransposed: bool = False) -> list[int]:
    """The index in ``group`` of each element of att_gconvs: ``F^m R^r`` at ``m·n + r``, where F reflects the rows.

    Args:
        group: The group.
        untransposed: Whether every element is conjugated by the transposition.

    Example:
        >>> from eqzoo.groups import P4, P4M
        >>> foreign_elements(P4), foreign_elements(P4M)
        ([0, 1, 2, 3], [0, 1, 2, 3, 6, 5, 4, 7])
    """
    rows = torch.diag(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    places = []
    for g in group.elements:
        reflected, rotation = divmod(g, group.rotations)
        matrix = torch.linalg.matrix_power(rows, reflected) @ group.matrix(rotation)
        place = group.element(swap @ matrix @ swap if untransposed else matrix)
        assert place is not None  # both groups hold all rotations and reflections of their grid
        places.append(place)
    return places


@dataclass(frozen=True)
class _Step:
    """The conversion of a tensor: its released name and shape, and the function to ours."""

    key: str
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor]


def _plan(network: nn.Module, layers: Mapping[str, str], untransposed: bool) -> dict[str, _Step]:
    plan = {}
    for ours, released in layers.items():
        module = network.get_submodule(ours)
        for name, own in module.state_dict().items():
            if isinstance(module, GroupBatchNorm2d):
                shift = EPS - module.eps if name == "running_var" else 0.0
                step = _Step(f"{released}.{name}", tuple(own.shape), partial(_shifted, shift=shift))
            else:
                step = _convolution(module, name, own.shape, untransposed, released)
            plan[f"{ours}.{name}"] = step
    return plan


def _shifted(value: Tensor, shift: float) -> Tensor:
    return value.double() + shift if value.is_floating_point() else value


def _convolution(module: Any, name: str, own: torch.Size, untransposed: bool, released: str) -> _Step:
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
    places = foreign_elements(group, untransposed) if poses > 1 else [0]
    factor = _factor(name, group, on_input) if poses > 1 else 1.0

    def change(value: Tensor) -> Tensor:
        value = value.double().reshape(shape).index_select(axis, torch.tensor(places).argsort()) * factor
        return (value.transpose(-2, -1) if filters and untransposed else value).reshape(own).contiguous()

    # What has no poses is released without the axis.
    there = shape if poses > 1 else shape[:axis] + shape[axis + 1 :]
    return _Step(f"{released}.{_PARAMETERS[name]}", there, change)


def _factor(name: str, group: Group, on_input: bool) -> float:
    """The factor of a parameter by which the released group convolutions differ."""
    haar = math.pi if group.reflections else math.pi / 2
    if name == "weight":
        return haar
    if on_input:
        return haar if name == "attention.spatial" else 1.0
    return 1.0 if name == "attention.expand" else 1 / haar


def _read(path: Path) -> dict[str, Tensor]:
    state = read_pth(path)
    # Networks saved from inside torch.nn.DataParallel.
    return {str(name).removeprefix("module."): value for name, value in state.items()}


def _check(path: Path, model: str, found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless a file has these weights and no others: those left out would compute something else."""
    shapes = {key: tuple(value.shape) for key, value in found.items()}
    if wrong := [key for key in wanted.keys() | shapes.keys() if wanted.get(key) != shapes.get(key)]:
        raise ValueError(
            f"{path} is no released checkpoint of {model}: missing, of another network or of another shape are "
            f"{some_of(wrong)}"
        )
