"""The config.json of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from .._common import __version__
from .base import EquivariantNet

__all__ = ["checkpoint_config"]

_NOT_IN_CONFIG = ("architecture", "label_names", "state_dict", "hf_hub_id", "file", "url", "source")


def checkpoint_config(
    model: EquivariantNet,
    cfg: Mapping[str, Any],
    *,
    model_args: Mapping[str, Any],
    label_names: Sequence[str],
    group: str,
    weights_sha256: str,
    weights_dtype: str = "float32",
    version: str = __version__,
    image_side: int | None = None,
) -> dict[str, Any]:
    """What config.json holds, from which timm's ``local-dir:`` and ``hf-hub:`` build the network.

    Args:
        model: The network.
        cfg: Its ``pretrained_cfg``, with ``architecture`` and the ``tag`` of the checkpoint.
        model_args: The arguments of its class.
        label_names: The names of the classes.
        group: The name of its group.
        weights_sha256: The hash of its weights file, which `eqzoo.hub` checks.
        weights_dtype: ``"float32"`` or ``"float16"``.
        version: The version of eqzoo that evaluated it.
        image_side: The shorter side of the images that it was trained on before they were resized, in pixels; None if
            it is unknown.
    """
    pool: Any = getattr(model, "global_pool", None) or model.group_pool
    return {
        "architecture": cfg["architecture"],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": getattr(pool, "reduce", pool),  # a layer, or its name
        "label_names": list(label_names),
        "model_args": dict(model_args),
        "pretrained_cfg": {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in cfg.items()
            if value is not None and key not in _NOT_IN_CONFIG
        },
        "eqzoo": {
            "version": version,
            "group": group,
            "weights_dtype": weights_dtype,
            "weights_sha256": weights_sha256,
        }
        | ({"image_side": image_side} if image_side else {}),
    }
