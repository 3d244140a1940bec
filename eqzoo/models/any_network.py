"""Any timm classification network, in an `OrbitNet`: registered as one network, ``orbitnet``, with arguments."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
from timm.models import build_model_with_cfg, register_model

from ..groups import Group
from .builder import complete_cfg, fits, per_channel, requested_side
from .load import ModelSource, is_own
from .orbit import OrbitNet


@register_model
def orbitnet(
    pretrained: bool = False,
    network: str = "",
    group: Group | str = "z2",
    copies: int | None = None,
    train_copies: int | None = None,
    pretrained_cfg: Mapping[str, Any] | None = None,
    pretrained_cfg_overlay: Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
    **kwargs: Any,
) -> OrbitNet:
    """An `OrbitNet` around a network of timm's registry.

    timm calls it: ``timm.create_model("orbitnet", network="resnet18.a1_in1k", group="p4m", pretrained=True)`` has the
    weights of ``resnet18.a1_in1k``, and the folder of such a network, whose config.json names ``orbitnet`` and these
    arguments, is loaded like any other.

    Args:
        pretrained: Whether to load weights: those of the network that is named or, of a folder, those of the folder.
        network: The name in timm's registry, with or without a tag.
        group: The group, or its name; the trivial one, ``"z2"``, leaves the network as it is.
        copies: The number of copies of each image, see `OrbitNet`.
        train_copies: Likewise, in training mode.
        pretrained_cfg: Where the weights of the whole network are and how images are normalized, from a config.json.
        pretrained_cfg_overlay: Other entries; a ``file`` holds weights in timm's names for the network that is named,
            or for all of a config.json.
        cache_dir: Where timm keeps its files.
        **kwargs: ``num_classes``, ``in_chans`` and the arguments of the network's class.
    """
    if kwargs.get("features_only"):
        raise ValueError("an OrbitNet has pooled features, the mean over the copies, and no features_only=True")
    wrap = partial(_wrapped, network, group, copies, train_copies)
    if pretrained_cfg:
        model: OrbitNet = build_model_with_cfg(
            wrap,
            "orbitnet",
            pretrained,
            pretrained_cfg=dict(pretrained_cfg),
            pretrained_cfg_overlay=pretrained_cfg_overlay,
            cache_dir=cache_dir,
            **kwargs,
        )
        side = requested_side({**kwargs, "pretrained_cfg": pretrained_cfg}, pretrained_cfg_overlay or {})
        complete_cfg(model, side, unnamed=False)
        return model
    overlay = dict(pretrained_cfg_overlay or {})
    with fits(overlay.get("file"), network):
        model = wrap(pretrained=pretrained, pretrained_cfg_overlay=overlay or None, cache_dir=cache_dir, **kwargs)
    channels = kwargs.get("in_chans") or model.network.pretrained_cfg["input_size"][0]
    model.pretrained_cfg = _own_cfg(model.network, channels, kwargs.get("img_size"))
    model.default_cfg = model.pretrained_cfg
    return model


def orbit_source(source: ModelSource, invariant: str | None, copies: int | None, weights: Path | None) -> ModelSource:
    """A network of the registry in an `OrbitNet`; a network of this package as it is, unless it is to be invariant.

    Args:
        source: The network.
        invariant: The name of the group, ``"p4"``, ``"p4m"`` or ``"z2m"``; None for the network's own.
        copies: The number of copies of each image in a prediction; None for all.
        weights: A file of weights in timm's names to start from, .safetensors or .pth; None for timm's own.

    Raises:
        FileNotFoundError: If there is no such file of weights.
        ValueError: If the network is that of a folder, whose config.json says what it is already, or there are copies
            without a group.
    """
    if weights is not None and not weights.is_file():
        raise FileNotFoundError(f"no file of weights at {weights}")
    own = source.architecture == "orbitnet" or is_own(source.architecture)
    if own and invariant is None and copies is None and weights is None:
        return source
    if source.config:
        raise ValueError(
            f"{source.name} is a folder, which is what its config.json says; invariant, copies and weights are for a "
            "network by its name in timm"
        )
    if copies is not None and invariant is None:
        raise ValueError("copies are those of a group: give invariant (--invariant p4m) too, or leave copies out")
    if own and invariant is None:
        return replace(source, weights=weights, has_weights=True)
    args: dict[str, Any] = {"network": source.timm_name, "group": invariant or "z2"}
    # Training on random copies, one of each image at a time, sees as many images as training without a group.
    args |= {"train_copies": 1} if copies is None else {"copies": copies}
    config = {"architecture": "orbitnet", "model_args": args}
    return ModelSource(source.name, "orbitnet", "orbitnet", config, weights, weights is not None or source.has_weights)


def _wrapped(network: str, group: Group | str, copies: int | None, train_copies: int | None, **kwargs: Any) -> OrbitNet:
    return OrbitNet(timm.create_model(network, **kwargs), group, copies, train_copies)


def _own_cfg(network: Any, channels: int, size: int | tuple[int, int] | None) -> dict[str, Any]:
    """The configuration of a timm network as that of the ``orbitnet`` around it."""
    cfg: dict[str, Any] = dict(network.pretrained_cfg)
    sides = (size, size) if isinstance(size, int) else size or cfg["input_size"][1:]
    prefixed = {key: _prefixed(cfg[key]) for key in ("classifier", "first_conv") if cfg.get(key)}
    per_image = {key: per_channel(cfg[key], channels) for key in ("mean", "std")}
    nowhere = {"url": "", "file": None, "hf_hub_id": None, "source": None}  # its weights are not those of all
    return cfg | prefixed | per_image | nowhere | {"architecture": "orbitnet", "input_size": (channels, *sides)}


def _prefixed(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return f"network.{names}" if isinstance(names, str) else tuple(f"network.{name}" for name in names)
