"""The cases of the benchmark: subjects, baselines and target ratios, on a CPU and on CUDA."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

import eqzoo
from eqzoo import layers
from eqzoo.groups import P4, P4M, Z2, Group
from eqzoo.ops._backend import Backend

__all__ = [
    "COMPILED",
    "FILES",
    "GROUP_CONVOLUTION",
    "GROUP_CONVOLUTION_NETWORKS",
    "LAYERS",
    "LAYOUTS",
    "MEMORY",
    "MODELS",
    "TRANSFORMERS",
    "TWINS",
    "Case",
    "Subject",
    "registered_shapes",
]

Pair = tuple[float, float]


@dataclass(frozen=True)
class Subject:
    """A module to measure.

    Args:
        name: What the tables call it.
        build: Builds it.
        input_shape: The shape of one of its inputs.
        is_layer: Whether its input needs a gradient, and its output is not logits.
        channels_last: Whether its images or fields are channels last in memory, whatever the options say.
        backend: The backend of its operations; ``"reference"`` stores every intermediate result.
        compiled: Whether it runs under torch.compile, whatever the options say.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    is_layer: bool = False
    channels_last: bool = False
    backend: Backend = "auto"
    compiled: bool = False


@dataclass(frozen=True)
class Case:
    """A subject, its baseline, and the target ratio of the two.

    Args:
        ours: The subject.
        theirs: The baseline.
        batch: The batch size.
        target: The ratio of a training step, time or memory, on a CPU and on CUDA; None for no target.
        inference_target: The ratio of a forward pass in evaluation mode.
        deployed_target: The ratio of the two after `timm.utils.reparameterize_model`, in evaluation mode.
        deploys: Whether both are also measured deployed.
        limit: The peak memory in GB, on a CPU and on CUDA.
        inference_batch: The batch size of inference, where it is another one.
    """

    ours: Subject
    theirs: Subject
    batch: int
    target: Pair | None = None
    deployed_target: Pair | None = None
    deploys: bool = False
    limit: Pair | None = None
    inference_target: Pair | None = None
    inference_batch: int | None = None

    @property
    def key(self) -> str:
        """A unique name."""
        return f"{self.ours.name} : {self.theirs.name}"


class _OnPlanes(nn.Module):
    """A plain convolution of fields, with the input and output shapes of a group convolution."""

    def __init__(self, conv: nn.Conv2d, order: int) -> None:
        super().__init__()
        self.conv = conv
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.flatten(1, 2) if x.ndim == 5 else x).unflatten(1, (-1, self.order))


def _network(name: str, stored: bool = False, title: str | None = None, **kwargs: Any) -> Subject:
    cfg = timm.get_pretrained_cfg(name)
    return Subject(
        title or (f"{name}, all stored" if stored else name),
        partial(eqzoo.create_model, name, **kwargs),
        tuple(cfg.input_size),
        backend="reference" if stored else "auto",
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
    return Subject(
        f"{subject.name}, all stored", subject.build, subject.input_shape, subject.is_layer, backend="reference"
    )


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


def _group_convolution(
    group: Group, channels: int, side: int, kernel_size: int, batch: int, forward: float | None, step: float | None
) -> Case:
    """A group convolution against the plain one with its planes."""
    planes, padding = channels * group.order, kernel_size // 2
    ours = _layer(layers.GroupConv2d, group, channels, side, channels, kernel_size, padding=padding, bias=False)
    plain = replace(
        ours,
        name=f"Conv2d({planes}, {planes}, {kernel_size})",
        build=lambda: nn.Conv2d(planes, planes, kernel_size, padding=padding, bias=False),
        input_shape=(planes, side, side),
    )
    return Case(ours, plain, batch, target=_both(step), inference_target=_both(forward))


def _both(target: float | None) -> Pair | None:
    return None if target is None else (target, target)


def _twin(name: str, batch: int, **kwargs: Any) -> Case:
    """A network against the plain one with the same planes."""
    group = eqzoo.create_model(name).group
    ours = _network(name)
    plain = _network(name, title=f"plain {name.removeprefix(f'{group.name}_')} with its planes", group=Z2, **kwargs)
    return Case(ours, plain, batch, deployed_target=(1.03, 1.03), deploys=True)


def _layout(name: str, batch: int) -> Case:
    """A network on images with channels last against the same on contiguous ones."""
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
    Case(_network("p4_e4net"), _network("p4_e4net", stored=True), 32),
    Case(_network("p4_e4_resnet18"), _network("p4_resnet18"), 16, target=(0.8, 0.8), deploys=True),
    Case(_network("p4_alpha_f_cnn"), _network("p4_cnn"), 128, target=(1.6, 1.5), deploys=True),
    Case(_network("p4_alpha_cnn"), _network("p4_cnn"), 32, target=(6, 4), deploys=True),
    Case(_network("p4_alpha_cnn"), _network("p4_alpha_cnn", stored=True), 8),
    Case(_network("p4_asc_resnet29"), _network("p4_resnet29"), 32, target=(2.5, 1.8), deploys=True),
    Case(_network("p4_asc_resnet29"), _network("p4_asc_resnet29", stored=True), 8),
    Case(_network("r4_gsanet_t"), _network("r4_gsanet_t", stored=True), 8, target=(0.1, 0.1)),
    Case(_network("r8_gsanet_t"), _network("r4_gsanet_t"), 2, target=(4, 4)),
    Case(_network("r16_gsanet_t"), _network("r4_gsanet_t"), 1, target=(16, 16)),
]

MEMORY = [
    Case(_network("p4_alpha_cnn"), _network("p4_cnn"), 128, limit=(0.4, 0.4)),
    Case(_network("p4_alpha_cnn"), _network("p4_alpha_cnn", stored=True), 16),
    Case(_network("p4_alpha_allcnn"), _network("p4_allcnn"), 128, limit=(8, 6)),
    Case(_network("p4_asc_resnet29"), _network("p4_resnet29"), 64, target=(1.5, 1.5)),
    Case(_network("p4_e4net"), _network("p4_cnn_w19"), 128),
    Case(_network("p4_e4net"), _network("p4_e4net", stored=True), 64),
    Case(_network("r4_gsanet_t"), _network("r4_gsanet_t", stored=True), 8, target=(0.1, 0.1)),
    Case(_network("r8_gsanet_t"), _network("r4_gsanet_t"), 4, target=(4, 4)),
    Case(_network("r16_gsanet_t"), _network("r4_gsanet_t"), 2, target=(16, 16)),
]

GROUP_CONVOLUTION = [
    _group_convolution(P4, 16, 32, 3, 32, 0.8, 0.9),
    _group_convolution(P4, 32, 32, 3, 16, 0.5, 0.58),
    _group_convolution(P4, 64, 16, 3, 16, 0.42, 0.48),
    _group_convolution(P4, 128, 8, 3, 32, 0.42, 0.48),
    _group_convolution(P4, 32, 16, 1, 32, None, None),
    _group_convolution(P4, 64, 16, 1, 32, 0.5, 0.6),
    _group_convolution(P4, 128, 8, 1, 64, 0.5, 0.6),
    _group_convolution(P4M, 16, 32, 3, 16, 0.38, 0.45),
    _group_convolution(P4M, 32, 16, 3, 16, 0.28, 0.35),
    _group_convolution(P4M, 64, 8, 3, 32, 0.2, 0.25),
    _group_convolution(P4M, 32, 16, 1, 32, 0.35, 0.45),
    _group_convolution(P4M, 64, 8, 1, 64, 0.35, 0.45),
]


def _plain_twin(name: str, batch: int, width: int, step: float, inference: float, **kwargs: Any) -> Case:
    """A network against the plain one with the same planes, with targets."""
    case = _twin(name, batch, width=width, **kwargs)
    return replace(case, deploys=False, target=_both(step), inference_target=_both(inference), inference_batch=8)


def _against_itself(name: str, batch: int) -> Case:
    """A network against itself with every group convolution expanded to a plain one."""
    ours = _network(name)
    theirs = replace(ours, name="group convolutions expanded", backend="expanded")
    return Case(ours, theirs, batch, target=_both(0.8), inference_batch=8)


GROUP_CONVOLUTION_NETWORKS = [
    _plain_twin("p4_resnet29", 8, 32, 0.85, 0.5),
    _plain_twin("p4_resnet18", 4, 128, 0.55, 0.5, drop_rate=0.2),
    _plain_twin("p4_allcnn", 4, 192, 0.55, 0.5),
    _plain_twin("p4m_resnet18", 4, 176, 0.35, 0.35, drop_rate=0.2),
    _plain_twin("p4m_allcnn", 4, 256, 0.35, 0.35),
    _against_itself("p4_e4_resnet18", 4),
    _against_itself("p4_asc_resnet29", 8),
    _against_itself("p4_alpha_f_allcnn", 4),
]


def _same_parameters(name: str, twin: str, batch: int) -> Case:
    """A network against the plain one of its paper, which has about as many parameters."""
    return Case(_network(name), _network(twin), batch, inference_batch=8)


TWINS = [
    _same_parameters("p4_resnet29", "z2_resnet29", 8),
    _same_parameters("p4m_resnet29", "z2_resnet29", 8),
    _same_parameters("p4_se_resnet29", "z2_se_resnet29", 8),
    _same_parameters("p4_asc_resnet29", "z2_asc_resnet29", 8),
    _same_parameters("p4_resnet18", "z2_resnet18", 4),
    _same_parameters("p4m_resnet18", "z2_resnet18", 4),
    _same_parameters("p4_allcnn", "z2_allcnn", 4),
    _same_parameters("p4m_allcnn", "z2_allcnn", 4),
    _same_parameters("p4_cnn", "z2_cnn", 64),
]


def _compiled(name: str, batch: int, layouts: tuple[str, ...] = ("",)) -> list[Case]:
    """A compiled network against the same in eager mode."""
    eager = replace(_network(name), build=partial(timm.create_model, name))
    return [
        Case(
            replace(eager, name=f"{name}, compiled{layout}", compiled=True, channels_last=bool(layout)),
            replace(eager, name="eager", channels_last=bool(layout)),
            batch,
            target=(1.0, 1.0),
        )
        for layout in layouts
    ]


_LAYOUTS = ("", ", channels last")

COMPILED = [
    *_compiled("p4_resnet29", 8, _LAYOUTS),
    *_compiled("z2_resnet29", 16, _LAYOUTS),
    *_compiled("p4_cnn", 64, _LAYOUTS),
    *_compiled("p4_allcnn", 4),
    *_compiled("p4m_resnet18", 2),
    *_compiled("p4_e4net", 32),
    *_compiled("p4_alpha_f_cnn", 32),
    *_compiled("p4_alpha_cnn", 16),
    *_compiled("p4_asc_resnet29", 8),
    *_compiled("r4_gsanet_t", 4),
    *_compiled("p4m_densenet", 2),
    *_compiled("p4m_convnext_atto", 2),
    *_compiled("p4m_octic_vit_tiny_patch16_224", 2),
]


def registered_shapes() -> dict[tuple[Any, ...], list[str]]:
    """All group convolutions of the registered networks with a group, and the names of the networks.

    A key is the group, fields in and out, the side of the filters, stride, padding, dilation, height and width. The
    networks run on the device meta, which has shapes and no numbers.
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for name in eqzoo.list_models():
        with torch.device("meta"):
            model = eqzoo.create_model(name).eval()
        convs = [m for m in model.modules() if isinstance(m, layers.GroupConv2d) and m.group.order > 1]
        for module in convs:
            module.register_forward_pre_hook(partial(_note, found, name))
        if convs:
            with torch.no_grad():
                model(torch.empty(2, *model.input_size, device="meta"))
    return found


def _note(
    found: dict[tuple[Any, ...], list[str]], name: str, module: layers.GroupConv2d, inputs: tuple[Tensor]
) -> None:
    sizes = (module.in_channels, module.out_channels, module.kernel_size)
    key = (module.group, *sizes, module.stride, module.padding, module.dilation, *inputs[0].shape[-2:])
    names = found.setdefault(key, [])
    if name not in names:
        names.append(name)


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


def _transformer(name: str, twin: str, depth: int, target: Pair) -> Case:
    """An octic ViT against timm's of the same width, both with so many blocks: all alike, and a large one has 24."""
    ours, theirs = (
        Subject(f"{full}, {depth} blocks", partial(timm.create_model, full, depth=depth), (3, 224, 224))
        for full in (name, twin)
    )
    return Case(ours, theirs, 4, target=target)


TRANSFORMERS = [
    _transformer("p4m_octic_vit_base_patch16_224", "deit3_base_patch16_224", 12, (0.71, 0.71)),
    _transformer("p4m_octic_vit_large_patch16_224", "deit3_large_patch16_224", 8, (0.67, 0.67)),
]


def _files(name: str, batch: int) -> Case:
    """The ONNX file of a network against the network in torch."""
    shape = tuple(timm.get_pretrained_cfg(name).input_size)
    network = Subject(name, partial(timm.create_model, name), shape)
    return Case(replace(network, name=f"{name} as a file, batch {batch}"), network, batch)


FILES = [
    _files(name, batch)
    for name in (
        "p4_cnn",
        "p4_alpha_f_cnn",
        "p4_alpha_cnn",
        "p4_allcnn",
        "p4_resnet18",
        "p4_e4_resnet18",
        "p4_e4net",
        "p4_resnet29",
        "p4_asc_resnet29",
        "r4_gsanet_t",
    )
    for batch in (1, 8, 64)
]
