"""The names of the registry: timm's functions, kept to the networks of this package."""

import os
import sys
from fnmatch import fnmatch
from importlib import import_module

import timm

from . import (  # noqa: F401  registers them
    allcnn,
    asc_resnet,
    e4_resnet,
    e4net,
    gcnn,
    group_convnext,
    gsanet,
    octic_vit,
    pcam_densenet,
    resnet44,
)
from .builder import known

__all__ = ["list_models", "list_pretrained", "module_of", "own_module"]


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
