"""The networks, one file for each family of the papers; importing this registers them with timm."""

from ._base import EquivariantNet
from ._builder import build, configs
from ._factory import create_model, list_models, list_pretrained
from .allcnn import AllCNN
from .asc_resnet import ASCResNet
from .e4_resnet import E4ResNet
from .e4net import E4Net
from .gcnn import GroupCNN
from .gsanet import GSANet
from .pcam_densenet import PCamDenseNet
from .resnet44 import ResNet44

__all__ = [
    "ASCResNet",
    "AllCNN",
    "E4Net",
    "E4ResNet",
    "EquivariantNet",
    "GSANet",
    "GroupCNN",
    "PCamDenseNet",
    "ResNet44",
    "build",
    "configs",
    "create_model",
    "list_models",
    "list_pretrained",
]
