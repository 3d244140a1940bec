"""The networks, one file for each family of the papers; importing this registers them with timm."""

from ._base import EquivariantNet
from ._factory import create_model, list_models, list_pretrained
from .gcnn import GroupCNN
from .gsanet import GSANet

__all__ = ["EquivariantNet", "GSANet", "GroupCNN", "create_model", "list_models", "list_pretrained"]
