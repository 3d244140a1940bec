"""Builds networks by name, and loads their weights; the bytes of a weights file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from timm.models import clean_state_dict
from torch import Tensor, nn

from ..groups import Group
from ..hub import CONFIG_NAME, WEIGHTS_NAME, WeightsNotFoundError
from .base import EquivariantNet
from .builder import check_group, misfit
from .resolve import ModelSource, resolve

__all__ = ["LoadedNetwork", "create_model", "instantiate", "load_network", "weights_file"]


def create_model(
    name: str | os.PathLike[str],
    pretrained: bool = False,
    checkpoint_path: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Builds a network by name, as `timm.create_model` does, for the networks of this package and the user's own.

    Weights come from ``checkpoint_path`` if it is given; else, with ``pretrained=True``, from the folder named by the
    environment variable ``EQZOO_WEIGHTS``, the checkpoints shipped with the package, and the Hugging Face Hub, in this
    order. A download is checked by its hash, see `eqzoo.hub`.

    Args:
        name: ``<model>``, ``<model>.<checkpoint>``, ``hf-hub:<owner>/<repo>``, ``local-dir:<folder>``, the folder of a
            checkpoint or its .safetensors file, or the name of a folder in ``EQZOO_WEIGHTS``, see
            `eqzoo.models.resolve`. A config.json says which network it is, with which classes.
        pretrained: Whether to load the checkpoint's weights. With other ``num_classes`` the classifier stays fresh;
            with other ``in_chans`` the filters of the first layer are repeated or summed; with another ``group``, a
            GSA-Net's tables of relative poses are interpolated, see `eqzoo.models.gsanet`.
        checkpoint_path: A safetensors file, or a folder with a ``model.safetensors``, that fits the network exactly.
            A config.json beside it that is of the same network says its classes, its input and its other arguments;
            those that are given come first.
        **kwargs: ``num_classes``, ``in_chans``, ``features_only`` and the arguments of the network's class, such as
            ``group``, a `Group` or its name, and, where it drops activations, ``drop_rate``.

    Returns:
        The network, in training mode.

    Raises:
        ValueError: If there is no such network or checkpoint, or a file cannot be read, does not fit, or is not what
            it should be.
        FileNotFoundError: If there is no such file or folder.
        WeightsNotFoundError: If the weights are found nowhere.

    Example:
        >>> model = create_model("p4_cnn", pretrained=True)
        >>> model.group.name, model.num_classes
        ('p4', 10)
    """
    checkpoint_path = checkpoint_path or None  # scripts give "" for none
    source = resolve(name, checkpoint_path, kwargs.get("cache_dir"))
    if checkpoint_path is None:
        return instantiate(source, pretrained, **kwargs)
    if "pretrained_cfg" in kwargs:  # says what the config.json beside the weights would say
        source = replace(resolve(name, None, kwargs.get("cache_dir")), weights=source.weights)
    if kwargs.get("features_only"):  # no classifier to load: timm leaves it out, as for its own checkpoints
        return instantiate(source, True, **kwargs)
    model = instantiate(source, False, **kwargs)
    assert source.weights is not None
    check_group(source.weights, source.architecture, type(model), getattr(model, "group", None))
    _load(model, source)
    return model


def instantiate(source: ModelSource, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Builds the network of a `ModelSource`.

    Args:
        source: The network.
        pretrained: Whether to load its weights.
        **kwargs: As those of `create_model`.

    Raises:
        ValueError: If the weights do not fit, or the network cannot be built from its config.json.
        WeightsNotFoundError: If the weights are found nowhere.
    """
    if pretrained and source.weights is not None:
        overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
        kwargs["pretrained_cfg_overlay"] = overlay | {"file": str(source.weights), "source": None}
    elif pretrained and source.folder and not (source.folder / WEIGHTS_NAME).is_file():
        pickled = (
            "; pytorch_model.bin is not read, because it could run code: save the network with "
            "timm.models.save_for_hf(model, folder, safe_serialization=True)"
        )
        more = pickled if (source.folder / "pytorch_model.bin").is_file() else ""
        raise WeightsNotFoundError(f"no weights at {source.folder / WEIGHTS_NAME}{more}")
    saved = (source.config.get("pretrained_cfg") or {}).get("input_size")
    if saved and kwargs.get("img_size") is None:  # whatever the side of the positions is
        overlay = dict(kwargs.get("pretrained_cfg_overlay") or {})
        kwargs["pretrained_cfg_overlay"] = {"input_size": tuple(saved)} | overlay
    if isinstance(kwargs.get("group"), Group):  # timm saves the arguments of a network as JSON
        kwargs["group"] = kwargs["group"].name
    try:
        return timm.create_model(source.timm_name, pretrained=pretrained, **kwargs)
    except (TypeError, RuntimeError) as error:
        # Of the arguments that config.json holds, not of those that the caller gives.
        if not source.config or kwargs.keys() - {"cache_dir", "pretrained_cfg_overlay"}:
            raise
        raise ValueError(f"{CONFIG_NAME} of {source.name} does not build {source.architecture} ({error})") from error


@dataclass(frozen=True)
class LoadedNetwork:
    """A network and where it comes from.

    Args:
        network: The network, in evaluation mode.
        source: What it was resolved to.
        trained: Whether it has trained weights; else they are random.
    """

    network: EquivariantNet
    source: ModelSource
    trained: bool

    @property
    def name(self) -> str:
        """What the user called it."""
        return self.source.name


def load_network(
    source: str | os.PathLike[str], model: str | None = None, pretrained: bool | None = None
) -> LoadedNetwork:
    """Builds a network of this package, with weights if there are any.

    Args:
        source: What `create_model` takes as a name.
        model: The registered name of the network that a folder or file without ``config.json`` is of.
        pretrained: Whether to load weights, which must then be there; None if there are any.

    Returns:
        The network, where it comes from and whether it is trained.

    Raises:
        ValueError: If nothing is called so, the weights do not fit, or it is not a network of this package.
        FileNotFoundError: If a path is given at which there is nothing.
        WeightsNotFoundError: If weights are asked for and found nowhere.

    Example:
        >>> load_network("p4_cnn").trained, load_network("r16_gsanet_t").trained
        (True, False)
    """
    text = os.fspath(source)
    if model is None:
        found = resolve(text)
        trained = found.has_weights if pretrained is None else pretrained
        network = instantiate(found, trained)
    elif Path(text).is_dir() or Path(text).suffix == ".safetensors":
        found, trained = resolve(model, text), True
        network = create_model(model, checkpoint_path=text)
    else:
        raise ValueError(f"a model is named for a folder or a .safetensors file; {text!r} is neither")
    if not isinstance(network, EquivariantNet):
        raise ValueError(f"{text} is a {type(network).__name__}, which is not a network of this package")
    return LoadedNetwork(network.eval(), found, trained)


def _load(model: nn.Module, source: ModelSource) -> None:
    """Loads a file that has to fit exactly."""
    file = source.weights
    assert file is not None
    try:
        model.load_state_dict(clean_state_dict(load_file(file)), strict=True)  # without prefixes of wrappers
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error}); fetch it again") from error
    except RuntimeError as error:
        way = "; timm.models.save_for_hf(model, folder, safe_serialization=True) saves a network with them"
        if (file.parent / CONFIG_NAME).is_file():
            way = f", or load {f'local-dir:{file.parent}'!r} with pretrained=True"
        raise ValueError(
            f"{file} does not fit {source.name}; name the network that it is of, with the num_classes, in_chans and "
            f"other arguments that it was saved with{way} ({misfit(error)})"
        ) from error


def weights_file(state_dict: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file of these weights; the same weights give the same bytes."""
    return save({name: value.detach().cpu().contiguous() for name, value in state_dict.items()})
