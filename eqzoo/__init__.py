"""eqzoo: image networks that are equivariant by construction, under timm's registry."""

from . import viz
from .certificate import Certificate, certify
from .count import multiply_adds
from .equivariance import equivariance_error
from .export import ExportError, ExportReport, export_onnx, export_pt2
from .finetune import FineTuned, finetune
from .groups import P4, P4M, Z2, Z2M, Group, cyclic, dihedral
from .hub import WeightsNotFoundError
from .models import create_model, list_models, list_pretrained
from .turns import turn, turn_curve

__version__ = "0.1.0"

__all__ = [
    "P4",
    "P4M",
    "Z2",
    "Z2M",
    "Certificate",
    "ExportError",
    "ExportReport",
    "FineTuned",
    "Group",
    "WeightsNotFoundError",
    "certify",
    "create_model",
    "cyclic",
    "dihedral",
    "equivariance_error",
    "finetune",
    "export_onnx",
    "export_pt2",
    "list_models",
    "list_pretrained",
    "multiply_adds",
    "turn",
    "turn_curve",
    "viz",
]
