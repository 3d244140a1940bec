"""eqzoo: image networks that are equivariant by construction, under timm's registry."""

import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ._common import __version__ as __version__
from ._common import lazy_names

if TYPE_CHECKING:
    from . import viz
    from .analysis import EquivarianceCheck, check_equivariance, multiply_adds
    from .equivariance import equivariance_error
    from .evaluation import evaluate, rotate, rotation_curve
    from .export import ExportError, ExportReport, QuantizationReport, export_onnx, export_pt2, quantize_onnx
    from .finetuning import FineTuned, finetune
    from .groups import P4, P4M, Z2, Z2M, Group, cyclic, dihedral
    from .hub import WeightsNotFoundError
    from .models import create_model, list_models, list_pretrained

__all__ = [
    "P4",
    "P4M",
    "Z2",
    "Z2M",
    "EquivarianceCheck",
    "ExportError",
    "ExportReport",
    "FineTuned",
    "Group",
    "QuantizationReport",
    "WeightsNotFoundError",
    "check_equivariance",
    "create_model",
    "cyclic",
    "dihedral",
    "equivariance_error",
    "evaluate",
    "export_onnx",
    "export_pt2",
    "finetune",
    "list_models",
    "list_pretrained",
    "multiply_adds",
    "quantize_onnx",
    "rotate",
    "rotation_curve",
    "viz",
]

_MODULES = {
    "analysis": ("EquivarianceCheck", "check_equivariance", "multiply_adds"),
    "equivariance": ("equivariance_error",),
    "export": ("ExportError", "ExportReport", "QuantizationReport", "export_onnx", "export_pt2", "quantize_onnx"),
    "evaluation": ("evaluate", "rotate", "rotation_curve"),
    "finetuning": ("FineTuned", "finetune"),
    "groups": ("P4", "P4M", "Z2", "Z2M", "Group", "cyclic", "dihedral"),
    "hub": ("WeightsNotFoundError",),
    "models": ("create_model", "list_models", "list_pretrained"),
}
_SUBPACKAGES = {module.name for module in iter_modules(__path__) if not module.name.startswith("_")}
_name = lazy_names(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name, or a sub-package such as ``eqzoo.data``, when it is first used (PEP 562)."""
    return import_module(f"{__name__}.{name}") if name in _SUBPACKAGES else _name(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})


# Importing the networks registers them, so that timm.create_model knows them after `import eqzoo`. It imports torch and
# timm, which takes seconds: the command `eqzoo` leaves it to those of its subcommands that need a network. No other
# program has that name and imports this package: a script eqzoo.py would import itself.
if Path(sys.argv[0] if sys.argv else "").stem != "eqzoo":
    import_module(f"{__name__}.models")
