"""Builds a registered network through timm, with weights from wherever they are."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.models import DefaultCfg, PretrainedCfg, build_model_with_cfg, generate_default_cfgs, resolve_pretrained_cfg
from torch import Tensor, nn

from ..groups import Group
from ..hub import (
    CONFIG_NAME,
    HUB_OWNER,
    WeightsNotFoundError,
    fetch_weights,
    find_weights,
    published_names,
    shipped_folder,
)
from .base import EquivariantNet

__all__ = [
    "build",
    "check_group",
    "checkpoint_arguments",
    "configs",
    "group_of_weights",
    "known",
    "loaded_checkpoint",
    "misfit",
    "per_channel",
    "published_checkpoints",
]

_ARGUMENTS: dict[str, dict[str, Any]] = {}  # of checkpoints, by name, the arguments of the network's class
_PLACES: dict[str, int] = {}  # of checkpoints, by name, the place among the typed entries
_MODELS: set[str] = set()  # every network that has configurations, of this package and of its users


def configs(typed: Mapping[str, dict[str, Any]]) -> dict[str, DefaultCfg]:
    """The entries of a family of networks in timm's registry: the typed ones, and every checkpoint that is published.

    `create_model`, `list_models` and everything else that takes a name then know the networks.

    A checkpoint is published, and listed as pretrained, if the package has its folder with a config.json (see
    `eqzoo.hub.shipped_folder`). One without a typed entry, such as that of a second recipe for a data set, gets its
    entry from config.json.

    Args:
        typed: The configuration of ``<model>.<data set>``, for every network at least one. Its ``"model_args"`` are
            arguments of the network's class with which the checkpoint's network is built.
    """
    entries = {name: dict(entry) for name, entry in typed.items()}
    _ARGUMENTS.update({name: entry.pop("model_args") for name, entry in entries.items() if "model_args" in entry})
    _PLACES.update({name: len(_PLACES) + place for place, name in enumerate(typed)})
    models = {name.partition(".")[0] for name in typed}
    _MODELS.update(models)
    for name in published_names():
        if name.partition(".")[0] in models:
            entry = entries.get(name) or _read_config(name)
            entries[name] = entry | {"hf_hub_id": f"{HUB_OWNER}/{name}", "license": "mit"}
    found = generate_default_cfgs(entries)
    # A name without tag builds the first entry of its network; timm would prefer one that has weights.
    first = {name.partition(".")[0]: name.partition(".")[2] for name in reversed(list(typed))}
    for model, tag in first.items():
        found[model].tags.remove(tag)
        found[model].tags.appendleft(tag)
    return dict(found)


def published_checkpoints(model: str) -> list[str]:
    """The published checkpoints of a network, in the order of its typed entries, then by name.

    The first one is what a name without tag takes, if the weights of the network's first entry are not published.
    """
    names = [name for name in published_names() if name.startswith(f"{model}.")]
    return sorted(names, key=lambda name: _PLACES.get(name, len(_PLACES)))


def loaded_checkpoint(model: str) -> str:
    """The checkpoint whose weights a name without tag takes: the network's first entry, or else a published one.

    If the weights of the first entry are published, they are not replaced by others, even if they cannot be fetched.
    """
    cfg = resolve_pretrained_cfg(model)
    name = f"{model}.{cfg.tag}" if cfg.tag else model
    if cfg.hf_hub_id:
        return name
    try:
        find_weights(name, None)
    except WeightsNotFoundError:
        return next(iter(published_checkpoints(model)), name)
    return name


def checkpoint_arguments(name: str) -> dict[str, Any]:
    """The arguments of the network's class that a checkpoint, ``<model>.<data set>``, is built with."""
    return dict(_ARGUMENTS.get(name, {}))


def known(model: str) -> bool:
    """Whether a network, by its name without tag, was registered through `configs`."""
    return model in _MODELS


def configured_name(model: str, dataset: str) -> str:
    """The name of a network with its configuration for a data set, or the network's alone where it has none.

    Args:
        model: The registered name.
        dataset: The name of the data set, or another tag.
    """
    tagged = f"{model}.{dataset}"
    return tagged if tagged in timm.list_models(model, include_tags=True) else model


def _read_config(name: str) -> dict[str, Any]:
    config = json.loads((shipped_folder() / name / CONFIG_NAME).read_text(encoding="utf-8"))
    fixed = {"num_classes", "in_chans"}  # the entry has them
    if args := {key: value for key, value in config.get("model_args", {}).items() if key not in fixed}:
        _ARGUMENTS[name] = args
    entry = config["pretrained_cfg"] | {"label_names": config.get("label_names")}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


def build(
    model_cls: type[EquivariantNet], variant: str, pretrained: bool, feature_indices: tuple[int, ...], **kwargs: Any
) -> EquivariantNet:
    """Builds a network as `timm.models.build_model_with_cfg` does, and finds its weights first.

    Args:
        model_cls: The class of the network, a subclass of `EquivariantNet`.
        variant: The registered name, without tag.
        pretrained: Whether to load weights.
        feature_indices: The features of ``features_only=True``, unless the caller gives ``out_indices``.
        **kwargs: timm's entries (``pretrained_cfg``, ``pretrained_cfg_overlay``, ``features_only``, ``device``,
            ``dtype`` ...) and the arguments of the class.

    Returns:
        The network, or timm's feature extractor around it.

    Raises:
        WeightsNotFoundError: If weights are asked for and found nowhere.
        ValueError: If the weights file cannot be read, is not what it should be, or does not fit the network, or a rate
            of dropout is no probability.
        TypeError: If the class has no argument of this name; the message has those that it has.
    """
    if isinstance(kwargs.get("group"), str):
        kwargs["group"] = Group.from_name(kwargs["group"])
    for name, rate in kwargs.items():
        if name.endswith(("drop_rate", "drop_path_rate")) and not (isinstance(rate, int | float) and 0 <= rate <= 1):
            raise ValueError(f"{name} is a probability, from 0 to 1; got {rate!r}")
    if kwargs.get("features_only") and kwargs.get("feature_cls", "getter") != "getter":
        raise ValueError(
            "features are planes of forward_intermediates, feature_cls='getter'; hooks would give fields and tracing "
            f"fails, so leave feature_cls out; got {kwargs['feature_cls']!r}"
        )
    placed = {key: value for key in ("device", "dtype") if (value := kwargs.pop(key, None)) is not None}
    if not isinstance(placed.get("dtype", torch.float32), torch.dtype):
        raise TypeError(f"dtype is a torch.dtype such as torch.bfloat16, got {placed['dtype']!r}")
    overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), overlay)
    if pretrained and cfg.source == "hf-hub":
        # timm would load it unchecked; here its hash is checked, and timm reads the file.
        overlay |= {"file": str(fetch_weights(str(cfg.hf_hub_id), kwargs.get("cache_dir"))), "source": None}
    elif pretrained and not _names_a_source(cfg):
        name = f"{variant}.{cfg.tag}" if cfg.tag else variant
        try:
            overlay["file"] = str(find_weights(name, cfg.hf_hub_id, kwargs.get("cache_dir")))
        except WeightsNotFoundError:
            other = loaded_checkpoint(variant)
            if kwargs.get("pretrained_cfg") or other == name:
                raise
            kwargs |= {"pretrained_cfg": other.partition(".")[2], "pretrained_cfg_overlay": overlay}
            return build(model_cls, variant, pretrained, feature_indices, **placed, **kwargs)
    cfg = replace(cfg, **overlay)
    if pretrained and cfg.file:
        check_group(Path(str(cfg.file)), variant, model_cls, kwargs.get("group"))
    # A config.json has the arguments of its own.
    own_arguments = not isinstance(kwargs.get("pretrained_cfg"), dict)
    arguments = checkpoint_arguments(f"{variant}.{cfg.tag}") if own_arguments else {}
    side = kwargs.get("img_size")
    if "input_size" in overlay or (side is not None and side == _side_of_positions(cfg)):
        side = None  # not asked for: it is that of the positions, and the network may be fine-tuned on another one
    # Names are those of the classes of weights; who asks for a number of classes alone has other ones.
    unnamed = not pretrained and "num_classes" in kwargs and not kwargs.get("pretrained_cfg")
    kwargs = arguments | kwargs
    # Features come from forward_intermediates: as planes, which timm's users expect.
    feature_cfg = {"feature_cls": "getter", "out_indices": feature_indices}
    filter_fn = kwargs.get("pretrained_filter_fn")
    if filter_fn and "source" in inspect.signature(filter_fn).parameters:
        filter_fn = partial(filter_fn, source=group_of_weights(Path(str(cfg.file)), variant) if cfg.file else None)
    kwargs["pretrained_filter_fn"] = _complete(filter_fn, cfg.classifier)
    try:
        model: EquivariantNet = build_model_with_cfg(
            model_cls, variant, pretrained, pretrained_cfg_overlay=overlay, feature_cfg=feature_cfg, **kwargs
        )
    except SafetensorError as error:
        raise ValueError(f"{cfg.file} is not a readable safetensors file ({error}); fetch it again") from error
    except TypeError as error:
        given = re.search(rf"{model_cls.__name__}\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if not given:
            raise
        raise TypeError(_no_argument(model_cls, variant, given[1])) from error
    except RuntimeError as error:
        if not (pretrained and cfg.file):
            raise
        raise ValueError(f"{cfg.file} does not fit {variant} with these arguments: {misfit(error)}") from error
    if hasattr(model, "in_chans"):  # not every extractor of features of timm's has it
        sides = side or model.pretrained_cfg["input_size"][1:]
        model.pretrained_cfg["input_size"] = (model.in_chans, *((sides, sides) if isinstance(sides, int) else sides))
        for key in ("mean", "std"):
            model.pretrained_cfg[key] = per_channel(model.pretrained_cfg[key], model.in_chans)
        if isinstance(inner := getattr(model, "model", None), EquivariantNet):
            inner.pretrained_cfg |= {key: model.pretrained_cfg[key] for key in ("input_size", "mean", "std")}
    labels = model.pretrained_cfg.get("label_names")
    if labels and (unnamed or len(labels) != getattr(model, "num_classes", len(labels))):
        model.pretrained_cfg["label_names"] = None  # they name the classes of the weights
    model._model_args = arguments  # timm saves them, and its caller's, with the network
    return model.to(**placed) if placed else model


def _side_of_positions(cfg: PretrainedCfg) -> Any:
    """The ``img_size`` of the config.json that a local configuration is of; None where there is none."""
    path = Path(str(cfg.file or ""))
    path = (path if path.is_dir() else path.parent) / CONFIG_NAME
    if cfg.source != "local-dir" or not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    sized = (config.get("pretrained_cfg") or config).get("input_size")
    return (config.get("model_args") or {}).get("img_size") if sized else None


def check_group(weights: Path, variant: str, model_cls: type[nn.Module], group: Group | None) -> None:
    """Raises ValueError where weights of one group would be loaded into a network of another.

    The numbers may fit: p4 and two rotations with reflections have four elements each. Without a config.json beside
    the weights there is nothing to compare. Networks that convert weights between groups say so by ``converts_groups``.
    """
    if group is None or getattr(model_cls, "converts_groups", False):
        return
    found = group_of_weights(weights, variant)
    if found not in (None, group):
        raise ValueError(
            f"{weights} has weights of {variant} for the group {found.name}, which mean something else in a network "
            f"for {group.name}; leave the argument group out, or train that network from random weights"
        )


def group_of_weights(weights: Path, variant: str) -> Group | None:
    """The group of a network whose weights a file or a folder holds.

    It is in the config.json beside them: what `eqzoo publish` writes, or the argument ``group`` that timm saved; else
    it is the one that the network is named after. None without a config.json of this network.
    """
    path = (weights if weights.is_dir() else weights.parent) / CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["architecture"] != variant:
            return None
        name = (config.get("eqzoo") or {}).get("group") or (config.get("model_args") or {}).get("group")
        return Group.from_name(name or variant.partition("_")[0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no file, or no config.json
        return None


def _complete(
    filter_fn: Callable[..., dict[str, Tensor]] | None, classifier: str | Sequence[str] | None
) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]:
    """The filter of a state dict, which also refuses one that lacks weights or has others, but for the classifier.

    timm itself says nothing of them where the classifier is left out or replaced.
    """
    heads = tuple(f"{name}." for name in ([classifier] if isinstance(classifier, str) else classifier or ()))

    def filtered(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        state = filter_fn(state, model) if filter_fn else state
        if not getattr(model, "num_classes", True):  # timm leaves out the classifier, here what belongs to it too
            state = {name: value for name, value in state.items() if not name.startswith("head.")}
        own, given = ({name for name in names if not name.startswith(heads)} for names in (model.state_dict(), state))
        faults = [
            f"{kind} key(s) in state_dict: {', '.join(map(repr, sorted(names)))}"
            for kind, names in (("Missing", own - given), ("Unexpected", given - own))
            if names
        ]
        if faults:
            raise RuntimeError("\n".join(["the weights do not fit", *faults]))
        return state

    return filtered


def _no_argument(model_cls: type[EquivariantNet], variant: str, name: str) -> str:
    """What to say of an argument that the class of a network does not have."""
    arguments = inspect.signature(model_cls).parameters
    text = f"{variant} has no argument {name!r}; those of {model_cls.__name__} are {', '.join(arguments)}"
    if name in ("img_size", "input_size") and "img_size" not in arguments:
        text += f". It takes images of every size that it is equivariant on: `eqzoo info {variant}` prints the sides"
    return text


def per_channel(values: Sequence[float], channels: int) -> Sequence[float]:
    """The mean or standard deviation of each channel: as given, or the mean of what is given for other channels."""
    return values if len(values) in (1, channels) else (round(fmean(values), 6),) * channels


def misfit(error: RuntimeError) -> str:
    """What torch says of a state dict that does not fit, in one line: the first fault, and how many more there are."""
    first, *others = [line.strip() for line in str(error).splitlines()][1:] or [str(error)]
    return shorten(first, 300) + f" and {len(others)} more" * bool(others)


def _names_a_source(cfg: PretrainedCfg) -> bool:
    """Whether the caller named the weights: a file, a state dict, hf-hub: or local-dir:."""
    return bool(cfg.source or cfg.file or cfg.state_dict)
