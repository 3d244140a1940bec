"""The networks, one file for each family of the papers; importing this registers them with timm."""

from ._base import EquivariantNet
from ._factory import create_model, list_models, list_pretrained
from .allcnn import AllCNN
from .gcnn import GroupCNN
from .pcam_densenet import PCamDenseNet
from .resnet44 import ResNet44

__all__ = [
    "AllCNN",
    "EquivariantNet",
    "GroupCNN",
    "PCamDenseNet",
    "ResNet44",
    "create_model",
    "list_models",
    "list_pretrained",
]
