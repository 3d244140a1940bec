"""Networks by whatever they are called: a registered name, a checkpoint's folder or file, a repo on the Hub."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from .hub import WEIGHTS_NAME
from .models import EquivariantNet, create_model, list_pretrained

__all__ = ["Source", "load_network"]

_CONFIG = "config.json"


@dataclass(frozen=True)
class Source:
    """A network and where it comes from.

    Args:
        network: The network, in evaluation mode.
        name: What to call it.
        trained: Whether it has trained weights; else they are random.
    """

    network: EquivariantNet
    name: str
    trained: bool


def load_network(source: str | os.PathLike[str], model: str | None = None) -> Source:
    """Builds a network of this package from its name or from a checkpoint.

    Args:
        source: One of: a registered name, which takes its published weights if there are any; a folder with
            ``config.json`` and ``model.safetensors``; a safetensors file, with ``config.json`` beside it or with
            ``model``; ``hf-hub:<owner>/<repo>`` or ``local-dir:<folder>``.
        model: The registered name of the network that a folder or file without ``config.json`` is of.

    Returns:
        The network, its name and whether it is trained.

    Raises:
        ValueError: If nothing is called so, or the weights do not fit.
        FileNotFoundError: If a path is given at which there is nothing.

    Example:
        >>> load_network("p4_cnn").trained, load_network("p4_cnn_w11").trained
        (True, False)
    """
    text = os.fspath(source)
    path = Path(text)
    if text.startswith(("hf-hub:", "local-dir:")):
        network: nn.Module = create_model(text, pretrained=True)
        trained = True
    elif path.suffix == ".safetensors" or path.is_dir():
        network, trained = _from_path(path, model), True
    elif path.is_file():
        raise ValueError(
            f"{text} is not read: a network is named, or given by its checkpoint's folder or .safetensors file; only "
            "eqzoo check takes .onnx files"
        )
    elif os.sep in text:
        raise FileNotFoundError(f"no checkpoint at {path}: give its folder or its .safetensors file")
    elif model is not None:
        raise ValueError(f"a model is named for a folder or a .safetensors file; {text!r} is neither")
    else:
        trained = bool(list_pretrained(text) or list_pretrained(f"{text}.*"))
        network = create_model(text, pretrained=trained)
    if not isinstance(network, EquivariantNet):
        raise ValueError(f"{text} is a {type(network).__name__}, which is not a network of this package")
    return Source(network.eval(), text, trained)


def _from_path(path: Path, model: str | None) -> nn.Module:
    folder = path if path.is_dir() else path.parent
    file = path / WEIGHTS_NAME if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}")
    if model is not None:
        return create_model(model, checkpoint_path=file)
    config = folder / _CONFIG
    if not config.is_file():
        raise ValueError(f"no {config} that says which network {file.name} is of; name the network as well")
    try:
        architecture = json.loads(config.read_text())["architecture"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} names no architecture ({error!r}), so it is no checkpoint's") from error
    if file.name == WEIGHTS_NAME:
        return create_model(f"local-dir:{folder}", pretrained=True)
    return create_model(str(architecture), checkpoint_path=file)
