"""From a name to a network: what is registered, what a name means, and the network with its weights."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from timm.models import clean_state_dict
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import Group
from ..hub import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    WeightsNotFoundError,
    fetch_config,
    find_weights,
    published_names,
    user_folder,
)
from . import (  # noqa: F401  registers them
    allcnn,
    asc_resnet,
    e4_resnet,
    e4net,
    gcnn,
    group_convnext,
    group_resnet,
    gsanet,
    octic_vit,
    pcam_densenet,
    resnet44,
)
from .base import EquivariantNet
from .builder import check_group, checkpoint_arguments, known, loaded_checkpoint, misfit

__all__ = [
    "LoadedNetwork",
    "ModelSource",
    "create_model",
    "instantiate",
    "list_models",
    "list_pretrained",
    "load_network",
    "module_of",
    "own_module",
    "resolve",
    "weights_file",
]


def list_models(pattern: str = "*") -> list[str]:
    """The names of the networks of this package, and of the user's own, that match a shell pattern.

    The user's own are those of the modules that have been imported, or that the environment variable
    ``EQZOO_NETWORKS`` names, separated by commas; each is registered with `timm.models.register_model` and has
    `configs`.

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


def module_of(model: str) -> str:
    """The file of the network, without its ending.

    Raises:
        ValueError: If there is no such network.
    """
    return _module(model).rpartition(".")[2]


def own_module(model: str) -> str:
    """The module of a network of the user's own; empty for one of this package.

    Raises:
        ValueError: If there is no such network.
    """
    found = _module(model)
    return "" if found.startswith(f"{__package__}.") else found


def _module(model: str) -> str:
    _import_own()
    if not timm.is_model(model):
        raise ValueError(
            f"{model} is no network here; if it is one of your own, import its module, or name it in EQZOO_NETWORKS"
        )
    return str(timm.model_entrypoint(model).__module__)


_LARGEST_SIDE = 2**16  # pixels, or channels
_PREFIXES = "names are <model>, <model>.<checkpoint>, hf-hub:<owner>/<repo>, local-dir:<folder>, or a path"


@dataclass(frozen=True)
class ModelSource:
    """A network by architecture, configuration and weights.

    Args:
        name: What the user called it.
        architecture: The registered network, such as ``p4_cnn``.
        timm_name: What `timm.create_model` builds it from: ``<model>[.<checkpoint>]``, ``local-dir:<folder>`` or
            ``hf-hub:<owner>/<repo>``.
        config: Its config.json; empty for a registered name.
        weights: The file of its weights; None where `timm_name` says where they are.
        has_weights: Whether there are trained weights: given, on this machine, or published.
    """

    name: str
    architecture: str
    timm_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    has_weights: bool = True

    @property
    def folder(self) -> Path | None:
        """The folder of the checkpoint, or None for a registered name or a repo on the Hub."""
        prefix, _, place = self.timm_name.partition(":")
        return Path(place) if prefix == "local-dir" else self.weights.parent if self.weights else None

    @property
    def model_args(self) -> dict[str, Any]:
        """The arguments of the network's class that config.json holds, or the registered checkpoint is built with."""
        return dict(self.config.get("model_args") or checkpoint_arguments(self.timm_name))

    @property
    def image_side(self) -> int | None:
        """The shorter side of the images that it was trained on, in pixels, if things in them have a certain size.

        Of a fine-tuned network as its config.json says; of the published ones for tiles of land and cells. Digits and
        photographs fill their images at any number of pixels. None if it is unknown.
        """
        if not self.config:
            name = self.timm_name if "." in self.timm_name else loaded_checkpoint(self.architecture)
            known = CATALOG.get(name.partition(".")[2])
            return known.side if known and known.fixed_scale else None
        found = self.config.get("eqzoo")
        side = found.get("image_side") if isinstance(found, Mapping) else None
        return side if isinstance(side, int) and side > 0 else None


def resolve(
    name: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    any_timm: bool = False,
) -> ModelSource:
    """Resolves what a user calls a network, in this order.

    1. ``hf-hub:<owner>/<repo>`` and ``local-dir:<folder>``: what their config.json says.
    2. ``<model>`` and ``<model>.<checkpoint>``: a registered network, or checkpoint of one.
    3. ``<model>.<checkpoint>``: the folder of this name in the folder ``EQZOO_WEIGHTS``.
    4. A path: a folder with config.json and model.safetensors, or a .safetensors file with a config.json beside it.

    Args:
        name: One of these.
        weights: A safetensors file, or a folder with a ``model.safetensors``, to take instead of the network's own.
            The config.json beside it counts if it is of the same network.
        cache_dir: Where the Hub's files are kept; by default huggingface_hub's own cache.
        any_timm: Whether a network of timm's that is not one of this package is accepted too.

    Raises:
        ValueError: If nothing is called so, or a config.json is not what it should be.
        FileNotFoundError: If there is no such file or folder.
        WeightsNotFoundError: If the Hub does not give a repo's config.json.

    Example:
        >>> source = resolve("p4_cnn.rotmnist")
        >>> source.architecture, source.timm_name, source.has_weights
        ('p4_cnn', 'p4_cnn.rotmnist', True)
    """
    text = os.fspath(name)
    prefix, colon, place = text.partition(":")
    if prefix.lower() in ("hf-hub", "hf_hub") and colon:
        config = fetch_config(place, None if cache_dir is None else Path(cache_dir))
        source = _configured(text, text, config, place)
    elif prefix.lower() == "local-dir" and colon:
        source = _folder(text, Path(place))
    else:
        source = _registered(text, any_timm) or _path(text, any_timm)
    return source if weights is None else _with_weights(source, Path(weights))


def _registered(text: str, any_timm: bool) -> ModelSource | None:
    """A network or checkpoint of the registry or of EQZOO_WEIGHTS; None if it is not the name of a network."""
    model, _, tag = text.partition(".")
    if model not in list_models():
        if any_timm and timm.is_model(model) and not Path(text).exists():
            if tag and text not in (tags := timm.list_models(model, include_tags=True)):
                raise ValueError(f"no checkpoint {text!r}; of timm's {model} there are {', '.join(tags)}")
            return ModelSource(text, model, text, has_weights=timm.get_pretrained_cfg(text).has_weights)
        return None
    names = timm.list_models(model, include_tags=True)
    if not tag or text in names:
        return ModelSource(text, model, text, has_weights=_is_trained(model, tag))
    folder = user_folder()
    if folder and (folder / text / CONFIG_NAME).is_file():
        return _folder(text, folder / text)
    if Path(text).exists():
        return None
    trained = [name for name in names if "." in name and _is_trained(*name.split(".", 1))]
    more = ", ".join(name for name in names if "." in name and name not in trained)
    there = f"of {model} there are {', '.join(trained) or 'none'}" + f", and without weights {more}" * bool(more)
    raise ValueError(f"no checkpoint {text!r}; {there}")


def _is_trained(model: str, tag: str) -> bool:
    """Whether `eqzoo.create_model` has weights for a registered name."""
    cfg = timm.get_pretrained_cfg(f"{model}.{tag}" if tag else model)
    if cfg.hf_hub_id or (not tag and any(name.startswith(f"{model}.") for name in published_names())):
        return True
    try:
        find_weights(f"{model}.{cfg.tag}" if cfg.tag else model, None)
    except WeightsNotFoundError:
        return False
    return True


def _path(text: str, any_timm: bool) -> ModelSource:
    path = Path(text)
    if path.is_dir():
        return _folder(text, path)
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise FileNotFoundError(f"no weights at {path}")
        if not (path.parent / CONFIG_NAME).is_file():
            raise ValueError(
                f"no {path.parent / CONFIG_NAME} that says which network {path.name} is of; name the network as well"
            )
        return _with_weights(_folder(text, path.parent), path)
    if path.is_file():
        raise ValueError(
            f"{text} is a file, and no network; weights are named by their folder, or by their .safetensors file, and "
            "only eqzoo check, predict and evaluate read .onnx files"
        )
    if ":" in text:
        raise ValueError(f"{text}: {_PREFIXES}")
    if os.sep in text:
        raise FileNotFoundError(f"no checkpoint at {path}: give its folder or its .safetensors file")
    raise ValueError(_unknown(text, any_timm))


def _unknown(text: str, any_timm: bool) -> str:
    model = text.partition(".")[0]
    if any_timm:
        near = ", ".join(get_close_matches(model, timm.list_models(), n=5))  # ours are among them
        return (
            f"nothing is called {text!r}: not a network here or of timm's{', near it are ' * bool(near)}{near}; and no "
            "folder, .safetensors file or .onnx file"
        )
    names, folders = list_models(), [path.parent.name for path in Path().glob(f"*/{CONFIG_NAME}")]
    found = get_close_matches(text, folders, n=2) + get_close_matches(model, names, n=5, cutoff=0.5)
    near = f"near it are {', '.join(found)}, and " if found else ""
    return f"no network {model!r} here, nor a folder of that name; {near}eqzoo.list_models() has all networks"


def _folder(text: str, folder: Path) -> ModelSource:
    """The checkpoint in a folder."""
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise FileNotFoundError(f"no {file}; the folder of a checkpoint has {CONFIG_NAME} and {WEIGHTS_NAME}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from error
    return _configured(text, f"local-dir:{folder}", config, str(folder))


def _with_weights(source: ModelSource, path: Path) -> ModelSource:
    """A network with the weights of a file, and the config.json beside it if that is of the same network."""
    file = path / WEIGHTS_NAME if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}")
    if file.suffix != ".safetensors":
        raise ValueError(
            f"weights are read from safetensors files alone, got {file}; safetensors.torch.save_file(state_dict, path) "
            "writes one from a state dict"
        )
    config = source.config
    if not config:
        try:
            config = json.loads((file.parent / CONFIG_NAME).read_text(encoding="utf-8"))
            same = config["architecture"] == source.architecture
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            same = False
        if same:
            source = _configured(source.name, f"local-dir:{file.parent}", config, str(file.parent))
    return ModelSource(source.name, source.architecture, source.timm_name, source.config, file)


def _configured(text: str, timm_name: str, config: object, place: str) -> ModelSource:
    """A network by its config.json; raises ValueError unless it is one that timm can build it from."""
    where = f"{CONFIG_NAME} of {place}"
    if not isinstance(config, dict):
        raise ValueError(f"{where} is a JSON {type(config).__name__}, and should be an object with an architecture")
    architecture = config.get("architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ValueError(f"{where} names no architecture (got {architecture!r}), so it is no checkpoint's")
    list_models()  # imports the user's own networks
    if not timm.is_model(architecture):
        raise ValueError(
            f"{where} is of the network {architecture!r}, which neither eqzoo nor timm has here; install the newest "
            "eqzoo, name the module of a network of your own in EQZOO_NETWORKS (or import it first), or correct it"
        )
    for key in ("model_args", "pretrained_cfg"):
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"{where}: {key} should be an object, got {config[key]!r}")
    cfg, args = config.get("pretrained_cfg") or {}, config.get("model_args") or {}
    for values in (config, cfg, args):
        _check_numbers(values, where)
    _check_together(config, cfg, args, where)
    return ModelSource(text, architecture, timm_name, config)


def _check_numbers(values: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for numbers that no network has."""
    for key, least in (("num_classes", 0), ("in_chans", 1)):
        value = values.get(key)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{where}: {key} should be a whole number of at least {least}, got {value!r}")
    size = values.get("input_size")
    if size is not None and not (
        isinstance(size, list)
        and len(size) == 3
        and all(type(side) is int and 0 < side <= _LARGEST_SIDE for side in size)
    ):
        raise ValueError(
            f"{where}: input_size should be [channels, height, width], each 1 to {_LARGEST_SIDE}, got {size!r}"
        )
    for key in ("mean", "std"):
        value = values.get(key)
        if value is not None and not (
            isinstance(value, list) and value and all(type(number) in (int, float) for number in value)
        ):
            raise ValueError(f"{where}: {key} should be a list of numbers, one for each channel, got {value!r}")
    if min(values.get("std") or [1]) <= 0:
        raise ValueError(f"{where}: std should be above 0, got {values['std']}")


def _check_together(config: Mapping[str, Any], cfg: Mapping[str, Any], args: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for entries that contradict each other."""
    places = {"config": config, "model_args": args, "pretrained_cfg": cfg}
    counts = {name: values["num_classes"] for name, values in places.items() if values.get("num_classes") is not None}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} in {name}" for name, count in counts.items())
        raise ValueError(f"{where}: num_classes should be the same everywhere, got {said}")
    names = config.get("label_names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{where}: label_names should be a list of texts, got {names!r}")
    classes = next(iter(counts.values()), None)
    if names and classes is not None and len(names) != classes:
        raise ValueError(f"{where}: label_names should name the {classes} classes, and are {len(names)}")
    channels = args.get("in_chans") or (cfg.get("input_size") or [None])[0]
    for key in ("mean", "std"):
        if channels and len(cfg.get(key) or [0]) not in (1, channels):
            raise ValueError(f"{where}: {key} should have a number for each of {channels} channels, got {cfg[key]}")


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
            `resolve`. A config.json says which network it is, with which classes.
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
