"""Builds a registered network through timm, with weights from wherever they are."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any

import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError
from timm.models import DefaultCfg, PretrainedCfg, build_model_with_cfg, generate_default_cfgs, resolve_pretrained_cfg
from timm.models._features import feature_take_indices
from torch import Tensor

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


@dataclass
class Checkpoint(PretrainedCfg):  # type: ignore[misc]  # timm is untyped
    """timm's entry of a checkpoint, with arguments of the class that its network is built with.

    Args:
        model_args: The arguments, JSON values.
    """

    model_args: dict[str, Any] = field(default_factory=dict)

    def to_dict(self, remove_source: bool = False, remove_null: bool = True) -> dict[str, Any]:
        """The entry as timm keeps it with a network, which knows its arguments itself."""
        entry = super().to_dict(remove_source, remove_null)
        return {key: value for key, value in entry.items() if key != "model_args"}


def configs(typed: Mapping[str, dict[str, Any]], **common: Any) -> dict[str, DefaultCfg]:
    """The entries of a family of networks in timm's registry: the typed ones, and every checkpoint that is published.

    `create_model`, `list_models` and everything else that takes a name then know the networks. A name without tag
    stands for its first published entry, or the first one if none is.

    A checkpoint is published, and listed as pretrained, if the package has its folder with a config.json (see
    `eqzoo.hub.shipped_folder`). One without a typed entry, such as that of a second recipe for a data set, gets its
    entry from config.json.

    Args:
        typed: The configuration of ``<model>.<data set>``, for every network at least one. Its ``"model_args"`` are
            arguments of the network's class with which the checkpoint's network is built.
        **common: What the configurations have in common, such as ``classifier``, the name of that layer.
    """
    entries = {name: Checkpoint(**(common | entry)) for name, entry in typed.items()}
    models = {name.partition(".")[0] for name in typed}
    for name in published_names():
        if name.partition(".")[0] in models:
            entries[name] = entries.get(name) or _published(name)
            entries[name].hf_hub_id = f"{HUB_OWNER}/{name}"
            entries[name].license = entries[name].license or "mit"
    return dict(generate_default_cfgs(entries))


def _published(name: str) -> Checkpoint:
    config = json.loads((shipped_folder() / name / CONFIG_NAME).read_text(encoding="utf-8"))
    fixed = {"num_classes", "in_chans"}  # the entry has them
    args = {key: value for key, value in config.get("model_args", {}).items() if key not in fixed}
    entry = config["pretrained_cfg"] | {"label_names": config.get("label_names")}
    entry = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Checkpoint(**entry, model_args=args)


def default_checkpoint(model: str) -> str:
    """The checkpoint that a network's name without tag stands for: ``<model>.<tag>``, or the name if it has no tag."""
    tag = timm.get_pretrained_cfg(model).tag
    return f"{model}.{tag}" if tag else model


def import_own() -> None:
    """Imports the modules of the user's own networks; not before a name is asked for, because they import this one."""
    for module in filter(None, (part.strip() for part in os.environ.get("EQZOO_NETWORKS", "").split(","))):
        try:
            import_module(module)
        except ImportError as error:
            raise ValueError(
                f"EQZOO_NETWORKS names the module {module}, which cannot be imported ({error}); correct it, add its "
                "folder to PYTHONPATH, or unset it"
            ) from error


def configured_name(model: str, dataset: str) -> str:
    """The name of a network with its configuration for a data set, or the network's alone where it has none.

    Args:
        model: The registered name.
        dataset: The name of the data set, or another tag.
    """
    import_own()
    tagged = f"{model}.{dataset}"
    return tagged if tagged in timm.list_models(model, include_tags=True) else model


def build(
    model_cls: type[EquivariantNet], variant: str, pretrained: bool, feature_indices: tuple[int, ...], **kwargs: Any
) -> EquivariantNet:
    """Builds a network as `timm.models.build_model_with_cfg` does, and finds its weights first.

    Args:
        model_cls: The class of the network, a subclass of `EquivariantNet`.
        variant: The registered name, without tag.
        pretrained: Whether to load weights.
        feature_indices: The features of ``features_only=True``, among which ``out_indices`` chooses: 0 is the first.
        **kwargs: timm's entries (``pretrained_cfg``, ``pretrained_cfg_overlay``, ``features_only``, ``device``,
            ``dtype`` ...) and the arguments of the class.

    Returns:
        The network, or timm's feature extractor around it.

    Raises:
        WeightsNotFoundError: If weights are asked for and found nowhere.
        ValueError: If the weights file cannot be read, is not what it should be, or does not fit the network.
    """
    if isinstance(kwargs.get("group"), str):
        kwargs["group"] = Group.from_name(kwargs["group"])
    placement = {key: value for key in ("device", "dtype") if (value := kwargs.pop(key, None)) is not None}
    overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), overlay)
    if pretrained and cfg.source == "hf-hub":
        # timm would load it unchecked; here its hash is checked, and timm reads the file.
        overlay |= {"file": str(fetch_weights(str(cfg.hf_hub_id), kwargs.get("cache_dir"))), "source": None}
    elif pretrained and not (cfg.source or cfg.file or cfg.state_dict):
        name = f"{variant}.{cfg.tag}" if cfg.tag else variant
        overlay["file"] = str(find_weights(name, cfg.hf_hub_id, kwargs.get("cache_dir")))
    cfg = replace(cfg, **overlay)
    # Names are those of the classes of weights, or of the data set that a registered name stands for.
    unnamed = not pretrained and ("num_classes" in kwargs or isinstance(kwargs.get("pretrained_cfg"), dict))
    side = requested_side(kwargs, overlay)
    arguments = getattr(cfg, "model_args", {})
    kwargs = arguments | kwargs
    source = group_of_weights(Path(str(cfg.file)), variant) if pretrained and cfg.file else None
    kwargs["pretrained_filter_fn"] = _checked(kwargs.get("pretrained_filter_fn"), cfg.classifier, source)
    # Features come from forward_intermediates: as planes, which timm's users expect.
    if "out_indices" in kwargs:
        levels, _ = feature_take_indices(len(feature_indices), kwargs["out_indices"])
        kwargs["out_indices"] = [feature_indices[level] for level in levels]
    feature_cfg = {"feature_cls": "getter", "out_indices": feature_indices}
    with fits(cfg.file if pretrained else None, variant):
        model: EquivariantNet = build_model_with_cfg(
            model_cls, variant, pretrained, pretrained_cfg_overlay=overlay, feature_cfg=feature_cfg, **kwargs
        )
    complete_cfg(model, side, unnamed)
    model._model_args = arguments  # timm saves them, and its caller's, with the network
    return model.to(**placement) if placement else model


def requested_side(kwargs: Mapping[str, Any], overlay: Mapping[str, Any]) -> Any:
    """The side of the images that the caller gives with ``img_size``; None where it is the one that was saved.

    That is the side of a network's positions, which may have been fine-tuned on images of another side.
    """
    side, cfg = kwargs.get("img_size"), kwargs.get("pretrained_cfg")
    saved = (kwargs.get("pretrained_model_args") or {}).get("img_size")
    sized = isinstance(cfg, Mapping) and "input_size" in cfg
    return None if "input_size" in overlay or (sized and side == saved) else side


def complete_cfg(model: Any, side: Any, unnamed: bool) -> None:
    """Sets the size, normalization and class names of a network's ``pretrained_cfg``, in place."""
    cfg = model.pretrained_cfg
    if hasattr(model, "in_chans"):  # not every extractor of features of timm's has it
        sides = side or cfg["input_size"][1:]
        cfg["input_size"] = (model.in_chans, *((sides, sides) if isinstance(sides, int) else sides))
        for key in ("mean", "std"):
            cfg[key] = per_channel(cfg[key], model.in_chans)
        if isinstance(inner := getattr(model, "model", None), EquivariantNet):
            inner.pretrained_cfg |= {key: cfg[key] for key in ("input_size", "mean", "std")}
    labels = cfg.get("label_names")
    if labels and (unnamed or len(labels) != getattr(model, "num_classes", len(labels))):
        cfg["label_names"] = None


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


def _checked(
    filter_fn: Callable[..., dict[str, Tensor]] | None, classifier: str | Sequence[str] | None, source: Group | None
) -> Callable[[dict[str, Tensor], Any], dict[str, Tensor]]:
    """The filter of a state dict, which also refuses one that lacks weights or has others, but for the classifier.

    timm itself says nothing of them where the classifier is left out or replaced.

    Args:
        filter_fn: The family's own filter.
        classifier: The name of the classifier, or names.
        source: The group of the weights, if it is known.
    """
    heads = tuple(f"{name}." for name in ([classifier] if isinstance(classifier, str) else classifier or ()))

    def filtered(state: dict[str, Tensor], model: EquivariantNet) -> dict[str, Tensor]:
        # Before timm sums filters for other channels.
        state = {name: value.float() if value.dtype == torch.float16 else value for name, value in state.items()}
        if source != model.group:
            state = model.convert_group(state, source)
        state = filter_fn(state, model) if filter_fn else state
        if not getattr(model, "num_classes", True):  # timm leaves out the classifier, here what belongs to it too
            state = {name: value for name, value in state.items() if not name.startswith("head.")}
        new = heads if any(name.startswith("head.") for name in state) else ("head.",)  # those of a trunk have none
        own, given = ({name for name in names if not name.startswith(new)} for names in (model.state_dict(), state))
        faults = [
            f"{kind} key(s) in state_dict: {', '.join(map(repr, sorted(names)))}"
            for kind, names in (("Missing", own - given), ("Unexpected", given - own))
            if names
        ]
        if faults:
            raise RuntimeError("\n".join(["the weights do not fit", *faults]))
        return state

    return filtered


@contextmanager
def fits(file: str | Path | None, subject: str) -> Iterator[None]:
    """Names the file of weights in errors of reading it, and says in one line what does not fit.

    Raises:
        ValueError: If the file cannot be read, or does not fit.
        WeightsNotFoundError: If timm has no weights, or has them on the Hub, which cannot be reached.
    """
    try:
        yield
    except (SafetensorError, EOFError) as error:
        raise ValueError(f"{file} has no readable weights ({str(error) or 'it is empty'}); fetch it again") from error
    except LocalEntryNotFoundError as error:
        raise WeightsNotFoundError(
            f"the weights of {subject} are not on this machine, and the Hub cannot be reached ({error})"
        ) from error
    except RuntimeError as error:
        if "No pretrained weights" in str(error):
            raise WeightsNotFoundError(f"there are no weights for {subject}") from error
        if not file or isinstance(error, torch.OutOfMemoryError):
            raise
        first, *others = [line.strip() for line in str(error).splitlines()][1:] or [str(error)]
        more = f" and {len(others)} more" if others else ""
        raise ValueError(f"{file} does not fit {subject} with these arguments: {shorten(first, 300)}{more}") from error


def stage_indices(depths: Sequence[int]) -> tuple[int, ...]:
    """The features after each stage, without those of the stem, which have the size of those after the first stage."""
    return tuple(range(1, len(depths) + 1))


def per_channel(values: Sequence[float], channels: int) -> Sequence[float]:
    """The mean or standard deviation of each channel: as given, or the mean of what is given for other channels."""
    return values if len(values) in (1, channels) else (round(fmean(values), 6),) * channels
