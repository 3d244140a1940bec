"""What the benchmark compares with what, and the ratios that are wanted, on a CPU and on CUDA."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
from torch import Tensor, nn

import eqzoo
from eqzoo import layers
from eqzoo.groups import P4, P4M, Z2, Group

__all__ = ["LAYERS", "LAYOUTS", "MEMORY", "MODELS", "Case", "Subject"]

Pair = tuple[float, float]


@dataclass(frozen=True)
class Subject:
    """A module to be measured.

    Args:
        name: What the tables call it.
        build: Makes it.
        input_shape: The shape of one of its inputs.
        is_layer: Whether its input needs a gradient, and its output is not logits.
        naive: Whether its operations store everything (see naive.py).
        channels_last: Whether its pictures have their channels last in memory, whatever the command says.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    is_layer: bool = False
    naive: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class Case:
    """Two modules and the ratio that is wanted between them.

    Args:
        ours: The subject.
        theirs: What it is compared with.
        batch: The batch size.
        target: The ratio of a training step, time or memory, on a CPU and on CUDA; None where none was set.
        deployed_target: The ratio of the two after `timm.utils.reparameterize_model`, in evaluation mode.
        deploys: Whether both are measured deployed, too.
        limit: The peak memory in GB, on a CPU and on CUDA.
    """

    ours: Subject
    theirs: Subject
    batch: int
    target: Pair | None = None
    deployed_target: Pair | None = None
    deploys: bool = False
    limit: Pair | None = None

    @property
    def key(self) -> str:
        """A name of its own."""
        return f"{self.ours.name} : {self.theirs.name}"


class _OnPlanes(nn.Module):
    """A plain convolution between fields, so that it takes what a group convolution takes."""

    def __init__(self, conv: nn.Conv2d, order: int) -> None:
        super().__init__()
        self.conv = conv
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.flatten(1, 2) if x.ndim == 5 else x).unflatten(1, (-1, self.order))


def _network(name: str, naive: bool = False, title: str | None = None, **kwargs: Any) -> Subject:
    cfg = timm.get_pretrained_cfg(name)
    return Subject(
        title or (f"{name}, all stored" if naive else name),
        partial(eqzoo.create_model, name, **kwargs),
        tuple(cfg.input_size),
        naive=naive,
    )


def _layer(
    layer: Callable[..., nn.Module], group: Group, channels: int, side: int, *args: Any, **kwargs: Any
) -> Subject:
    options = ", ".join([str(channels), *map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
    return Subject(
        f"{layer.__name__}({group.name}, {options}) at {side}",
        partial(layer, group, channels, *args, **kwargs),
        (channels, group.order, side, side),
        is_layer=True,
    )


def _stored(subject: Subject) -> Subject:
    return Subject(f"{subject.name}, all stored", subject.build, subject.input_shape, subject.is_layer, naive=True)


def _conv(group: Group, channels: int, side: int, kernel_size: int = 3) -> Case:
    planes, padding = channels * group.order, kernel_size // 2
    plain = Subject(
        f"Conv2d({planes}, {planes}, {kernel_size})",
        lambda: _OnPlanes(nn.Conv2d(planes, planes, kernel_size, padding=padding), group.order),
        (channels, group.order, side, side),
        is_layer=True,
    )
    ours = _layer(layers.GroupConv2d, group, channels, side, channels, kernel_size, padding=padding)
    return Case(ours, plain, 32, target=(1.05, 1.05) if channels >= 32 else None)


def _twin(name: str, batch: int, **kwargs: Any) -> Case:
    """A network against the plain one with the same planes."""
    group = eqzoo.create_model(name).group
    ours = _network(name)
    plain = _network(name, title=f"plain {name.removeprefix(f'{group.name}_')} with its planes", group=Z2, **kwargs)
    return Case(ours, plain, batch, deployed_target=(1.03, 1.03), deploys=True)


def _layout(name: str, batch: int) -> Case:
    """A network on pictures with channels last against the same on contiguous ones."""
    ours = replace(_network(name, title=f"{name}, channels last"), channels_last=True)
    return Case(ours, _network(name, title="contiguous"), batch)


_E4 = _layer(layers.E4Layer2d, P4, 16, 28, 16, 5)
_ALPHA = _layer(layers.AttentiveGroupConv2d, P4, 10, 24, 10, 3, padding=1)
_ALPHA_F = _layer(layers.AttentiveGroupConv2d, P4, 10, 24, 10, 3, padding=1, attention="input")
_ASC = _layer(layers.AffineSelfConv2d, P4, 16, 16)
_SIMPLE_ASC = _layer(layers.SimpleAffineSelfConv2d, P4, 16, 16)
_SASA = _layer(layers.StandAloneSelfAttention2d, P4, 16, 16)
_GSA = _layer(layers.GroupSelfAttention2d, P4, 20, 24, 20)

LAYERS = [
    _conv(P4, 16, 28),
    _conv(P4, 32, 28),
    _conv(P4, 32, 28, kernel_size=1),
    _conv(P4, 64, 14),
    _conv(P4M, 32, 14),
    Case(_E4, _layer(layers.GroupConv2d, P4, 16, 28, 16, 3, padding=1), 32),
    Case(_E4, _stored(_E4), 32),
    Case(_ALPHA, _layer(layers.GroupConv2d, P4, 10, 24, 10, 3, padding=1), 8),
    Case(_ALPHA, _stored(_ALPHA), 8),
    Case(_ALPHA_F, _layer(layers.GroupConv2d, P4, 10, 24, 10, 3, padding=1), 32),
    Case(_ASC, _layer(layers.GroupConv2d, P4, 16, 16, 16, 3, padding=1), 16),
    Case(_ASC, _stored(_ASC), 16),
    Case(_SIMPLE_ASC, _stored(_SIMPLE_ASC), 16),
    Case(_SASA, _stored(_SASA), 16),
    Case(_GSA, _stored(_GSA), 2),
]

MODELS = [
    _twin("p4_cnn", 128, width=40),
    _twin("p4_cnn_w19", 128, width=76),
    _twin("p4m_cnn", 128, width=56),
    _twin("p4_allcnn", 16, width=192),
    _twin("p4_resnet29", 32, width=32),
    _twin("p4_resnet18", 8, width=128, drop_rate=0.2),
    Case(_network("p4_e4net"), _network("p4_cnn_w19"), 128, target=(1.0, 1.0), deploys=True),
    Case(_network("p4_e4net"), _network("p4_e4net", naive=True), 32),
    Case(_network("p4_e4_resnet18"), _network("p4_resnet18"), 16, target=(0.8, 0.8), deploys=True),
    Case(_network("p4_alpha_f_cnn"), _network("p4_cnn"), 128, target=(1.6, 1.5), deploys=True),
    Case(_network("p4_alpha_cnn"), _network("p4_cnn"), 32, target=(6, 4), deploys=True),
    Case(_network("p4_alpha_cnn"), _network("p4_alpha_cnn", naive=True), 8),
    Case(_network("p4_asc_resnet29"), _network("p4_resnet29"), 32, target=(2.5, 1.8), deploys=True),
    Case(_network("p4_asc_resnet29"), _network("p4_asc_resnet29", naive=True), 8),
    Case(_network("r4_gsanet_t"), _network("r4_gsanet_t", naive=True), 8, target=(0.1, 0.1)),
    Case(_network("r8_gsanet_t"), _network("r4_gsanet_t"), 2, target=(4, 4)),
    Case(_network("r16_gsanet_t"), _network("r4_gsanet_t"), 1, target=(16, 16)),
]

MEMORY = [
    Case(_network("p4_alpha_cnn"), _network("p4_cnn"), 128, limit=(0.4, 0.4)),
    Case(_network("p4_alpha_cnn"), _network("p4_alpha_cnn", naive=True), 16),
    Case(_network("p4_alpha_allcnn"), _network("p4_allcnn"), 128, limit=(8, 6)),
    Case(_network("p4_asc_resnet29"), _network("p4_resnet29"), 64, target=(1.5, 1.5)),
    Case(_network("p4_e4net"), _network("p4_cnn_w19"), 128),
    Case(_network("p4_e4net"), _network("p4_e4net", naive=True), 64),
    Case(_network("r4_gsanet_t"), _network("r4_gsanet_t", naive=True), 8, target=(0.1, 0.1)),
    Case(_network("r8_gsanet_t"), _network("r4_gsanet_t"), 4, target=(4, 4)),
    Case(_network("r16_gsanet_t"), _network("r4_gsanet_t"), 2, target=(16, 16)),
]

LAYOUTS = [
    _layout("p4_cnn", 128),
    _layout("p4_resnet29", 32),
    _layout("z2_resnet29", 32),
    _layout("p4_se_resnet29", 32),
    _layout("p4_resnet18", 16),
    _layout("p4_asc_resnet29", 16),
    _layout("p4_e4net", 64),
    _layout("p4_alpha_f_cnn", 64),
]
