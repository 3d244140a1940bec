"""The door to the registry: timm's functions, kept to the networks of this package."""

import json
import os
import sys
from difflib import get_close_matches
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..hub import CONFIG_NAME, WEIGHTS_NAME, fetch_config, user_folder
from . import allcnn, asc_resnet, e4_resnet, e4net, gcnn, gsanet, pcam_densenet, resnet44  # noqa: F401  registers
from ._builder import known

__all__ = ["create_model", "list_models", "list_pretrained"]


def create_model(
    name: str, pretrained: bool = False, checkpoint_path: str | os.PathLike[str] | None = None, **kwargs: Any
) -> nn.Module:
    """Builds a network by name, as `timm.create_model` does, for the networks of this package and one's own.

    Weights come from ``checkpoint_path`` if it is given; else, with ``pretrained=True``, from the folder named by the
    environment variable ``EQZOO_WEIGHTS``, the checkpoints shipped with the package, and the Hugging Face Hub, in this
    order. A download is checked by its hash, see `eqzoo.hub`.

    Args:
        name: ``<model>``, ``<model>.<checkpoint>``, or ``hf-hub:<owner>/<repo>`` and ``local-dir:<folder>``, whose
            config.json says which network it is, with which classes. A folder with a config.json may be named without
            ``local-dir:``, and a checkpoint of one's own in ``EQZOO_WEIGHTS`` by the name of its folder.
        pretrained: Whether to load the checkpoint's weights. With other ``num_classes`` the classifier stays fresh;
            with other ``in_chans`` the filters of the first layer are repeated or summed; with another ``group``, a
            GSA-Net's tables of relative poses are interpolated, see `eqzoo.models.gsanet`.
        checkpoint_path: A safetensors file, or a folder with a ``model.safetensors``, that fits the network exactly.
            A config.json beside it that is of the same network says its classes, its input and its other arguments;
            those that are given come first.
        **kwargs: ``num_classes``, ``in_chans``, ``features_only`` and the arguments of the network's class, such as
            ``group`` and, where it drops activations, ``drop_rate``.

    Returns:
        The network, in training mode.

    Raises:
        ValueError: If there is no such network or checkpoint, or the file is not safetensors, does not fit, or is not
            what it should be.
        FileNotFoundError: If there is no such file or folder.
        WeightsNotFoundError: If the weights are found nowhere.

    Example:
        >>> model = create_model("p4_cnn", pretrained=True)
        >>> model.group.name, model.num_classes
        ('p4', 10)
    """
    _import_own()
    if ":" not in name:
        name = _registered(name)
    source, _, place = name.partition(":")
    if place:
        _check_config(source, place, kwargs.get("cache_dir"))
    if checkpoint_path is None:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    file = _weights_file(Path(checkpoint_path))
    source = name if "pretrained_cfg" in kwargs else _described(name, file)
    if kwargs.get("features_only"):  # no classifier to load: timm leaves it out, as for its own checkpoints
        if source != name and file.name == WEIGHTS_NAME:
            return timm.create_model(source, pretrained=True, **kwargs)
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(file)}, **kwargs)
    model = timm.create_model(source, **kwargs)
    _load(model, file, name)
    return model


def list_models(pattern: str = "*") -> list[str]:
    """The names of the networks of this package, and of one's own, that match a pattern of the shell's kind.

    One's own are those of the modules that have been imported, or that the environment variable ``EQZOO_NETWORKS``
    names, separated by commas; each is registered with `timm.models.register_model` and has `configs`.

    Raises:
        ValueError: If ``EQZOO_NETWORKS`` names what cannot be imported.

    Example:
        >>> list_models("z2_cnn*")
        ['z2_cnn']
    """
    _import_own()
    return sorted(name for name in timm.list_models() if known(name) and fnmatch(name, pattern))


def list_pretrained(pattern: str = "*") -> list[str]:
    """The names of the checkpoints that exist, ``<model>.<data set>``, that match a pattern.

    Example:
        >>> list_pretrained("z2_cnn*")
        ['z2_cnn.rotmnist']
    """
    _import_own()
    names = timm.list_models(pretrained=True)
    return sorted(name for name in names if known(name.partition(".")[0]) and fnmatch(name, pattern))


def _import_own() -> None:
    """Imports the modules of the user's own networks; not before a name is asked for, because they import this one."""
    for module in filter(None, (part.strip() for part in os.environ.get("EQZOO_NETWORKS", "").split(","))):
        if module in sys.modules:
            continue
        try:
            import_module(module)
        except ImportError as error:
            raise ValueError(
                f"EQZOO_NETWORKS names the module {module}, which cannot be imported ({error}); correct it, add its "
                "folder to PYTHONPATH, or unset it"
            ) from error


def _registered(name: str) -> str:
    """The name if it is registered, or ``local-dir:`` and a folder of EQZOO_WEIGHTS; raises ValueError if neither."""
    model, _, tag = name.partition(".")
    names = list_models()
    if model not in names and (Path(name) / CONFIG_NAME).is_file():
        return f"local-dir:{name}"
    if model not in names and Path(name).is_file():
        raise ValueError(
            f"{name} is a file, and no network; weights are named by their folder, or by their .safetensors file as "
            "checkpoint_path, and eqzoo check reads .onnx files"
        )
    if model not in names:
        near = get_close_matches(model, names, n=5, cutoff=0.5) or names[:5]
        raise ValueError(f"no network {model!r} here; near it are {', '.join(near)}, and eqzoo.list_models() has all")
    known = timm.list_models(model, include_tags=True)
    if not tag or name in known:
        return name
    folder = user_folder()
    if folder and (folder / name / CONFIG_NAME).is_file():
        return f"local-dir:{folder / name}"
    raise ValueError(f"no checkpoint {name!r}; of {model} there are {', '.join(known)}")


def _check_config(source: str, place: str, cache_dir: str | os.PathLike[str] | None) -> None:
    """Raises an error in plain words where timm would fail on a config.json that is missing or of another network."""
    if source.lower() in ("hf-hub", "hf_hub"):
        config = fetch_config(place, None if cache_dir is None else Path(cache_dir))
    elif source.lower() == "local-dir":
        file = Path(place) / CONFIG_NAME
        if not file.is_file():
            raise FileNotFoundError(f"no {file}; local-dir: takes a folder with {CONFIG_NAME} and {WEIGHTS_NAME}")
        try:
            config = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is not JSON ({error})") from error
    else:
        raise ValueError(
            f"{source}:{place}: names are <model>, <model>.<checkpoint>, hf-hub:<repo>, local-dir:<folder>"
        )
    architecture = config.get("architecture")
    if not architecture or not timm.is_model(architecture):
        raise ValueError(
            f"{CONFIG_NAME} of {place} is of the network {architecture!r}, which neither eqzoo nor timm has here; "
            "install the newest eqzoo, or correct it"
        )


def _described(name: str, file: Path) -> str:
    """``local-dir:`` and the folder of weights, if a config.json there is of the network; else the name."""
    try:
        config = json.loads((file.parent / CONFIG_NAME).read_text())
        same = ":" not in name and config["architecture"] == name.partition(".")[0]
    except (OSError, ValueError, KeyError, TypeError):
        return name
    return f"local-dir:{file.parent}" if same else name


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
        folder = file.parent
        way = f", or load {f'local-dir:{folder}'!r} with pretrained=True" if (folder / CONFIG_NAME).is_file() else ""
        raise ValueError(
            f"{file} does not fit {name}; name the network that it is of, with the num_classes, in_chans and other "
            f"arguments that it was saved with{way} ({error})"
        ) from error
