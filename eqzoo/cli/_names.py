"""The names of networks and checkpoints, without importing torch or timm."""

import os
import re
from pathlib import Path

from ..hub import published_names

_REGISTERED = re.compile(r"^@register_model\ndef (\w+)\(", re.MULTILINE)


def network_names() -> list[str]:
    """The names of `eqzoo.list_models` and `eqzoo.list_pretrained`, sorted, in milliseconds.

    Networks are the functions under ``@register_model`` in the source of `eqzoo.models`, but for the wrapper of other
    networks, and checkpoints the folders that are shipped. The user's own networks are known once their modules are
    imported: where ``EQZOO_NETWORKS`` names some, the registry is asked.
    """
    if os.environ.get("EQZOO_NETWORKS"):
        from ..models import list_models, list_pretrained

        return [*list_models(), *list_pretrained()]
    folder = Path(__file__).parents[1] / "models"
    models = sorted(
        name
        for path in folder.glob("*.py")
        if path.stem != "any_network"
        for name in _REGISTERED.findall(path.read_text(encoding="utf-8"))
    )
    return [*models, *(name for name in published_names() if name.partition(".")[0] in models)]
