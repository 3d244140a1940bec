"""The networks for torch.hub: `torch.hub.load("eqzoo/eqzoo", "p4_cnn", pretrained=True)`, or a clone's path."""

from timm.models import model_entrypoint as _model_entrypoint

import eqzoo as _eqzoo

dependencies = ["torch", "torchvision", "timm", "safetensors", "huggingface_hub"]

globals().update({_name: _model_entrypoint(_name) for _name in _eqzoo.list_models()})
