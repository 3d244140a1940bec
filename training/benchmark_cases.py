"""The cases of the benchmark: what is measured, and against what."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
from torch import nn

import eqzoo
from eqzoo.groups import Z2
from eqzoo.ops._dispatch import Backend


@dataclass(frozen=True)
class Subject:
    """A network to measure.

    Args:
        name: What the tables call it.
        build: Builds it.
        input_shape: The shape of an image.
        channels_last: Whether its images are channels last in memory, whatever the options say.
        backend: The backend of its operations; ``"reference"`` stores every intermediate result.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    channels_last: bool = False
    backend: Backend = "auto"


@dataclass(frozen=True)
class Case:
    """A subject and its baseline.

    Args:
        ours: The subject.
        theirs: The baseline.
        batch: The batch size.
        deploys: Whether both are also measured after `timm.utils.reparameterize_model`.
    """

    ours: Subject
    theirs: Subject
    batch: int
    deploys: bool = False

    @property
    def key(self) -> str:
        """A unique name."""
        return f"{self.ours.name} : {self.theirs.name}"


def _network(name: str, title: str = "", **kwargs: Any) -> Subject:
    shape = tuple(timm.get_pretrained_cfg(name).input_size)
    return Subject(title or name, partial(eqzoo.create_model, name, **kwargs), shape)


def _as_wide(name: str, batch: int, **kwargs: Any) -> Case:
    """A network against the plain one with as many channels."""
    ours = _network(name)
    group = eqzoo.create_model(name).group
    plain = _network(name, title=f"plain {name.removeprefix(f'{group.name}_')} with its planes", group=Z2, **kwargs)
    return Case(ours, plain, batch, deploys=True)


def _pair(name: str, other: str, batch: int, deploys: bool = False) -> Case:
    return Case(_network(name), _network(other), batch, deploys)


def _stored(name: str, batch: int) -> Case:
    """A network against itself with every intermediate result stored, as its formula is written."""
    ours = _network(name)
    return Case(ours, replace(ours, name=f"{name}, all stored", backend="reference"), batch)


MODELS = [
    _as_wide("p4_cnn", 128, width=40),
    _as_wide("p4_cnn_w19", 128, width=76),
    _as_wide("p4m_cnn", 128, width=56),
    _as_wide("p4_allcnn", 16, width=192),
    _as_wide("p4_resnet29", 32, width=32),
    _as_wide("p4_resnet18", 8, width=128, drop_rate=0.2),
    _pair("p4_e4net", "p4_cnn_w19", 128, deploys=True),
    _stored("p4_e4net", 32),
    _pair("p4_e4_resnet18", "p4_resnet18", 16, deploys=True),
    _pair("p4_alpha_f_cnn", "p4_cnn", 128, deploys=True),
    _pair("p4_alpha_cnn", "p4_cnn", 32, deploys=True),
    _stored("p4_alpha_cnn", 8),
    _pair("p4_asc_resnet29", "p4_resnet29", 32, deploys=True),
    _stored("p4_asc_resnet29", 8),
    _stored("r4_gsanet_t", 8),
    _pair("r8_gsanet_t", "r4_gsanet_t", 2),
    _pair("r16_gsanet_t", "r4_gsanet_t", 1),
]

MEMORY = [
    _pair("p4_alpha_cnn", "p4_cnn", 128),
    _stored("p4_alpha_cnn", 16),
    _pair("p4_alpha_allcnn", "p4_allcnn", 128),
    _pair("p4_asc_resnet29", "p4_resnet29", 64),
    _pair("p4_e4net", "p4_cnn_w19", 128),
    _stored("p4_e4net", 64),
    _stored("r4_gsanet_t", 8),
    _pair("r8_gsanet_t", "r4_gsanet_t", 4),
    _pair("r16_gsanet_t", "r4_gsanet_t", 2),
]

# With the plain network of the same paper, which has about as many parameters; z2_resnet_m has twice as many.
TWINS = [
    _pair("p4m_resnet_m", "z2_resnet_m", 32),
    _pair("p4_resnet29", "z2_resnet29", 8),
    _pair("p4m_resnet29", "z2_resnet29", 8),
    _pair("p4_se_resnet29", "z2_se_resnet29", 8),
    _pair("p4_asc_resnet29", "z2_asc_resnet29", 8),
    _pair("p4_resnet18", "z2_resnet18", 4),
    _pair("p4m_resnet18", "z2_resnet18", 4),
    _pair("p4_allcnn", "z2_allcnn", 4),
    _pair("p4m_allcnn", "z2_allcnn", 4),
    _pair("p4_cnn", "z2_cnn", 64),
]

# Networks whose ONNX files hold convolutions through irreps; each against its file of plain convolutions.
_THROUGH_IRREPS = (
    "p4m_resnet_s",
    "p4m_resnet_m",
    "p4m_resnet_l",
    "p4m_resnet18",
    "p4m_resnet44",
    "p4m_e4_resnet18",
    "p4_resnet18",
)
FILES = [Case(_network(name), _network(name, title="plain convolutions"), 16) for name in _THROUGH_IRREPS]
