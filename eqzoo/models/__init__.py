"""The networks, one file for each family of the papers; importing this registers them with timm."""

from ._base import EquivariantNet
from ._factory import create_model, list_models, list_pretrained
from .asc_resnet import ASCResNet
from .e4_resnet import E4ResNet
from .e4net import E4Net
from .gcnn import GroupCNN

__all__ = [
    "ASCResNet",
    "E4Net",
    "E4ResNet",
    "EquivariantNet",
    "GroupCNN",
    "create_model",
    "list_models",
    "list_pretrained",
]
