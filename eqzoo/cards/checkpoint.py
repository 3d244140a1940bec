"""The config.json of a published checkpoint, and the checks that its files belong together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..hub import sha256_of
from ..models import EquivariantNet, create_model, list_models
from ..models.builder import configured_name, per_channel
from ..models.config import checkpoint_config
from ..models.load import resolve

__all__ = ["check_loads", "check_weights", "published_config", "weights_dtype"]


def published_config(results: Mapping[str, Any], weights: Path) -> dict[str, Any]:
    """The config.json of a checkpoint, see `eqzoo.models.config.checkpoint_config`.

    Args:
        results: The results.json of the checkpoint.
        weights: Its weights file, which says how many classes there are.

    Raises:
        ValueError: If the results do not belong to a network of eqzoo, or to these weights.
    """
    recipe = results["recipe"]
    if recipe["model"] not in list_models():
        raise ValueError(f"{recipe['model']!r} is no network of eqzoo; cards are made for those of eqzoo.list_models()")
    configured = configured_name(recipe["model"], results["dataset"]["name"])
    cfg = timm.get_pretrained_cfg(configured).to_dict(remove_source=True)
    standard = cfg["num_classes"]
    head = _load(weights).get(f"{cfg['classifier']}.weight")
    classes = recipe["model_args"].get("num_classes", standard if head is None else len(head))
    labels = list(results.get("label_names") or (cfg.get("label_names", ()) if classes == standard else ()))
    if labels and len(labels) != classes:
        raise ValueError(f"{len(labels)} names of classes for a network of {classes} classes: {', '.join(labels)}")
    args = {"num_classes": classes, "in_chans": cfg["input_size"][0]}
    # Those of a fine-tuned network, whose data set may have the name of another one, are all in its recipe.
    args |= ({} if "mean" in results else resolve(configured).model_args) | recipe["model_args"]
    try:
        model = cast(EquivariantNet, create_model(recipe["model"], **args))
    except (TypeError, ValueError) as error:
        raise ValueError(f"model_args of {results['checkpoint']}: {error}") from error
    cfg |= {key: results[key] for key in ("input_size", "mean", "std") if key in results}
    channels = args["in_chans"]
    cfg["input_size"] = [channels, *cfg["input_size"][1:]]
    for key in ("mean", "std"):  # as in training: one value stands for all channels, or a mean for other channels
        values = list(per_channel(cfg[key], channels))
        cfg[key] = values * channels if len(values) == 1 else values
    cfg |= {"tag": results["checkpoint"].partition(".")[2], "num_classes": classes}
    cfg |= {"license": results.get("license", "mit")}
    return checkpoint_config(
        model,
        cfg | {"architecture": recipe["model"]},
        model_args=args,
        label_names=labels,
        group=results["group"],
        weights_sha256=results["weights_sha256"],
        weights_dtype=weights_dtype(results),
        version=results["versions"]["eqzoo"],
        image_side=results.get("image_side"),
    )


def weights_dtype(results: Mapping[str, Any]) -> str:
    """The data type of a checkpoint's weights file: ``"float32"`` or ``"float16"``."""
    return str(results.get("weights_dtype", "float32"))


def check_weights(weights: Path, results: Mapping[str, Any], way: str) -> None:
    """Raises ValueError unless the results are those of the weights file, by its SHA-256.

    Args:
        weights: The weights file.
        results: The results.json.
        way: What the error advises.
    """
    if not weights.is_file():
        raise ValueError(f"no {weights}; {way}")
    if (found := sha256_of(weights)) != results["weights_sha256"]:
        raise ValueError(
            f"the results are of weights with sha256 {results['weights_sha256']}, and {weights} has {found}; {way}"
        )


def check_loads(config: Mapping[str, Any], weights: Path, dataset: str | None) -> None:
    """Raises ValueError unless the weights fit the network that config.json describes.

    Args:
        config: The config.json.
        weights: The weights file.
        dataset: The data set by whose name a checkpoint of the zoo is loaded, ``<model>.<data set>``: the network of
            that name has to give the same logits. None for the user's own checkpoint.
    """
    name = config["architecture"]
    model = create_model(name, checkpoint_path=weights, **config["model_args"]).eval()
    if dataset is None:
        return
    plain = create_model(configured_name(name, dataset), checkpoint_path=weights).eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, *config["pretrained_cfg"]["input_size"], generator=generator)
    with torch.no_grad():
        if not torch.equal(model(x), plain(x)):
            raise ValueError(
                f"with model_args {config['model_args']} this is not the network that {name} stands for, so its "
                "weights cannot go by that name; publish them as a checkpoint of your own, with --output DIR"
            )


def _load(weights: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} is not a readable safetensors file ({error})") from error
