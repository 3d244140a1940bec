"""Builds a registered network through timm, with weights from wherever they are."""

from dataclasses import replace
from typing import Any

from safetensors import SafetensorError
from timm.models import PretrainedCfg, build_model_with_cfg, resolve_pretrained_cfg

from ..hub import HUB_OWNER, find_weights
from ._base import EquivariantNet

__all__ = ["CIFAR10", "CIFAR100", "PCAM", "ROTMNIST", "build", "published"]

ROTMNIST: dict[str, Any] = {
    "num_classes": 10,
    "input_size": (1, 28, 28),
    # The mean and standard deviation of the pixels of the 10,000 training pictures, over 255.
    "mean": (0.1314,),
    "std": (0.3025,),
    "crop_pct": 1.0,
    "interpolation": "bicubic",
    "label_names": tuple("0123456789"),
}
CIFAR10: dict[str, Any] = {
    "num_classes": 10,
    "input_size": (3, 32, 32),
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2470, 0.2435, 0.2616),
    "crop_pct": 1.0,
    "interpolation": "bicubic",
    "label_names": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
CIFAR100: dict[str, Any] = {
    "num_classes": 100,
    "input_size": (3, 32, 32),
    "mean": (0.5071, 0.4865, 0.4409),
    "std": (0.2673, 0.2564, 0.2762),
    "crop_pct": 1.0,
    "interpolation": "bicubic",
}
PCAM: dict[str, Any] = {
    "num_classes": 2,
    "input_size": (3, 96, 96),
    "mean": (0.701, 0.538, 0.692),
    "std": (0.235, 0.277, 0.213),
    "crop_pct": 1.0,
    "interpolation": "bicubic",
    "label_names": ("normal", "tumor"),
}


def published(name: str) -> dict[str, str]:
    """The configuration entries of a checkpoint that exists: where the Hub has it."""
    return {"hf_hub_id": f"{HUB_OWNER}/{name}", "license": "mit"}


def build(
    model_cls: type[EquivariantNet], variant: str, pretrained: bool, feature_indices: tuple[int, ...], **kwargs: Any
) -> EquivariantNet:
    """Builds a network as `timm.models.build_model_with_cfg` does, and finds its weights first.

    Args:
        model_cls: The class of the network.
        variant: The registered name, without tag.
        pretrained: Whether to load weights.
        feature_indices: The features that ``features_only=True`` gives where the caller names none.
        **kwargs: timm's entries (``pretrained_cfg``, ``pretrained_cfg_overlay``, ``features_only`` ...) and the
            arguments of the class.

    Returns:
        The network, or timm's feature extractor around it.

    Raises:
        WeightsNotFoundError: If weights are asked for and found nowhere.
        ValueError: If the weights file cannot be read or does not fit the network.
    """
    overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), overlay)
    if pretrained and not _names_a_source(cfg):
        name = f"{variant}.{cfg.tag}" if cfg.tag else variant
        overlay["file"] = str(find_weights(name, cfg.hf_hub_id, kwargs.get("cache_dir")))
        cfg = replace(cfg, file=overlay["file"])
    # Features come through forward_intermediates: as planes, which is what timm's consumers take.
    feature_cfg = {"feature_cls": "getter", "out_indices": feature_indices}
    try:
        model: EquivariantNet = build_model_with_cfg(
            model_cls, variant, pretrained, pretrained_cfg_overlay=overlay, feature_cfg=feature_cfg, **kwargs
        )
    except SafetensorError as error:
        raise ValueError(f"{cfg.file} is not a readable safetensors file ({error}); fetch it again") from error
    except RuntimeError as error:
        if not (pretrained and cfg.file):
            raise
        raise ValueError(f"{cfg.file} does not fit {variant} with these arguments: {error}") from error
    return model


def _names_a_source(cfg: PretrainedCfg) -> bool:
    """Whether the caller said where the weights are: a file, a state dict, or timm's hf-hub: and local-dir:."""
    return bool(cfg.source or cfg.file or cfg.state_dict)
