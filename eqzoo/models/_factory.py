"""The door to the registry: timm's functions, kept to the networks of this package."""

import os
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..hub import WEIGHTS_NAME
from . import allcnn, asc_resnet, e4_resnet, e4net, gcnn, gsanet, pcam_densenet, resnet44

__all__ = ["create_model", "list_models", "list_pretrained"]

_MODULES = (allcnn, asc_resnet, e4_resnet, e4net, gcnn, gsanet, pcam_densenet, resnet44)


def create_model(
    name: str, pretrained: bool = False, checkpoint_path: str | os.PathLike[str] | None = None, **kwargs: Any
) -> nn.Module:
    """Builds a network by name, as `timm.create_model` does, for the networks of this package.

    Weights come from ``checkpoint_path`` if it is given; else, with ``pretrained=True``, from the folder named by the
    environment variable ``EQZOO_WEIGHTS``, the checkpoints shipped with the package, and the Hugging Face Hub, in this
    order.

    Args:
        name: ``<model>``, ``<model>.<checkpoint>``, or ``hf-hub:<owner>/<repo>`` and ``local-dir:<folder>``.
        pretrained: Whether to load the checkpoint's weights. With other ``num_classes`` the classifier stays fresh;
            with other ``in_chans`` the filters of the first layer are repeated or summed.
        checkpoint_path: A safetensors file, or a folder with a ``model.safetensors``, that fits the network exactly.
        **kwargs: ``num_classes``, ``in_chans``, ``features_only`` and the arguments of the network's class, such as
            ``group`` and, where it drops activations, ``drop_rate``.

    Returns:
        The network, in training mode.

    Raises:
        ValueError: If there is no such network or checkpoint, or the file is not safetensors or does not fit.
        WeightsNotFoundError: If the weights are found nowhere.

    Example:
        >>> model = create_model("p4_cnn", pretrained=True)
        >>> model.group.name, model.num_classes
        ('p4', 10)
    """
    if ":" not in name:
        _check_name(name)
    if checkpoint_path is None:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    file = _weights_file(Path(checkpoint_path))
    if kwargs.get("features_only"):  # no classifier to load: timm leaves it out, as for its own checkpoints
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(file)}, **kwargs)
    model = timm.create_model(name, **kwargs)
    _load(model, file, name)
    return model


def list_models(pattern: str = "*") -> list[str]:
    """The names of the networks of this package that match a pattern of the shell's kind.

    Example:
        >>> list_models("z2_cnn*")
        ['z2_cnn']
    """
    names = (name for module in _MODULES for name in timm.list_models(module=module.__name__.rpartition(".")[2]))
    return sorted(name for name in names if fnmatch(name, pattern))


def list_pretrained(pattern: str = "*") -> list[str]:
    """The names of the checkpoints that exist, ``<model>.<data set>``, that match a pattern.

    Example:
        >>> list_pretrained("z2_cnn*")
        ['z2_cnn.rotmnist']
    """
    modules = (module.__name__.rpartition(".")[2] for module in _MODULES)
    names = (name for module in modules for name in timm.list_models(module=module, pretrained=True))
    return sorted(name for name in names if fnmatch(name, pattern))


def _check_name(name: str) -> None:
    """Raises ValueError unless the network, and the checkpoint where one is named, are registered."""
    model, _, tag = name.partition(".")
    names = list_models()
    if model not in names:
        near = get_close_matches(model, names, n=5, cutoff=0.5) or names[:5]
        raise ValueError(f"no network {model!r} here; near it are {', '.join(near)}, and eqzoo.list_models() has all")
    known = timm.list_models(model, include_tags=True)
    if tag and name not in known:
        raise ValueError(f"no checkpoint {name!r}; of {model} there are {', '.join(known)}")


def _weights_file(path: Path) -> Path:
    file = path / WEIGHTS_NAME if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"checkpoint_path: no file at {file}")
    if file.suffix != ".safetensors":
        raise ValueError(f"checkpoint_path: weights are read from safetensors files alone, got {file}")
    return file


def _load(model: nn.Module, file: Path, name: str) -> None:
    try:
        state = load_file(file)
        model.load_state_dict(state, strict=True)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error}); fetch it again") from error
    except RuntimeError as error:
        raise ValueError(
            f"{file} does not fit {name}; name the network that it is of, with the num_classes, in_chans and other "
            f"arguments that it was saved with ({error})"
        ) from error
