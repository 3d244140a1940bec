"""The config.json of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .._common import __version__

_NOT_IN_CONFIG = ("architecture", "label_names", "state_dict", "hf_hub_id", "file", "url", "source")


def checkpoint_config(
    model: nn.Module,
    cfg: Mapping[str, Any],
    *,
    model_args: Mapping[str, Any],
    label_names: Sequence[str],
    group: str | None,
    weights_sha256: str | None = None,
    image_side: int | None = None,
) -> dict[str, Any]:
    """What config.json holds, from which timm's ``local-dir:`` and ``hf-hub:`` build the network.

    Args:
        model: The network.
        cfg: Its ``pretrained_cfg``, with ``architecture`` and the ``tag`` of the checkpoint.
        model_args: The arguments of its class, unless timm has built it: then those that timm recorded, which has those
            of its name besides, and none that are None. The number of classes is left out: it stands beside them, and
            Hugging Face transformers takes it from there alone.
        label_names: The names of the classes.
        group: The name of its group; None for a network that is equivariant under translations alone.
        weights_sha256: The hash of its weights file, which `eqzoo.hub` checks; None while it is trained.
        image_side: The shorter side of the images that it was trained on before they were resized, in pixels; None if
            it is unknown.
    """
    args: Mapping[str, Any] = getattr(model, "_model_args", model_args)
    pool: Any = getattr(model, "global_pool", None) or getattr(model, "group_pool", None)
    pool = getattr(pool, "reduce", getattr(pool, "pool_type", pool))  # a layer of ours or of timm's, or its name
    return {
        "architecture": cfg["architecture"],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": pool,
        "label_names": list(label_names),
        "model_args": {key: value for key, value in args.items() if key != "num_classes"},
        "pretrained_cfg": {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in cfg.items()
            if value is not None and key not in _NOT_IN_CONFIG
        },
        "eqzoo": {"version": __version__, "group": group, "weights_dtype": "float32", "weights_sha256": weights_sha256}
        | ({"image_side": image_side} if image_side else {}),
    }
