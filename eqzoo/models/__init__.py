"""The networks, one file per family; importing this registers them with timm."""

from .allcnn import AllCNN
from .any_network import orbitnet
from .asc_resnet import ASCResNet
from .base import EquivariantNet
from .builder import build, configs
from .e4_resnet import E4ResNet
from .e4net import E4Net
from .gcnn import GroupCNN
from .group_convnext import ConvNeXt
from .group_resnet import GroupResNet
from .gsanet import GSANet
from .load import create_model, list_models, list_pretrained
from .octic_vit import OcticViT
from .orbit import OrbitNet
from .pcam_densenet import PCamDenseNet
from .resnet44 import ResNet44

__all__ = [
    "ASCResNet",
    "AllCNN",
    "OrbitNet",
    "ConvNeXt",
    "E4Net",
    "E4ResNet",
    "EquivariantNet",
    "GSANet",
    "GroupCNN",
    "GroupResNet",
    "OcticViT",
    "PCamDenseNet",
    "ResNet44",
    "build",
    "configs",
    "create_model",
    "list_models",
    "list_pretrained",
    "orbitnet",
]
