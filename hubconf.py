"""The networks for torch.hub: `torch.hub.load("eqzoo/eqzoo", "p4_cnn", pretrained=True)`, or a clone's path.

`create_model` takes any name that `eqzoo.create_model` does: `torch.hub.load("eqzoo/eqzoo", "create_model",
"hf-hub:<owner>/<repo>", pretrained=True)`.
"""

from timm.models import model_entrypoint as _model_entrypoint

import eqzoo as _eqzoo

dependencies = ["torch", "torchvision", "timm", "safetensors", "huggingface_hub"]

create_model = _eqzoo.create_model
globals().update({_name: _model_entrypoint(_name) for _name in _eqzoo.list_models()})
