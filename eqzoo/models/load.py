"""From a name to a network: what is registered, what a name means, and the network with its weights."""

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import save
from timm.models import DefaultCfg, load_state_dict
from torch import Tensor, nn

from ..data import CATALOG
from ..groups import Group
from ..hub import (
    CONFIG_NAME,
    STATE_NAME,
    WEIGHTS_NAME,
    WeightsNotFoundError,
    fetch_config,
    find_weights,
    read_config,
    user_folder,
)
from .base import EquivariantNet
from .builder import Checkpoint, default_checkpoint, fits, group_of_weights, import_own
from .orbit import OrbitNet

_TIMM_WEIGHTS = (WEIGHTS_NAME, "pytorch_model.bin")  # the files that timm.models.save_for_hf writes


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
    import_own()
    return sorted(name for name in timm.list_models() if fnmatch(name, pattern) and is_own(name))


def list_pretrained(pattern: str = "*") -> list[str]:
    """The names of the checkpoints that exist, ``<model>.<data set>``, that match a pattern.

    Example:
        >>> list_pretrained("z2_cnn*")
        ['z2_cnn.rotmnist']
    """
    import_own()
    names = timm.list_models(pretrained=True)
    return sorted(name for name in names if fnmatch(name, pattern) and is_own(name.partition(".")[0]))


def is_own(model: str) -> bool:
    """Whether a network, by its name without tag, is registered by `configs`: by this package or by its users."""
    module = sys.modules[timm.model_entrypoint(model).__module__] if timm.is_model(model) else None
    entries = getattr(module, "default_cfgs", {}).get(model)
    return isinstance(entries, DefaultCfg) and isinstance(entries.default, Checkpoint)


def own_module(model: str) -> str:
    """The module of a network of the user's own; empty for one of this package."""
    import_own()
    module = str(timm.model_entrypoint(model).__module__)
    return "" if module.startswith(f"{__package__}.") else module


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
        if self.config:
            return dict(self.config.get("model_args") or {})
        return dict(getattr(timm.get_pretrained_cfg(self.timm_name), "model_args", {}))

    @property
    def image_side(self) -> int | None:
        """The shorter side of the images that it was trained on, in pixels, if things in them have a certain size.

        Of a fine-tuned network as its config.json says; of the published ones for tiles of land and cells. Digits and
        photographs fill their images at any number of pixels. None if it is unknown.
        """
        if not self.config:
            name = self.timm_name if "." in self.timm_name else default_checkpoint(self.architecture)
            known = CATALOG.get(name.partition(".")[2])
            return known.side if known and known.fixed_scale else None
        return (self.config.get("eqzoo") or {}).get("image_side")


def resolve(
    name: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ModelSource:
    """Resolves what a user calls a network, in this order.

    1. ``hf-hub:<owner>/<repo>`` and ``local-dir:<folder>``: what their config.json says.
    2. ``<model>`` and ``<model>.<checkpoint>``: a registered network, or checkpoint of one, of this package, of timm
       or of the user's own.
    3. ``<model>.<checkpoint>``: the folder of this name in the folder ``EQZOO_WEIGHTS``.
    4. A path: a folder with config.json and model.safetensors, or a .safetensors file with a config.json beside it.

    Args:
        name: One of these.
        weights: A file of weights, or a folder with a ``model.safetensors``, to take instead of the network's own.
            The config.json beside it counts if it is of the same network.
        cache_dir: Where the Hub's files are kept; by default huggingface_hub's own cache.

    Raises:
        ValueError: If nothing is called so, or a config.json does not name a network.
        FileNotFoundError: If there is no such file or folder.
        WeightsNotFoundError: If the Hub does not give a repo's config.json.
        UserWarning: If a registered network has the name of a checkpoint's folder in the working directory.

    Example:
        >>> source = resolve("p4_cnn.rotmnist")
        >>> source.architecture, source.timm_name, source.has_weights
        ('p4_cnn', 'p4_cnn.rotmnist', True)
    """
    text = os.fspath(name)
    prefix, colon, place = text.partition(":")
    if colon and prefix.lower() in ("hf-hub", "hf_hub"):
        source = _configured(text, text, fetch_config(place, None if cache_dir is None else Path(cache_dir)))
    elif colon and prefix.lower() == "local-dir":
        source = _in_folder(text, Path(place))
    else:
        source = _registered(text) or _at_path(text)
    return source if weights is None else _with_weights(source, Path(weights))


def _registered(text: str) -> ModelSource | None:
    """A network or checkpoint of the registry or of EQZOO_WEIGHTS; None if it is not the name of a network."""
    import_own()
    model, _, tag = text.partition(".")
    if not timm.is_model(model):
        return None
    names = timm.list_models(model, include_tags=True)
    if not tag or text in names:
        if (Path(text) / CONFIG_NAME).is_file():
            warnings.warn(f"{text} is the registered network; the folder of that name is ./{text}", stacklevel=3)
        return ModelSource(text, model, text, has_weights=_has_weights(text))
    folder = user_folder()
    if folder and (folder / text / CONFIG_NAME).is_file():
        return _in_folder(text, folder / text)
    if Path(text).exists():
        return None
    trained = [name for name in names if _has_weights(name)]
    without = ", ".join(name for name in names if "." in name and name not in trained)
    raise ValueError(
        f"no checkpoint {text!r}; of {model} there are {', '.join(trained) or 'none'}"
        + (f", and without weights {without}" if without else "")
    )


def _has_weights(name: str) -> bool:
    """Whether there are weights for a registered name."""
    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or cfg.has_weights or not isinstance(cfg, Checkpoint):
        return bool(cfg and cfg.has_weights)
    try:
        find_weights(name if "." in name else default_checkpoint(name), None)
    except WeightsNotFoundError:
        return False
    return True


def _at_path(text: str) -> ModelSource:
    path = Path(text)
    if path.is_dir():
        return _in_folder(text, path)
    if path.suffix == ".safetensors" and path.is_file():
        return _with_weights(_in_folder(text, path.parent), path)
    model = text.partition(".")[0]
    names = [path.parent.name for path in Path().glob(f"*/{CONFIG_NAME}")] + timm.list_models()  # ours are among them
    near = ", ".join(get_close_matches(model, names, n=5))
    is_path = (os.sep in text and ":" not in text) or path.suffix == ".safetensors"
    kind = FileNotFoundError if is_path else ValueError
    raise kind(
        f"nothing is called {text!r}: no registered network, no checkpoint's folder and no .safetensors file"
        + (f"; near it are {near}" if near else "")
        + "; names are <model>, <model>.<checkpoint>, hf-hub:<owner>/<repo>, local-dir:<folder>, or a path"
    )


def _in_folder(text: str, folder: Path) -> ModelSource:
    """The checkpoint in a folder."""
    return _configured(text, f"local-dir:{folder}", read_config(folder / CONFIG_NAME))


def _with_weights(source: ModelSource, path: Path) -> ModelSource:
    """A network with the weights of a file, and the config.json beside it if that is of the same network."""
    file = path / WEIGHTS_NAME if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}")
    if not source.config and (file.parent / CONFIG_NAME).is_file():
        beside = _in_folder(source.name, file.parent)
        source = beside if beside.architecture == source.architecture else source
    return replace(source, weights=file, has_weights=True)


def _configured(text: str, timm_name: str, config: Any) -> ModelSource:
    """A network by its config.json."""
    import_own()
    architecture = config.get("architecture") if isinstance(config, dict) else None
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise ValueError(
            f"{CONFIG_NAME} of {text} is of the network {architecture!r}, which neither eqzoo nor timm has here; "
            "install the newest eqzoo, or name the module of a network of your own in EQZOO_NETWORKS"
        )
    return ModelSource(text, architecture, timm_name, config)


def create_model(
    model_name: str | os.PathLike[str],
    pretrained: bool = False,
    checkpoint_path: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Builds a network by name, as `timm.create_model` does; also by the folder or file of a checkpoint.

    Weights come from ``checkpoint_path`` if it is given; else, with ``pretrained=True``, from the folder named by the
    environment variable ``EQZOO_WEIGHTS``, the checkpoints shipped with the package, and the Hugging Face Hub, in this
    order. A download is checked by its hash, see `eqzoo.hub`.

    Args:
        model_name: ``<model>``, ``<model>.<checkpoint>``, ``hf-hub:<owner>/<repo>``, ``local-dir:<folder>``, the folder
            of a checkpoint or its .safetensors file, or the name of a folder in ``EQZOO_WEIGHTS``, see `resolve`. A
            config.json says which network it is, with which classes.
        pretrained: Whether to load the checkpoint's weights. With other ``num_classes`` the classifier stays fresh;
            with other ``in_chans`` the filters of the first layer are repeated or summed, and attention in it is
            initialized anew, with a warning; with another ``group``, a GSA-Net's tables of relative poses are
            interpolated, see `eqzoo.models.gsanet`.
        checkpoint_path: A safetensors file, one of `torch.save` that ``weights_only=True`` reads, or a folder with a
            ``model.safetensors``, that fits the network exactly. A config.json beside it that is of the same network
            says its classes, its input and its other arguments; those that are given come first.
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
    source = resolve(model_name, checkpoint_path or None, kwargs.get("cache_dir"))  # scripts give "" for none
    if not checkpoint_path:
        return instantiate(source, pretrained, **kwargs)
    if kwargs.get("features_only"):  # no classifier to load: timm leaves it out, as for its own checkpoints
        return instantiate(source, True, **kwargs)
    model: Any = instantiate(source, False, **kwargs)
    assert source.weights is not None
    with fits(source.weights, source.name):
        state = load_state_dict(str(source.weights), device="cpu", weights_only=True)
        group = group_of_weights(source.weights, source.architecture)
        if isinstance(model, EquivariantNet) and group not in (None, model.group):
            state = model.convert_group(state, group)
        model.load_state_dict(state)
    labels = source.config.get("label_names")
    if labels and len(labels) == model.num_classes:
        model.pretrained_cfg["label_names"] = labels
    return model


def instantiate(source: ModelSource, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Builds the network of a `ModelSource`.

    Args:
        source: The network.
        pretrained: Whether to load its weights.
        **kwargs: As those of `create_model`.

    Raises:
        ValueError: If the weights do not fit.
        WeightsNotFoundError: If the weights are found nowhere.
    """
    if pretrained and source.weights is not None:
        overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
        kwargs["pretrained_cfg_overlay"] = overlay | {"file": str(source.weights), "source": None}
    elif pretrained and source.folder and not any((source.folder / name).is_file() for name in _TIMM_WEIGHTS):
        raise WeightsNotFoundError(f"no weights in {source.folder}: neither {' nor '.join(_TIMM_WEIGHTS)}")
    if isinstance(kwargs.get("group"), Group):  # timm saves the arguments of a network as JSON
        kwargs["group"] = kwargs["group"].name
    if ":" not in source.timm_name:  # else timm itself reads config.json
        kwargs = dict(source.config.get("model_args") or {}) | kwargs
    subject = source.architecture if ":" in source.timm_name else source.name
    with fits((source.weights or source.folder) if pretrained else None, subject):
        return timm.create_model(source.timm_name, pretrained=pretrained, **kwargs)


@dataclass(frozen=True)
class LoadedNetwork:
    """A network and where it comes from.

    Args:
        network: The network, in evaluation mode.
        source: What it was resolved to.
        trained: Whether it has trained weights; else they are random.
    """

    network: EquivariantNet | OrbitNet
    source: ModelSource
    trained: bool

    @property
    def name(self) -> str:
        """What the user called it."""
        return self.source.name


def load_network(
    source: str | os.PathLike[str], model: str | None = None, pretrained: bool | None = None
) -> LoadedNetwork:
    """Builds a network, with weights if there are any.

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
        >>> load_network("p4_cnn").trained, load_network("z2m_gsanet_b").trained
        (True, False)
    """
    text = os.fspath(source)
    found = resolve(text) if model is None else resolve(model, text)
    trained = model is not None or (found.has_weights if pretrained is None else pretrained)
    network = instantiate(found, trained) if model is None else create_model(model, checkpoint_path=text)
    if trained and model is None and found.folder and (found.folder / STATE_NAME).is_file():
        said = "these are its best weights so far; its command, run again, goes on"
        print(f"eqzoo: the training in {found.folder} has not ended: {said}", file=sys.stderr)
    if not isinstance(network, EquivariantNet | OrbitNet):
        raise ValueError(f"{text} is a {type(network).__name__}, which is not a network of this package")
    return LoadedNetwork(network.eval(), found, trained)


def weights_file(state_dict: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file of these weights; the same weights give the same bytes."""
    return save({name: value.detach().cpu().contiguous() for name, value in state_dict.items()})
