"""torch.hub entry points: one for each network, such as `torch.hub.load("eqzoo/eqzoo", "p4_cnn", pretrained=True)`.

The entry point `create_model` takes any name that `eqzoo.create_model` takes: `torch.hub.load("eqzoo/eqzoo",
"create_model", "hf-hub:<owner>/<repo>", pretrained=True)`.
"""

from collections.abc import Callable as _Callable
from typing import Any as _Any

from timm.models import model_entrypoint as _model_entrypoint

import eqzoo as _eqzoo
from eqzoo.models.builder import default_checkpoint as _default_checkpoint

dependencies = ["torch", "torchvision", "timm", "safetensors", "huggingface_hub"]

# torch.hub lists every callable of this module whose name does not begin with an underscore.
_HELP = """{summary}

Arguments:
    pretrained: Whether to load trained weights: {checkpoints}.
    checkpoint: The tag of the checkpoint, the name of its data set; by default the first.
    **kwargs: num_classes, in_chans, features_only and the arguments of the network's class. With another num_classes
        the classifier is initialized anew; with another in_chans the first filters are repeated or summed.

The input is (batch, channels, height, width), normalized by the mean and std in pretrained_cfg; the output is logits.
"""


def _entry(name: str, tags: list[str]) -> _Callable[..., _Any]:
    def build(pretrained: bool = False, checkpoint: str | None = None, **kwargs: _Any) -> _Any:
        return _eqzoo.create_model(f"{name}.{checkpoint}" if checkpoint else name, pretrained, **kwargs)

    checkpoints = ", ".join(tags) or "there are none yet; pass a file of weights as checkpoint_path="
    build.__name__ = build.__qualname__ = name
    build.__doc__ = _HELP.format(summary=_model_entrypoint(name).__doc__, checkpoints=checkpoints)
    return build


def _tags(name: str) -> list[str]:
    """The tags of its checkpoints; first the one that the name without tag stands for."""
    default = _default_checkpoint(name)
    names = sorted(_eqzoo.list_pretrained(f"{name}.*"), key=lambda checkpoint: checkpoint != default)
    return [checkpoint.partition(".")[2] for checkpoint in names]


create_model = _eqzoo.create_model
globals().update({_name: _entry(_name, _tags(_name)) for _name in _eqzoo.list_models()})
